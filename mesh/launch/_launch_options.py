"""The launcher's command line, as a value."""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from mesh._mesh_errors import nearest
from mesh.job._timeouts import DEFAULT_PORT, FIRST_STEP_S, GANG_JOIN_S, WATCHDOG_S
from mesh.launch._emit_options import KINDS, add_emit_options, setup_of
from mesh.schedulers._scheduled_job import Setup


@dataclass(frozen=True)
class Options:
    """What to run, how often, where.

    Attributes:
        program: script and its arguments, or "-m", module and its arguments.
        processes: in the whole job.
        devices: virtual CPU devices of each process; None: what the machine has.
        restarts: how often the gang may fail without a new checkpoint in between and be started again.
        hosts: machines to start it on over SSH; empty: this one.
        ssh: the command that runs a command on a host.
        coordinator: "name:port" of process 0; None: loopback and a free port, or the first host.
        directory: the job's own; None: a temporary one.
        watchdog_s, first_step_s, timeout_s: see `mesh.init`.
        preload: modules imported once, before the processes are forked; empty: each process starts Python anew.
        emit: write the files for a scheduler of this kind instead of running; None: run.
        out: folder for these files.
        setup: what these files say of the hosts.
        join: this process is one that a scheduler started: join its job and run the program here.
        node: of a launcher that was started over SSH: number of its first process; None otherwise.
        local: with `node`, how many processes to start here.
    """

    program: tuple[str, ...]
    processes: int = 1
    devices: int | None = None
    restarts: int = 0
    hosts: tuple[str, ...] = ()
    ssh: str = "ssh -o BatchMode=yes"
    coordinator: str | None = None
    directory: Path | None = None
    watchdog_s: float = WATCHDOG_S
    first_step_s: float = FIRST_STEP_S
    timeout_s: float = GANG_JOIN_S
    preload: tuple[str, ...] = ()
    emit: str | None = None
    out: Path = Path()
    join: bool = False
    node: int | None = None
    local: int | None = None
    setup: Setup = field(default_factory=Setup)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown:
            options = [option for option in self._option_string_actions if option.startswith("--")]
            message = f"no option {unknown[1]!r}{nearest(unknown[1], options)}"
        chosen = re.match(r"argument (\S+): invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if chosen:
            known = chosen[3].replace("'", "").split(", ")
            message = f"{chosen[1]} is one of {', '.join(known)}, not {chosen[2]!r}{nearest(chosen[2], known)}"
        wrong = re.match(r"argument (\S+): invalid (int|float) value: (.*)", message)
        if wrong:
            kind = "a whole number" if wrong[2] == "int" else "a number"
            message = f"{wrong[1].rpartition('/')[2]} takes {kind}, not {wrong[3]}"
        self.exit(2, f"{self.prog}: {message}\n")


def parse(argv: Sequence[str], prog: str, preload: Sequence[str]) -> Options:
    """Options from the command line; a line on stderr and exit code 2 when they make no sense."""
    parser = _parser(prog, preload)
    given = parser.parse_args(_divided(parser, argv))
    program = tuple(given.program[1:] if given.program[:1] == ["--"] else given.program)
    hosts = tuple(name for name in given.hosts.split(",") if name)
    if given.hostfile is not None:
        try:
            lines = given.hostfile.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--hostfile {given.hostfile} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}")
        hosts += tuple(line.split()[0] for line in lines if line.strip() and not line.startswith("#"))
        if not hosts:
            parser.error(f"--hostfile {given.hostfile} names no host")
    if not program or program == ("-m",):
        parser.error("say which program to run: a script with its arguments, or -m and a module")
    setup, wrong = setup_of(given)
    if wrong:
        parser.error(wrong)
    least = setup.resources.tpu.num_hosts if setup.resources.tpu is not None else max(1, len(hosts))
    processes: int = least if given.processes is None else given.processes
    fault = _fault_of_numbers(given, processes) or _fault_of_hosts(given, processes, hosts)
    if fault:
        parser.error(fault)
    return Options(
        program,
        processes,
        given.devices_per_process,
        given.restarts,
        hosts,
        given.ssh,
        given.coordinator,
        given.job_dir,
        given.watchdog,
        given.first_step,
        given.timeout,
        tuple(name for name in given.preload.split(",") if name),
        given.emit,
        given.out,
        given.join,
        given.node,
        given.local,
        setup,
    )


def _divided(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """The arguments with "--" before a program that is a module, whose "-m" argparse takes for an option."""
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "--":
        if argv[at] == "-m":
            return [*argv[:at], "--", *argv[at:]]
        action = parser._option_string_actions.get(argv[at])
        at += 2 if action is not None and action.nargs is None else 1
    return list(argv)


def _fault_of_numbers(given: argparse.Namespace, processes: int) -> str | None:
    least = {"-n": (processes, 1), "--devices-per-process": (given.devices_per_process, 1), "--restarts": (given.restarts, 0)}
    for option, (value, smallest) in least.items():
        if value is not None and value < smallest:
            return f"{option} must be at least {smallest}, got {value}"
    for option, seconds in {"--watchdog": given.watchdog, "--first-step": given.first_step, "--timeout": given.timeout}.items():
        if not 0 < seconds < math.inf:
            return f"{option} is a number of seconds above 0, not {seconds:g}"
    return None


def _fault_of_hosts(given: argparse.Namespace, processes: int, hosts: Sequence[str]) -> str | None:
    if hosts and processes % len(hosts):
        return f"-n {processes} does not divide over {len(hosts)} hosts: give a multiple of {len(hosts)}"
    if len(set(hosts)) != len(hosts):
        return "a host is named twice; give -n to run several processes on each"
    if not given.ssh.split():
        return "--ssh is a command that runs a command on a host, not nothing"
    name, _, port = (given.coordinator or "localhost:1").rpartition(":")
    if not name or not port.isdecimal() or not 0 < int(port) < 65536:
        return f"--coordinator is a name and a port, as in host1:8476, not {given.coordinator!r}"
    return None


def absent(options: Options) -> str | None:
    """What of the options is not there on this machine, or cannot be written; None if all is."""
    for name in options.preload:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            return f"--preload: there is no module {name!r}"
    for option, folder in {"--job-dir": options.directory, "--out": options.out if options.emit is not None else None}.items():
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"{option} {folder} is not a writable folder: {error.strerror}"
    if options.emit is not None or options.hosts:  # the program lies elsewhere
        return None
    first, *rest = options.program
    if first != "-m":
        return None if Path(first).exists() else f"there is no script {first!r}"
    top = rest[0].partition(".")[0]
    is_here = Path(top).is_dir() or any(Path().glob(f"{top}.*"))
    return None if is_here or importlib.util.find_spec(top) is not None else f"there is no module {rest[0]!r}"


def _parser(prog: str, preload: Sequence[str]) -> argparse.ArgumentParser:
    # Not tyro, as the other commands: what follows the program's name is the program's own, `-n 7` too, and tyro would read it. It
    # would also add 0.05 s to the 0.65 s (CPU) that the launcher takes to import.
    parser = _Parser(prog, description="Run a program as one job of several processes.", allow_abbrev=False)
    add = parser.add_argument
    add("-n", "--processes", type=int, metavar="N", help="processes in all (default: one, or one per host)")
    add("--devices-per-process", type=int, metavar="D", help="virtual CPU devices of each process (default: the machine's own)")
    add("--restarts", type=int, default=0, metavar="K", help="start the whole gang again, up to K times without a new checkpoint")
    add("--hosts", default="", metavar="A,B", help="run on these machines over SSH")
    add("--hostfile", type=Path, metavar="FILE", help="the same, one name per line")
    add("--ssh", default=Options.ssh, metavar="COMMAND", help=f"how to run a command on a host (default: {Options.ssh!r})")
    add(
        "--coordinator", metavar="NAME:PORT", help=f"where process 0 listens (default: loopback, or the first host and port {DEFAULT_PORT})"
    )
    add("--job-dir", type=Path, metavar="DIR", help="keep logs, first failures and thread dumps here")
    add("--watchdog", type=float, default=Options.watchdog_s, metavar="S", help="seconds without progress (at least; 20 median steps)")
    add("--first-step", type=float, default=Options.first_step_s, metavar="S", help="the same for the first step and for saving")
    add("--timeout", type=float, default=Options.timeout_s, metavar="S", help="seconds to wait until all processes have come")
    add("--preload", default=",".join(preload), metavar="MODULES", help="import once, then fork (empty: start Python in each process)")
    add("--emit", choices=KINDS, help="write the files for a scheduler instead of running")
    add("--out", type=Path, default=Path(), metavar="DIR", help="where --emit writes")
    add_emit_options(parser)
    add("--join", action="store_true", help="a scheduler started this process: join its job and run the program here")
    add("--node", type=int, help=argparse.SUPPRESS)
    add("--local", type=int, help=argparse.SUPPRESS)
    add("program", nargs=argparse.REMAINDER, help="script and its arguments, or -m module and its arguments")
    return parser

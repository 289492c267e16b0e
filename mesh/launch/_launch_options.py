"""The launcher's command line, parsed and checked."""

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
    """Options of the launcher.

    Attributes:
        program: script and its arguments, or "-m", module and its arguments.
        processes: number of processes of the whole job.
        devices: number of virtual CPU devices of each process. None: the machine's own devices.
        restarts: number of times that the job is restarted after a failure, counted anew after each new checkpoint.
        hosts: machines to start processes on over SSH. Empty: this machine.
        ssh: command that runs another command on a host.
        coordinator: "name:port" of process 0. None: loopback with a free port, or the first host.
        directory: the job's directory. None: a temporary one.
        watchdog_s, first_step_s, timeout_s: see `mesh.init`.
        preload: modules that are imported once, before the processes are forked. Empty: each process starts its own Python.
        emit: kind of scheduler for which to write a file instead of running. None: run.
        out: folder for this file.
        setup: resources and setup of the hosts, for this file.
        join: whether a scheduler started this process, which then joins its job and runs the program.
        node: index of the first process on this machine, if this launcher was started over SSH by another. None otherwise.
        local: with `node`, number of processes to start on this machine.
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
    """Argument parser whose errors are one line, without the usage before it."""

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
    """Parse the command line. An invalid one ends the process with a line on stderr and exit code 2.

    Args:
        argv: arguments without the program's name.
        prog: name of the command in help and errors.
        preload: default of `--preload`.
    """
    parser = _parser(prog, preload)
    given = parser.parse_args(_with_separator(parser, argv))
    program = tuple(given.program[1:] if given.program[:1] == ["--"] else given.program)
    hosts = tuple(name for name in given.hosts.split(",") if name)
    if given.hostfile is not None:
        try:
            lines = given.hostfile.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--hostfile {given.hostfile} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}")
        hosts += tuple(line.split()[0] for line in lines if line.strip() and not line.startswith("#"))
        if not hosts:
            parser.error(f"--hostfile {given.hostfile} contains no host names")
    if not program or program == ("-m",):
        parser.error("no program to run: pass a script with its arguments, or -m and a module")
    setup, problem = setup_of(given)
    if problem:
        parser.error(problem)
    least = setup.resources.tpu.num_hosts if setup.resources.tpu is not None else max(1, len(hosts))
    processes: int = least if given.processes is None else given.processes
    problem = _number_problem(given, processes) or _host_problem(given, processes, hosts)
    if problem:
        parser.error(problem)
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


def _with_separator(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """The arguments with "--" before "-m module", because argparse would parse that "-m" as an option of the launcher."""
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "--":
        if argv[at] == "-m":
            return [*argv[:at], "--", *argv[at:]]
        action = parser._option_string_actions.get(argv[at])
        at += 2 if action is not None and action.nargs is None else 1
    return list(argv)


def _number_problem(given: argparse.Namespace, processes: int) -> str | None:
    least = {"-n": (processes, 1), "--devices-per-process": (given.devices_per_process, 1), "--restarts": (given.restarts, 0)}
    for option, (value, smallest) in least.items():
        if value is not None and value < smallest:
            return f"{option} must be at least {smallest}, got {value}"
    for option, seconds in {"--watchdog": given.watchdog, "--first-step": given.first_step, "--timeout": given.timeout}.items():
        if not 0 < seconds < math.inf:
            return f"{option} must be a positive number of seconds, got {seconds:g}"
    return None


def _host_problem(given: argparse.Namespace, processes: int, hosts: Sequence[str]) -> str | None:
    if hosts and processes % len(hosts):
        return f"-n {processes} does not divide over {len(hosts)} hosts: give a multiple of {len(hosts)}"
    if len(set(hosts)) != len(hosts):
        return "a host is named twice; pass -n to run several processes on each"
    if not given.ssh.split():
        return f"--ssh takes a command that runs another on a host, as in {Options.ssh!r}, not {given.ssh!r}"
    name, _, port = (given.coordinator or "localhost:1").rpartition(":")
    if not name or not port.isdecimal() or not 0 < int(port) < 65536:
        return f"--coordinator takes a name and a port, as in host1:8476, not {given.coordinator!r}"
    return None


def missing(options: Options) -> str | None:
    """Error line for the first module, script or folder of the options that this machine lacks or cannot write; None if there is none."""
    for name in options.preload:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            return f"--preload: there is no module {name!r}"
    for option, folder in {"--job-dir": options.directory, "--out": options.out if options.emit is not None else None}.items():
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"{option} {folder} is not a writable folder: {error.strerror}"
    if options.emit is not None or options.hosts:  # the program is on other machines
        return None
    first, *rest = options.program
    if first != "-m":
        return None if Path(first).exists() else f"there is no script {first!r}"
    top = rest[0].partition(".")[0]
    is_local = Path(top).is_dir() or any(Path().glob(f"{top}.*"))
    return None if is_local or importlib.util.find_spec(top) is not None else f"there is no module {rest[0]!r}"


def _parser(prog: str, preload: Sequence[str]) -> argparse.ArgumentParser:
    # Unlike the other commands this does not use tyro, which would also parse the arguments after the program's name (`train.py -n 7`)
    # and add 0.05 s to the 0.65 s of CPU time that importing the launcher takes.
    parser = _Parser(prog, description="Run a program as one job of several processes.", allow_abbrev=False)
    add = parser.add_argument
    add("-n", "--processes", type=int, metavar="N", help="total number of processes (default: one, or one per host)")
    add("--devices-per-process", type=int, metavar="D", help="virtual CPU devices of each process (default: the machine's own)")
    add("--restarts", type=int, default=0, metavar="K", help="restart the job after a failure, up to K times without a new checkpoint")
    add("--hosts", default="", metavar="A,B", help="run on these machines over SSH")
    add("--hostfile", type=Path, metavar="FILE", help="the same, one name per line")
    add("--ssh", default=Options.ssh, metavar="COMMAND", help=f"command that runs another on a host (default: {Options.ssh!r})")
    add("--coordinator", metavar="NAME:PORT", help=f"address of process 0 (default: loopback, or the first host and port {DEFAULT_PORT})")
    add("--job-dir", type=Path, metavar="DIR", help="keep logs, failure records and thread dumps in this folder")
    add(
        "--watchdog",
        type=float,
        default=Options.watchdog_s,
        metavar="S",
        help="end the job after S seconds without progress, or 20 median steps",
    )
    add("--first-step", type=float, default=Options.first_step_s, metavar="S", help="the same for the first step and for saving")
    add("--timeout", type=float, default=Options.timeout_s, metavar="S", help="seconds to wait until all processes have joined")
    add("--preload", default=",".join(preload), metavar="MODULES", help="import once, then fork (empty: start Python in each process)")
    add("--emit", choices=KINDS, help="write the file for a scheduler instead of running")
    add("--out", type=Path, default=Path(), metavar="DIR", help="folder in which --emit writes the file")
    add_emit_options(parser)
    add("--join", action="store_true", help="a scheduler started this process: join its job and run the program here")
    add("--node", type=int, help=argparse.SUPPRESS)
    add("--local", type=int, help=argparse.SUPPRESS)
    add("program", nargs=argparse.REMAINDER, help="script and its arguments, or -m module and its arguments")
    return parser

"""The launcher's command line, as a value."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mesh.job._timeouts import DEFAULT_PORT, FIRST_STEP_S, GANG_JOIN_S, WATCHDOG_S

KINDS = ("slurm", "jobset", "tpu-vm", "skypilot")


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


def parse(argv: Sequence[str], prog: str, preload: Sequence[str]) -> Options:
    """Options from the command line; argparse ends the process when they make no sense."""
    parser = _parser(prog, preload)
    given = parser.parse_args(argv)
    program = tuple(given.program[1:] if given.program[:1] == ["--"] else given.program)
    if not program or program == ("-m",):
        parser.error("say which program to run: a script with its arguments, or -m and a module")
    hosts = tuple(name for name in given.hosts.split(",") if name)
    if given.hostfile is not None:
        lines = given.hostfile.read_text(encoding="utf-8").splitlines()
        hosts += tuple(line.split()[0] for line in lines if line.strip() and not line.startswith("#"))
    processes: int = given.processes or max(1, len(hosts))
    if hosts and processes % len(hosts):
        parser.error(f"-n {processes} does not divide over {len(hosts)} hosts: give a multiple of {len(hosts)}")
    if processes < 1 or given.restarts < 0 or (given.devices_per_process is not None and given.devices_per_process < 1):
        parser.error("-n and --devices-per-process start at 1, --restarts at 0")
    if len(set(hosts)) != len(hosts):
        parser.error("a host is named twice; give -n to run several processes on each")
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
    )


def _parser(prog: str, preload: Sequence[str]) -> argparse.ArgumentParser:
    # Not tyro, as the other commands: what follows the program's name is the program's own, `-n 7` too, and tyro would read it. It
    # would also add 0.05 s to the 0.65 s (CPU) that the launcher takes to import.
    parser = argparse.ArgumentParser(prog, description="Run a program as one job of several processes.", allow_abbrev=False)
    add = parser.add_argument
    add("-n", "--processes", type=int, default=0, metavar="N", help="processes in all (default: one, or one per host)")
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
    add("--join", action="store_true", help="a scheduler started this process: join its job and run the program here")
    add("--node", type=int, help=argparse.SUPPRESS)
    add("--local", type=int, help=argparse.SUPPRESS)
    add("program", nargs=argparse.REMAINDER, help="script and its arguments, or -m module and its arguments")
    return parser

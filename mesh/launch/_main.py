"""`spmd launch`: runs attempts until one succeeds or is stopped, or until too many fail without a new checkpoint."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import select
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mesh.job._records import write_record
from mesh.job._timeouts import DEFAULT_PORT
from mesh.launch import _member
from mesh.launch._attempt import Outcome, Stops, report_outcome, watch
from mesh.launch._emit import emit
from mesh.launch._gang import Gang, InMember
from mesh.launch._launch_options import Options, missing, parse
from mesh.launch._output import Output, log
from mesh.launch._reaper import Reaper


def main(argv: Sequence[str] | None = None, prog: str = "python -m mesh.launch", preload: Sequence[str] = ("jax",)) -> int:
    """Run the launcher.

    Args:
        argv: command-line arguments without the program's name. None: `sys.argv[1:]`.
        prog: name of the command in help and errors.
        preload: default of `--preload`: modules that are imported once, before the processes are forked.

    Returns:
        The exit code of the job; 2 for a wrong command line.
    """
    options = parse(sys.argv[1:] if argv is None else argv, prog, preload)
    problem = missing(options)
    if problem is not None:
        sys.stderr.write(f"{prog}: {problem}\n")
        return 2
    if options.emit is not None:
        for path in emit(options):
            log(f"wrote {path}")
        return 0
    if options.join:
        return _member.run(options.program, options.timeout_s)
    try:
        return _launch(options)
    except InMember as member:
        run = member.run
    return run()  # outside `except`, so that the program's exceptions do not get this one as their context


def _launch(options: Options) -> int:
    stops = Stops()
    reaper = Reaper()
    for name in options.preload:
        importlib.import_module(name)
    is_temporary = options.directory is None
    directory = Path(tempfile.mkdtemp(prefix="spmd-job-")) if options.directory is None else options.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    sent = _read_sent_variables() if options.node is not None else {}
    code = _attempts(options, stops, reaper, directory, sent)
    reaper.release()
    if is_temporary:
        shutil.rmtree(directory, ignore_errors=True)
    return code


def _attempts(options: Options, stops: Stops, reaper: Reaper, directory: Path, sent: Mapping[str, str]) -> int:
    """Run the job until it needs no further attempt. Returns the exit code of the last one."""
    failures, attempt, last_saved = 0, 0, _saved(directory)
    while True:
        began = time.time()
        outcome, output, names = _attempt(options, stops, reaper, directory, attempt, sent)
        report_outcome(outcome, output, names(outcome), began, directory)
        if outcome.first is not None and options.node is None:
            record = {"process": outcome.first.member, "code": outcome.first.code, "seen": outcome.first.time, "why": outcome.why}
            write_record(directory / f"first-exit-{attempt}.json", json.dumps(record))
        output.close()
        if outcome.first is None or not outcome.may_restart or options.node is not None:
            return outcome.code
        saved = _saved(directory)
        failures = 1 if saved != last_saved else failures + 1
        if failures > options.restarts:
            if options.restarts:
                since = "without a checkpoint" if saved is None else f"since the checkpoint of step {saved}"
                log(f"giving up after {failures} failures {since}, --restarts {options.restarts}")
            return outcome.code
        last_saved, attempt = saved, attempt + 1
        where = "the start" if saved is None else f"the checkpoint of step {saved}"
        log(f"restarting all {options.processes} processes from {where} (restart {attempt})")


def _attempt(
    options: Options, stops: Stops, reaper: Reaper, directory: Path, attempt: int, sent: Mapping[str, str]
) -> tuple[Outcome, Output, Callable[[Outcome], str]]:
    """Start the processes once and wait for their end. The third result is a function that names the process that failed first."""
    for path in directory.glob("threads-*.txt"):
        path.unlink()
    if options.hosts:
        names = dict(enumerate(options.hosts))
        output = Output(names, directory, attempt, has_names=True)
        gang = Gang(reaper, output.line)
        _start_over_ssh(gang, options, attempt)
    else:
        first, count = options.node or 0, options.local or options.processes
        host = socket.gethostname()
        names = {first + i: f"{host} {first + i}" for i in range(count)}
        output = Output(names, directory, attempt, has_names=False)
        gang = Gang(reaper, output.line)
        _start_here(gang, options, list(names), stops, directory, attempt, sent)
    is_node = options.node is not None
    if not is_node:  # a launcher on another host may share the directory with the launcher that started it
        pids = {member: gang.pid(member) for member in names}
        write_record(directory / "pids.json", json.dumps({"launcher": os.getpid(), "attempt": attempt, "pids": pids}))
    own_records = None if options.hosts else (directory, int(sent.get("SPMD_ATTEMPT", attempt)))
    outcome = watch(gang, output, stops, own_records, _stdin_closed if is_node else lambda: False, options.watchdog_s)

    def named(outcome: Outcome) -> str:
        if outcome.first is None:
            return ""
        member = outcome.first.member
        return f"host {names[member]}" if options.hosts else f"process {member} (host {names[member].partition(' ')[0]})"

    return outcome, output, named


def _start_here(
    gang: Gang, options: Options, members: list[int], stops: Stops, directory: Path, attempt: int, sent: Mapping[str, str]
) -> None:
    """Start the processes `members` on this machine, by fork if modules were preloaded."""
    common = {
        "SPMD_PROCESSES": str(options.processes),
        "SPMD_LOCAL_PROCESSES": str(len(members)),
        "SPMD_COORDINATOR": options.coordinator or f"127.0.0.1:{_free_port()}",
        "SPMD_DEVICES": "" if options.devices is None else str(options.devices),
        "SPMD_JOB_DIR": str(directory),
        "SPMD_ATTEMPT": sent.get("SPMD_ATTEMPT", str(attempt)),
        "SPMD_JOB_KEY": sent.get("SPMD_JOB_KEY") or secrets.token_hex(16),
        "SPMD_WATCHDOG": str(options.watchdog_s),
        "SPMD_FIRST_STEP": str(options.first_step_s),
    }
    launcher = os.getpid()
    for member in members:
        environ = {**common, "SPMD_PROCESS": str(member), "SPMD_LOCAL_PROCESS": str(member - members[0])}
        if options.preload:

            def run(out: int, err: int, environ: dict[str, str] = environ) -> Callable[[], int]:
                for descriptor in stops.descriptors:
                    os.close(descriptor)
                _member.forked(environ, out, err, launcher)
                return lambda: _member.run(options.program, options.timeout_s)

            gang.fork(member, run)
        else:
            command = [sys.executable, "-m", "mesh.launch", "--join", "--timeout", str(options.timeout_s), *options.program]
            gang.spawn(member, command, {**os.environ, **environ, "SPMD_LAUNCHER": str(launcher)})


def _start_over_ssh(gang: Gang, options: Options, attempt: int) -> None:
    """Start a launcher on each host. It reads the job's key from its stdin, and ends when stdin is closed."""
    each = options.processes // len(options.hosts)
    sent = json.dumps({"SPMD_JOB_KEY": secrets.token_hex(16), "SPMD_ATTEMPT": str(attempt)}).encode() + b"\n"
    coordinator = options.coordinator or f"{options.hosts[0]}:{DEFAULT_PORT + 2 * (attempt % 50)}"
    for number, host in enumerate(options.hosts):
        name, port = coordinator.rpartition(":")[::2]
        if options.coordinator is not None and attempt:  # a new port for each attempt
            port = str(int(port) + 2 * (attempt % 50))
        command = [sys.executable, "-m", "mesh.launch", "--node", str(number * each), "--local", str(each), "-n", str(options.processes)]
        command += ["--coordinator", f"{name}:{port}", "--watchdog", str(options.watchdog_s), "--first-step", str(options.first_step_s)]
        command += ["--timeout", str(options.timeout_s), "--preload", ",".join(options.preload)]
        command += [] if options.devices is None else ["--devices-per-process", str(options.devices)]
        command += [] if options.directory is None else ["--job-dir", str(options.directory.absolute())]
        remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join([*command, '--', *options.program])}"
        gang.spawn(number, [*shlex.split(options.ssh), host, remote], os.environ, sent)


def _read_sent_variables() -> dict[str, str]:
    """Environment variables that the first launcher sends to stdin as one line of JSON, so that no command line shows the job's key."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 4096:
        piece = os.read(0, 1)
        if not piece:
            break
        line += piece
    sent: dict[str, str] = json.loads(line or b"{}")
    return sent


def _stdin_closed() -> bool:
    readable, _, _ = select.select([0], [], [], 0)
    return bool(readable) and os.read(0, 1) == b""


def _saved(directory: Path) -> int | None:
    """The step of the last checkpoint that the program reported (`mesh.report_saved`), or None."""
    with contextlib.suppress(OSError, ValueError):
        return int((directory / "saved").read_text(encoding="utf-8"))
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

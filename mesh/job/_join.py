"""Joining a job: `mesh.init()` makes this process one of several that run one program. The one reader of the environment.

    host = mesh.init()        # under spmd launch, torchrun, mpirun, srun, on TPU pods; alone it changes nothing
    host.index, host.count

It finds out where the process stands (`mesh/job/_clusters.py` has the order), calls the roll (`_rollcall`), starts jax's
service with limits that suit a job, and from then on watches: an exception anywhere ends the job at once (`_alarm`,
`_notices`), a standstill is noticed (`_watchdog`), SIGTERM is agreed on (`_preemption`).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import ipaddress
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import jax

from mesh import _devices
from mesh._mesh_errors import JobError, message
from mesh.job._agreement import Steps
from mesh.job._alarm import Alarm
from mesh.job._clusters import detect, metadata, on_tpu_vm
from mesh.job._notices import Notice, Notices
from mesh.job._place import Host
from mesh.job._preemption import Preemption
from mesh.job._records import write_record
from mesh.job._rollcall import Report, RollCall, report, require_reachable_name, resolve
from mesh.job._service import Service, ServiceLost
from mesh.job._timeouts import BARRIER_S, HEARTBEAT_S, JOIN_S, LEAVE_S, SERVICE_START_S, SERVICE_STOP_S, SHARED_VALUE_S
from mesh.job._watchdog import Limits, Watchdog
from mesh.platform import _gloo

_VERSIONED = ("jax", "jaxlib", "libtpu", "ml_dtypes", "numpy", "spmd-mesh", "torch")


@dataclass
class Job:
    """The running parts of a job of several processes."""

    host: Host
    service: Service
    alarm: Alarm
    notices: Notices
    watchdog: Watchdog
    preemption: Preemption
    steps: Steps
    roll: RollCall | None
    num_programs: int = 0

    def next_program(self) -> int:
        """Number of the next program to be compared; all processes count alike."""
        self.num_programs += 1
        return self.num_programs - 1


@dataclass
class _Membership:
    """The one mutable of this module: what this process has joined."""

    host: Host | None = None
    job: Job | None = None
    alone: Preemption | None = None  # of a job of one
    when_joined: list[Callable[[Job], None]] = field(default_factory=list[Callable[["Job"], None]])


_joined = _Membership()


def when_joined(do: Callable[[Job], None]) -> None:
    """Call `do` once this process is part of a job of several: at once if it is."""
    if _joined.job is not None:
        do(_joined.job)
    else:
        _joined.when_joined.append(do)


def init(
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
    *,
    devices: int | None = None,
    timeout_s: float = JOIN_S,
    watchdog_s: float | None = None,
    first_step_s: float | None = None,
) -> Host:
    """Join the job that this process belongs to; call it before the first array, tensor or mesh. Further calls have no effect.

    Args:
        coordinator: "name:port" of process 0; it listens there, on that address only, and on the port above it.
        count: number of processes. Give all three, or none to read them from the environment (see `mesh/job/_clusters.py`).
        index: the index of this process, from 0.
        devices: virtual CPU devices of each process; None takes what the machine has.
        timeout_s: how long to wait for the other processes.
        watchdog_s: the least number of seconds without progress after which the job ends (default 60; 20 median steps if longer).
        first_step_s: the same for the first step, and for compiling and saving (default 1800).

    Returns:
        This process's place; `count` is 1 when there is no job.

    Raises:
        JobError: the processes could not form the job; the message gives the reason and a fix.
        DeviceError: jax has already started.
    """
    if _joined.host is not None:
        return _joined.host
    host = _placed(coordinator, count, index)
    if devices is not None:
        host = replace(host, devices=devices)
    if host.devices is not None:
        _devices.virtual_devices(host.devices)
    if host.count > 1:
        limits = _limits(watchdog_s, first_step_s)
        _join(host, timeout_s, limits)
    else:
        _joined.alone = Preemption(1, lambda step: cast("Preemption", _joined.alone).hear(0, step))
    _joined.host = host
    _devices.set_job_devices(host.count, host.devices)
    _listen_for_sigterm()
    while _joined.job is not None and _joined.when_joined:
        _joined.when_joined.pop(0)(_joined.job)
    return host


def place() -> Host:
    """Where this process stands, or would once it joins its job; nothing is joined."""
    return _joined.host or _placed(None, None, None)


def job() -> Job | None:
    """The running parts of the job that this process has joined; None alone."""
    return _joined.job


def should_stop(step: int) -> bool:
    """Whether to save and exit before this step; asked before each, with its number, in every process.

    True in all processes at the same step, once any of them got SIGTERM. Save then, and leave with `mesh.PREEMPTED`.
    """
    if _joined.job is not None:
        return _joined.job.preemption.should_stop(step)
    return _joined.alone is not None and _joined.alone.should_stop(step)


def shared(name: str, own: str, timeout_s: float = SHARED_VALUE_S) -> str:
    """Process 0's value of something that all processes must hold alike; `own` is this process's.

    Raises:
        JobError: process 0 did not answer in time.
    """
    if _joined.job is None:
        return own
    service, key = _joined.job.service, f"spmd/shared/{name}"
    if _joined.job.host.index == 0:
        service.set(key, own)
        return own
    value = service.get(key, timeout_s)
    if value is None:
        raise JobError(message(f"process 0 did not send its {name} within {timeout_s:g} s", fix="check the last output of process 0"))
    return value


def barrier(name: str, timeout_s: float = BARRIER_S) -> None:
    """Wait until every process of the job has reached the barrier of this name; each name is used once.

    Raises:
        JobError: some processes did not arrive in time; the message names them.
    """
    if _joined.job is not None:
        _joined.job.service.barrier(f"user/{name}", timeout_s)


def report_saved(step: int) -> None:
    """Tell the launcher that a checkpoint of this step is complete; this resets its count of failures."""
    host = _joined.host
    if host is None or host.directory is None or host.index != 0:
        return
    write_record(host.directory / "saved", str(step))


def programs_of_job() -> Path | None:
    """Where the programs of this job are kept for its restarts; None outside a job of several processes that has a directory."""
    return None if _joined.job is None else _programs(_joined.job.host)


@contextmanager
def extended_timeout(what: str) -> Generator[None]:
    """A context manager under which the watchdog allows as much time as for a first step, for saving, evaluating or loading."""
    if _joined.job is None:
        yield
        return
    with _joined.job.watchdog.extended(what):
        yield


long = extended_timeout  # its name before


def _placed(coordinator: str | None, count: int | None, index: int | None) -> Host:
    given = [value is not None for value in (coordinator, count, index)]
    if all(given):
        found = detect(os.environ) if "SPMD_COORDINATOR" in os.environ else None
        base = found or Host()
        host = replace(base, index=cast("int", index), count=cast("int", count), coordinator=coordinator, found_by="arguments")
    elif any(given):
        raise JobError(
            message(
                "mesh.init got only some of coordinator, count and index",
                f"coordinator={coordinator!r}, count={count!r}, index={index!r}",
                fix="give all three, or none to read them from the environment",
            )
        )
    else:
        host = detect(os.environ) or (on_tpu_vm(metadata) if _devices.has_tpu() else None) or Host()
    if not 0 <= host.index < host.count:
        raise JobError(
            message(
                f"process {host.index} is out of range in a job of {host.count} processes",
                f"read from: {host.found_by}",
                fix="number them from 0",
            )
        )
    return host


def _limits(watchdog_s: float | None, first_step_s: float | None) -> Limits:
    default = Limits()
    least = watchdog_s if watchdog_s is not None else float(os.environ.get("SPMD_WATCHDOG", default.least_s))
    first = first_step_s if first_step_s is not None else float(os.environ.get("SPMD_FIRST_STEP", default.first_s))
    return Limits(least, max(least, first))


def _join(host: Host, timeout_s: float, limits: Limits) -> None:
    if _devices.has_started():
        raise JobError(
            message(
                "mesh.init was called too late: jax has already initialized its devices",
                f"{host} joins before the first array, tensor or mesh",
                fix="call mesh.init() at the top of the program",
            )
        )
    assert host.coordinator is not None
    spans_machines = host.num_local is not None and host.num_local < host.count
    ip, port = resolve(host.coordinator, spans_machines=spans_machines)
    if spans_machines and not ipaddress.ip_address(ip.split("%")[0]).is_loopback and _devices.is_confined_to_cpu():
        require_reachable_name(socket.gethostname())
    own = Report(host.index, host.count, _versions(), f"{socket.gethostname()}, pid {os.getpid()}")
    roll = None
    if host.index == 0:
        roll = RollCall(ip, port, own, host.key)
        roll.wait(timeout_s)
        address = f"{_bracketed(ip)}:{_service_port(ip, port)}"
        start = roll.start
    else:
        address, start = report((ip, port), own, host.key, timeout_s), _nothing
    _configure(host, limits)
    _start_jax(host, address, start)
    _joined.job = _watched(host, limits, roll)
    atexit.register(_leave)


def _programs(host: Host) -> Path | None:
    return None if host.directory is None else host.directory / "programs"


def _configure(host: Host, limits: Limits) -> None:
    """Flags of XLA and jax that a job needs; before jax starts."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "--xla_cpu_collective_timeout_seconds" not in flags:
        # Not below the first step's allowance: a process may compile while the others wait for it in a collective.
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_collective_timeout_seconds={int(max(limits.least_s, limits.first_s))}".strip()
    jax.config.update("jax_enable_preemption_service", False)  # it swallows SIGTERM; see mesh/job/_preemption.py
    jax.config.update("jax_check_proxy_envs", False)
    programs = _programs(host)
    if programs is not None and jax.config.values["jax_compilation_cache_dir"] is None:
        # A restarted gang finds its programs compiled. The folder is the job's own: what lies in it is run.
        programs.mkdir(mode=0o700, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(programs))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _gloo.install()


def _start_jax(host: Host, address: str, start: Callable[[str], None]) -> None:
    """jax's own service and clients; process 0 lets the others come when its service listens."""
    if host.index == 0:
        # The others are let in by a thread: initialize returns in process 0 only when all have connected.
        def let_in() -> None:
            deadline = time.monotonic() + 5.0
            while time.monotonic() < deadline and not _listens(address):
                time.sleep(0.002)
            start(address)

        threading.Thread(target=let_in, name="roll call answers", daemon=True).start()
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=host.count,
        process_id=host.index,
        local_device_ids=_own_gpus(host),
        cluster_detection_method="deactivate",
        initialization_timeout=SERVICE_START_S,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=SERVICE_STOP_S,
        coordinator_bind_address=address,
    )


def _own_gpus(host: Host) -> list[int] | None:
    if host.devices is not None or host.num_local is None or host.local_index is None:
        return None
    return _devices.gpu_share(host.local_index, host.num_local)


def _listens(address: str) -> bool:
    ip, _, port = address.rpartition(":")
    try:
        with socket.create_connection((ip.strip("[]"), int(port)), timeout=0.5):
            return True
    except OSError:
        return False


def _watched(host: Host, limits: Limits, roll: RollCall | None) -> Job:
    """The parts that watch over the job, wired to each other."""
    service = Service(host.count)

    def announce(kind: str, **what: Any) -> None:
        notices.post(kind, **what)

    alarm = Alarm(host, announce)

    def hear(notice: Notice) -> None:
        _hear(notice, host, alarm, preemption, watchdog)

    def lost(error: ServiceLost) -> None:
        alarm.peer_failed(0, str(error).splitlines()[0])

    preemption = Preemption(host.count, lambda step: announce("can stop", step=step))
    watchdog = Watchdog(service, host.index, host.count, limits, alarm.stuck, lambda text: alarm.say(f"slow: {text}"))
    notices = Notices(service, host.index, hear, lost)
    alarm.install()
    return Job(host, service, alarm, notices, watchdog, preemption, Steps(service, host.index, alarm.failed), roll)


def _hear(notice: Notice, host: Host, alarm: Alarm, preemption: Preemption, watchdog: Watchdog) -> None:
    kind, by = notice["kind"], notice["by"]
    if kind in ("failed", "stuck") and by != host.index:
        culprit = by if kind == "failed" else notice["culprit"]
        alarm.peer_failed(by if culprit is None else culprit, notice["why"], show_threads=culprit == host.index or culprit is None)
    elif kind == "stop":
        preemption.ask()
    elif kind == "can stop":
        preemption.hear(by, notice["step"])


def _leave() -> None:
    """The orderly end of a process: all leave together, so that nobody takes an early end for a failure."""
    left, _joined.job = _joined.job, None
    if left is None:
        return
    left.steps.stop()
    left.watchdog.stop()
    try:
        left.service.barrier("spmd/leave", LEAVE_S)
    except JobError as error:
        left.alarm.failed(str(error), 1)
    left.notices.leave()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all is done and saved; the interpreter's end would take its default, and die of it


def _listen_for_sigterm() -> None:
    """SIGTERM is heard by a thread, because the main thread may be in a collective or in the compiler for minutes."""
    if threading.current_thread() is not threading.main_thread():
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.signal(signal.SIGTERM, _ignored)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def listen() -> None:
        asked = False
        while True:
            if signal.SIGTERM not in reader.recv(64):
                continue
            if asked:
                _force()
            asked = True
            _say("told to stop (SIGTERM): all stop where they next ask mesh.should_stop; told once more, this one stops at once")
            _ask_to_stop()

    thread = threading.Thread(target=listen, name="SIGTERM", daemon=True)
    thread.ends = (reader, writer)  # type: ignore[attr-defined]  # kept open as long as the thread lives
    thread.start()


def _say(text: str) -> None:
    if _joined.job is not None:
        _joined.job.alarm.say(text)


def _ask_to_stop() -> None:
    if _joined.job is None:
        if _joined.alone is not None:
            _joined.alone.ask()
        return
    with contextlib.suppress(ServiceLost):  # the listener of notices ends the process for that
        _joined.job.notices.post("stop")


def _force() -> None:
    if _joined.job is not None:
        _joined.job.alarm.forced()
    os._exit(143)


def _ignored(number: int, frame: FrameType | None) -> None:
    """SIGTERM's handler: the thread behind `set_wakeup_fd` does the work."""


def _nothing(address: str) -> None:
    """What other processes than 0 do when jax's service listens."""


def _bracketed(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip


def _service_port(ip: str, port: int) -> int:
    """jax's own port: the one above the roll call's, which a firewall can know; on loopback any free one."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, 0 if ip in ("127.0.0.1", "::1") else port + 1))
        except OSError as error:
            fix = f"choose another port than {port} for the coordinator; {port} and {port + 1} must be free"
            raise JobError(message(f"port {port + 1} of {ip} is in use", "jax's service needs it", fix=fix)) from error
        return int(probe.getsockname()[1])


def _versions() -> dict[str, str]:
    """Of everything that must be equal in all processes."""
    found = {"Python": platform.python_version()}
    for name in _VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def program_environment() -> dict[str, str]:
    """The variables that change what a compiled program is or does, for the digest of a program."""
    return {name: os.environ[name] for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") if name in os.environ}


__all__ = [
    "Job",
    "barrier",
    "init",
    "job",
    "long",
    "program_environment",
    "report_saved",
    "shared",
    "should_stop",
    "when_joined",
]

"""`mesh.init()`: makes this process one of several that run the same program. Only this module reads the environment for it.

    host = mesh.init()        # under spmd launch, torchrun, mpirun, srun, on TPU pods; has no effect outside a job
    host.index, host.count

It detects the process's place in the job (`mesh/job/_clusters.py` has the order), runs the roll call (`_rollcall`) and starts jax's
service with timeouts for such a job. From then on the job is monitored: an exception in any process ends the job at once
(`_alarm`, `_notices`), a hang is detected (`_watchdog`), and after SIGTERM all agree on a step to stop at (`_preemption`).
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
from mesh.job._agreement import StepChecks
from mesh.job._alarm import Alarm
from mesh.job._clusters import detect, metadata, on_tpu_vm
from mesh.job._notices import Notice, Notices
from mesh.job._place import Host
from mesh.job._preemption import Preemption
from mesh.job._records import write_record
from mesh.job._rollcall import Report, RollCall, report, require_reachable_name, resolve, service_address
from mesh.job._service import Service, ServiceLost
from mesh.job._timeouts import BARRIER_S, HEARTBEAT_S, JOIN_S, LEAVE_S, SERVICE_START_S, SERVICE_STOP_S, SHARED_VALUE_S
from mesh.job._watchdog import Limits, Watchdog
from mesh.platform import _gloo

_VERSIONED = ("jax", "jaxlib", "libtpu", "ml_dtypes", "numpy", "spmd-mesh", "torch")


@dataclass
class Job:
    """The services and threads of this process for a job of several processes."""

    host: Host
    service: Service
    alarm: Alarm
    notices: Notices
    watchdog: Watchdog
    preemption: Preemption
    steps: StepChecks
    roll: RollCall | None
    num_programs: int = 0

    def next_program(self) -> int:
        """Number of the next program to compare. All processes count in the same order."""
        self.num_programs += 1
        return self.num_programs - 1


@dataclass
class _Membership:
    """The only mutable state of this module: the job that this process has joined."""

    host: Host | None = None
    job: Job | None = None
    alone: Preemption | None = None  # in a job of one process
    when_joined: list[Callable[[Job], None]] = field(default_factory=list[Callable[["Job"], None]])


_joined = _Membership()


def when_joined(callback: Callable[[Job], None]) -> None:
    """Call `callback` when this process joins a job of several processes, or at once if it has joined."""
    if _joined.job is not None:
        callback(_joined.job)
    else:
        _joined.when_joined.append(callback)


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
    """Join the job that this process belongs to. Call this before the first array, tensor or mesh. Further calls have no effect.

    Args:
        coordinator: "name:port" of process 0. It listens on that address only, on this port and the one above.
        count: number of processes. Pass coordinator, count and index, or none of them to read them from the environment
            (see `mesh/job/_clusters.py`).
        index: index of this process, from 0.
        devices: number of virtual CPU devices of each process. None: the machine's own devices.
        timeout_s: seconds to wait for the other processes.
        watchdog_s: seconds without progress after which the job ends, or 20 median steps if that is longer (default 60).
        first_step_s: the same for the first step, and for compiling and saving (default 1800).

    Returns:
        This process's place in the job; `count` is 1 without a job.

    Raises:
        JobError: the processes could not start together; the message gives the reason and a fix.
        DeviceError: jax has already initialised its devices, and `devices` asks for others.
    """
    if _joined.host is not None:
        return _joined.host
    host = _detected(coordinator, count, index)
    if devices is not None:
        host = replace(host, devices=devices)
    if host.devices is not None:
        _devices.virtual_devices(host.devices)
    if host.count > 1:
        limits = _limits(watchdog_s, first_step_s)
        _join(host, timeout_s, limits)
    else:
        _joined.alone = Preemption(1, lambda step: cast("Preemption", _joined.alone).record(0, step))
    _joined.host = host
    _devices.set_job_devices(host.count, host.devices)
    _listen_for_sigterm()
    while _joined.job is not None and _joined.when_joined:
        _joined.when_joined.pop(0)(_joined.job)
    return host


def place() -> Host:
    """This process's place in its job, whether it has joined it or not. Does not join."""
    return _joined.host or _detected(None, None, None)


def job() -> Job | None:
    """The job of several processes that this process has joined, or None."""
    return _joined.job


def should_stop(step: int) -> bool:
    """Whether to save and exit before this step. Call it before each step, in every process.

    After any process received SIGTERM, it is True in all processes from the same step on. Then save, and exit with `mesh.PREEMPTED`.

    Args:
        step: number of the step, the same in all processes.

    Raises:
        JobError: a process did not answer in time after SIGTERM.
    """
    if _joined.job is not None:
        return _joined.job.preemption.should_stop(step)
    return _joined.alone is not None and _joined.alone.should_stop(step)


def shared(name: str, own: str, timeout_s: float = SHARED_VALUE_S) -> str:
    """Broadcast a value from process 0.

    Args:
        name: name of the value; used once.
        own: this process's value, which only process 0 sends.
        timeout_s: seconds to wait for process 0.

    Returns:
        The value of process 0.

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
    """Wait until every process of the job has reached the barrier with this name. Has no effect outside a job.

    Args:
        name: name of the barrier, which can be used only once.
        timeout_s: seconds to wait for the other processes.

    Raises:
        JobError: some processes did not arrive in time; the message names them if the service does.
    """
    if _joined.job is not None:
        _joined.job.service.barrier(f"user/{name}", timeout_s)


def report_saved(step: int) -> None:
    """Tell the launcher that the checkpoint of this step is complete, which resets its count of failures (`--restarts`)."""
    host = _joined.host
    if host is None or host.directory is None or host.index != 0:
        return
    write_record(host.directory / "saved", str(step))


def programs_of_job() -> Path | None:
    """Folder with the compiled programs of this job, for its restarts. None without a job of several processes or its directory."""
    return None if _joined.job is None else _programs(_joined.job.host)


@contextmanager
def extended_timeout(what: str) -> Generator[None]:
    """Context manager under which the watchdog allows as much time as for a first step: for saving, evaluating or loading.

    Args:
        what: name of the phase, which the watchdog's messages show.
    """
    if _joined.job is None:
        yield
        return
    with _joined.job.watchdog.extended(what):
        yield


long = extended_timeout  # the former name


def _detected(coordinator: str | None, count: int | None, index: int | None) -> Host:
    """This process's place in its job, from the arguments of `init` or, without any, from the environment."""
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
                fix="pass all three, or none to read them from the environment",
            )
        )
    else:
        host = detect(os.environ) or (on_tpu_vm(metadata) if _devices.has_tpu() else None) or Host()
    if not 0 <= host.index < host.count:
        raise JobError(
            message(
                f"process {host.index} is out of range in a job of {host.count} processes",
                f"read from: {host.found_by}",
                fix="pass an index from 0 to count - 1",
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
                f"{host} must join before its first array, tensor or mesh",
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
        address = service_address(ip, port)
        start = roll.start
    else:
        address, start = report((ip, port), own, host.key, timeout_s), _do_nothing
    _configure(host, limits)
    _start_jax(host, address, start)
    _joined.job = _monitored(host, limits, roll)
    atexit.register(_leave)


def _programs(host: Host) -> Path | None:
    return None if host.directory is None else host.directory / "programs"


def _configure(host: Host, limits: Limits) -> None:
    """Set the options of XLA and jax that a job needs, before jax starts."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "--xla_cpu_collective_timeout_seconds" not in flags:
        # At least the timeout of a first step: a process may compile while the others wait for it in a collective.
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_collective_timeout_seconds={int(max(limits.least_s, limits.first_s))}".strip()
    jax.config.update("jax_enable_preemption_service", False)  # it would consume SIGTERM; see mesh/job/_preemption.py
    jax.config.update("jax_check_proxy_envs", False)
    programs = _programs(host)
    if programs is not None and jax.config.values["jax_compilation_cache_dir"] is None:
        # A restarted job finds its programs compiled. Only this job may write to the folder, because its contents are executed.
        programs.mkdir(mode=0o700, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(programs))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _gloo.install()


def _start_jax(host: Host, address: str, start: Callable[[str], None]) -> None:
    """Start jax's service and clients. Process 0 sends the address to the others when its service listens."""
    if host.index == 0:
        # On a thread, because in process 0 `initialize` returns only when all processes have connected.
        def send_address() -> None:
            deadline = time.monotonic() + 5.0
            while time.monotonic() < deadline and not _listens(address):
                time.sleep(0.002)
            start(address)

        threading.Thread(target=send_address, name="roll call answers", daemon=True).start()
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
    """The GPUs of this process, or None for all of the machine."""
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


def _monitored(host: Host, limits: Limits, roll: RollCall | None) -> Job:
    """Start the threads that monitor the job, and connect them with each other."""
    service = Service(host.count)

    def announce(kind: str, **what: Any) -> None:
        notices.post(kind, **what)

    alarm = Alarm(host, announce)

    def on_notice(notice: Notice) -> None:
        _handle_notice(notice, host, alarm, preemption)

    def on_lost(error: ServiceLost) -> None:
        alarm.peer_failed(0, str(error).splitlines()[0])

    preemption = Preemption(host.count, lambda step: announce("can stop", step=step))
    watchdog = Watchdog(service, host.index, host.count, limits, alarm.stuck, lambda text: alarm.log(f"slow: {text}"))
    notices = Notices(service, host.index, on_notice, on_lost)
    alarm.install()
    return Job(host, service, alarm, notices, watchdog, preemption, StepChecks(service, host.index, alarm.failed), roll)


def _handle_notice(notice: Notice, host: Host, alarm: Alarm, preemption: Preemption) -> None:
    kind, by = notice["kind"], notice["by"]
    if kind in ("failed", "stuck") and by != host.index:
        culprit = by if kind == "failed" else notice["culprit"]
        alarm.peer_failed(by if culprit is None else culprit, notice["why"], show_threads=culprit == host.index or culprit is None)
    elif kind == "stop":
        preemption.request_stop()
    elif kind == "can stop":
        preemption.record(by, notice["step"])


def _leave() -> None:
    """Leave the job at the normal end of the program. All processes leave together, so that an early end is not mistaken for a failure."""
    ending, _joined.job = _joined.job, None
    if ending is None:
        return
    ending.steps.stop()
    ending.watchdog.stop()
    try:
        ending.service.barrier("spmd/leave", LEAVE_S)
    except JobError as error:
        ending.alarm.failed(str(error), 1)
    ending.notices.leave()
    if threading.current_thread() is threading.main_thread():
        # The work is done and saved. Python restores the default handler when it exits, so a late SIGTERM would kill it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _listen_for_sigterm() -> None:
    """Handle SIGTERM on a thread, because the main thread may be in a collective or in the compiler for minutes."""
    if threading.current_thread() is not threading.main_thread():
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.signal(signal.SIGTERM, _no_action)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def listen() -> None:
        is_second = False
        while True:
            if signal.SIGTERM not in reader.recv(64):
                continue
            if is_second:
                _exit_at_once()
            is_second = True
            _log("received SIGTERM: all processes stop at the same mesh.should_stop(step); a second SIGTERM ends this one at once")
            _request_stop()

    thread = threading.Thread(target=listen, name="SIGTERM", daemon=True)
    thread.ends = (reader, writer)  # type: ignore[attr-defined]  # keeps the sockets open as long as the thread lives
    thread.start()


def _log(text: str) -> None:
    if _joined.job is not None:
        _joined.job.alarm.log(text)


def _request_stop() -> None:
    if _joined.job is None:
        if _joined.alone is not None:
            _joined.alone.request_stop()
        return
    with contextlib.suppress(ServiceLost):  # the thread that receives notices ends the process in this case
        _joined.job.notices.post("stop")


def _exit_at_once() -> None:
    if _joined.job is not None:
        _joined.job.alarm.forced()
    os._exit(143)


def _no_action(number: int, frame: FrameType | None) -> None:
    """Python's handler of SIGTERM. The thread that reads the other end of `set_wakeup_fd` handles the signal."""


def _do_nothing(address: str) -> None:
    """In place of `RollCall.start` in processes other than 0."""


def _versions() -> dict[str, str]:
    """Versions of Python and of the packages that must be equal in all processes."""
    found = {"Python": platform.python_version()}
    for name in _VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def program_environment(beginnings: tuple[str, ...] = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")) -> dict[str, str]:
    """The environment variables whose names begin so, for a digest. By default those that affect compiled programs."""
    return {name: value for name, value in os.environ.items() if name.startswith(beginnings)}


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

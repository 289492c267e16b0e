"""The devices of the job, and virtual CPU devices. The only module of the project that asks jax for its devices.

A device's *logical id* is its position in `devices()`. On a laptop, create virtual devices at the top of the program:

    import mesh
    mesh.virtual_devices(8)
    mesh.device_count()  # 8

This module does not depend on meshes or specs.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import jax

from mesh._mesh_errors import AcceleratorIdle, DeviceError, message
from mesh.platform._allocator import keep_freed_memory
from mesh.platform._jax_runtime import backends_are_initialized
from mesh.platform._threads import count_in_flags, has_threads, provide_threads

# Note [Accelerator device files]
# The driver's device files show whether this machine has an accelerator. Asking jax instead would initialise its backend, which
# on a GPU reserves most of the memory.
_ACCELERATOR_FILES = {
    "NVIDIA GPU": ("nvidia[0-9]*",),
    "TPU": ("accel[0-9]*", "vfio/[0-9]*"),
}


class Device(Protocol):
    """Protocol with the attributes of a `jax.Device` that this project uses. jax itself has no types for them."""

    @property
    def id(self) -> int: ...
    @property
    def platform(self) -> str: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def process_index(self) -> int: ...


@dataclass
class _JobDevices:
    """Number of processes of the job, and the number of devices of each (None: all devices of its machine)."""

    num_processes: int = 1
    per_process: int | None = None


_job_devices = _JobDevices()
_has_enough_threads = [False]  # whether the CPU client was created with enough threads; see Note [Threads of XLA:CPU]


def set_job_devices(num_processes: int, per_process: int | None) -> None:
    """Record the size of the job that this process has joined (see `mesh/job/_join.py`), for `virtual_devices`."""
    _job_devices.num_processes, _job_devices.per_process = num_processes, per_process


def virtual_devices(n: int) -> None:
    """Create `n` virtual CPU devices. In a job of several processes, `n` is the total over all processes.

    Real accelerators are not initialised, and their memory is not used. Call this at the top of the program, before any
    array, tensor or mesh exists. A second call with the same number has no effect. Host memory that a step
    frees is kept for the next step, unless the environment configures glibc's allocator (`MALLOC_...`, `GLIBC_TUNABLES`).

    Args:
        n: total number of devices; in a job, a multiple of its number of processes.

    Raises:
        DeviceError: `n` is not a positive int, or jax has already started other devices.

    Warns:
        AcceleratorIdle: this machine seems to have an accelerator, and jax was not yet restricted to CPU.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        what = f"virtual_devices({n!r}) must create at least one device"
        raise DeviceError(message(what, f"{n!r} is not a positive int", fix="mesh.virtual_devices(8)"))
    if _job_devices.num_processes > 1:
        n = _devices_per_process(n)
    if _backends_are_initialized():
        _require_virtual(n)
        return
    found = [] if is_confined_to_cpu() else _accelerators()
    _confine_to_cpu(n)
    if found:
        warnings.warn(
            message(
                f"virtual_devices({n}) leaves this machine's {' and '.join(found)} alone",
                f"the program runs on {n} virtual CPU devices",
                fix="to use the real devices, remove the call to mesh.virtual_devices",
            ),
            AcceleratorIdle,
            stacklevel=2,
        )


def devices() -> tuple[Device, ...]:
    """All devices of the default platform on all hosts, ordered by id. A device's position is its logical id."""
    return tuple(sorted(cast("list[Device]", jax.devices()), key=lambda device: device.id))


def host_device() -> Device | None:
    """A CPU device of this process, whatever the default platform is, or None if jax may not use the CPU."""
    try:
        return cast("Device", jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU
        return None


def device_count() -> int:
    """Number of devices of the default platform on all hosts."""
    return jax.device_count()


def platform() -> str:
    """Name of the default platform as jax spells it: 'cpu', 'gpu' or 'tpu'."""
    return devices()[0].platform


def is_confined_to_cpu() -> bool:
    """Whether jax is restricted to CPU devices, even if the machine has others."""
    return jax.config.values["jax_platforms"] == "cpu"


def gpu_share(index: int, count: int, device_files: Path = Path("/dev")) -> list[int] | None:
    """The GPUs of this machine that process `index` uses, if `count` processes run on it. None without GPUs or with one process.

    Args:
        index: index of the process among those on this machine.
        count: number of the job's processes on this machine.
        device_files: folder with the driver's device files.

    Raises:
        DeviceError: `count` does not divide the number of GPUs.
    """
    num_gpus = len(list(device_files.glob(_ACCELERATOR_FILES["NVIDIA GPU"][0])))
    if count < 2 or num_gpus == 0 or is_confined_to_cpu():
        return None
    if num_gpus % count:
        raise DeviceError(
            message(
                f"{count} processes cannot share this machine's GPUs evenly",
                f"it has {num_gpus} GPUs",
                fix=f"start a number of processes on each machine that divides {num_gpus}",
            )
        )
    each = num_gpus // count
    return list(range(index * each, (index + 1) * each))


def has_tpu() -> bool:
    """Whether this machine seems to have a TPU that this program may use. Does not initialise it."""
    return not is_confined_to_cpu() and any(name.startswith("TPU") for name in _accelerators())


def has_started() -> bool:
    """Whether jax has initialised its devices, so that their number is fixed."""
    return _backends_are_initialized()


def _devices_per_process(n: int) -> int:
    """Number of devices that each process creates if the job is to have `n` devices in total."""
    num_processes, per_process = _job_devices.num_processes, _job_devices.per_process
    if n % num_processes == 0 and per_process in (None, n // num_processes):
        return n // num_processes
    each = "" if per_process is None else f" of {per_process} devices each, {num_processes * per_process} in total"
    fix = f"spmd launch --devices-per-process {max(1, n // num_processes)}, or mesh.virtual_devices({num_processes * (per_process or 1)})"
    raise DeviceError(message(f"virtual_devices({n}) does not fit the job", f"the job has {num_processes} processes{each}", fix=fix))


def _require_virtual(n: int) -> None:
    # In a job of several processes, `n` is the number of devices of this process.
    num_local = jax.local_device_count()
    if platform() == "cpu" and num_local == n:
        return
    raise DeviceError(
        message(
            f"virtual_devices({n}) was called too late: jax has already initialized its devices",
            f"{num_local} exist on platform {platform()!r}, {n} virtual CPU devices were requested",
            fix=f"call mesh.virtual_devices({n}) at the top of the program, before any tensor, array or mesh",
        )
    )


def _confine_to_cpu(n: int) -> None:
    jax.config.update("jax_num_cpu_devices", n)
    jax.config.update("jax_platforms", "cpu")
    keep_freed_memory()
    prepare_threads()


def prepare_threads() -> None:
    """Make XLA:CPU start enough threads for its devices. Has no effect once jax has started. See Note [Threads of XLA:CPU]."""
    if not _backends_are_initialized():
        configured = int(jax.config.values["jax_num_cpu_devices"])
        num_devices = configured if configured > 0 else count_in_flags()
        provide_threads(num_devices)
        _has_enough_threads[0] = has_threads(num_devices)


def started_with_threads() -> bool:
    """Whether XLA:CPU started with enough threads in this process for programs whose devices wait for each other."""
    return _has_enough_threads[0]


def _backends_are_initialized() -> bool:
    return _cpu_count_is_frozen() if backends_are_initialized is None else backends_are_initialized()


def _cpu_count_is_frozen() -> bool:
    """Whether jax refuses to change the number of CPU devices, which it does once its backends are initialised."""
    current = int(jax.config.values["jax_num_cpu_devices"])
    try:
        jax.config.update("jax_num_cpu_devices", current + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", current)
    return False


def _accelerators(device_files: Path = Path("/dev")) -> list[str]:
    # See Note [Accelerator device files].
    found: list[str] = []
    for kind, patterns in _ACCELERATOR_FILES.items():
        files = sorted(str(file) for pattern in patterns for file in device_files.glob(pattern))
        if files:
            found.append(f"{kind} ({files[0]})")
    return found

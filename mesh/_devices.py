"""Which devices exist; the only module of the project that asks jax for them.

A device's *logical id* is its position in `devices()`. On a laptop, ask for virtual devices at the top of the program:

    import mesh
    mesh.virtual_devices(8)
    mesh.device_count()  # 8

Knows nothing of meshes or specs.
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
# Looking for the driver's files says that an accelerator is there without starting it: asking jax would initialise
# the backend, which on a GPU grabs most of its memory.
_ACCELERATOR_FILES = {
    "NVIDIA GPU": ("nvidia[0-9]*",),
    "TPU": ("accel[0-9]*", "vfio/[0-9]*"),
}


class Device(Protocol):
    """The typed part of a `jax.Device` (a Protocol): jax ships no types for it."""

    @property
    def id(self) -> int: ...
    @property
    def platform(self) -> str: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def process_index(self) -> int: ...


@dataclass
class _Split:
    """Over how many processes the devices are spread, and how many each has (None: what its machine has)."""

    num_processes: int = 1
    per_process: int | None = None


_split = _Split()
_with_threads = [False]  # whether the CPU client was made with enough of them; see Note [Threads of XLA:CPU]


def split_over(num_processes: int, per_process: int | None) -> None:
    """This process has joined a job of so many processes (see `mesh/job/_join.py`)."""
    _split.num_processes, _split.per_process = num_processes, per_process


def virtual_devices(n: int) -> None:
    """Create `n` virtual CPU devices; in a job of several processes, `n` in all processes together.

    Real accelerators are not initialised and their memory is not used. Call it at the top of the program, before any
    array, tensor or mesh exists; calling it again with the same number has no effect. Host memory that a step
    frees is kept for the next one, unless the environment sets glibc's allocator (`MALLOC_...`, `GLIBC_TUNABLES`).

    Args:
        n: how many devices the program gets; in a job, a multiple of the number of its processes.

    Raises:
        DeviceError: `n` is not a positive int, or jax has already started other devices.

    Warns:
        AcceleratorIdle: this machine seems to have an accelerator, and jax had not been confined to CPU before.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        what = f"virtual_devices({n!r}) needs at least one device"
        raise DeviceError(message(what, f"{n!r} is not a positive int", fix="mesh.virtual_devices(8)"))
    if _split.num_processes > 1:
        n = _share(n)
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
    """All devices of the default platform, on every host, ordered by id; the position is the logical id."""
    return tuple(sorted(cast("list[Device]", jax.devices()), key=lambda device: device.id))


def host_device() -> Device | None:
    """A CPU device of this process, beside those of the default platform; None where jax may use that platform alone."""
    try:
        return cast("Device", jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS says so
        return None


def device_count() -> int:
    """Number of devices of the default platform, on every host."""
    return jax.device_count()


def platform() -> str:
    """Name of the platform in use as jax spells it: 'cpu', 'gpu' or 'tpu'."""
    return devices()[0].platform


def is_confined_to_cpu() -> bool:
    """Whether jax will use CPU devices, whatever else there is."""
    return jax.config.values["jax_platforms"] == "cpu"


def gpu_share(index: int, count: int, device_files: Path = Path("/dev")) -> list[int] | None:
    """Which of this machine's GPUs belong to process `index` of the `count` on it; None without GPUs, or when all are its own."""
    num_gpus = len(list(device_files.glob(_ACCELERATOR_FILES["NVIDIA GPU"][0])))
    if count < 2 or num_gpus == 0 or is_confined_to_cpu():
        return None
    if num_gpus % count:
        raise DeviceError(
            message(
                f"{count} processes cannot share this machine's GPUs evenly",
                f"it has {num_gpus}",
                fix=f"start 1, or a divisor of {num_gpus}, on each machine",
            )
        )
    each = num_gpus // count
    return list(range(index * each, (index + 1) * each))


def has_tpu() -> bool:
    """Whether this machine seems to have a TPU that this program may use; starts nothing."""
    return not is_confined_to_cpu() and any(name.startswith("TPU") for name in _accelerators())


def has_started() -> bool:
    """Whether jax has started its devices, so that their number is fixed."""
    return _backends_are_initialized()


def _share(n: int) -> int:
    """Of `n` devices of the job those of one process."""
    num_processes, per_process = _split.num_processes, _split.per_process
    if n % num_processes == 0 and per_process in (None, n // num_processes):
        return n // num_processes
    have = "" if per_process is None else f" of {per_process} devices each, {num_processes * per_process} in all"
    fix = f"spmd launch --devices-per-process {max(1, n // num_processes)}, or mesh.virtual_devices({num_processes * (per_process or 1)})"
    raise DeviceError(message(f"virtual_devices({n}) does not fit the job", f"it has {num_processes} processes{have}", fix=fix))


def _require_virtual(n: int) -> None:
    # Several hosts: `n` counts the devices of this one.
    num_local = jax.local_device_count()
    if platform() == "cpu" and num_local == n:
        return
    raise DeviceError(
        message(
            f"virtual_devices({n}) was called too late: jax has already initialized its devices",
            f"{num_local} exist on platform {platform()!r}, {n} virtual CPU devices were asked for",
            fix=f"call mesh.virtual_devices({n}) at the top of the program, before any tensor, array or mesh",
        )
    )


def _confine_to_cpu(n: int) -> None:
    jax.config.update("jax_num_cpu_devices", n)
    jax.config.update("jax_platforms", "cpu")
    keep_freed_memory()
    prepare_threads()


def prepare_threads() -> None:
    """Have XLA:CPU start enough threads for the devices that jax is set to make, unless it has made them; see Note [Threads of XLA:CPU]."""
    if not _backends_are_initialized():
        asked = int(jax.config.values["jax_num_cpu_devices"])
        num_devices = asked if asked > 0 else count_in_flags()
        provide_threads(num_devices)
        _with_threads[0] = has_threads(num_devices)


def started_with_threads() -> bool:
    """Whether the CPU devices of this process have threads enough for programs that wait for each other."""
    return _with_threads[0]


def _backends_are_initialized() -> bool:
    return _cpu_count_is_frozen() if backends_are_initialized is None else backends_are_initialized()


def _cpu_count_is_frozen() -> bool:
    """Whether jax refuses to change the number of CPU devices, as it does once started."""
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

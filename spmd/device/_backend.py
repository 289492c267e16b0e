"""Registers `torch.device("jax")` as a PyTorch device, once per process.

PyTorch's Python-backend API is experimental, so its names are imported in `base/_torch` only. Importing `spmd` calls `register()`.
"""

from __future__ import annotations

import importlib.metadata
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import torch

from mesh import _devices
from mesh.job import _join
from spmd.base import _jax_paddings
from spmd.base._errors import DeviceSlotError, TraceError, called_at, message
from spmd.base._fork import fork
from spmd.base._torch import (
    get_privateuse1_backend_name,
    setup_privateuseone_for_python_backend,
)
from spmd.device import _addresses, _dlpack, _engine, _memory_statistics, _number_arithmetic, _serialize, _storage_bytes, _streams
from spmd.device._checks import raise_failed
from spmd.device._deferred import end_step
from spmd.device._generator import made
from spmd.device._kernels import Installed, install
from spmd.device._only_device import NAME, require_only_device
from spmd.device._random_stream import default_stream, share_seed
from spmd.device._storage import Buffer, recording
from spmd.patches import _embedding_bag, _unsupported_features
from spmd.patches._table import current, is_expected, replace

_installed: list[Installed] = []


class DeviceProperties(NamedTuple):
    """Result of `torch.jax.get_device_properties`.

    Attributes:
        name: kind of chip, as in `torch.jax.get_device_name`.
        total_memory: bytes that jax may use on one chip; 0 if jax does not report it (CPU devices).
        num_devices: number of chips.
    """

    name: str
    total_memory: int
    num_devices: int


class DeviceModule:
    """The module `torch.jax`: the functions that PyTorch looks up on a device's module."""

    _initialized = True  # torch.utils.checkpoint reads it before it saves the random state

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        """1, because PyTorch sees a mesh of any number of chips as one device."""
        return 1

    def device(self, index: Any) -> AbstractContextManager[None]:
        """A context in which device `index` is current; there is only device 0."""
        set_device_index(index)
        return nullcontext()

    def set_device(self, device: Any) -> None:
        """Make a device current; there is only device 0."""
        set_device_index(device)

    def _is_in_bad_fork(self) -> bool:
        return fork.is_bad

    def manual_seed(self, seed: int) -> None:
        """Restart the device's random stream from `seed`.

        Raises:
            TraceError: a program is being traced.
        """
        if recording.get() is not None:
            raise TraceError(
                message(
                    "the compiled function sets the random seed",
                    *called_at(),
                    "the seed and the number of draws are inputs of the program, so that each call draws new numbers",
                    fix="call torch.manual_seed before the compiled function, not inside it",
                )
            )
        default_stream.seed, default_stream.draws = seed % 2**64, 0

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return default_stream.seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """The random stream's seed and number of draws, as a CPU byte tensor of 16 elements."""
        return default_stream.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Set the random stream to a state from `get_rng_state`."""
        default_stream.set_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [default_stream.get_state()]

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        default_stream.set_state(new_states[0])

    def seed(self) -> None:
        """Restart the random stream from a seed drawn by the operating system."""
        self.manual_seed(torch.Generator().seed())

    seed_all = seed

    def init(self) -> None:
        """Does nothing: importing `spmd` has initialised the device."""

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """(free, total) bytes, like `torch.accelerator.get_memory_info`."""
        return _memory_statistics.get_memory_info()

    def ipc_collect(self) -> None:
        """Does nothing: device memory is never shared with other processes."""

    def get_device_name(self, device: Any = None) -> str:
        """The kind of the chips, as jax names it ("TPU v5 lite", "cpu")."""
        return str(_devices.devices()[0].device_kind)

    def get_device_properties(self, device: Any = None) -> DeviceProperties:
        """The kind and number of the chips, and the memory of one chip."""
        limits = [limit for chip in _memory_statistics.counted() if (limit := chip.get("bytes_limit"))]
        return DeviceProperties(self.get_device_name(), min(limits, default=0), _devices.device_count())

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def __getattr__(self, name: str) -> Any:
        """Raise an error that names the replacement for a function of `torch.cuda`."""
        raise _unsupported_features.no_such_name(name, [n for n in dir(self) if not n.startswith("_")])

    def synchronize(self, device: Any = None) -> None:
        """Wait until the devices have finished all dispatched work.

        Raises:
            CheckFailed: a check of a compiled call failed.
        """
        end_step()
        jax.effects_barrier()
        jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])
        raise_failed()


for _function in (*_memory_statistics.FUNCTIONS, *_streams.MEMBERS):
    setattr(DeviceModule, _function.__name__, staticmethod(_function))
_streams.waiting_by(lambda: DeviceModule().synchronize())


def synchronize(device: Any = None, /) -> None:
    """`torch.accelerator.synchronize`; device 'jax' is the only accelerator of the process."""
    DeviceModule().synchronize(device)


def set_device_index(device: Any, /) -> None:
    """`torch.accelerator.set_device_index`; there is only device 0, and a negative index changes nothing, as in torch.

    Raises:
        SpmdError: the index is greater than 0.
        ValueError: a device of another type.
    """
    given = torch.device(device) if isinstance(device, str) else device
    index = given.index if isinstance(given, torch.device) else given
    if isinstance(given, torch.device) and given.type != NAME:
        raise ValueError(f"{given.type} doesn't match the current accelerator {NAME}.")
    require_only_device(index)


def register() -> None:
    """Claim PyTorch's PrivateUse1 slot for 'jax' and install the kernels; a second call does nothing.

    Raises:
        DeviceSlotError: another package has claimed the slot, or torchax or torch_xla is loaded.
    """
    if _installed:
        return
    owner = get_privateuse1_backend_name()
    others = sorted({"torchax", "torch_xla"} & set(sys.modules))
    if owner != "privateuseone" or others:
        raise DeviceSlotError(
            message(
                "device 'jax' cannot be registered: PyTorch has one slot for an out-of-tree device per process",
                f"the slot belongs to {owner!r}; loaded: {others or 'neither torchax nor torch_xla'}",
                fix="import spmd in a process of its own",
            )
        )
    setup_privateuseone_for_python_backend(NAME, backend_module=DeviceModule(), device_guard=_engine.DeviceGuard())
    _engine.register()
    replace("torch.accelerator.synchronize", synchronize)
    replace("torch.accelerator.set_device_index", set_device_index)
    _memory_statistics.register()
    _devices.prepare_threads()  # also needed if the environment or jax.config creates the virtual devices
    _installed.append(install())
    _number_arithmetic.install()
    _jax_paddings.install()
    _serialize.register()
    fork.refuse(Buffer, "value")
    _addresses.register()
    _storage_bytes.register()
    _dlpack.register()
    _embedding_bag.register()
    _unsupported_features.register()
    for target in ("torch._opaque_base.OpaqueBaseMeta.__call__", "torch._custom_class_base.CustomClassBaseMeta.__call__"):
        if is_expected(target):  # older versions of torch do not have it and refuse Generator(device="jax")
            replace(target, made)
    _join.when_joined(lambda job: share_seed())


def installed() -> Installed:
    """The kernels installed in this process."""
    return _installed[0]


def accept_in_foreach(*classes: type[torch.Tensor]) -> None:
    """Let optimizers use their foreach form, which makes a tenth of the calls, for these classes. torch compares exact types."""
    for target in ("torch.optim.optimizer._foreach_supported_types", "torch.utils._foreach_utils._foreach_supported_types"):
        supported: list[type[torch.Tensor]] = current(target)
        supported.extend(c for c in classes if c not in supported)


def versions() -> dict[str, str]:
    """Versions of the packages that a program's result depends on, by package name."""
    return {name: importlib.metadata.version(name) for name in ("torch", "jax", "jaxlib", "numpy")}

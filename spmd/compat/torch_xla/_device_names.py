"""Supports `device="xla"`: devices that a program passes are translated to "jax", devices that it reads to "xla".

PyTorch has its own device type "xla", without kernels here, so device 'jax' cannot take that name. Instead a TorchFunctionMode sees every
call of a torch function: a device "xla" among its arguments becomes "jax", and `t.device` read by the program is
`torch.device("xla:0")`. Code of this package, torch and jax sees the real device (see `_caller`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from spmd.base._torch import package_registry
from spmd.compat.torch_xla._caller import is_user
from spmd.device import _serialize
from spmd.patches._table import current, replaced

XLA = torch.device("xla", 0)
_TYPE = "xla"
_DEVICE: Any = torch.Tensor.device
_IS_XLA: Any = torch.Tensor.is_xla  # pyright: ignore[reportAttributeAccessIssue]
# torch_xla accepts class labels as floats, which PyTorch refuses
_TAKE_CLASSES = (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)
_SHOWN = (torch.Tensor.__repr__, torch.Tensor.__format__)


def translated(device: Any) -> Any:
    """Device 'jax' for device "xla" in any form; other values unchanged."""
    if isinstance(device, torch.device):
        return torch.device("jax") if device.type == _TYPE else device
    if isinstance(device, str) and device.partition(":")[0] == _TYPE:
        return "jax"
    return device


class XlaDeviceMode(TorchFunctionMode):
    """Translates devices in every call of a torch function on this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owner = getattr(func, "__self__", None)
        if owner is _DEVICE:
            real = func(*args)
            return XLA if real.type == "jax" and is_user(1) else real
        if owner is _IS_XLA:
            return args[0].device.type == "jax"
        if kwargs and "device" in kwargs:
            kwargs = {**kwargs, "device": translated(kwargs["device"])}
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], translated(args[1]), *args[2:])
        elif any(isinstance(arg, torch.device) for arg in args) and func is not torch.device:
            args = tuple(translated(arg) if isinstance(arg, torch.device) else arg for arg in args)
        if func in _TAKE_CLASSES:
            args, kwargs = _with_classes(*args, **(kwargs or {}))
        result: Any = func(*args, **(kwargs or {}))
        return result.replace("device='jax:0'", "device='xla:0'") if func in _SHOWN else result


mode = XlaDeviceMode()


def _with_classes(input: Any, target: Any, *rest: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a classification loss, with float labels as integers. Probabilities, with the input's rank, stay floats."""
    is_written_so = isinstance(target, torch.Tensor) and target.is_floating_point() and target.dim() < input.dim()
    return (input, target.long() if is_written_so and target.device.type == "jax" else target, *rest), options


def enter(stack: ExitStack) -> None:
    """Make "xla" mean device 'jax' until `stack` closes: in this thread, in threads started from now on, and in backward passes."""
    stack.enter_context(mode)
    _patch(stack, "threading.Thread.run", lambda run: lambda self: _within(run, self))
    for module in (
        "torch.autograd",
        "torch.autograd.graph",
    ):  # the mode is inactive inside a call that it handles: enter it again
        _patch(stack, f"{module}._engine_run_backward", lambda run: lambda *args, **kwargs: _backward(run, *args, **kwargs))
    _patch(stack, "torch.utils._device.DeviceContext.__init__", lambda init: lambda self, device: init(self, translated(device)))
    _patch(stack, "torch.amp.autocast_mode.autocast.__init__", _autocast)
    _patch(stack, "torch.get_default_device", lambda get: lambda: XLA if get().type == "jax" else get())
    _register_location(stack)


def _patch(stack: ExitStack, target: str, make: Callable[[Any], Any]) -> None:
    stack.enter_context(replaced(target, make(current(target))))


def _within(run: Callable[..., Any], *args: Any) -> Any:
    with mode:
        return run(*args)


def _backward(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.autograd.set_multithreading_enabled(False), mode:
        return run(*args, **kwargs)


def _autocast(init: Callable[..., None]) -> Callable[..., None]:
    def with_xla(self: Any, device_type: Any, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if isinstance(device_type, torch.device):
            device_type = device_type.type
        if device_type == _TYPE:
            device_type, dtype = "jax", dtype or torch.bfloat16
        init(self, device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    return with_xla


def _register_location(stack: ExitStack) -> None:
    """Support `torch.load(..., map_location="xla")`."""

    def restore(storage: Any, location: str) -> Any:
        return _serialize._storage_on_device(storage, "jax") if location.partition(":")[0] == _TYPE else None

    registry: Any = package_registry
    entry = (_serialize._PRIORITY, lambda storage: None, restore)
    registry.insert(0, entry)
    stack.callback(registry.remove, entry)

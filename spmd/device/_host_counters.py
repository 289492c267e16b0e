"""Flags and counters that eager code writes: small tensors of integers or bools whose values the host knows, and single floats.

ptr.zero_(); ptr[0] = 3; n += 1          # between calls of a compiled function that reads `int(ptr)`

The CPU's kernels compute the new values, which are sent to the devices at their next use. So the host goes on knowing them, and a
compiled function may read them as numbers. See Note [Known inputs] in `program/trace/_known_inputs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from spmd.base._convert import host_array, host_tensor, to_numpy_dtype
from spmd.base._jax import is_tracing
from spmd.base._torch import OpOverload
from spmd.device._storage import buffer_of, is_device_tensor, is_whole, recording
from spmd.device._uploaded import host_values, may_follow


def overwritten(tensor: torch.Tensor, write: Callable[[torch.Tensor], Any]) -> bool:
    """Overwrite all elements of a flag or counter on the host.

    Args:
        tensor: a device tensor, perhaps a view.
        write: writes to a CPU tensor that stands for `tensor`, or returns False.

    Returns:
        False for other tensors and in a trace, and nothing is done.
    """
    return _written(tensor, write, needs_old=not is_whole(tensor, buffer_of(tensor)))


def updated(op: OpOverload, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], *, fills: bool) -> bool:
    """Update a flag or counter in place on the host.

    Args:
        op: its result for a CPU tensor that stands for `tensor` is the new value.
        tensor: a device tensor, perhaps a view.
        args, kwargs: further arguments of `op`.
        fills: the result does not depend on the old value. Other updates of floats are left to the device, which may round otherwise.

    Returns:
        False as `overwritten` does, and if the host does not know an argument on the device.
    """
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    if not (is_integer or fills) or not _may_be_written(tensor):
        return False
    given, named = list(map(_on_host, args)), {name: _on_host(value) for name, value in kwargs.items()}
    if any(map(is_device_tensor, (*given, *named.values()))):
        return False

    def write(view: torch.Tensor) -> bool:
        try:
            result = op(view, *given, **named)
            if not isinstance(result, torch.Tensor) or (result.dtype, result.shape) != (view.dtype, view.shape):
                return False
            view.copy_(result)
        except Exception:  # the device's rule raises the error, or fills an expanded view
            return False
        return True

    return overwritten(tensor, write) if fills else _written(tensor, write, needs_old=True)


def copied(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Copy a device tensor whose values the host knows into a flag or counter, on the host. Returns what `overwritten` does."""
    if not _may_be_written(tensor) or is_device_tensor(values := _on_host(source)):
        return False
    return overwritten(tensor, lambda view: view.copy_(values))


def _on_host(value: Any) -> Any:
    """A CPU tensor with the values of a small device tensor that the host knows; any other value itself."""
    if not is_device_tensor(value) or not _is_counter(value) or (known := host_values(buffer_of(value))) is None:
        return value
    return _view(host_tensor(known), value)


def _view(root: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return root.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _is_counter(tensor: torch.Tensor) -> bool:
    buffer = buffer_of(tensor)
    is_plain = not (tensor.is_conj() or tensor.is_neg()) and buffer.dropped is None
    return is_plain and may_follow(buffer) and to_numpy_dtype(tensor.dtype) == buffer.dtype


def _may_be_written(tensor: torch.Tensor) -> bool:
    return not is_tracing() and recording.get() is None and _is_counter(tensor)


def _written(tensor: torch.Tensor, write: Callable[[torch.Tensor], Any], *, needs_old: bool) -> bool:
    if not _may_be_written(tensor):
        return False
    buffer = buffer_of(tensor)
    known = host_values(buffer) if needs_old else np.zeros(buffer.shape, buffer.dtype)
    if known is None:
        return False
    root = host_tensor(known)
    if write(_view(root, tensor)) is False:
        return False
    annotation = buffer.annotation
    buffer.set(None)
    buffer.host = host_array(root)
    if annotation is not None:
        buffer.annotate(annotation)
    return True


__all__ = ["copied", "overwritten", "updated"]

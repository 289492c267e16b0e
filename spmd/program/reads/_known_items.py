"""`int(t)`, `float(t)`, `t.item()` and `t.tolist()` of a tensor that the host knows, where they are numbers that vary.

p = int(self.ptr)               # a counter in a buffer: the trace gets a `Varying` that every call computes from the counter

They are Python numbers, guarded, until a later call asks for another one. See Note [Known inputs] in `trace/_known_inputs`.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import torch

from spmd.device._host_copies import held_of
from spmd.device._storage import is_device_tensor, load, recording

_BOUND = (types.BuiltinMethodType, types.MethodType, types.MethodWrapperType)
_METHODS: dict[str, Any] = {"item": None, "tolist": list, "__int__": int, "__float__": float, "__index__": operator.index}
_MOST_LISTED = 16  # elements of a tensor whose values are followed
_AS_THEY_ARE = (torch.bool, torch.uint64)


def for_known_items(fn: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The callable to use for a conversion of a tensor to a number that varies; None for other calls."""
    if len(args) == 1 and (fn is int or fn is float or fn is operator.index):
        tensor, convert = args[0], fn
    elif not args and type(fn) in _BOUND and fn.__name__ in _METHODS:
        tensor, convert = fn.__self__, _METHODS[fn.__name__]
    else:
        return None
    number = _list_of(tensor) if convert is list else _number(tensor)
    if number is None:
        return None
    return lambda *given: number if convert in (None, list) else number.apply(convert, number)


def _list_of(tensor: Any) -> Any:
    """`tensor.tolist()` with numbers that vary; None if one of them does not."""
    if not isinstance(tensor, torch.Tensor) or not is_device_tensor(held_of(tensor)) or not 0 < tensor.numel() <= _MOST_LISTED:
        return None
    if not tensor.dim():
        return _number(tensor)
    rows = list(map(_list_of, held_of(tensor).detach().unbind()))
    return None if any(row is None for row in rows) else rows


def _number(tensor: Any) -> Any:
    """The number that a tensor with one element has, if it varies; else None."""
    if not isinstance(tensor, torch.Tensor) or (recorder := recording.get()) is None:
        return None
    held = held_of(tensor)
    if not is_device_tensor(held) or held.numel() != 1 or held.is_complex() or held.dtype in _AS_THEY_ARE:
        return None
    return recorder.known_number(load(held))


__all__ = ["for_known_items"]

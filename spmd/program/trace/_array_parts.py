"""Takes arrays of numpy that a trace created into parts: those that own their memory, which every call copies, and views of these.

    a = np.zeros(4)
    return a, a[1:]     # in every call a new array and a view of it

Other objects that share memory with what a call creates anew (a `memoryview`, a masked array, a CPU tensor) cannot be created on the copy:
refused.
"""

from __future__ import annotations

import array
import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from spmd.base._errors import TraceError, message
from spmd.program.reads._parts import memory_owners

if TYPE_CHECKING:
    from spmd.program.trace._object_parts import ObjectParts

_OTHER_OWNERS = (bytearray, array.array)
_SHARES = (np.ndarray, np.flatiter, memoryview)


class _View(NamedTuple):
    """The geometry of an array on the memory of another object: strides and offset in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: np.dtype[Any]
    is_writeable: bool

    def shown(self, _: Any, parts: list[Any]) -> np.ndarray[Any, Any]:
        """This view of the owner of memory in `parts`."""
        owner = parts[0]
        if self.dtype.hasobject:
            made = as_strided(_in_memory_order(owner)[self.offset // self.dtype.itemsize :], self.shape, self.strides)
        else:
            memory = _in_memory_order(owner).view(np.uint8) if isinstance(owner, np.ndarray) and owner.size else owner
            made = np.ndarray(self.shape, self.dtype, memory if len(memory) else None, self.offset if len(memory) else 0, self.strides)
        if not self.is_writeable:
            made.flags.writeable = False
        return made


def array_parts(value: np.ndarray[Any, Any]) -> ObjectParts:
    """The parts of an array, and the functions that create it from them."""
    owner = _owner(value)
    if _is_shown(value, owner):
        first = owner.ctypes.data if isinstance(owner, np.ndarray) else np.frombuffer(owner, np.uint8).ctypes.data if len(owner) else 0
        offset = value.ctypes.data - first if value.size else 0
        return None, _View(value.shape, value.strides, offset, value.dtype, value.flags.writeable).shown, [owner]
    if value.dtype == object:
        return partial(np.empty_like, value), partial(_fill, value.flags.writeable), [value[place] for place in np.ndindex(value.shape)]
    return partial(_copied, value), _as_made, ()


class SharedMemory:
    """The objects taken apart that share memory. `is_before`: whether an object existed before the trace."""

    def __init__(self, is_before: Callable[[Any], bool]) -> None:
        self._is_before = is_before
        self._sharing: dict[int, dict[int, Any]] = {}  # by id of the owner, then by id
        self._tensors: dict[int, torch.Tensor] = {}  # by id of the storage
        self._others: list[Any] = []

    def note(self, value: Any) -> None:
        """Note an object that the trace created."""
        if has_memory(value):
            self._tensors[id(value.untyped_storage())] = value
            return
        if issubclass(type(value), (*_SHARES, *_OTHER_OWNERS)):
            self._others.append(value)
        if issubclass(type(value), _SHARES):
            owner = _owner(value)
            self._sharing.setdefault(id(value if owner is None else owner), {})[id(value)] = value

    def require_shown(self) -> None:
        """Raise TraceError if an object whose memory others share cannot be created on the memory of theirs."""
        for sharing in self._sharing.values():
            for value in sharing.values():
                owner = _owner(value)
                is_made = owner is None or (type(value) is np.ndarray and _is_shown(value, owner))
                if not is_made and (len(sharing) > 1 or self._is_before(owner)) and _is_writeable(value):
                    raise _unshared(value, owner)
        for tensor in self._tensors.values() if self._others else ():
            held = bytes_of(tensor).numpy()
            for value in self._others:
                if shares_memory(value, held):
                    raise _unshared(value, tensor)


def has_memory(value: Any) -> bool:
    """Whether it is a tensor with memory of the host."""
    cls = type(value)
    is_plain = issubclass(cls, torch.Tensor) and cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]
    return is_plain and value.device.type == "cpu" and value.layout == torch.strided and not value.is_nested


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of the storage of a tensor that `has_memory`."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # pyright: ignore[reportArgumentType]


def shares_memory(value: Any, held: np.ndarray[Any, Any]) -> bool:
    """Whether an object of numpy or of Python has a part of the memory of `held`."""
    if issubclass(type(value), np.flatiter):
        value = value.base
    if not issubclass(type(value), np.ndarray):
        try:
            value = np.frombuffer(value, np.uint8)
        except (TypeError, ValueError, BufferError, AttributeError):  # it has no buffer, or an empty one
            return False
    return np.may_share_memory(value, held)


def _owner(value: Any) -> Any:
    """The object whose memory `value` shows; None if that is its own."""
    return next(iter(reversed([*memory_owners(value)])), None)


def _is_shown(value: np.ndarray[Any, Any], owner: Any) -> bool:
    """Whether an array can be created as a view of a copy of the owner of its memory."""
    if not isinstance(owner, np.ndarray):
        return isinstance(owner, _OTHER_OWNERS)
    flat = _in_memory_order(owner)
    has_copies_alike = np.empty_like(np.asarray(owner)).strides == owner.strides and (np.may_share_memory(flat, owner) or not flat.size)
    return has_copies_alike and (not value.dtype.hasobject or value.dtype == owner.dtype)


def _in_memory_order(owner: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The elements of an array in the order of its memory: a view, if there are no gaps between them."""
    plain = np.asarray(owner)
    return plain.transpose(sorted(range(plain.ndim), key=lambda dim: -abs(plain.strides[dim]))).reshape(-1)


def _is_writeable(value: Any) -> bool:
    if isinstance(value, memoryview):
        return not value.readonly
    return (value.base if isinstance(value, np.flatiter) else value).flags.writeable


def _copied(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    made = copy.copy(value)
    made.flags.writeable = value.flags.writeable
    return made


def _as_made(made: Any, parts: list[Any]) -> Any:
    return made


def _fill(is_writeable: bool, made: np.ndarray[Any, Any], parts: list[Any]) -> None:
    for place, part in zip(np.ndindex(made.shape), parts, strict=True):
        made[place] = part
    made.flags.writeable = is_writeable


def _unshared(value: Any, owner: Any) -> TraceError:
    return TraceError(
        message(
            f"a {type(value).__name__} that the compiled function returns or stores shares memory with a {type(owner).__name__}",
            "every call creates it anew, and a write to one of the two would not show in the other",
            fix="return or store one of the two, or a copy; views of class numpy.ndarray share their memory, and so do CPU tensors",
        )
    )


__all__ = ["SharedMemory", "array_parts", "bytes_of", "has_memory", "shares_memory"]

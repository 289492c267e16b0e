"""Indices and slice bounds of tensors that vary from call to call: a read gathers rows, a write scatters them.

This covers `x[i]`, `x[:, lo:hi]` and assignments to them. `i` is a varying Python number or a 0-dim device tensor, whose value only the
program knows; `hi - lo` is the same in every call. Such a read gives a copy. If it must be a view, because one of the two tensors is
written in place or the result leaves the function, the function is traced again with the index guarded by its value.

An item of a numpy array or a tuple of numbers (`schedule[i]`) is itself a varying number. The content of the array is guarded like any
array that is read. The same holds for `schedule[i].item()` of a tensor on the CPU.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from numbers import Integral
from types import BuiltinMethodType, EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import TraceAgain
from spmd.base._torch import DisableTorchFunctionSubclass, is_functorch_wrapped_tensor, pytree
from spmd.device._numbers import carried
from spmd.device._storage import buffer_of, is_device_tensor, recording, wrap
from spmd.program.reads._assigned_numbers import element_of
from spmd.program.reads._varying import Varying, fixed, fixed_if_varying, is_varying

if TYPE_CHECKING:
    from spmd.program.trace._trace_settings import TraceSettings

_ALL = slice(None)
_AS_MASKS = (torch.bool, torch.uint8)
_TOO_MANY = 64  # more dims than a tensor has: the key reads nothing, and torch's function raises its error


class ViewNeeded(TraceAgain):
    """A read at a varying index must be a view: trace again, with one program for each index."""

    def other_settings(self, settings: TraceSettings) -> TraceSettings:
        return replace(settings, fixes_indices=True)


class _Selection(NamedTuple):
    """The rows of a tensor that a key selects.

    Attributes:
        view: the tensor, indexed by all parts of the key that do not vary.
        dims: the dims of the view that the varying parts index.
        rows: the selected rows of each of these dims, int64[n].
        is_window: whether the varying part is a slice, so that its dim stays; otherwise one row is selected and the dim is dropped.
    """

    view: torch.Tensor
    dims: list[int]
    rows: list[torch.Tensor]
    is_window: bool

    def place(self) -> tuple[torch.Tensor, Any]:
        """A tensor and an index into it. The indexed result has an extra leading dim of size 1, unless the selection is a window."""
        if self.is_window:
            return self.view, (*[_ALL] * self.dims[0], self.rows[0])
        return self.view.movedim(self.dims, list(range(len(self.dims)))), tuple(self.rows)


def may_vary(holder: Any, key: Any) -> bool:
    """Whether a key contains a varying Python number, or, for a device tensor, a position on the device."""
    if is_varying(key):
        return True
    return is_device_tensor(holder) and (any(map(_is_position, key)) if type(key) is tuple else _is_position(key))


def written_at(tensor: Any, key: Any) -> tuple[_Rows, Any] | None:
    """(target, index) such that `target[index] = value` writes what `tensor[key] = value` writes; None if no program can."""
    selected = _selection(tensor, key)
    if selected is None:
        return None
    base, place = selected.place()
    return _Rows(base), place


class _Rows:
    """A tensor whose rows are assigned like a slice: the value is cast to the dtype, and may share memory with the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __setitem__(self, place: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.to(self._tensor.dtype)
            if is_device_tensor(value) and buffer_of(value) is buffer_of(self._tensor):
                value = value.clone()
        self._tensor[place] = element_of(self._tensor, value)


def read_at(holder: Any, key: Any) -> torch.Tensor | Varying | None:
    """`holder[key]`, as a copy if the holder is a tensor; None if no program can read it."""
    if type(key) is Varying and (numbers := _numbers_of(holder)) is not None:
        return key.apply(operator.getitem, numbers, key)
    if type(key) is tuple and (item := _item_of_array(holder, key)) is not None:
        return item
    if (found := _host_item(holder, key)) is not None:
        return found
    if (parted := by_lists(holder, key)) is not None:
        first, rest = parted
        read: Any = holder if first is None else read_at(holder, first)
        return None if read is None else read[rest]
    selected = _selection(holder, key)
    if selected is None:
        return None
    base, place = selected.place()
    found = base[place] if selected.is_window else base[place][0].clone()
    recorder = recording.get()
    if recorder is not None:
        recorder.is_copy_of(buffer_of(holder), buffer_of(found), ViewNeeded)
    return found


def _numbers_of(holder: Any) -> Any:
    """A copy of a 1-dim array of ints or floats, or a tuple of some; None for other holders."""
    if type(holder) is np.ndarray and holder.ndim == 1 and holder.dtype.kind in "iuf":
        return holder.copy()
    return holder if type(holder) is tuple and {int, float}.issuperset(map(type, holder)) else None


def _item_of_array(array: Any, key: tuple[Any, ...]) -> Varying | None:
    """The item of an array of ints or floats at one index for each dim, some of which vary; None for other keys."""
    first = next((part for part in key if type(part) is Varying), None)
    if type(array) is not np.ndarray or array.dtype.kind not in "iuf" or array.ndim != len(key) or first is None:
        return None
    if not all(type(part) is int or (type(part) is Varying and _is_int(part)) for part in key):
        return None
    values = array.copy()
    return first.apply(lambda *at: values[at], *key)


def by_lists(tensor: Any, key: Any) -> tuple[tuple[Any, ...] | None, tuple[Any, ...]] | None:
    """Two keys in the place of one with lists or tensors of indices: `tensor[key]` is `tensor[first][rest]`, as PyTorch computes it.

    `first` has the numbers and slices; None if none of them varies. `rest` has the lists. None for other keys.
    """
    parts = list(key) if type(key) is tuple else [key]
    if not is_device_tensor(tensor) or is_functorch_wrapped_tensor(tensor) or not any(map(_is_list, parts)):
        return None
    if (at := next((i for i, part in enumerate(parts) if part is Ellipsis), None)) is not None:
        parts[at : at + 1] = [_ALL] * (tensor.dim() - len(parts) + 1)
    if len(parts) > tensor.dim() or not all(_is_list(part) or _is_number_or_slice(part) for part in parts):
        return None
    lists = [_indices(size, part) if _is_list(part) else _ALL for size, part in zip(tensor.shape, parts, strict=False)]
    if any(part is None for part in lists):
        return None
    others = [_ALL if _is_list(part) else part for part in parts]
    if not is_varying(tuple(others)):
        return None, tuple(listed if _is_list(part) else part for part, listed in zip(parts, lists, strict=True))
    return tuple(others), tuple(listed for part, listed in zip(parts, lists, strict=True) if _is_list(part) or isinstance(part, slice))


def _is_list(part: Any) -> bool:
    """Whether a part of a key is a list of indices, or an integer tensor with dims on the device."""
    if type(part) is list:
        return bool(part) and all(type(i) is int or (type(i) is Varying and _is_int(i)) for i in part)
    return is_device_tensor(part) and part.dim() > 0 and part.dtype in (torch.int64, torch.int32)


def _is_number_or_slice(part: Any) -> bool:
    return type(part) is int or isinstance(part, slice) or (type(part) is Varying and _is_int(part))


def _indices(size: int, part: Any) -> Any:
    """A list of indices into a dim; as a tensor if some of them vary. None if one of these is out of bounds."""
    if not is_varying(part):
        return part
    rows = [_rows(size, i, 1) if type(i) is Varying else torch.tensor([i], device="jax") for i in part]
    found = [row for row in rows if row is not None]
    return torch.cat(found) if len(found) == len(rows) else None


class HostItem(torch.Tensor):
    """An element of a CPU tensor at a varying index. Its `item()` is a varying number; any other use guards the index by its value.

    Attributes:
        number: the varying number.
        key: its index in the CPU tensor.
    """

    number: Varying
    key: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", "")
            if name == "item":
                return args[0].number
            if name == "__get__" and not isinstance(found := func(*args), torch.Tensor):  # its dtype, its device
                return found
            for value in pytree.tree_leaves((args, kwargs)):
                if type(value) is HostItem:
                    fixed(value.key)
            plain = pytree.tree_map(lambda v: v.as_subclass(torch.Tensor) if type(v) is HostItem else v, (args, kwargs or {}))
            return func(*plain[0], **plain[1])


def _host_item(tensor: Any, key: Any) -> HostItem | None:
    parts = key if type(key) is tuple else (key,)
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.requires_grad or tensor.dim() != len(parts):
        return None
    is_number = not (tensor.is_complex() or tensor.dtype in _AS_MASKS)
    if not is_number or any(type(part) is not int and (type(part) is not Varying or type(part.evaluate()) is not int) for part in parts):
        return None
    values = tensor.clone()
    first = next(part for part in parts if type(part) is Varying)
    number = first.apply(lambda *at: values[at].item(), *parts)
    found = tensor[tuple(part.evaluate() if type(part) is Varying else part for part in parts)].as_subclass(HostItem)
    found.number, found.key = number, key
    return found


def for_items(fn: Any, args: tuple[Any, ...], fixes_indices: bool) -> Callable[..., Any] | None:
    """The callable to use instead of `float(item)` and `int(item)` of a `HostItem`, and of `narrow` and `select` at a varying index.

    Args:
        fixes_indices: whether a read at a varying index must give a view.
    """
    if len(args) == 1 and type(args[0]) is HostItem and (fn is float or fn is int):
        return lambda item: item.number.apply(fn, item.number)
    if fixes_indices or not isinstance(fn, BuiltinMethodType) or fn.__name__ not in _KEYS or not any(map(is_varying, args)):
        return None
    keyed = _KEYS[fn.__name__]
    if isinstance(fn.__self__, torch.Tensor):
        return partial(_read, partial(keyed, fn.__self__), fn)
    return partial(_read, keyed, fn) if fn is getattr(torch, fn.__name__) else None


def _read(keyed: Callable[..., tuple[Any, Any]], fn: Any, *given: Any, **options: Any) -> Any:
    found = read_at(*keyed(*given, **options))
    if found is not None:
        return found
    return fn(*map(fixed_if_varying, given), **{name: fixed_if_varying(value) for name, value in options.items()})


def _is_position(part: Any) -> bool:
    """Whether it is an integer 0-dim tensor on the device."""
    return is_device_tensor(part) and part.dim() == 0 and not (part.is_floating_point() or part.is_complex() or part.dtype in _AS_MASKS)


def _selection(tensor: Any, key: Any) -> _Selection | None:
    """The rows that `tensor[key]` selects; None if no program can select them with the numbers as inputs."""
    parts = key if type(key) is tuple else (key,)
    open_ones = [is_varying(part) or _is_position(part) for part in parts]
    if (
        not is_device_tensor(tensor)
        or is_functorch_wrapped_tensor(tensor)
        or not all(is_open or _is_plain(part) for part, is_open in zip(parts, open_ones, strict=True))
    ):
        return None
    num_taken = sum(part is not None and part is not Ellipsis for part in parts)
    if num_taken > tensor.dim() or sum(part is Ellipsis for part in parts) > 1:
        return None  # PyTorch's own error
    dims, rows, windows, at = list[int](), list[torch.Tensor](), 0, 0
    view = tensor[tuple(_ALL if is_open else part for part, is_open in zip(parts, open_ones, strict=True))]
    for part, is_open in zip(parts, open_ones, strict=True):
        if is_open:
            found = _rows_of(view.shape[at], part)
            if found is None:
                return None
            dims.append(at)
            rows.append(found)
            windows += isinstance(part, slice)
        at += tensor.dim() - num_taken if part is Ellipsis else type(part) is not int
    return None if windows and len(dims) > 1 else _Selection(view, dims, rows, bool(windows))


def _is_plain(part: Any) -> bool:
    """Whether a part of a key is the same in every call and gives a view."""
    if isinstance(part, slice):
        return all(bound is None or type(bound) is int for bound in (part.start, part.stop, part.step))
    return part is None or type(part) in (int, EllipsisType)


def _is_int(value: Any) -> bool:
    return isinstance(value.evaluate() if type(value) is Varying else value, Integral)


def _rows_of(length: int, part: Any) -> torch.Tensor | None:
    """The rows that a part of a key selects, int64[n]; None if their number varies, or if they are out of bounds."""
    if isinstance(part, torch.Tensor):
        return part.view(1)  # an index out of bounds is an error before the call, because the host knows the argument
    if type(part) is Varying:
        return _rows(length, part, 1) if _is_int(part) else None
    if (
        not isinstance(part, slice)
        or part.step not in (None, 1)
        or type(part.start) is not Varying
        or not (_is_int(part.start) and _is_int(part.stop))
    ):
        return None
    size = part.start.apply(lambda lo, hi: int(hi) - int(lo), part.start, part.stop)
    num = size.concrete() if type(size) is Varying else size
    return _rows(length, part.start, num, is_slice=True) if num > 0 else None


def _rows(length: int, first: Varying, num: int, is_slice: bool = False) -> torch.Tensor | None:
    """The rows from a varying one on. `x[-2:0]` is empty, so a slice from a negative bound ends at one."""

    def inside(i: Any) -> int:
        i = int(i)
        is_negative = -length <= i < (-num if is_slice else 0)
        return int((is_negative or i >= 0) and (i + length if i < 0 else i) + num <= length)

    is_inside = first.apply(inside, first)
    if not is_inside:  # a guard: every call decides it again
        return None
    start = first.apply(lambda i: int(i) + length if i < 0 else int(i), first)
    with exact_dtypes():
        value = carried(start.traced()) if type(start) is Varying else jnp.asarray(start)
        return wrap(value.astype(jnp.int64) + jnp.arange(num, dtype=jnp.int64))


def _narrowed(input: Any, dim: int, start: Any, length: Any) -> tuple[Any, Any]:
    is_window = all(type(n) in (int, Varying) for n in (start, length)) and type(fixed_if_varying(length)) is int
    return input, (*_all_before(input, dim if is_window else None), slice(start, start + length if is_window else None))


def _selected(input: Any, dim: int, index: Any) -> tuple[Any, Any]:
    return input, (*_all_before(input, dim if type(index) is Varying else None), index)


def _all_before(tensor: Any, dim: Any) -> list[slice]:
    is_dim = type(dim) is int and -tensor.dim() <= dim < tensor.dim()
    return [_ALL] * (dim % tensor.dim() if is_dim else _TOO_MANY)


_KEYS: dict[str, Callable[..., tuple[Any, Any]]] = {"narrow": _narrowed, "select": _selected}

__all__ = ["ViewNeeded", "by_lists", "for_items", "may_vary", "read_at", "written_at"]

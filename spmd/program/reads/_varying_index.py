"""Places and slice bounds that vary from call to call: of tensors, reading gathers rows, writing scatters them.

`x[i]`, `x[:, lo:hi]` and assignments to them, where `i` is a Python number that varies or a 0-dim tensor (a position of which only the
program knows the value), and `hi - lo` is the same in every call. What is read so is a copy. Where it must be a view (one of the two
is written to in place, or it leaves the function), the function is traced again with the index as a value that is guarded. An item of
an array or a tuple of numbers (`schedule[i]`) is a number that varies itself: its contents are guarded, as those of any array that is read.
So is what `schedule[i].item()` gives of a tensor on the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import TraceAgain
from spmd.base._torch import DisableTorchFunctionSubclass, pytree
from spmd.device._numbers import carried
from spmd.device._storage import buffer_of, is_device_tensor, recording, wrap
from spmd.program.reads._varying import Varying, fixed, is_varying

if TYPE_CHECKING:
    from spmd.program.trace._trace_settings import TraceSettings

_ALL = slice(None)
_PYTHONS = (np.int64, np.float64)  # what arithmetic with Python's numbers gives is the same
_AS_MASKS = (torch.bool, torch.uint8)


class ViewNeeded(TraceAgain):
    """What was read at an index that varies must be a view: trace again, with a program for each index."""

    def other_settings(self, settings: TraceSettings) -> TraceSettings:
        return replace(settings, fixes_indices=True)


class _Taken(NamedTuple):
    """What a key takes of a tensor.

    Attributes:
        view: the tensor by all of the key that does not vary.
        dims: of the view, of which some rows are taken.
        rows: of each, int64[n].
        is_window: the dim stays; else one row is taken and the dim is gone.
    """

    view: torch.Tensor
    dims: list[int]
    rows: list[torch.Tensor]
    is_window: bool

    def place(self) -> tuple[torch.Tensor, Any]:
        """A view and a key of it, which has a dim of size 1 in front unless it is a window's."""
        if self.is_window:
            return self.view, (*[_ALL] * self.dims[0], self.rows[0])
        return self.view.movedim(self.dims, list(range(len(self.dims)))), tuple(self.rows)


def may_vary(holder: Any, key: Any) -> bool:
    """Whether a key of an item has what another call has otherwise: a Python number that varies, or a position on the device."""
    if is_varying(key):
        return True
    return is_device_tensor(holder) and (any(map(_is_position, key)) if type(key) is tuple else _is_position(key))


def written_at(tensor: Any, key: Any) -> tuple[_Rows, Any] | None:
    """What to assign to, and a key, to write what `tensor[key] = value` writes; None: no program can."""
    taken = _taken(tensor, key)
    if taken is None:
        return None
    base, place = taken.place()
    return _Rows(base), place


class _Rows:
    """A tensor to whose rows values are assigned as to a slice: they are cast, and may lie in the tensor itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __setitem__(self, place: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.to(self._tensor.dtype)
            if is_device_tensor(value) and buffer_of(value) is buffer_of(self._tensor):
                value = value.clone()
        self._tensor[place] = value


def read_at(holder: Any, key: Any) -> torch.Tensor | Varying | None:
    """`holder[key]`, of a tensor as a copy; None: no program can take it."""
    if type(key) is Varying and (numbers := _numbers_of(holder)) is not None:
        found = key.apply(_item, numbers, key)
        if type(found) is Varying:
            found.is_numpys = type(holder) is np.ndarray
        return found
    if (found := _host_item(holder, key)) is not None:
        return found
    taken = _taken(holder, key)
    if taken is None:
        return None
    base, place = taken.place()
    found = base[place] if taken.is_window else base[place][0].clone()
    recorder = recording.get()
    if recorder is not None:
        recorder.is_copy_of(buffer_of(holder), buffer_of(found), ViewNeeded)
    return found


def _numbers_of(holder: Any) -> Any:
    """An array or a tuple that holds nothing but Python's ints or floats, as it is now."""
    if type(holder) is np.ndarray and holder.ndim == 1 and holder.dtype.type in _PYTHONS:
        return holder.copy()
    return holder if type(holder) is tuple and {int, float}.issuperset(map(type, holder)) else None


def _item(numbers: Any, index: int) -> int | float:
    return numbers[index] if type(numbers) is tuple else numbers[index].item()


class HostItem(torch.Tensor):
    """An element of a tensor on the CPU, at an index that varies: as a number it varies too, as a tensor it is that of today's index.

    Attributes:
        number: the number that it holds.
        key: where it lies.
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


def as_number(fn: Any, args: tuple[Any, ...]) -> Any:
    """What to call instead of `float(item)` and `int(item)`, which are numbers that vary; None for other calls."""
    if len(args) == 1 and type(args[0]) is HostItem and (fn is float or fn is int):
        return lambda item: item.number.apply(fn, item.number)
    return None


def _is_position(part: Any) -> bool:
    return is_device_tensor(part) and part.dim() == 0 and not (part.is_floating_point() or part.is_complex() or part.dtype in _AS_MASKS)


def _taken(tensor: Any, key: Any) -> _Taken | None:
    """None: there is no program for it that takes the numbers from its inputs."""
    parts = key if type(key) is tuple else (key,)
    open_ones = [is_varying(part) or _is_position(part) for part in parts]
    if not is_device_tensor(tensor) or not all(is_open or _is_plain(part) for part, is_open in zip(parts, open_ones, strict=True)):
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
    return None if windows and len(dims) > 1 else _Taken(view, dims, rows, bool(windows))


def _is_plain(part: Any) -> bool:
    """Whether it says the same in every call, and makes a view."""
    if isinstance(part, slice):
        return all(bound is None or type(bound) is int for bound in (part.start, part.stop, part.step))
    return part is None or type(part) in (int, EllipsisType)


def _rows_of(length: int, part: Any) -> torch.Tensor | None:
    """The rows that a part of a key means, int64[n]; None: their number varies, or they are not there."""
    if isinstance(part, torch.Tensor):
        return part.view(1)  # of what the host knows of the argument: an index out of bounds is an error before the call
    if type(part) is Varying:
        return _rows(length, part, 1) if isinstance(part.evaluate(), int) else None
    if (
        not isinstance(part, slice)
        or part.step not in (None, 1)
        or type(part.start) is not Varying
        or not isinstance(part.stop, (int, Varying))
    ):
        return None
    size = part.start.apply(lambda lo, hi: hi - lo, part.start, part.stop)
    num = size.concrete() if type(size) is Varying else size
    return _rows(length, part.start, num) if num > 0 else None


def _rows(length: int, first: Varying, num: int) -> torch.Tensor | None:
    is_inside = first.apply(lambda i: int(-length <= i < 0 or i >= 0) and int((i + length if i < 0 else i) + num <= length), first)
    if not is_inside:  # decided anew by every call
        return None
    start = first.apply(lambda i: i + length if i < 0 else i, first)
    with exact_dtypes():
        value = carried(start.traced()) if type(start) is Varying else jnp.asarray(start)
        return wrap(value.astype(jnp.int64) + jnp.arange(num, dtype=jnp.int64))


__all__ = ["ViewNeeded", "as_number", "may_vary", "read_at", "written_at"]

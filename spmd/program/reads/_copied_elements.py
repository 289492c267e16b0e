"""In-place updates of what was read at a varying index: `x[i] += 1`, `x[i].mul_(2)`, `x[i][0] = 1.0`.

PyTorch reads a view there, and a program a copy (`_varying_index`). An update of the copy is therefore written to the tensor at the same
index. Other copies of elements of the tensor are stale then: if one of them is used, the function is traced again with a constant index.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinMethodType, EllipsisType, NoneType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from spmd.device._storage import Buffer, buffer_of, is_device_tensor, recording
from spmd.program.reads._number_arguments import is_overridden
from spmd.program.reads._varying import Varying, is_varying
from spmd.program.reads._varying_index import ViewNeeded, written_at

_UPDATES = frozenset(  # methods that write values, and change nothing else
    f"{name}_"
    for names in (
        "add sub mul div subtract multiply divide true_divide floor_divide remainder fmod pow addcmul addcdiv lerp",
        "fill zero copy masked_fill clamp clamp_min clamp_max clip neg abs square sqrt exp log sin cos tanh sigmoid relu floor ceil round",
        "bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor logical_not",
    )
    for name in names.split()
)


@dataclass(frozen=True)
class _Origin:
    """Where a copy was read.

    Attributes:
        copy: gives the copy while it is alive.
        holder, key: the copy is `holder[key]`.
        part: the recorder of the part of the trace.
        has_gradients: whether gradients were enabled.
    """

    copy: Callable[[], torch.Tensor | None]
    holder: torch.Tensor
    key: Any
    part: Any
    has_gradients: bool


class CopiedElements:
    """The copies of elements that one trace read at varying indices."""

    def __init__(self) -> None:
        self._origins: WeakKeyDictionary[Buffer, _Origin] = WeakKeyDictionary()

    def note(self, found: Any, holder: Any, key: Any) -> Any:
        """Note that `found` was read as `holder[key]`, and return it."""
        part = recording.get()
        if is_device_tensor(found) and part is not None and is_varying(key) and _is_of_numbers(key) and _is_writable(holder):
            is_enabled = torch.is_grad_enabled()
            if not (is_enabled and holder.is_leaf and holder.requires_grad):  # PyTorch's own error
                self._origins[buffer_of(found)] = _Origin(ref(found), holder, key, part, is_enabled)
        return found

    def has(self, value: Any) -> bool:
        """Whether it is a copy that may be updated, or a view of one."""
        return self._origin_of(value) is not None

    def _origin_of(self, value: Any) -> _Origin | None:
        found = self._origins.get(buffer_of(value)) if self._origins and is_device_tensor(value) else None
        if found is None or found.copy() is None or found.part is not recording.get():
            return None
        return found if found.has_gradients == torch.is_grad_enabled() else None

    @contextmanager
    def writing(self, tensor: torch.Tensor) -> Generator[None]:
        """While active, a copy may be written. What it was read from has its values at the end."""
        origin, part = self._origin_of(tensor), recording.get()
        copy = None if origin is None else origin.copy()
        if origin is None or copy is None or part is None:
            yield
            return
        part.read(buffer_of(copy))  # raises if it is stale
        part.is_current(buffer_of(copy))
        try:
            yield
            target, place = written_at(origin.holder, origin.key) or (None, None)
            if target is None:
                raise ViewNeeded
            with self.writing(origin.holder):
                target[place] = copy.clone()
            part.is_current(buffer_of(copy))
        finally:
            part.is_copy_of(buffer_of(origin.holder), buffer_of(copy), ViewNeeded)

    def around(self, fn: Any, chosen: Callable[..., Any]) -> Callable[..., Any]:
        """What to call in the place of `chosen`, which takes the place of `fn`."""
        if not isinstance(fn, BuiltinMethodType) or fn.__name__ not in _UPDATES or not self.has(owner := fn.__self__):
            return chosen

        def update(*given: Any, **options: Any) -> Any:
            with self.writing(owner):  # pyright: ignore[reportArgumentType]
                return chosen(*given, **options)

        return update

    def assigned(self, holder: Any, key: Any, target: Any) -> Any:
        """What takes the place of `target`, which takes the place of `holder` in `holder[key] = value`."""
        return _Assigned(self, holder, key, target) if self._origins and is_device_tensor(holder) else target

    def is_at(self, value: Any, holder: torch.Tensor, key: Any) -> bool:
        """Whether it is the copy that was read as `holder[key]`: PyTorch would write a view to itself."""
        origin = self._origins.get(buffer_of(value)) if is_device_tensor(value) else None
        return origin is not None and origin.copy() is value and origin.holder is holder and origin.key is key


class _Assigned:
    """Takes the place of a tensor to whose elements a value is assigned."""

    __slots__ = ("_copies", "_holder", "_key", "_target")

    def __init__(self, copies: CopiedElements, holder: torch.Tensor, key: Any, target: Any) -> None:
        self._copies, self._holder, self._key, self._target = copies, holder, key, target

    def __setitem__(self, place: Any, value: Any) -> None:
        if not self._copies.is_at(value, self._holder, self._key):
            with self._copies.writing(self._holder):
                self._target[place] = value


def _is_writable(holder: torch.Tensor) -> bool:
    """Whether no mode or subclass sees writes to it, and it has memory for each element."""
    return not is_overridden((holder,)) and all(stride or size < 2 for size, stride in zip(holder.shape, holder.stride(), strict=True))


def _is_of_numbers(key: Any) -> bool:
    """Whether nothing but numbers decides what a key selects."""
    parts = key if type(key) is tuple else (key,)
    return all(type(part) in (int, Varying, slice, NoneType, EllipsisType) for part in parts)


__all__ = ["CopiedElements"]

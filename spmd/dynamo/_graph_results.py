"""How each result of a graph is made after a call: computed, an input, a view of an input or of another result, or plain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from spmd.base._errors import TraceError, message
from spmd.device._host_copies import computed_on_host, is_host_copy
from spmd.device._storage import Buffer, buffer_of, is_device_tensor, is_whole, load, strided_alias, wrap
from spmd.program.trace._window import Window, leaves_whole


class Untraceable(TraceError):
    """The graph does something that only PyTorch itself can do, operation by operation."""


class Made(NamedTuple):
    """A result that the program computes, at `position` among the computed values."""

    position: int


class Shown(NamedTuple):
    """A view of an input's storage or (`is_made`) of a computed value's. `window` None: the tensor itself."""

    position: int
    is_made: bool
    window: Window | None
    has_gradient: bool

    def shown(self, tensor: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
        """The result as a view of `tensor`. `stride`: strides of the tensor in the trace; None: it was contiguous there."""
        if self.window is None:
            return tensor
        if not self.has_gradient and tensor.requires_grad:
            tensor = tensor.detach()
        if stride is not None:  # the window refers to the storage
            offset = int(tensor.storage_offset()) + self.window.offset
            return tensor.as_strided(self.window.size, self.window.stride, offset)
        if is_whole(tensor, buffer_of(tensor)):
            return tensor.as_strided(self.window.size, self.window.stride, self.window.offset)
        if not tensor.requires_grad:
            return self.window.part_of(tensor, is_contiguous=True)
        place = self.window.through(tensor, is_contiguous=True)
        if place is None:  # its strides allow no such view; PyTorch would copy too
            tensor, place = tensor.clone(memory_format=torch.contiguous_format), (self.window.stride, self.window.offset)
        return tensor.as_strided(self.window.size, *place)


class Plain(NamedTuple):
    """A result that is not a device tensor."""

    value: Any


class Results:
    """The results of the graph in a trace.

    Attributes:
        results: how each result is made.
        made: tensors whose values the program computes.
        windows: how each of these views its storage, which the program returns as a whole; None: it is returned contiguous.
        flowing: positions of those that take a cotangent.
    """

    def __init__(self, returned: Sequence[Any], inputs: Sequence[torch.Tensor]) -> None:
        """`inputs`: tensors that each have their own storage."""
        self.made: list[torch.Tensor] = []
        self.windows: list[Window | None] = []
        self._positions: dict[Any, int] = {}
        owners = {buffer_of(t): i for i, t in enumerate(inputs)}
        sharing: dict[Buffer, list[torch.Tensor]] = {}
        for value in filter(is_device_tensor, returned):
            tensors = sharing.setdefault(buffer_of(value), [])
            if all(value is not t for t in tensors):
                tensors.append(value)
        self.results: list[Made | Shown | Plain] = []
        for value in returned:
            if is_host_copy(value):
                raise computed_on_host("a result of the graph is on the CPU")
            if not is_device_tensor(value):
                self.results.append(Plain(value))
            elif (owner := owners.get(buffer_of(value))) is not None:
                self.results.append(_of_input(value, owner, inputs[owner]))
            else:
                self.results.append(self._of_value(value, sharing[buffer_of(value)], buffer_of(value)))
        self.flowing = [i for i, t in enumerate(self.made) if t.requires_grad]

    def values(self) -> list[Any]:
        """The arrays that the program returns."""
        found = zip(map(torch.Tensor.detach, self.made), self.windows, strict=True)
        return [load(t) if window is None else buffer_of(t).get() for t, window in found]

    def _of_value(self, value: torch.Tensor, sharing: list[torch.Tensor], buffer: Buffer) -> Made | Shown:
        """One of the results that share a storage created by the graph."""
        if len(sharing) == 1 or not leaves_whole(sharing, buffer):
            dense = value.numel() == math.prod(buffer.shape) and not value.is_conj() and not value.is_neg()
            return Made(self._add(id(value), value, Window.of(value) if dense and leaves_whole([value], buffer) else None))
        whole = [t for t in (*sharing, *(t._base for t in sharing)) if t is not None and is_whole(t, buffer)]
        base = next((t for t in whole if t.requires_grad), whole[0] if whole else None)  # `y.detach()` may come before y
        has_lost = base is not None and not base.requires_grad and any(t.requires_grad for t in sharing)
        if base is None or has_lost or any(t.dtype != base.dtype or t.is_conj() or t.is_neg() for t in sharing):
            raise Untraceable(message("two results share a storage in a way that no view can express", fix="return copies: y.clone()"))
        position = self._add(buffer, base, None)
        return Made(position) if value is base else Shown(position, True, Window.of(value), value.requires_grad)

    def _add(self, key: Any, tensor: torch.Tensor, window: Window | None) -> int:
        position = self._positions.setdefault(key, len(self.made))
        if position == len(self.made):
            self.made.append(tensor)
            self.windows.append(window)
        return position


def _of_input(value: torch.Tensor, position: int, given: torch.Tensor) -> Shown:
    if value.dtype != given.dtype or value.is_conj() or value.is_neg():
        raise Untraceable(message("a result views an input as another dtype", fix="return a copy: y.clone()"))
    window = Window.of(value)
    is_itself = window[:3] == Window.of(given)[:3] and value.requires_grad == given.requires_grad
    return Shown(position, False, None if is_itself else window, value.requires_grad)


def made_of(value: Any, window: Window | None) -> torch.Tensor:
    """The tensor of a computed value."""
    tensor = wrap(value)
    return tensor if window is None else strided_alias(tensor, window.size, window.stride, window.offset)


__all__ = ["Made", "Plain", "Results", "Shown", "Untraceable", "made_of"]

"""The class, attributes and view geometry of a result of a trace, and how a call gives them to another tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from spmd.base._convert import to_torch_dtype
from spmd.device._storage import Buffer
from spmd.device._views import contiguous_stride
from spmd.program.trace._arguments import own_storage
from spmd.program.trace._memory_order import memory_order
from spmd.program.trace._result_attributes import constants_of

_MAX_MARKED = 1 << 24  # elements of a storage up to which overlaps of views are found by marking the elements of each


class Kind(NamedTuple):
    """Class and attributes of a tensor.

    Attributes:
        cls: its class.
        requires_grad: it is a leaf that requires a gradient. A computed result has no graph after a call.
        attributes: its Python attributes, if all are constants (see `_result_attributes`).
        is_of_other_mode: whether it was made in inference mode while the call is not in it, or the reverse.
    """

    cls: type
    requires_grad: bool
    attributes: dict[str, Any]
    is_of_other_mode: bool = False

    @staticmethod
    def of(tensor: torch.Tensor) -> Kind:
        """The kind of a device tensor."""
        is_leaf = tensor.requires_grad and tensor.grad_fn is None
        kind = Kind(type(tensor), is_leaf, constants_of(tensor), _is_of_other_mode(tensor))
        return PLAIN_KIND if kind == PLAIN_KIND else kind

    @staticmethod
    def of_whole(tensors: Iterable[torch.Tensor]) -> Kind:
        """The kind of a new storage that these tensors are views of."""
        return PLAIN_KIND._replace(is_of_other_mode=True) if any(map(_is_of_other_mode, tensors)) else PLAIN_KIND

    @property
    def is_plain(self) -> bool:
        """Whether this is the kind of a new tensor."""
        return self is PLAIN_KIND

    @staticmethod
    def of_copy(copy: torch.Tensor) -> Kind:
        """The kind of the CPU tensor that a copy to the host becomes."""
        return Kind(copy.__class__, copy.requires_grad and copy.grad_fn is None, constants_of(copy), _is_of_other_mode(copy))

    def made_by(self, make: Callable[[Any], torch.Tensor], value: Any) -> torch.Tensor:
        """`make(value)`, a new tensor, as a tensor of this kind."""
        if self.is_plain:
            return make(value)
        if self.is_of_other_mode:
            with torch.inference_mode(not torch.is_inference_mode_enabled()):
                return self.made_of(make(value))
        return self.made_of(make(value))

    def made_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, a new tensor, converted to this kind in place where possible."""
        made = tensor if type(tensor) is self.cls else tensor.as_subclass(self.cls)
        if self.is_plain:
            return made
        if self.attributes:
            vars(made).update(self.attributes)
        return made.requires_grad_() if self.requires_grad else made


PLAIN_KIND = Kind(torch.Tensor, False, {})


def _is_of_other_mode(tensor: torch.Tensor) -> bool:
    return tensor.is_inference() is not torch.is_inference_mode_enabled()


class Window(NamedTuple):
    """Sizes, strides and offset in elements of `dtype`, pending conjugation and negation, and the kind of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool
    kind: Kind

    @staticmethod
    def of(tensor: torch.Tensor) -> Window:
        """The window of a device tensor."""
        return Window.with_kind(tensor, Kind.of(tensor))

    @staticmethod
    def with_kind(tensor: torch.Tensor, kind: Kind) -> Window:
        """The window of a device tensor, with another kind."""
        size, offset = tuple(tensor.shape), int(tensor.storage_offset())
        return Window(size, tensor.stride(), offset, tensor.dtype, tensor.is_conj(), tensor.is_neg(), kind)

    def is_base(self, root: torch.Tensor) -> bool:
        """Whether this is the window of `root` itself."""
        is_plain = self.dtype == root.dtype and not self.is_conj and not self.is_neg and not self.offset
        return is_plain and self.size == tuple(root.shape) and self.stride == root.stride()

    def shown(self, root: torch.Tensor) -> torch.Tensor:
        """This view of the storage of `root`, a tensor without a gradient."""
        if self.dtype != root.dtype:
            count = root.untyped_storage().nbytes() // root.element_size()
            root = root.as_strided((count,), (1,), 0).view(self.dtype)
        view = root.as_strided(self.size, self.stride, self.offset)
        view = torch.ops.aten._neg_view(view) if self.is_neg else view
        view = torch.ops.aten._conj(view) if self.is_conj else view
        return self.kind.made_of(view)

    def part_of(self, given: torch.Tensor, *, is_contiguous: bool = False) -> torch.Tensor:
        """The same view of `given`, an argument. If no strides on its memory describe it, it is a view of a copy.

        Args:
            is_contiguous: the trace had a contiguous tensor in place of `given`; otherwise it had `own_storage(given)`.
        """
        with torch.no_grad():
            given = given.detach()
            strided = None if given.is_conj() or given.is_neg() else self.through(given, is_contiguous=is_contiguous)
            if strided is not None:
                return self._replace(stride=strided[0], offset=strided[1]).shown(given)
            given = given.resolve_conj().resolve_neg()
            return self.shown(given.clone(memory_format=torch.contiguous_format) if is_contiguous else own_storage(given))

    def through(self, given: torch.Tensor, *, is_contiguous: bool) -> tuple[tuple[int, ...], int] | None:
        """Strides and offset of this view on the storage of `given`; None if no strides describe it.

        They exist if every step along a dim of the view stays within one dim of the storage that the trace had.
        """
        narrow = min(self.dtype.itemsize, given.element_size())
        mine, its = self.dtype.itemsize // narrow, given.element_size() // narrow  # elements of both, in units of the narrower
        first = int(given.storage_offset()) * its // mine
        if not given.numel():
            return self.stride, first + self.offset
        size, stride = tuple(given.shape), given.stride()
        order = memory_order(size, stride)
        extents, memory = (size, stride) if is_contiguous else (order.extents, order.memory)
        shape, strides = _collapsed((*extents, its), (*(s * its for s in memory), 1))
        places = list(enumerate(zip(contiguous_stride(shape), shape, strict=True)))

        def digits(position: int) -> list[int]:
            return [position * mine // step % size if number else position * mine // step for number, (step, size) in places]

        start, along = digits(self.offset), [digits(s) for s in self.stride]
        last = [d + sum(a[i] * (n - 1) for a, n in zip(along, self.size, strict=True)) for i, d in enumerate(start)]
        if any(end >= size for end, size in zip(last, shape, strict=True)):
            return None

        def position_of(indices: Sequence[int]) -> tuple[int, int]:
            return divmod(sum(i * s for i, s in zip(indices, strides, strict=True)), mine)

        found = [position_of(start), *map(position_of, along)]
        if any(rest for _, rest in found):
            return None
        offset, *steps = (position for position, _ in found)
        if not is_contiguous and order.stride == stride:  # dims of size 1 may have any stride
            steps = [own if n == 1 else s for s, own, n in zip(steps, self.stride, self.size, strict=True)]
        return tuple(steps), first + offset


def _collapsed(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the same elements in the same order, with as few dims as possible."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(n for n, _ in merged), tuple(s for _, s in merged)


def leaves_whole(tensors: Sequence[torch.Tensor], buffer: Buffer) -> bool:
    """Whether the whole storage of these results becomes one output of the program, of which each result is a view.

    This is so for a single result that is not contiguous and is no smaller than its storage, and for several results that overlap.
    """
    count, dtype = math.prod(buffer.shape), to_torch_dtype(buffer.dtype)
    if len(tensors) == 1:
        (tensor,) = tensors
        return tensor.dtype == dtype and tensor.numel() >= count and not tensor.is_contiguous()
    tensors = [t for t in tensors if t.numel()]
    if any(t.dtype != dtype for t in tensors):
        return True
    spans = sorted((o := int(t.storage_offset()), o + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) for t in tensors)
    if all(end < start for (_, end), (start, _) in pairwise(spans)):
        return False
    if count > _MAX_MARKED:
        return True
    marks = np.zeros(count, bool)
    for t in tensors:
        shown = as_strided(marks[int(t.storage_offset()) :], tuple(t.shape), t.stride())
        if shown.any():
            return True
        shown[...] = True
    return False

"""Finds the dims whose sizes vary for `spmd.compile(dynamic=True)`: dims that have had a second size, and marked dims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from spmd.base._errors import SpmdError, called_at, message, shown
from spmd.program.sizes._dims import SMALLEST, Dim, Named

_MARK = "_spmd_dynamic_dims"
_TORCHS_MARK = "_dynamo_dynamic_indices"
_Place = tuple[tuple[Any, ...], int, int]  # path of a tensor, its number of dims, dim


def mark_dynamic(tensor: torch.Tensor, dim: int, *, max: int | None = None) -> None:
    """Mark a dim's size as varying before a second size occurs, for functions compiled with `spmd.compile(dynamic=True)`.

    Args:
        tensor: an argument of the function.
        dim: from -tensor.ndim to tensor.ndim - 1.
        max: the largest size, in elements; None: determined from the sizes that occur.

    Raises:
        SpmdError: `tensor` is none, it has no such dim, or the dim is larger than `max`.
    """
    given: Any = tensor
    if not isinstance(given, torch.Tensor) or type(dim) is not int:
        what = f"mark_dynamic takes a tensor and the number of a dim, got {shown(given)} and {shown(dim)}"
        raise SpmdError(message(what, *called_at(), fix="spmd.mark_dynamic(x, 0)"))
    if not -tensor.ndim <= dim < tensor.ndim:
        what = f"mark_dynamic got dim {dim} of a tensor of shape {tuple(tensor.shape)}"
        raise SpmdError(message(what, fix="spmd.mark_dynamic(x, 0)"))
    if max is not None and max < tensor.shape[dim]:
        what = f"mark_dynamic got max={max} for dim {dim} of size {tensor.shape[dim]}"
        raise SpmdError(message(what, fix=f"spmd.mark_dynamic(x, {dim}, max={tensor.shape[dim]})"))
    marks: dict[int, int | None] = getattr(tensor, _MARK, {})
    setattr(tensor, _MARK, {**marks, dim % tensor.ndim: max})


class LearnedDims:
    """The dims that vary, learned from the calls so far.

    Dims that have had equal sizes in all calls share a name. From the first call in which they differ they have different names.

    Attributes:
        dims: every varying `Dim`, by name.
    """

    def __init__(self) -> None:
        self.dims: dict[str, Dim] = {}
        self._first: dict[_Place, int] = {}  # size of a dim in its first call
        self._class: dict[_Place, Any] = {}  # equal for dims that have had equal sizes so far
        self._vary: dict[_Place, int] = {}  # largest size so far of each varying dim
        self._given: dict[_Place, int] = {}  # largest `max` passed to `mark_dynamic`, or 0

    def found(self, arguments: Mapping[str, Any]) -> list[Named]:
        """The tensors of a call that have varying dims."""
        tensors = [(path, tensor) for name, value in arguments.items() for path, tensor in _tensors((name,), value)]
        for path, tensor in tensors:
            self._note(path, tensor)
        sizes = {(path, t.ndim, d): int(n) for path, t in tensors for d, n in enumerate(t.shape)}
        numbers: dict[Any, int] = {}
        for place, size in sizes.items():
            known = self._class.get(place, self._first[place])
            self._class[place] = numbers.setdefault((known, size), len(numbers))
        names = self._names(sizes)
        found = [Named(p, t, {d: names[p, t.ndim, d] for d in range(t.ndim) if (p, t.ndim, d) in names}) for p, t in tensors]
        return [named for named in found if named.dims]

    def _note(self, path: tuple[Any, ...], tensor: torch.Tensor) -> None:
        marks: dict[int, int | None] = getattr(tensor, _MARK, {})
        marked = {**dict.fromkeys(getattr(tensor, _TORCHS_MARK, ())), **marks}
        for d, size in enumerate(tensor.shape):
            place = path, tensor.ndim, d
            if self._first.setdefault(place, int(size)) != size or d in marked:
                self._vary[place] = max(self._vary.get(place, 0), int(size))
                self._given[place] = max(self._given.get(place, 0), marked.get(d) or 0)

    def _names(self, sizes: Mapping[_Place, int]) -> dict[_Place, str]:
        """Name of each varying dim of a call; `dims` has a `Dim` for every name."""
        titles: dict[Any, str] = {}
        names: dict[_Place, str] = {}
        for place, size in sizes.items():
            if place in self._vary and size > 0:
                path, _, d = place
                title = titles.setdefault(self._class[place], f"{Named(path, torch.empty(0), {}).title}.shape[{d}]")
                names[place] = title
                known, most = self.dims.get(title), self._vary[place]
                if known is None or known.max < most:
                    given = self._given[place]
                    self.dims[title] = Dim(title, max=given if given >= most else max(2 * SMALLEST, 2 << (most - 1).bit_length()))
        return names

    def sizes(self, found: Sequence[Named]) -> dict[str, int]:
        """Size of each named dim in a call."""
        return {name: int(named.tensor.shape[d]) for named in found for d, name in named.dims.items()}


def _tensors(path: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors((*path, key), item)
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            yield from _tensors((*path, i), item)


__all__ = ["LearnedDims", "mark_dynamic"]

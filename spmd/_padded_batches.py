"""Pads batches to the sizes of a few buckets, for models that mask padding: `shard_loader(..., pad_to=..., fill=...)`.

pad_to={"input_ids": {1: spmd.Dim("seq", max=512)}, "attention_mask": {1: "seq"}, "labels": {1: "seq"}}, fill={"labels": -100}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from mesh._mesh_errors import nearest
from spmd.base._errors import SpmdError, message
from spmd.program.sizes._dims import AskedDims, Named

Parts = Callable[[tuple[Any, ...], int], int]  # (path of an array in the batch, dim) -> number of shards of this dim
_EXAMPLE = 'pad_to={"input_ids": {1: spmd.Dim("seq", max=512)}}, fill={"labels": -100}'


class Padding:
    """The parsed `pad_to` and `fill` options of `shard_loader`."""

    def __init__(self, pad_to: Any, fill: Any) -> None:
        """Raises SpmdError: `pad_to` names no dim, or `fill` does not fit it."""
        if not isinstance(pad_to, Mapping) or not pad_to:
            raise SpmdError(message(f"shard_loader's pad_to is {pad_to!r}, which names no dim", fix=_EXAMPLE))
        self._asked = AskedDims({"batch": dict(pad_to)}, None, "pad_to")
        self._fill = fill
        for path, value in _leaves((), fill):
            if isinstance(value, bool | int | float):
                continue
            raise SpmdError(message(f"fill{_title(path)} is {value!r}, not a number", fix=_EXAMPLE))
        self._require_named(pad_to, fill, "fill")

    def _require_named(self, tree: Any, fill: Any, title: str) -> None:
        """Raise SpmdError if `fill` has an entry without one in `pad_to`."""
        for key, value in fill.items() if isinstance(fill, Mapping) else ():
            if key not in tree or not isinstance(tree[key], Mapping):
                what = f"{title} names {key!r}, which pad_to does not have{nearest(str(key), list(map(str, tree)))}"
                raise SpmdError(
                    message(what, f"pad_to has {', '.join(map(repr, tree))}", fix=f"name its dims in pad_to, or drop it from {title}")
                )
            self._require_named(tree[key], value, f"{title}[{key!r}]")

    def sizes(self, batch: Any) -> dict[str, int]:
        """The size in a batch of every dim in `pad_to`, by name.

        Raises:
            SpmdError: the batch lacks an array or dim of `pad_to`, or a size is outside the range of its dim.
        """
        return self._asked.sizes(self._found(batch))

    def has_rows(self, batch: Any) -> bool:
        """Whether dim 0 of any array is padded."""
        return any(0 in named.dims for named in self._found(batch))

    def _found(self, batch: Any) -> list[Named]:
        return self._asked.found({"batch": batch})

    def padded(self, batch: Any, sizes: Mapping[str, int], parts: Parts) -> Any:
        """The batch with its arrays padded to the buckets of `sizes`.

        Args:
            sizes: sizes by name, as returned by `sizes`; in a job the largest of all processes.
            parts: returns the number of shards of a dim. The padded size is a multiple of it.

        Raises:
            SpmdError: the dtype of an array cannot represent its `fill`.
        """
        named = self._found(batch)
        multiples = dict.fromkeys(sizes, 1)
        for one in named:
            for d, name in one.dims.items():
                multiples[name] = math.lcm(multiples[name], parts(one.path[1:], d))
        buckets = {name: self._asked.dims[name].bucket(size, multiples[name]) for name, size in sizes.items()}
        return _replaced(batch, {one.path[1:]: self._widened(one, buckets) for one in named}, ())

    def _widened(self, named: Named, buckets: Mapping[str, int]) -> Any:
        """One array, padded to the buckets of its named dims."""
        value, fill = named.tensor, self._fill_of(named)
        filled = torch.tensor(fill).to(value.dtype) if isinstance(value, torch.Tensor) else np.asarray(fill).astype(value.dtype)
        is_whole = not value.dtype.is_floating_point if isinstance(value, torch.Tensor) else value.dtype.kind in "iub"
        if (is_whole and filled.item() != fill) or (math.isfinite(fill) and not math.isfinite(filled.item())):
            what = f"fill of batch{_title(named.path[1:])} is {fill}, which {value.dtype} cannot represent"
            raise SpmdError(message(what, fix="use a number of that dtype"))
        if 0 in value.shape:  # this process has no more batches: its array is empty, and its other sizes may exceed the buckets
            value = value[tuple(slice(0, buckets[named.dims[d]] if d in named.dims else None) for d in range(value.ndim))]
        widths = [(0, buckets[named.dims[d]] - n if d in named.dims else 0) for d, n in enumerate(value.shape)]
        if not isinstance(value, torch.Tensor):
            return np.pad(value, widths, constant_values=filled)
        return torch.nn.functional.pad(value, [w for pair in reversed(widths) for w in pair], value=filled.item())

    def _fill_of(self, named: Named) -> Any:
        """The padding value of an array: its entry in `fill`, else the `fill` of its first padded dim."""
        found = self._fill
        for key in named.path[1:]:
            found = found.get(key) if isinstance(found, Mapping) else found
        return self._asked.dims[next(iter(named.dims.values()))].fill if found is None else found


def _leaves(path: tuple[Any, ...], tree: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves((*path, key), value)
    elif tree is not None:
        yield path, tree


def _title(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key!r}]" for key in path)


def _replaced(value: Any, others: Mapping[tuple[Any, ...], Any], path: tuple[Any, ...]) -> Any:
    """The batch with the arrays at the paths of `others` replaced."""
    if path in others:
        return others[path]
    if isinstance(value, Mapping):
        return {key: _replaced(item, others, (*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        kind: Any = type(value)
        items = [_replaced(item, others, (*path, i)) for i, item in enumerate(value)]
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    return value


__all__ = ["Padding"]

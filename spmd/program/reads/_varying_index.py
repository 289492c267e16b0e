"""Indices and slice bounds of tensors that vary from call to call: reading gathers rows, writing scatters them.

`x[i]`, `x[lo:hi]` and assignments to them, along the first dim, where `hi - lo` is the same in every call. What is read so is a copy.
Where it must be a view (one of the two is written to in place, or it leaves the function), the function is traced again with the
index as a value that is guarded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import TraceAgain
from spmd.device._numbers import carried
from spmd.device._storage import buffer_of, recording, wrap
from spmd.program.reads._varying import Varying

if TYPE_CHECKING:
    from spmd.program.trace._way import Way


class ViewNeeded(TraceAgain):
    """What was read at an index that varies must be a view: trace again, with a program for each index."""

    def other_way(self, way: Way) -> Way:
        return replace(way, fixes_indices=True)


def index_of(tensor: torch.Tensor, key: Any) -> torch.Tensor | None:
    """The rows that `key` means, int64[n], or None if no program can take them from its inputs."""
    if type(key) is Varying:
        return _rows(tensor, key, 1) if isinstance(key.evaluate(), int) else None
    if type(key) is not slice or key.step not in (None, 1):
        return None
    if type(key.start) is not Varying or not isinstance(key.stop, (int, Varying)):
        return None
    size = key.start.apply(lambda lo, hi: hi - lo, key.start, key.stop)
    num = size.concrete() if type(size) is Varying else size
    return _rows(tensor, key.start, num) if num > 0 else None


def read_at(tensor: torch.Tensor, key: Any) -> torch.Tensor | None:
    """`tensor[key]`, as a copy."""
    rows = index_of(tensor, key)
    if rows is None:
        return None
    found = tensor.index_select(0, rows)
    found = found[0].clone() if type(key) is Varying else found
    recorder = recording.get()
    if recorder is not None:
        recorder.is_copy_of(buffer_of(tensor), buffer_of(found), ViewNeeded)
    return found


def _rows(tensor: torch.Tensor, first: Varying, num: int) -> torch.Tensor | None:
    length = tensor.shape[0] if tensor.dim() else 0
    is_inside = first.apply(lambda i: int(-length <= i < 0 or i >= 0) and int((i + length if i < 0 else i) + num <= length), first)
    if not is_inside:  # decided anew by every call
        return None
    start = first.apply(lambda i: i + length if i < 0 else i, first)
    with exact_dtypes():
        value = carried(start.traced()) if type(start) is Varying else jnp.asarray(start)
        return wrap(value.astype(jnp.int64) + jnp.arange(num, dtype=jnp.int64))

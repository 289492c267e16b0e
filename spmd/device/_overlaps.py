"""Raises torch's errors for writes to tensors whose elements share memory with each other, or with a tensor that the op reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from spmd.base._errors import SpmdError, called_at, message
from spmd.device._storage import buffer_of, is_device_tensor

# Ops that write to an expanded tensor on the CPU too, because they repeat one number or do not check.
# fmt: off
_WRITES_EXPANDED = frozenset({
    "addmv_", "baddbmm_", "conj_physical_", "fill", "fill_", "full", "index_fill", "index_put", "masked_fill", "ones", "threshold",
    "tril", "triu", "zeros",
})
# Ops that may not write to a tensor that they read, not even to the same window.
_READS_ALL_ALONG = frozenset({"cat", "gather", "index_select", "kthvalue", "linalg_cross", "masked_select", "take"})
# In-place ops that may not read the tensor that they write to; pointwise ops may read the same window.
WRITES_APART = frozenset({"index_add", "index_copy", "index_put", "index_reduce", "scatter", "scatter_add", "scatter_reduce"})
# fmt: on
_SHARED = (
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory location. "
    "Please clone() the tensor before performing the operation."
)


def check_in_place(name: str, target: torch.Tensor) -> None:
    """Raise torch's error for writing to a tensor whose elements share memory.

    Args:
        name: name of the op without its overload.
        target: the tensor to write to.

    Raises:
        RuntimeError: a dim of `target` is expanded.
    """
    if target.is_contiguous() or name in _WRITES_EXPANDED:
        return
    if any(step == 0 and size > 1 for size, step in zip(target.shape, target.stride(), strict=True)):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def require_apart(name: str, target: torch.Tensor) -> None:
    """Raise if an op that reads the tensor it writes to, or writes a part of it, gets overlapping windows (`x.unfold(0, 3, 1).add_(1)`).

    CPU torch's result depends on its order of evaluation. Its documentation asks for a clone, but it raises only for expanded dims.

    Raises:
        SpmdError: two elements of `target` share memory.
    """
    reach = 0
    for step, size in sorted((s, n) for n, s in zip(target.shape, target.stride(), strict=True) if n > 1):
        if step <= reach:
            places = np.zeros((), np.int64)
            for n, s in zip(target.shape, target.stride(), strict=True):
                places = places[..., None] + np.arange(n) * s
            if np.unique(places).size < places.size:
                what = f"in-place {name} on a view whose elements share memory: shape {tuple(target.shape)}, strides {target.stride()}"
                raise SpmdError(message(what, *called_at(), fix="clone the view first, and write the result back where it belongs"))
            return
        reach += (size - 1) * step


def check_out(name: str, targets: Sequence[torch.Tensor], read: Iterable[Any]) -> None:
    """Raise torch's error if a tensor that an op writes to (`out=`) overlaps with itself or with a tensor that the op reads.

    Args:
        name: name of the op without its overload.
        targets: the tensors to write to.
        read: the op's arguments.

    Raises:
        RuntimeError: elements share memory.
    """
    for target in targets:
        check_in_place(name, target)
    for arg in read:
        if isinstance(arg, list | tuple):
            check_out(name, targets, arg)
        elif _is_shared(targets, arg, may_be_read=name not in _READS_ALL_ALONG):
            raise RuntimeError(_SHARED)


def check_overlap(name: str, target: torch.Tensor, read: Iterable[Any]) -> None:
    """Raise torch's error if a tensor that is written in place partly overlaps with a tensor that the op reads.

    Args:
        name: name of the op without its overload.
        target: the tensor to write to.
        read: the op's other arguments.

    Raises:
        RuntimeError: two tensors overlap and are not the same window.
    """
    for arg in read:
        if isinstance(arg, torch.Tensor) and _is_shared((target,), arg, may_be_read=name not in WRITES_APART):
            raise RuntimeError(_SHARED)


def _is_shared(targets: Sequence[torch.Tensor], arg: Any, *, may_be_read: bool) -> bool:
    if not isinstance(arg, torch.Tensor) or arg.device.type != "jax":
        return False
    return any(_overlap(target, arg, may_be_read=may_be_read) for target in targets)


def _overlap(target: torch.Tensor, arg: torch.Tensor, *, may_be_read: bool) -> bool:
    """Whether the two tensors overlap, by torch's test, which compares the extents of dense windows."""
    if target is arg:
        return not may_be_read
    if not (is_device_tensor(target) and is_device_tensor(arg)):
        return False
    if not (target.numel() and arg.numel()) or buffer_of(target) is not buffer_of(arg):
        return False
    if not (_is_dense(target) and _is_dense(arg)):
        return False
    (start, stop), (first, last) = _extent(target), _extent(arg)
    if (start, stop) == (first, last) and target.stride() == arg.stride():
        return not may_be_read
    return start < last and first < stop


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + tensor.numel() * tensor.itemsize


__all__ = ["WRITES_APART", "check_in_place", "check_out", "check_overlap", "require_apart"]

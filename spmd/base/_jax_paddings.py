"""Paddings that leave out elements, or put some between others, as slices and paddings of the ends.

XLA's SPMD partitioner takes a padding of a replicated operand whose result is sharded for no padding at all if the result has the size of
the operand: in a step that is compiled over 8 devices, `lax.pad(p, 0, [(1, -1, 0)]) + x` of a replicated p is `p + x`, and the gradient
of `x[::2]` is in the wrong rows. Paddings of the ends alone make an operand larger, and are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from jax import lax
from jax.interpreters import mlir

from spmd.base import _jax

Edges = tuple[int, int, int]  # elements before (negative: left out), after, and between


def install() -> None:
    """Lower the paddings of all jitted functions of this process in this form: those that jax's derivatives make too."""
    mlir.register_lowering(lax.pad_p, _lower)


def _lower(ctx: Any, operand: Any, value: Any, *, padding_config: Sequence[Edges]) -> Any:
    if all(low >= 0 and high >= 0 and not between for low, high, between in padding_config):
        return _jax.pad_lower(ctx, operand, value, padding_config=padding_config)
    lowered = mlir.lower_fun(partial(in_steps, padding_config=padding_config), multiple_results=False)
    return lowered(ctx, operand, value)


def in_steps(operand: Any, value: Any, padding_config: Sequence[Edges]) -> Any:
    """`lax.pad(operand, value, padding_config)` in steps: elements between others, then at the ends, then those that are left out."""
    for dim, (_, _, between) in enumerate(padding_config):
        if between and operand.shape[dim] > 1:
            operand = _spread(operand, value, dim, between)
    cuts = [(max(-low, 0), max(-high, 0)) for low, high, _ in padding_config]
    ends = [(max(low, 0), max(high, 0), 0) for low, high, _ in padding_config]
    is_cut_first = all(before + after <= size for (before, after), size in zip(cuts, operand.shape, strict=True))
    if is_cut_first:  # otherwise what is left out reaches into the padding of the other end
        operand = _cut(operand, cuts)
    if any(before or after for before, after, _ in ends):
        operand = lax.pad(operand, value, ends)
    return operand if is_cut_first else _cut(operand, cuts)


def _spread(operand: Any, value: Any, dim: int, between: int) -> Any:
    """Put `between` values between the elements along a dim."""
    shape, step = operand.shape, between + 1
    column = lax.reshape(operand, (*shape[: dim + 1], 1, *shape[dim + 1 :]))
    wide = lax.pad(column, value, [(0, between if d == dim + 1 else 0, 0) for d in range(len(shape) + 1)])
    joined = lax.reshape(wide, (*shape[:dim], shape[dim] * step, *shape[dim + 1 :]))
    return lax.slice_in_dim(joined, 0, (shape[dim] - 1) * step + 1, axis=dim)


def _cut(operand: Any, cuts: Sequence[tuple[int, int]]) -> Any:
    ends = [size - after for size, (_, after) in zip(operand.shape, cuts, strict=True)]
    return lax.slice(operand, [before for before, _ in cuts], ends) if any(map(any, cuts)) else operand


__all__ = ["in_steps", "install"]

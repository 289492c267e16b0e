"""Paddings that leave out elements, or put some between others, as slices and paddings of the ends.

XLA's SPMD partitioner takes a padding of a replicated operand whose result is sharded for no padding at all if the result has the size of
the operand: in a step that is compiled over 8 devices, `lax.pad(p, 0, [(1, -1, 0)]) + x` of a replicated p is `p + x`, and the gradient
of `x[::2]` is in the wrong rows. Paddings of the ends alone make an operand larger, and are right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jax import lax
from jax.core import max_dim
from jax.errors import InconclusiveDimensionOperation
from jax.interpreters import mlir

from spmd.base import _jax

Edges = tuple[int, int, int]  # elements before (negative: left out), after, and between


def install() -> None:
    """Lower the paddings of all functions that this process jits over several devices so: those that jax's derivatives make too."""
    mlir.register_lowering(lax.pad_p, _lower)


def _lower(ctx: Any, operand: Any, value: Any, *, padding_config: Sequence[Edges]) -> Any:
    num_devices = getattr(ctx.module_context.axis_context, "num_devices", None)
    if num_devices == 1 or all(_is_sure(lambda e=e: e[0] >= 0 and e[1] >= 0 and e[2] == 0) for e in padding_config):
        return _jax.pad_lower(ctx, operand, value, padding_config=padding_config)
    lowered = mlir.lower_fun(partial(in_steps, padding_config=padding_config), multiple_results=False)
    return lowered(ctx, operand, value)


def in_steps(operand: Any, value: Any, padding_config: Sequence[Edges]) -> Any:
    """`lax.pad(operand, value, padding_config)` in steps: elements between others, then at the ends, then those that are left out."""
    for dim, (_, _, between) in enumerate(padding_config):
        if between and not _is_sure(lambda n=operand.shape[dim]: n <= 1):
            operand = _spread(operand, value, dim, between)
    cuts = [(max_dim(-low, 0), max_dim(-high, 0)) for low, high, _ in padding_config]
    ends = [(max_dim(low, 0), max_dim(high, 0), 0) for low, high, _ in padding_config]
    is_cut_first = all(_is_sure(lambda c=c, n=n: c[0] + c[1] <= n) for c, n in zip(cuts, operand.shape, strict=True))
    if is_cut_first:  # otherwise what is left out reaches into the padding of the other end
        operand = _cut(operand, cuts)
    if any(not _is_sure(lambda e=e: e[0] == 0 and e[1] == 0) for e in ends):
        operand = lax.pad(operand, value, ends)
    return operand if is_cut_first else _cut(operand, cuts)


def _is_sure(compared: Callable[[], bool]) -> bool:
    """Whether a comparison holds for all values of the symbols in its sizes."""
    try:
        return compared()
    except InconclusiveDimensionOperation:
        return False


def _spread(operand: Any, value: Any, dim: int, between: int) -> Any:
    """Put `between` values between the elements along a dim."""
    shape, step = operand.shape, between + 1
    column = lax.reshape(operand, (*shape[: dim + 1], 1, *shape[dim + 1 :]))
    wide = lax.pad(column, value, [(0, between if d == dim + 1 else 0, 0) for d in range(len(shape) + 1)])
    joined = lax.reshape(wide, (*shape[:dim], shape[dim] * step, *shape[dim + 1 :]))
    return lax.slice_in_dim(joined, 0, (shape[dim] - 1) * step + 1, axis=dim)


def _cut(operand: Any, cuts: Sequence[tuple[int, int]]) -> Any:
    ends = [size - after for size, (_, after) in zip(operand.shape, cuts, strict=True)]
    is_whole = all(_is_sure(lambda c=c: c[0] == 0 and c[1] == 0) for c in cuts)
    return operand if is_whole else lax.slice(operand, [before for before, _ in cuts], ends)


__all__ = ["in_steps", "install"]

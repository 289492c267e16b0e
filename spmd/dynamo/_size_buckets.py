"""One program for many sizes of a dim: rows beyond the real ones are there, and have no part in what comes out.

Note [Buckets]
Dynamo's graph for a size that varies (`dynamic=True`, `mark_dynamic`, a second size) is compiled for sizes 64, 128, 256, ... and run with
its rows padded. That is exact by what is found in the program, or not done: the graph is traced at two sizes, and where the two traces
differ is where the size has part in it. A dim that differs holds rows. An operation that treats each row for itself leaves them alone.
One that sums over rows (a loss, the gradient of a weight) gets zeros for those that are padding, on every operand. A number that is
proportional to the size, or to its inverse (a mean), is made of today's size. Anything else is refused, and so are random numbers,
which are drawn by shape; then each size is a program of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.base._jax import is_jaxpr, is_literal

SMALLEST = 64  # rows; below, a program is hardly quicker


class NotByRows(Exception):
    """The program is not one of rows; the message is the operation that says so."""


def bucket_of(size: int) -> int:
    """The size that a program for `size` rows has."""
    return max(SMALLEST, 1 << (size - 1).bit_length())


# element by element, whatever the shapes
_ELEMENTWISE = frozenset(
    [
        "abs",
        "add",
        "and",
        "atan2",
        "cbrt",
        "ceil",
        "clamp",
        "convert_element_type",
        "copy",
        "copy_p",
        "cos",
        "cosh",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "integer_pow",
        "is_finite",
        "le",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "not",
        "or",
        "pow",
        "rem",
        "round",
        "rsqrt",
        "select_n",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "xor",
        "asin",
        "acos",
        "atan",
        "asinh",
        "acosh",
        "atanh",
        "optimization_barrier",
        "reduce_precision",
        "add_any",
    ]
)
_CALLS = frozenset(("pjit", "jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint"))
_SUMS: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: 0,
    "reduce_max": lambda dtype: -np.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min,
    "reduce_min": lambda dtype: np.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max,
}


class Rows:
    """A program traced at two sizes, evaluated for rows of which `count` are real."""

    def __init__(self, sizes: tuple[int, int], count: Any) -> None:
        self.sizes, self.count = sizes, count

    def evaluate(self, first: Any, second: Any, consts: Sequence[tuple[Any, Any]], args: Sequence[Any]) -> list[Any]:
        """The first of two jaxprs of the same program, on values of its size.

        Raises:
            NotByRows: what it does is not proved to be exact.
        """
        if len(first.eqns) != len(second.eqns):
            raise NotByRows("the size decides what is computed")
        values: dict[Any, Any] = {}
        for variable, (value, other) in zip(first.constvars, consts, strict=True):
            values[variable] = self._scaled(value, other)
        values.update(zip(first.invars, args, strict=True))
        for one, other in zip(first.eqns, second.eqns, strict=True):
            if one.primitive is not other.primitive:
                raise NotByRows("the size decides what is computed")
            operands = [self._operand(a, b, values) for a, b in zip(one.invars, other.invars, strict=True)]
            values.update(zip(one.outvars, self._results(one, other, operands), strict=True))
        return [self._operand(a, b, values) for a, b in zip(first.outvars, second.outvars, strict=True)]

    def rows_of(self, one: Any, other: Any) -> tuple[int, int] | None:
        """The dim of an aval that holds rows, and how many elements of it each row has; None: it has none."""
        dims = [i for i, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b]
        if not dims:
            return None
        size, each = one.shape[dims[0]], one.shape[dims[0]] // self.sizes[0]
        if len(dims) > 1 or size != each * self.sizes[0] or other.shape[dims[0]] != each * self.sizes[1]:
            raise NotByRows("a dim that is no multiple of the size, or two of them")
        return dims[0], each

    def _operand(self, one: Any, other: Any, values: dict[Any, Any]) -> Any:
        return self._scaled(one.val, other.val) if is_literal(one) else values[one]

    def _scaled(self, value: Any, other: Any) -> Any:
        """A constant of the program for today's size."""
        if np.shape(value) != np.shape(other):
            raise NotByRows("a constant with the size in its shape")
        if value is other or np.array_equal(np.asarray(value), np.asarray(other), equal_nan=np.asarray(value).dtype.kind in "fc"):
            return value
        if np.ndim(value) or not float(value) or not float(other):
            raise NotByRows("a constant that differs by the size")
        ratio, (first, second) = float(other) / float(value), self.sizes
        count = jnp.asarray(self.count, jnp.float64)
        if math.isclose(ratio, second / first, rel_tol=1e-6):
            return (count * (float(value) / first)).astype(np.asarray(value).dtype)
        if math.isclose(ratio, first / second, rel_tol=1e-6):
            return (float(value) * first / count).astype(np.asarray(value).dtype)
        raise NotByRows("a number that is not proportional to the size")

    def _masked(self, value: Any, rows: tuple[int, int] | None, neutral: Any) -> Any:
        if rows is None:
            return value
        dim, each = rows
        position = lax.broadcasted_iota(np.int64, value.shape, dim) // each
        return jnp.where(position < self.count, value, jnp.asarray(neutral, value.dtype))

    def _results(self, one: Any, other: Any, operands: list[Any]) -> list[Any]:
        name = one.primitive.name
        ins = [self.rows_of(a.aval, b.aval) for a, b in zip(one.invars, other.invars, strict=True)]
        outs = [self.rows_of(a.aval, b.aval) for a, b in zip(one.outvars, other.outvars, strict=True)]
        inner = next((k for k, v in one.params.items() if is_jaxpr(v)), None)
        if name in _CALLS and inner is not None:
            first, second = map(_open, (one.params[inner], other.params[inner]))
            return self.evaluate(first[0], second[0], list(zip(first[1], second[1], strict=True)), operands)
        if name in _SUMS and ins[0] is not None and ins[0][0] in one.params["axes"]:
            operands = [self._masked(operands[0], ins[0], _SUMS[name](operands[0].dtype))]
        elif name == "dot_general":
            operands = self._product(one, ins, operands)
        elif name == "scatter-add" and ins[0] is None and (ins[1] or ins[2]):
            operands[2] = self._masked(operands[2], ins[2], 0)
        elif not self._keeps_rows(name, one, other, ins, outs):
            raise NotByRows(name)
        results = one.primitive.bind(*operands, **one.params)
        return list(results) if one.primitive.multiple_results else [results]

    def _product(self, one: Any, ins: list[tuple[int, int] | None], operands: list[Any]) -> list[Any]:
        (left, right), (left_batch, right_batch) = one.params["dimension_numbers"]
        summed = [rows is not None and rows[0] in dims for rows, dims in zip(ins, (left, right), strict=True)]
        batched = [rows is not None and rows[0] in dims for rows, dims in zip(ins, (left_batch, right_batch), strict=True)]
        if summed[0] != summed[1] or batched[0] != batched[1]:
            raise NotByRows("dot_general")
        return [self._masked(v, rows, 0) for v, rows in zip(operands, ins, strict=True)] if summed[0] else operands

    def _keeps_rows(self, name: str, one: Any, other: Any, ins: list[tuple[int, int] | None], outs: list[tuple[int, int] | None]) -> bool:
        """Whether each row of the results is made of the same row of the operands, in the same order."""
        params, given = one.params, [rows for rows in ins if rows is not None]
        if name in _ELEMENTWISE:
            return all(rows == outs[0] for rows in given)  # an operand without rows is a scalar, or the same for all
        if name in ("iota", "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "rev", "slice", "concatenate", "pad"):
            return _moves_rows(name, one, ins[0] if ins else None, outs[0])
        if name == "split":
            return ins[0] is None or (params["axis"] != ins[0][0] and all(out == ins[0] for out in outs))
        if name == "gather":
            return ins[0] is None and params["dimension_numbers"].operand_batching_dims == ()
        if name in (*_SUMS, "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"):
            return not given or given[0][0] not in params["axes"]
        if name in ("cumsum", "cumlogsumexp", "cummax", "cumprod"):
            return not given or given[0][0] != params["axis"]
        return not given and not any(outs) and _is_equal(params, other.params)


def _open(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


def _is_equal(params: dict[str, Any], others: dict[str, Any]) -> bool:
    return all(str(params[k]) == str(others[k]) for k in params)


def _moves_rows(name: str, one: Any, rows: tuple[int, int] | None, out: tuple[int, int] | None) -> bool:
    params, shape = one.params, one.outvars[0].aval.shape
    if name == "iota":
        return out is None or (out[1] == 1 or out[0] != params["dimension"])
    if rows is None:
        return name == "broadcast_in_dim" or out is None
    dim, each = rows
    before = one.invars[0].aval.shape
    if name == "broadcast_in_dim":
        return out == (params["broadcast_dimensions"][dim], each)
    if name == "reshape":
        return params["dimensions"] is None and out is not None and math.prod(before[:dim]) == math.prod(shape[: out[0]])
    if name == "transpose":
        return out == (params["permutation"].index(dim), each)
    if name in ("squeeze", "expand_dims"):
        return out is not None and math.prod(before[:dim]) == math.prod(shape[: out[0]])
    if name == "rev":
        return dim not in params["dimensions"]
    if name == "slice":
        return out == rows and params["start_indices"][dim] == 0 and (params["strides"] is None or params["strides"][dim] == 1)
    if name == "concatenate":
        return params["dimension"] != dim and out == rows
    return params["padding_config"][dim] == (0, 0, 0)  # pad


def by_rows(first: Any, second: Any, sizes: tuple[int, int], position: int) -> Any:
    """A closed jaxpr traced at two sizes as one for the first of them, of which as many rows are real as its argument at `position` says.

    Raises:
        NotByRows: what it does is not proved to be exact.
    """

    def run(*arrays: Any) -> list[Any]:
        return Rows(sizes, arrays[position]).evaluate(first.jaxpr, second.jaxpr, (), arrays)

    return jax.make_jaxpr(run)(*first.in_avals)


def padded_rows(value: np.ndarray[Any, Any], dim: int, size: int) -> np.ndarray[Any, Any]:
    """A host array with its first row repeated at the end until there are `size`: what is finite stays so."""
    first = np.take(value, [0], axis=dim)
    return np.concatenate([value, np.repeat(first, size - value.shape[dim], axis=dim)], axis=dim)


__all__ = ["NotByRows", "Rows", "bucket_of", "by_rows", "padded_rows"]

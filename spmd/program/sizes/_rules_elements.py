"""Padding rules of elementwise primitives, reductions, products, sorts, and primitives that move or merge dims.

The real elements of a result are those of the unpadded program. See Note [Padding].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from spmd.program.sizes._evaluate import Equation, Evaluation, rule
from spmd.program.sizes._formulas import Inexact
from spmd.program.sizes._padded import Dim, Dims, Padded, Room

ELEMENTWISE = (
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e"),
    *("bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh"),
    *("digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac"),
    *("igamma_grad_a", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "logistic", "lt", "lt_to", "max"),
    *("min", "mul", "name", "ne", "neg", "nextafter", "not", "or", "polygamma", "population_count", "pow", "random_gamma_grad", "real"),
    *("reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "sharding_constraint", "shift_left"),
    *("shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh"),
    *("threefry2x32", "xor", "zeta"),
)


def joined(room: Room, operands: list[Padded]) -> tuple[list[Padded], Dims]:
    """Operands of one shape, changed to the same factors, and their dims. Dims of size 1 and scalars match any shape."""
    rank = max(len(v.dims) for v in operands)
    dims = list[Dim]()
    for d in range(rank):
        given = [v.dims[d] for v in operands if len(v.dims) == rank]
        wide = [dim for dim in given if set(room.product(dim)) != {1}]
        dims.append(max(wide, key=len) if wide else given[0])
    found = []
    for value in operands:
        own = [dim if set(room.product(old)) != {1} else old for dim, old in zip(dims, value.dims, strict=False)]
        found.append(room.like(value, tuple(own)) if value.dims else value)
    return found, tuple(dims)


@rule(*ELEMENTWISE)
def elementwise(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Bind the primitive to operands with the same factors."""
    values, dims = joined(ev.room, operands)
    if eqn.name == "bitcast_convert_type" and len(eqn.shapes()[0]) != len(dims):
        raise Inexact("the bitcast changes the shape")
    return [Padded(a, dims) for a in eqn.bind(*(v.array for v in values))]


@rule("optimization_barrier")
def barrier(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Keep the dims of each operand."""
    return [Padded(a, v.dims) for a, v in zip(eqn.bind(*(v.array for v in operands)), operands, strict=True)]


def lowest(dtype: Any) -> Any:
    """The smallest value of a dtype."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return -np.inf
    return False if dtype == np.bool_ else jnp.iinfo(dtype).min


def highest(dtype: Any) -> Any:
    """The largest value of a dtype."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.inf
    return True if dtype == np.bool_ else jnp.iinfo(dtype).max


_NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: 0,
    "reduce_prod": lambda dtype: 1,
    "reduce_max": lowest,
    "reduce_min": highest,
    "reduce_or": lambda dtype: 0,
    "reduce_and": lambda dtype: True if dtype == np.bool_ else -1,
    "reduce_xor": lambda dtype: 0,
    "argmax": lowest,
    "argmin": highest,
    "cumsum": lambda dtype: 0,
    "cumprod": lambda dtype: 1,
    "cummax": lowest,
    "cummin": highest,
    "cumlogsumexp": lowest,
}


@rule("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_or", "reduce_and", "reduce_xor", "argmax", "argmin")
def reduction(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Replace padding by the neutral element. It follows the real elements, so the first of equal elements is real."""
    value, axes = operands[0], eqn.fixed("axes")
    (array,) = eqn.bind(ev.room.masked(value, axes, _NEUTRAL[eqn.name](value.array.dtype)))
    if eqn.name.startswith("arg") and len(value.dims[axes[0]]) > 1:
        array = ev.room.index(value.dims[axes[0]])[array].astype(array.dtype)
    return [Padded(array, tuple(dim for d, dim in enumerate(value.dims) if d not in axes))]


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Replace padding by the neutral element, which is right in both directions."""
    value = operands[0]
    masked = ev.room.masked(value, [eqn.fixed("axis")], _NEUTRAL[eqn.name](value.array.dtype))
    return [Padded(eqn.bind(masked)[0], value.dims)]


@rule("dot_general")
def product(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Replace padding in contracted dims by 0 on both sides, since 0 * NaN is NaN."""
    (left, right), (left_batch, right_batch) = eqn.fixed("dimension_numbers")
    one, other = operands
    for a, b in (*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)):
        other = ev.room.relaid(other, b, one.dims[a])
    arrays = ev.room.masked(one, left, 0), ev.room.masked(other, right, 0)
    free = [dim for d, dim in enumerate(one.dims) if d not in (*left, *left_batch)]
    free += [dim for d, dim in enumerate(other.dims) if d not in (*right, *right_batch)]
    return [Padded(eqn.bind(*arrays)[0], (*(one.dims[d] for d in left_batch), *free))]


@rule("iota")
def iota(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Index of each position in the unpadded array."""
    dims, along = ev.room.plain(eqn.shapes()), eqn.fixed("dimension")
    if len(dims[along]) == 1:
        return [Padded(eqn.bind(shape=ev.room.shape(dims))[0], dims)]
    index = ev.room.index(dims[along]).astype(eqn.fixed("dtype"))
    return [Padded(lax.broadcast_in_dim(index, ev.room.shape(dims), (along,)), dims)]


@rule("broadcast_in_dim")
def broadcast(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Add dims, and repeat dims of size 1."""
    value, dims = operands[0], list(ev.room.plain(eqn.shapes()))
    for own, new in zip(value.dims, eqn.fixed("broadcast_dimensions"), strict=True):
        if set(ev.room.product(own)) != {1}:
            dims[new] = own
    return [Padded(eqn.bind(value.array, shape=ev.room.shape(tuple(dims)))[0], tuple(dims))]


@rule("reshape")
def reshape(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Merge and split dims. Elements are gathered if padding lies between them."""
    if eqn.fixed("dimensions") is not None:
        raise Inexact("the reshape also permutes dims")
    return [ev.room.reshaped(operands[0], eqn.shapes())]


@rule("squeeze", "expand_dims")
def squeeze(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Remove or add dims of size 1."""
    return [ev.room.reshaped(operands[0], eqn.shapes())]


@rule("transpose")
def transpose(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Permute the dims."""
    dims = tuple(operands[0].dims[d] for d in eqn.fixed("permutation"))
    return [Padded(eqn.bind(operands[0].array)[0], dims)]


@rule("rev")
def reverse(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Reverse dims. A reversed padded dim would begin with padding, so its elements are gathered."""
    value, array = operands[0], operands[0].array
    for d in eqn.fixed("dimensions"):
        dim = value.dims[d]
        if not ev.room.is_padded(dim):
            array = lax.rev(array, (d,))
            continue
        last = ev.room.real(ev.room.product(dim)) - 1
        array = jnp.take(array, ev.room.position(last - ev.room.index(dim), dim), axis=d, mode="clip")
    return [Padded(array, value.dims)]


@rule("tile")
def tile(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Repeat the array along dims; the number of copies is a new factor of each."""
    value, repeats = operands[0], eqn.columns("reps")
    dims = tuple(dim if set(r) == {1} else (r, *dim) for dim, r in zip(value.dims, repeats, strict=True))
    return [Padded(eqn.bind(value.array)[0], dims)]


@rule("stack")
def stack(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Stack operands along a new dim."""
    values, dims = joined(ev.room, operands)
    axis, count = eqn.fixed("axis"), (len(values),) * len(ev.room.points.at)
    return [Padded(eqn.bind(*(v.array for v in values))[0], (*dims[:axis], (count,), *dims[axis:]))]


@rule("unstack")
def unstack(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Split along a dim of fixed size, since the number of results cannot vary."""
    value, axis = operands[0], eqn.fixed("axis")
    return [Padded(array, (*value.dims[:axis], *value.dims[axis + 1 :])) for array in eqn.bind(value.array)]


@rule("sort")
def sort(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Sort, with all padding after the real elements, even after NaN."""
    values, dims = joined(ev.room, operands)
    along = eqn.fixed("dimension")
    if not ev.room.is_padded(dims[along]):
        return [Padded(a, dims) for a in eqn.bind(*(v.array for v in values))]
    mask = ev.room.mask(values[0], [along])
    arrays = eqn.bind(~mask, *(v.array for v in values), num_keys=eqn.fixed("num_keys") + 1)[1:]
    new = (*dims[:along], (ev.room.product(dims[along]),), *dims[along + 1 :])  # the real elements are first now
    return [Padded(a, new) for a in arrays]


@rule("top_k")
def top_k(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Replace padding by the lowest value. Of equal elements the first are taken, which are real."""
    value, last = operands[0], len(operands[0].dims) - 1
    count, axis = eqn.param("k"), set(eqn.param("axis")) if "axis" in eqn.first.params else {last}
    if axis - {last, -1}:
        raise Inexact("top_k along a dim other than the last")
    extent = ev.room.product(value.dims[last])
    ev.room.need(tuple(n - k for n, k in zip(extent, count, strict=True)), 0)
    value = ev.room.relaid(value, last, (extent,))  # padding after all real elements, which may include the lowest value too
    array, index = eqn.bind(ev.room.masked(value, [last], lowest(value.array.dtype)))
    dims = (*value.dims[:-1], (count,))
    return [Padded(array, dims), Padded(index, dims)]


@rule("random_bits")
def random_bits(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Random bits from each element's index in the unpadded array, as jax's partitionable threefry computes them."""
    key, dims, settings = operands[0], ev.room.plain(eqn.shapes()), cast(Any, jax.config)
    if key.dims or "fry" not in str(key.array.dtype) or not settings.jax_threefry_partitionable:
        raise Inexact("random numbers from several keys, or from a generator other than threefry")
    width = eqn.fixed("bit_width")
    index = numbering(ev.room, dims)
    words = jax.random.key_data(key.array)
    high, low = (index >> np.uint64(32)).astype(np.uint32), index.astype(np.uint32)
    first, second = threefry(words[0], words[1], high, low)
    if width == 64:
        bits = first.astype(np.uint64) << np.uint64(32) | second.astype(np.uint64)
    else:
        bits = (first ^ second).astype(f"uint{width}")
    return [Padded(bits, dims)]


def numbering(room: Room, dims: Dims) -> Any:
    """Row-major index of each element in the unpadded array: uint64 of the padded shape."""
    index, shape = jnp.zeros((), np.uint64), room.shape(dims)
    for d, dim in enumerate(dims):
        own = lax.broadcast_in_dim(room.index(dim).astype(np.uint64), shape, (d,))
        index = index * jnp.asarray(room.real(room.product(dim))).astype(np.uint64) + own
    return index


def threefry(first: Any, second: Any, high: Any, low: Any) -> Any:
    """jax's threefry2x32 with the two key words `first` and `second`, for counts of any shape."""
    return threefry2x32_p.bind(jnp.broadcast_to(first, high.shape), jnp.broadcast_to(second, high.shape), high, low)


@rule("iota_2x32_shape")
def counts(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """High and low word of each element's index in the unpadded array."""
    dims = ev.room.plain(eqn.shapes())
    index = numbering(ev.room, dims)
    return [Padded((index >> np.uint64(32)).astype(np.uint32), dims), Padded(index.astype(np.uint32), dims)]


_BATCHED = {  # number of trailing dims of one matrix or vector
    "cholesky": 2,
    "eig": 2,
    "eigh": 2,
    "geqrf": 2,
    "geqp3": 2,
    "householder_product": 2,
    "lu": 2,
    "lu_pivots_to_permutation": 1,
    "qr": 2,
    "svd": 2,
    "triangular_solve": 2,
    "fft": 3,
}


@rule(*_BATCHED)
def batched(ev: Evaluation, eqn: Equation, operands: list[Padded]) -> list[Padded]:
    """Linear algebra and FFTs over batch dims. Padded batch entries do not affect the others."""
    own = len(eqn.fixed("fft_lengths")) if eqn.name == "fft" else _BATCHED[eqn.name]
    first = operands[0].dims
    num_batch = len(first) - own
    operands = [operands[0], *(ev.room.like(v, (*first[:num_batch], *v.dims[num_batch:])) for v in operands[1:])]
    for value in operands:
        if any(map(ev.room.is_padded, value.dims[num_batch:])):
            raise Inexact("the size of one matrix or transform varies")
    arrays = eqn.bind(*(v.array for v in operands))
    return [
        Padded(a, (*first[:num_batch], *ev.fixed_like(a, v.aval).dims[num_batch:])) for a, v in zip(arrays, eqn.first.outvars, strict=True)
    ]

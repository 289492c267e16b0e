"""Resampling of images: interpolation to another size, sampling on a grid, sliding blocks.

Interpolation is separable: one small constant matrix per dim and a `dot_general`, as in `jax.image`. Nearest-neighbour
interpolation that repeats or skips elements regularly is a broadcast or a strided slice. Backward ops are the transposes.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.base._open_sizes import are_sizes_open, closed_sizes
from spmd.lowering._registry import lower
from spmd.lowering.norm import wide

Matrix = np.ndarray[Any, np.dtype[Any]]


def _scale(size: int, count: int, align_corners: bool, given: float | None, dtype: Any) -> Any:
    """Input elements per output element. A scale factor given by the user has precedence over the ratio of the sizes."""
    if not align_corners and given is not None and given > 0:
        return dtype(1.0 / given)
    above, below = (size - 1, count - 1) if align_corners else (size, count)
    if are_sizes_open():  # both vary between calls, and no formula for their quotient could be derived from traces
        return jnp.asarray(above, dtype) / jnp.asarray(below, dtype) if below else dtype(0)
    return dtype(above / below if below else 0) if align_corners else dtype(above) / dtype(below)


def _iota(count: int, dtype: Any) -> Any:
    """0, 1, 2, ...: a numpy array, or a traced one if the program is also for other sizes."""
    return lax.iota(dtype, count) if are_sizes_open() else np.arange(count).astype(dtype)


def _nearest_at(size: int, count: int, given: float | None, exact: bool, is_short: bool) -> Any:
    """The input index of each output index, computed in float32 like torch. See Note [Nearest without a scale]."""
    scale = _scale(size, count, False, given, np.float32)
    xp: Any = jnp if are_sizes_open() else np
    at = xp.floor((_iota(count, np.float32) + np.float32(0.5 if exact else 0)) * scale)
    at = xp.minimum(at.astype(np.int64), size - 1)
    if not is_short or given is None:
        return at
    index = _iota(count, np.int64)
    return xp.where(xp.asarray(count) == size, index, xp.where(xp.asarray(count) == 2 * size, index // 2, at))


# Note [Nearest without a scale]: torch's loops for "nearest" in 2-D, and the gradients of all ranks, ignore a given scale factor where the
# output is exactly as large as the input, or twice as large. Its loops for 1-D and 3-D, and "nearest-exact", do not.
def _nearest(x: Any, dim: int, count: int, given: float | None, exact: bool, is_short: bool) -> Any:
    """`x` resized along one dim: by a broadcast if elements repeat, by a slice for regular steps, else by a gather."""
    size = x.shape[dim]
    if count == size and (given is None or given == 1.0):
        return x
    is_repeated = given is not None and given >= 1 and float(given).is_integer()
    if are_sizes_open() and not is_repeated:
        return jnp.take(x, _nearest_at(size, count, given, exact, is_short), axis=dim, mode="clip")
    with closed_sizes():  # every element repeats equally often, for any size
        return _taken(x, dim, _nearest_at(size, count, given, exact, is_short))


def _taken(x: Any, dim: int, at: Matrix) -> Any:
    """`x` at the indices `at` along one dim."""
    size, count = x.shape[dim], len(at)
    if count == size and (at == np.arange(size)).all():
        return x
    if size and count % size == 0 and (at == np.arange(count) // (count // size)).all():
        shape = (*x.shape[: dim + 1], count // size, *x.shape[dim + 1 :])
        return jnp.broadcast_to(jnp.expand_dims(x, dim + 1), shape).reshape(*x.shape[:dim], count, *x.shape[dim + 1 :])
    step = int(at[1] - at[0]) if count > 1 else 1
    if step > 0 and (at == at[0] + np.arange(count) * step).all():
        return lax.slice_in_dim(x, int(at[0]), int(at[-1]) + 1, step, dim)
    return jnp.take(x, at, axis=dim, mode="clip")


def _source(size: int, count: int, align_corners: bool, given: float | None, dtype: Any) -> Any:
    """The fractional input position of each output element."""
    scale = _scale(size, count, align_corners, given, dtype)
    index = _iota(count, dtype)
    return scale * index if align_corners else scale * (index + dtype(0.5)) - dtype(0.5)


def _matrix_of_taps(size: int, count: int, taps: Sequence[tuple[Any, Any]], dtype: Any) -> Any:
    """[count, size]: for each tap (at, weight), `weight[i]` is added in row i and column `at[i]`."""
    if are_sizes_open():
        column = lax.broadcasted_iota(np.int64, (count, size), 1)
        return sum(jnp.where(column == at[:, None], weight[:, None], jnp.zeros((), dtype)) for at, weight in taps)
    matrix = np.zeros((count, size), dtype)
    for at, weight in taps:
        np.add.at(matrix, (np.arange(count), at), weight)
    return matrix


def _linear_matrix(size: int, count: int, align_corners: bool, given: float | None, dtype: Any) -> Any:
    """[count, size], with two taps per output element. If no size changes, torch ignores a given scale factor here."""
    xp: Any = jnp if are_sizes_open() else np
    source = xp.maximum(_source(size, count, align_corners, given, dtype), dtype(0))
    if given is not None:
        source = xp.where(xp.asarray(count) == size, _iota(count, dtype), source)
    low = xp.minimum(source.astype(np.int64), size - 1)
    share = xp.clip(source - low.astype(dtype), 0, 1)
    return _matrix_of_taps(size, count, [(low, 1 - share), (xp.minimum(low + 1, size - 1), share)], dtype)


def _cubic(t: Any, a: float, xp: Any = np) -> Any:
    """Keys' cubic convolution kernel."""
    t = xp.abs(t)
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
    return xp.where(t <= 1, near, xp.where(t < 2, far, 0.0))


def _cubic_matrix(size: int, count: int, align_corners: bool, given: float | None, dtype: Any) -> Any:
    """[count, size], with four taps per output element. Taps outside the input move to its border."""
    xp: Any = jnp if are_sizes_open() else np
    source = _source(size, count, align_corners, given, dtype)
    low = xp.floor(source)
    columns = [xp.clip(low.astype(np.int64) + offset, 0, size - 1) for offset in (-1, 0, 1, 2)]
    weights = [_cubic(source - low - offset, -0.75, xp).astype(dtype) for offset in (-1, 0, 1, 2)]
    return _matrix_of_taps(size, count, list(zip(columns, weights, strict=True)), dtype)


def _antialiased(kernel: Callable[[Any], Any], radius: float) -> Callable[..., Matrix]:
    """The matrix of a filter that is scaled to the spacing of the output. Its rows sum to one."""

    def matrix_of(size: int, count: int, align_corners: bool, given: float | None, dtype: Any) -> Matrix:
        with closed_sizes():
            scale = float(_scale(size, count, align_corners, given, np.float64))
        wide_scale = max(scale, 1.0)
        matrix = np.zeros((count, size), dtype)
        for i in range(count):
            centre = scale * (i + 0.5)
            start = max(int(centre - radius * wide_scale + 0.5), 0)
            end = min(int(centre + radius * wide_scale + 0.5), size)
            weights = kernel((np.arange(start, end) - centre + 0.5) / wide_scale)
            total = weights.sum()
            matrix[i, start:end] = weights / total if total != 0 else weights
        return matrix

    return matrix_of


def _lanczos(t: Any) -> Any:
    return np.where(np.abs(t) < 3, np.sinc(t) * np.sinc(t / 3), 0.0)


_MATRICES = {
    "upsample_linear1d": (1, _linear_matrix),
    "upsample_bilinear2d": (2, _linear_matrix),
    "upsample_trilinear3d": (3, _linear_matrix),
    "upsample_bicubic2d": (2, _cubic_matrix),
    "_upsample_bilinear2d_aa": (2, _antialiased(lambda t: np.maximum(1 - np.abs(t), 0), 1.0)),
    "_upsample_bicubic2d_aa": (2, _antialiased(lambda t: _cubic(t, -0.5), 2.0)),
    "_upsample_lanczos2d_aa": (2, _antialiased(_lanczos, 3.0)),
}


def _lower_interpolation(name: str, rank: int, matrix_of: Callable[..., Matrix]) -> None:
    def resized(self: Any, output_size: Any, align_corners: bool, scales: Sequence[float | None], is_skipped: bool) -> Any:
        """[N, C, ...] to [N, C, *output_size]. Integers are computed in float32 and rounded.

        `is_skipped`: a dim whose size does not change is left as it is, also if a scale factor is given.
        """
        is_integer = not jnp.issubdtype(self.dtype, jnp.floating)
        x = self.astype(jnp.float32) if is_integer else wide(self)
        given = (*scales, *(None,) * rank)[:rank]
        for dim, (count, scale) in enumerate(zip(output_size, given, strict=True), 2):
            if count == x.shape[dim] and (is_skipped or scale is None or scale == 1.0):
                continue
            matrix = matrix_of(x.shape[dim], count, align_corners, scale, np.float64 if x.dtype == np.float64 else np.float32)
            product = lax.dot_general(x, jnp.asarray(matrix), (((dim,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
            x = jnp.moveaxis(product, -1, dim)
        if is_integer:
            bounds = jnp.iinfo(self.dtype)
            x = jnp.clip(jnp.round(x), int(bounds.min), int(bounds.max))
        return x.astype(self.dtype)

    def upsample(self: Any, output_size: Any, align_corners: bool, *scales: float | None) -> Any:
        return resized(self, output_size, align_corners, scales, is_skipped=name.endswith("_aa"))  # in torch, not in the gradient

    def upsample_backward(grad_output: Any, output_size: Any, input_size: Any, align_corners: bool, *scales: float | None) -> Any:
        g = wide(grad_output)
        if name == "upsample_bicubic2d" and tuple(output_size) == tuple(input_size[2:]):  # torch copies, though its forward resamples
            return g
        return _transposed(lambda x: resized(x, output_size, align_corners, scales, is_skipped=False), input_size, g)

    lower(name)(upsample)
    lower(f"{name}_backward")(upsample_backward)


def _lower_nearest(name: str, rank: int, exact: bool) -> None:
    def resized(x: Any, output_size: Any, scales: Sequence[float | None], is_short: bool) -> Any:
        given = (*scales, *(None,) * rank)[:rank]
        for dim, (count, scale) in enumerate(zip(output_size, given, strict=True), 2):
            x = _nearest(x, dim, count, scale, exact, is_short)
        return x

    def upsample(self: Any, output_size: Any, *scales: float | None) -> Any:
        return resized(self, output_size, scales, rank == 2 and not exact)

    def upsample_backward(grad_output: Any, output_size: Any, input_size: Any, *scales: float | None) -> Any:
        return _transposed(lambda x: resized(x, output_size, scales, not exact), input_size, wide(grad_output))

    lower(name)(upsample)
    lower(f"{name}_backward")(upsample_backward)


def _transposed(linear: Callable[[Any], Any], input_size: Any, grad: Any) -> Any:
    return jax.linear_transpose(linear, jax.ShapeDtypeStruct(tuple(input_size), grad.dtype))(grad)[0]


for _name, (_rank, _matrix_of) in _MATRICES.items():
    _lower_interpolation(_name, _rank, _matrix_of)
for _rank in (1, 2, 3):
    _lower_nearest(f"upsample_nearest{_rank}d", _rank, exact=False)
    _lower_nearest(f"_upsample_nearest_exact{_rank}d", _rank, exact=True)

_BILINEAR, _NEAREST = 0, 1
_ZEROS, _BORDER = 0, 1


def _reflected(x: Any, twice_low: int, twice_high: int) -> Any:
    """Positions reflected into [low, high], whose bounds are given doubled."""
    if twice_low == twice_high:
        return jnp.zeros_like(x)
    low, span = twice_low / 2, (twice_high - twice_low) / 2
    away = jnp.abs(x - low)
    extra = jnp.fmod(away, span)
    is_even = jnp.floor(away / span) % 2 == 0
    return jnp.where(is_even, extra + low, span - extra + low)


def _inside(x: Any, size: int, padding_mode: int, align_corners: bool) -> Any:
    """Positions, moved into the image according to the padding mode."""
    if padding_mode == _ZEROS:
        return x
    if padding_mode != _BORDER:
        x = _reflected(x, 0, 2 * (size - 1)) if align_corners else _reflected(x, -1, 2 * size - 1)
    is_low = (x <= 0) | jnp.isnan(x)  # torch clips NaN to 0, and a position on an edge has no gradient
    return jnp.where(is_low, jnp.zeros_like(x), jnp.where(x >= size - 1, jnp.full_like(x, size - 1), x))


def _pick(image: Any, positions: list[Any]) -> Any:
    """image [N, C, ...] at integer positions, [N, ...] per dim; zeros outside."""
    sizes = image.shape[2:]
    valid = jnp.ones((), bool)
    index: list[Any] = []
    for at, size in zip(positions, sizes, strict=True):
        valid = valid & (at >= 0) & (at <= size - 1)
        index.append(jnp.clip(jnp.nan_to_num(at), 0, max(size - 1, 0)).astype(jnp.int32))
    picked = jax.vmap(lambda one, *at: one[(slice(None), *at)])(image, *index)
    return jnp.where(valid[:, None], picked, jnp.zeros((), image.dtype))


@lower("grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Any:
    """input [N, C, (D,) H, W] sampled at grid [N, ..., rank], whose last dim is x, y(, z) in [-1, 1]."""
    image, at = wide(input), wide(grid)
    sizes = image.shape[2:]
    positions: list[Any] = []
    for i, size in enumerate(sizes):
        x = at[..., len(sizes) - 1 - i]
        positions.append((x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2)
    moved = [_inside(x, n, padding_mode, align_corners) for x, n in zip(positions, sizes, strict=True)]
    if interpolation_mode == _NEAREST:
        return _pick(image, [jnp.round(x) for x in moved])
    if interpolation_mode == _BILINEAR:
        return _weighted(image, moved, (0, 1), lambda beyond, tap: beyond if tap else 1 - beyond, lambda x, n: x)
    return _weighted(image, positions, (-1, 0, 1, 2), _keys, lambda x, n: _inside(x, n, padding_mode, align_corners))


# Note [One floor]: XLA:CPU computes a cheap value again in each loop that uses it, and rounds it differently where a product and a sum
# become one instruction. Next to an integer, `floor` then is one number where values are picked, and the next one where they
# are weighted: a wrong pixel. A loop is never computed twice, and the second `floor` changes nothing.
def _floor(x: Any) -> Any:
    return lax.platform_dependent(
        lax.stop_gradient(x), cpu=lambda x: lax.fori_loop(0, 2, lambda _, whole: jnp.floor(whole), x), default=jnp.floor
    )


def _keys(beyond: Any, tap: int) -> Any:
    t, a = jnp.abs(beyond - tap), -0.75
    return jnp.where(t <= 1, ((a + 2) * t - (a + 3)) * t * t + 1, ((a * t - 5 * a) * t + 8 * a) * t - 4 * a)


def _weighted(
    image: Any, positions: list[Any], taps: tuple[int, ...], weight_of: Callable[[Any, int], Any], moved: Callable[[Any, int], Any]
) -> Any:
    """Sum over the taps around each position of weight times value."""
    lows = [_floor(x) for x in positions]  # See Note [One floor]
    beyond = [x - low for x, low in zip(positions, lows, strict=True)]  # relative to low: for large positions, low + tap is rounded
    total: Any = 0
    for offsets in np.ndindex(*(len(taps),) * len(positions)):
        corner = [low + taps[o] for low, o in zip(lows, offsets, strict=True)]
        weight = functools.reduce(operator.mul, [weight_of(part, taps[o]) for part, o in zip(beyond, offsets, strict=True)])
        value = _pick(image, [moved(c, n) for c, n in zip(corner, image.shape[2:], strict=True)])
        total = total + value * weight[:, None]
    return total


@lower("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def grid_sampler_backward(
    grad_output: Any, input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool, output_mask: Any
) -> Any:
    def sampled(image: Any, at: Any) -> Any:
        return grid_sampler(image, at, interpolation_mode, padding_mode, align_corners)

    of_image, of_grid = jax.vjp(sampled, wide(input), wide(grid))[1](wide(grad_output))
    return of_image if output_mask[0] else None, of_grid if output_mask[1] else None


@lower("im2col")
def im2col(self: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """[N, C, H, W] to [N, C * kernel elements, blocks]: one strided slice per kernel element."""
    if self.ndim == 3:
        return im2col(self[None], kernel_size, dilation, padding, stride)[0]
    (kh, kw), (dh, dw), (ph, pw), (sh, sw) = (tuple(v) * 2 if len(v) == 1 else v for v in (kernel_size, dilation, padding, stride))
    n, c = self.shape[:2]
    x = jnp.pad(self, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    rows, columns = (x.shape[2] - dh * (kh - 1) - 1) // sh + 1, (x.shape[3] - dw * (kw - 1) - 1) // sw + 1
    if (kh, kw) == (sh, sw) and (dh, dw) == (1, 1):  # adjacent blocks: only a transpose
        x = x[:, :, : rows * kh, : columns * kw].reshape(n, c, rows, kh, columns, kw)
        return jnp.transpose(x, (0, 1, 3, 5, 2, 4)).reshape(n, c * kh * kw, rows * columns)
    blocks = [
        x[:, :, i * dh : i * dh + (rows - 1) * sh + 1 : sh, j * dw : j * dw + (columns - 1) * sw + 1 : sw]
        for i in range(kh)
        for j in range(kw)
    ]
    return jnp.stack(blocks, 2).reshape(n, c * kh * kw, rows * columns)


@lower("col2im")
def col2im(self: Any, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """The transpose of `im2col`, which sums overlapping blocks."""
    kernel = tuple(kernel_size) * 2 if len(kernel_size) == 1 else tuple(kernel_size)
    size = (*self.shape[:-2], self.shape[-2] // math.prod(kernel), *output_size)
    return _transposed(lambda x: im2col(x, kernel, dilation, padding, stride), size, self)

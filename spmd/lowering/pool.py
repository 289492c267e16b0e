"""Pooling over windows: `reduce_window` if the windows are regular, else a product with an averaging matrix.

Each op accepts any leading dims. The backward of max pooling is the transpose of `reduce_window` (select-and-scatter), which does
not read the indices, so a program that does not use the indices never computes them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.base._open_sizes import are_sizes_open
from spmd.lowering._padded_windows import apart
from spmd.lowering._registry import lower
from spmd.lowering.norm import wide


def _per_dim(values: Any, rank: int) -> tuple[int, ...]:
    """One value per pooled dim. torch also accepts a single value for all of them."""
    return tuple(values) * rank if len(values) == 1 else tuple(values)


class Windows:
    """Regular windows over the last dims of an array, counted like torch.

    Attributes:
        out: number of windows per dim.
        padding: (low, high) per dim, independent of the size. With this padding `reduce_window` has as many windows as torch. In
            `ceil_mode`, the last window may extend beyond torch's padding.
    """

    def __init__(self, size: tuple[int, ...], kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> None:
        rank = len(size)
        self.size = size
        self.kernel = _per_dim(kernel, rank)
        self.stride = _per_dim(stride, rank) if stride else self.kernel
        self.low = _per_dim(padding, rank)
        self.dilation = _per_dim(dilation, rank)
        self.out: list[int] = []
        self.padding: list[tuple[int, int]] = []
        for n, k, s, p, d in zip(size, self.kernel, self.stride, self.low, self.dilation, strict=True):
            span = d * (k - 1) + 1
            room = n + 2 * p - span
            count = (-(-room // s) if ceil_mode else room // s) + 1
            if ceil_mode and (count - 1) * s >= n + p:
                count -= 1  # a window that starts in the high padding does not count
            if count < 1:
                raise RuntimeError(f"Given input size {size}, kernel {self.kernel}: calculated output size is too small")
            self.out.append(count)
            self.padding.append((p, min(s + p, span) - 1 if ceil_mode else p))

    def reduce(self, operand: Any, init: Any, computation: Any, leading: int) -> Any:
        """`lax.reduce_window` over the last dims of one array or several."""
        ones, nones, padding = (1,) * leading, [(0, 0)] * leading, self.padding
        if not np.all(init == 0):
            operand = apart(operand, init[0] if isinstance(init, tuple) else init)
        if any(map(self._may_lose_padding, range(len(self.size)))):
            ends = [*((0, 0, 0) for _ in nones), *((low, 0, 0) for low, _ in padding)]
            padded = [lax.pad(x, v, ends) for x, v in (zip(operand, init, strict=True) if isinstance(init, tuple) else [(operand, init)])]
            operand, padding = padded if isinstance(init, tuple) else padded[0], [(0, high) for _, high in padding]
            operand = apart(operand, 0)  # XLA would make it the padding of the windows again
        return lax.reduce_window(
            tuple(operand) if isinstance(init, tuple) else operand,
            init,
            computation,
            ones + self.kernel,
            ones + self.stride,
            [*nones, *padding],
            window_dilation=ones + self.dilation,
        )

    def _may_lose_padding(self, dim: int) -> bool:
        """Whether XLA may take the windows of a replicated operand for windows without padding. See `spmd.base._jax_paddings`.

        It does if those of a sharded result, whose size is rounded up, cover as many elements as the operand has.
        """
        span, stride = self.dilation[dim] * (self.kernel[dim] - 1) + 1, self.stride[dim]
        return self.padding[dim][0] > 0 and (self.size[dim] - span) % stride == 0 and (self.size[dim] - span) // stride + 1 >= self.out[dim]

    def counts(self, with_padding: bool, ceil_mode: bool) -> list[Any]:
        """Per dim, the number of elements of each window, with or without those in the padding: an int, or int32[windows]."""
        counts = list[Any]()
        for n, k, s, p, count in zip(self.size, self.kernel, self.stride, self.low, self.out, strict=True):
            if not ceil_mode and (with_padding or p == 0):  # no window extends beyond the padding
                counts.append(k)
                continue
            start = lax.iota(np.int32, count) * s - p
            end = lax.min(start + k, jnp.full_like(start, n + p))
            within = lax.min(end, jnp.full_like(end, n)) - lax.max(start, jnp.zeros_like(start))
            counts.append(end - start if with_padding else within)
        return counts


def _lowest(dtype: Any) -> Any:
    """The initial value of a maximum."""
    return np.array(-np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min, dtype)


def _plane_positions(shape: tuple[int, ...], rank: int) -> Any:
    """For each element, its row-major position within its last `rank` dims."""
    positions = jnp.zeros(shape, jnp.int32)
    for dim in range(len(shape) - rank, len(shape)):
        positions = positions + lax.broadcasted_iota(jnp.int32, shape, dim) * math.prod(shape[dim + 1 :])
    return positions


def _first_larger(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
    """The (value, position) pair with the larger value; NaN exceeds any number. Of equal values the earlier, of NaNs the later."""
    (a, i), (b, j) = left, right
    a_wins = (a > b) | ((a == b) & (i < j)) | ((a != a) & ~((b != b) & (j > i)))
    return jnp.where(a_wins, a, b), jnp.where(a_wins, i, j)


def _index_of_largest(values: Any) -> Any:
    """Position along the last dim, kept with size 1, that `_first_larger` selects."""
    largest = jnp.argmax(values, -1, keepdims=True)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        return largest
    is_nan = jnp.isnan(values)
    last = values.shape[-1] - 1 - jnp.argmax(is_nan[..., ::-1], -1, keepdims=True)
    return jnp.where(is_nan.any(-1, keepdims=True), last, largest)


def _max_pool(x: Any, windows: Windows) -> tuple[Any, Any]:
    leading = x.ndim - len(windows.size)
    out = windows.reduce(x, _lowest(x.dtype), lax.max, leading)
    positions = _plane_positions(x.shape, len(windows.size))
    last = np.array(np.iinfo(np.int32).max, np.int32)
    indices = windows.reduce((x, positions), (_lowest(x.dtype), last), _first_larger, leading)[1]
    return out, indices.astype(jnp.int64)


def max_pool_with_indices(
    self: Any, kernel_size: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False, *, rank: int
) -> Any:
    return _max_pool(self, Windows(self.shape[self.ndim - rank :], kernel_size, stride, padding, dilation, ceil_mode))


def max_pool_with_indices_backward(
    grad_output: Any,
    self: Any,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Any,
    *,
    rank: int,
) -> Any:
    windows = Windows(self.shape[self.ndim - rank :], kernel_size, stride, padding, dilation, ceil_mode)
    if any(d > 1 for d in windows.dilation):  # select-and-scatter does not support dilated windows
        return _to_plane(grad_output, indices, self.shape, rank)

    def largest(x: Any) -> Any:
        return windows.reduce(x, _lowest(x.dtype), lax.max, x.ndim - rank)

    return jax.vjp(largest, self)[1](grad_output.astype(self.dtype))[0]


def _to_plane(values: Any, indices: Any, shape: tuple[int, ...], rank: int) -> Any:
    """Sum of `values` at their positions in planes of the last `rank` dims."""
    leading = shape[: len(shape) - rank]
    count = math.prod(values.shape[len(leading) :])
    flat, at = values.reshape(*leading, count), indices.reshape(*leading, count)
    zeros = jnp.zeros((*leading, math.prod(shape[len(shape) - rank :])), values.dtype)
    add = lambda plane, i, v: plane.at[i].add(v)  # noqa: E731
    for _ in leading:
        add = jax.vmap(add)
    return add(zeros, at, flat).reshape(shape)


def avg_pool(
    self: Any,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    rank: int,
) -> Any:
    """Window sums divided by their element counts, which are constants: a number per dim, or a vector if the windows differ."""
    x = wide(self)
    windows = Windows(x.shape[x.ndim - rank :], kernel_size, stride, padding, (1,), ceil_mode)
    total = windows.reduce(x, np.zeros((), x.dtype), lax.add, x.ndim - rank)
    if divisor_override is not None:
        return _divided(total, divisor_override)
    for i, counts in enumerate(windows.counts(count_include_pad, ceil_mode)):
        total = _divided(total, counts if isinstance(counts, int) else counts.astype(total.dtype).reshape((-1,) + (1,) * (rank - 1 - i)))
    return total


def _divided(total: Any, count: Any) -> Any:
    """`total / count`. torch also pools integers, with truncating division."""
    return total / count if jnp.issubdtype(total.dtype, jnp.floating) else lax.div(total, jnp.full_like(total, count))


def avg_pool_backward(
    grad_output: Any,
    self: Any,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    *,
    rank: int,
) -> Any:
    def pooled(x: Any) -> Any:
        return avg_pool(x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, rank=rank)

    return _transposed(pooled, self, grad_output)


def _transposed(linear: Any, like: Any, grad: Any) -> Any:
    """The transpose of a linear function at `grad`, in float32 for 16-bit floats."""
    wide_grad = wide(grad)
    return jax.linear_transpose(linear, jax.ShapeDtypeStruct(like.shape, wide_grad.dtype))(wide_grad)[0]


def _averaging(size: int, count: int, dtype: Any) -> Any:
    """[count, size]: row i averages the elements from floor(i * size / count) to ceil((i + 1) * size / count)."""
    window, element = lax.iota(np.int64, count)[:, None], lax.iota(np.int64, size)[None]
    start, end = window * size // count, ((window + 1) * size + count - 1) // count
    return jnp.where((element >= start) & (element < end), 1 / (end - start).astype(dtype), 0)


@lower("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def _adaptive_avg_pool(self: Any, output_size: Any) -> Any:
    """Dim by dim: a mean, a sum over regular windows, or a product with the averaging matrix if windows overlap or differ."""
    x = wide(self)
    first = x.ndim - len(output_size)
    for dim, count in zip(range(first, x.ndim), output_size, strict=True):
        size = x.shape[dim]
        if count == size:
            continue
        if count == 1:
            x = jnp.mean(x, dim, keepdims=True)
        elif count and size % count == 0 and not are_sizes_open():
            window = tuple(size // count if i == dim else 1 for i in range(x.ndim))
            x = lax.reduce_window(x, np.zeros((), x.dtype), lax.add, window, window, "VALID") / (size // count)
        else:
            matrix = _averaging(size, count, x.dtype)
            product = lax.dot_general(x, matrix, (((dim,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
            x = jnp.moveaxis(product, -1, dim)
    return x


def _adaptive_avg_pool_backward(grad_output: Any, self: Any, *, rank: int) -> Any:
    output_size = grad_output.shape[grad_output.ndim - rank :]
    return _transposed(lambda x: _adaptive_avg_pool(x, output_size), self, grad_output)


def _divides(size: tuple[int, ...], count: tuple[int, ...]) -> bool:
    return all(c and n % c == 0 for n, c in zip(size, count, strict=True))


def _regular(size: tuple[int, ...], count: tuple[int, ...]) -> Windows:
    kernel = tuple(n // c for n, c in zip(size, count, strict=True))
    return Windows(size, kernel, kernel, (0,), (1,), False)


def adaptive_max_pool(self: Any, output_size: Any, *, rank: int) -> Any:
    """(out, positions): regular windows if the sizes divide, else each window is gathered and its first maximum taken."""
    size = self.shape[self.ndim - rank :]
    if _divides(size, output_size):
        return _max_pool(self, _regular(size, output_size))
    starts = [np.arange(c) * n // c for n, c in zip(size, output_size, strict=True)]
    ends = [-(-(np.arange(c) + 1) * n // c) for n, c in zip(size, output_size, strict=True)]
    offsets = [np.arange(max((e - s).max(initial=1), 1)) for s, e in zip(starts, ends, strict=True)]
    return _largest_in(self, [s[:, None] + o for s, o in zip(starts, offsets, strict=True)], ends)


def _largest_in(x: Any, taken: list[np.ndarray[Any, Any]], ends: list[np.ndarray[Any, Any]]) -> tuple[Any, Any]:
    """(maximum, position) per window. Per dim, `taken` has the indices [windows, longest], and `ends` the end of each window."""
    rank = len(taken)
    size = x.shape[x.ndim - rank :]
    first = x.ndim - rank
    values, position, inside = x, np.zeros((), np.int64), np.ones((), bool)
    for i, (at, end) in enumerate(zip(taken, ends, strict=True)):
        shape = [1] * (2 * rank)
        shape[2 * i : 2 * i + 2] = at.shape
        inside = inside & (at < end[:, None]).reshape(shape)
        clipped = np.minimum(at, size[i] - 1)
        position = position * size[i] + clipped.reshape(shape)
        values = jnp.take(values, clipped, axis=first + 2 * i, mode="clip")
    order = (*range(first), *(first + 2 * i for i in range(rank)), *(first + 2 * i + 1 for i in range(rank)))
    within = tuple(i - first for i in order[first:])
    values = jnp.transpose(jnp.where(inside, values, _lowest(x.dtype)), order)
    values = values.reshape(*values.shape[: first + rank], math.prod(at.shape[1] for at in taken))
    positions = np.transpose(np.broadcast_to(position, [n for at in taken for n in at.shape]), within)
    positions = jnp.asarray(positions.reshape(*positions.shape[:rank], math.prod(positions.shape[rank:])))
    best = _index_of_largest(values)
    out = jnp.take_along_axis(values, best, -1)[..., 0]
    return out, jnp.take_along_axis(jnp.broadcast_to(positions, values.shape), best, -1)[..., 0].astype(jnp.int64)


def adaptive_max_pool_backward(grad_output: Any, self: Any, indices: Any, *, rank: int) -> Any:
    size, count = self.shape[self.ndim - rank :], grad_output.shape[grad_output.ndim - rank :]
    if 0 in count:
        what = "Expected grad_output to have non-zero size for non-batch dimensions, but grad_output has sizes"
        empty = grad_output.ndim - rank + count.index(0)
        raise RuntimeError(f"adaptive_max_pool{rank}d_backward(): {what} {list(grad_output.shape)} with dimension {empty} being empty")
    if not _divides(size, count):
        return _to_plane(grad_output, indices, self.shape, rank)
    windows = _regular(size, count)
    return jax.vjp(lambda x: windows.reduce(x, _lowest(x.dtype), lax.max, x.ndim - rank), self)[1](grad_output)[0]


def fractional_max_pool(self: Any, kernel_size: Any, output_size: Any, random_samples: Any, *, rank: int) -> Any:
    """Windows at pseudo-random positions. `random_samples` has one sample per plane and dim (in 2-d, first the width).

    Samples for more images than `self` has are ignored.
    """
    size = self.shape[self.ndim - rank :]
    batched = self.ndim == rank + 2
    x = self if batched else self[None]
    order = range(rank) if rank == 3 else reversed(range(rank))
    taken: list[Any] = []
    for n, k, count, sample in zip(size, kernel_size, output_size, order, strict=True):
        start = _fractional_starts(random_samples[: x.shape[0], :, sample], n, k, count)
        taken.append(start[..., None] + jnp.arange(k, dtype=start.dtype))
    pool = jax.vmap(jax.vmap(_largest_in_plane))
    out, indices = pool(x, *taken)
    return (out, indices) if batched else (out[0], indices[0])


def _fractional_starts(sample: Any, size: int, kernel: int, count: int) -> Any:
    """[..., count] starts of the windows along one dim. The last window is at the end."""
    last = jnp.full((*sample.shape, 1), size - kernel, jnp.int32)
    if count == 1:
        return last
    alpha = jnp.asarray((size - kernel) / (count - 1), sample.dtype)
    steps = jnp.arange(count - 1, dtype=jnp.int32).astype(sample.dtype)
    start = ((steps + sample[..., None]) * alpha).astype(jnp.int32) - (sample[..., None] * alpha).astype(jnp.int32)
    return jnp.concatenate([start, last], -1)


def _largest_in_plane(plane: Any, *taken: Any) -> tuple[Any, Any]:
    """(maximum, position) of each window of one plane; `taken`: indices [windows, kernel] per dim."""
    rank = plane.ndim
    grids = [at.reshape([1] * i + [at.shape[0]] + [1] * (rank - 1) + [at.shape[1]] + [1] * (rank - 1 - i)) for i, at in enumerate(taken)]
    position: Any = 0
    for grid, n in zip(grids, plane.shape, strict=True):
        position = position * n + grid
    values = plane.reshape(-1)[position.reshape(*position.shape[:rank], -1)]
    position = position.reshape(values.shape)
    best = _index_of_largest(values)
    return jnp.take_along_axis(values, best, -1)[..., 0], jnp.take_along_axis(position, best, -1)[..., 0].astype(jnp.int64)


def fractional_max_pool_backward(grad_output: Any, self: Any, kernel_size: Any, output_size: Any, indices: Any, *, rank: int) -> Any:
    return _to_plane(grad_output, indices, self.shape, rank)


_BY_RANK = {
    "max_pool{}d_with_indices": max_pool_with_indices,
    "max_pool{}d_with_indices_backward": max_pool_with_indices_backward,
    "avg_pool{}d": avg_pool,
    "avg_pool{}d_backward": avg_pool_backward,
    "_adaptive_avg_pool{}d_backward": _adaptive_avg_pool_backward,
    "adaptive_max_pool{}d": adaptive_max_pool,
    "adaptive_max_pool{}d_backward": adaptive_max_pool_backward,
    "fractional_max_pool{}d": fractional_max_pool,
    "fractional_max_pool{}d_backward": fractional_max_pool_backward,
}
for _name, _rule in _BY_RANK.items():
    for _rank in (2, 3):
        lower(_name.format(_rank))(functools.partial(_rule, rank=_rank))

"""Strided windows on a row-major buffer, expressed as array operations.

PyTorch describes a view by (size, stride, offset) on its storage. The value of a storage is one array, the *root*, whose row-major
flattening is the storage's content. This module converts a view to reshape, slice, transpose and broadcast, which a partitioner can
handle. If no such form exists (diagonals, overlapping windows), it uses an explicit gather or scatter. It depends on shapes and
arrays only, not on tensors or storages.

    window = plan_window(root_shape=(3, 4), size=(3,), stride=(4,), offset=1)   # column 1
    column = window.read(root)                                                  # root[:, 1]
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.base._jax import is_tracing
from spmd.base._open_sizes import are_sizes_open

Shape = tuple[int, ...]


@dataclass
class _Digit:
    """One digit of the mixed-radix form of a flat position: `extent` values, `stride` elements apart.

    The window takes `size` of these values, from `start` on, `step` apart.
    """

    extent: int
    stride: int
    dim: int = -1  # the dim of the window along this digit; -1: none
    size: int = 1
    step: int = 1
    start: int = 0

    @property
    def stop(self) -> int:
        return self.start + (self.size - 1) * self.step + 1

    @property
    def end(self) -> int:
        """Stop of the slice: the end of the digit if no further element lies before it, else `stop`."""
        return self.extent if self.extent - self.stop < self.step else self.stop


@dataclass(frozen=True)
class Window:
    """A view as array operations: reshape the root to `radix`, slice, transpose, reshape to `kept`, broadcast to `size`.

    Attributes:
        root_shape: shape of the root.
        size: shape of the view.
        radix: shape of the root with its dims divided into digits.
        starts, stops, steps: the slice of each digit.
        permutation: sliced digits in the order of the view's dims.
        kept: `size` with 1 for the dims of stride 0.
    """

    root_shape: Shape
    size: Shape
    radix: Shape
    starts: Shape
    stops: Shape
    steps: Shape
    permutation: Shape
    kept: Shape

    @property
    def _is_whole(self) -> bool:
        return all(a == 0 and b == n and s == 1 for a, b, s, n in zip(self.starts, self.stops, self.steps, self.radix, strict=True))

    def read(self, root: Any) -> Any:
        """The view's value."""
        out = _reshaped(root, self.radix)
        if not self._is_whole:
            out = self._sliced(out)
        if self.permutation != tuple(range(len(self.permutation))):
            out = lax.transpose(out, self.permutation)
        out = _reshaped(out, self.kept)
        return out if self.kept == self.size else jnp.broadcast_to(out, self.size)

    def _sliced(self, root: Any) -> Any:
        if is_tracing() or any(s != 1 for s in self.steps):
            return lax.slice(root, self.starts, self.stops, self.steps)
        sizes = tuple(b - a for a, b in zip(self.starts, self.stops, strict=True))
        return lax.dynamic_slice(root, self.starts, sizes)  # eagerly one compiled slice serves every offset: 0.1 ms instead of 20 ms

    def write(self, root: Any, value: Any) -> Any:
        """The root with the view's elements replaced by `value` (of shape `size`)."""
        if self.kept != self.size:  # all broadcast copies are the same element; the first one is written
            value = value[tuple(slice(0, 1) if k != n else slice(None) for k, n in zip(self.kept, self.size, strict=True))]
        sliced = tuple(-(-(b - a) // s) for a, b, s in zip(self.starts, self.stops, self.steps, strict=True))
        value = _reshaped(value, tuple(sliced[p] for p in self.permutation))
        inverse = tuple(self.permutation.index(i) for i in range(len(self.permutation)))
        if inverse != tuple(range(len(inverse))):
            value = lax.transpose(value, inverse)
        if self._is_whole:
            return _reshaped(value, self.root_shape)
        fine = _reshaped(root, self.radix)
        if any(s != 1 for s in self.steps):
            fine = self._spread(fine, value)
        elif is_tracing():  # See Note [Shifted writes]
            fine = lax.platform_dependent(fine, value, cpu=self._spread, default=self._updated)
        else:
            fine = self._updated(fine, value)
        return _reshaped(fine, self.root_shape)

    # Note [Shifted writes]: XLA:CPU may compile `x[1:] = x[:-1].clone()` to one loop that writes in place and reads elements that
    # it has already written (openxla/xla#49176, silently wrong; decoder inputs of mBART). A select is never done in place. Other
    # platforms are correct.
    def _updated(self, fine: Any, value: Any) -> Any:
        return lax.dynamic_update_slice(fine, value, self.starts)

    def _spread(self, fine: Any, value: Any) -> Any:
        """`fine` with `value` at every step-th position, by a pad and a select. The partitioner splits these, but gathers for a scatter."""
        sides = zip(self.starts, self.steps, self.radix, strict=True)
        ends = [(start, n - (start + (count - 1) * step + 1), step - 1) for (start, step, n), count in zip(sides, value.shape, strict=True)]
        spread = lax.pad(value, jnp.zeros((), value.dtype), ends)
        is_written = jnp.ones((), bool)
        for dim, (start, stop, step, n) in enumerate(zip(self.starts, self.stops, self.steps, self.radix, strict=True)):
            if (start, stop, step) != (0, n, 1):
                place = lax.broadcasted_iota(jnp.int32, self.radix, dim)
                is_written = is_written & (place >= start) & ((place - start) % step == 0)
                is_written = is_written if stop == n else is_written & (place < stop)
        return jnp.where(is_written, spread, fine)


@dataclass(frozen=True)
class GatherWindow:
    """A view that is read by a gather from, and written by a scatter to, the flattened root."""

    root_shape: Shape
    size: Shape
    stride: Shape
    offset: int

    def _positions(self) -> Any:
        positions = jnp.full(self.size, self.offset, jnp.int64)
        for dim, step in enumerate(self.stride):
            positions = positions + lax.broadcasted_iota(jnp.int64, self.size, dim) * step
        return positions

    def read(self, root: Any) -> Any:
        """The view's value."""
        if 0 in self.size:
            return jnp.zeros(self.size, root.dtype)
        return root.reshape(-1).at[self._positions()].get(mode="promise_in_bounds")

    def write(self, root: Any, value: Any) -> Any:
        """The root with the view's elements replaced; for overlapping elements the last write remains, as in torch."""
        if 0 in self.size:
            return root
        return root.reshape(-1).at[self._positions().reshape(-1)].set(value.reshape(-1)).reshape(self.root_shape)


def plan_window(root_shape: Shape, size: Shape, stride: Shape, offset: Any) -> Window | GatherWindow:
    """The operations that read and write the view (size, stride, offset) of a root of `root_shape`; stride and offset in elements.

    Raises:
        RuntimeError: the view extends beyond the end of the root.
    """
    return _planned(root_shape, size, stride, offset, are_sizes_open())


@functools.lru_cache(maxsize=65536)
def _planned(root_shape: Shape, size: Shape, stride: Shape, offset: int, has_open_sizes: bool) -> Window | GatherWindow:
    if math.prod(size) == 0:
        return GatherWindow(root_shape, size, stride, offset)
    needed, held = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1, math.prod(root_shape)
    if needed > held:
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset} requiring a storage of {needed} elements "
            f"are out of bounds for storage of {held} elements"
        )
    digits = _digits(root_shape, size, stride, offset, has_open_sizes)
    if digits is None:
        return GatherWindow(root_shape, size, stride, offset)
    used = sorted((d for d in digits if d.dim >= 0), key=lambda d: d.dim)
    order = [digits.index(d) for d in used] + [i for i, d in enumerate(digits) if d.dim < 0]
    return Window(
        root_shape=root_shape,
        size=size,
        radix=tuple(d.extent for d in digits),
        starts=tuple(d.start for d in digits),
        stops=tuple(d.end for d in digits),
        steps=tuple(d.step for d in digits),
        permutation=tuple(order),
        kept=tuple(1 if s == 0 else n for n, s in zip(size, stride, strict=True)),
    )


def _digits(root_shape: Shape, size: Shape, stride: Shape, offset: int, has_open_sizes: bool) -> list[_Digit] | None:
    """The root's digits, most significant first, with the window's dims assigned to them; None if that is not possible."""
    digits: list[_Digit] = []
    below = 1
    for extent in reversed(root_shape):
        if extent > 1:
            digits.insert(0, _Digit(extent, below))
            below *= extent
    live = sorted(((s, n, dim) for dim, (n, s) in enumerate(zip(size, stride, strict=True)) if n > 1 and s > 0), reverse=True)
    for number, (step, count, dim) in enumerate(live):
        below = [other for other, *_ in live[number + 1 :]]
        if not _place(digits, step, count, dim, below if has_open_sizes else None):
            return None
    position = 0
    while position < len(digits):
        digit = digits[position]
        digit.start = offset // digit.stride % digit.extent
        if digit.stop <= digit.extent:
            position += 1
            continue
        above = digits[position - 1] if position else None  # the slice extends into the next digit: merge the two
        if above is None or above.dim >= 0:
            return None
        digits[position - 1 : position + 1] = [_Digit(above.extent * digit.extent, digit.stride, digit.dim, digit.size, digit.step)]
        position -= 1
    if sum(d.start * d.stride for d in digits) != offset:
        return None
    return [part for digit in digits for part in _selected(digit, root_shape)]


# Note [Selected parts]: if one dim contains the q, k and v of each head next to each other ([T, H * 3 * K]), the k of a head is the
# slice K:2K of 3K. Written as `[T, H, 3, K][:, :, 1]`, as models do, it needs no slice of the last dim. TPUs keep 128 neighbours of
# the last dim in a row of a register and must shift to cut it at 64; they kept q, k and v in float32 for this, 15 MiB per layer of
# GPT-2 instead of 6. A slice of a dim of the root, or of its leading part, stays a slice: that dim may be sharded, and a reshape
# would move it between devices.
def _selected(digit: _Digit, root_shape: Shape) -> list[_Digit]:
    """The digit divided into (part, position in the part) if it selects one of several equal parts. See Note [Selected parts]."""
    ends, below = set[int](), 1
    for extent in reversed(root_shape):
        below *= extent
        ends.add(below)
    is_part = digit.step == 1 < digit.size < digit.extent and digit.extent % digit.size == 0 and digit.start % digit.size == 0
    if not is_part or digit.stride * digit.extent in ends:
        return [digit]
    which = _Digit(digit.extent // digit.size, digit.stride * digit.size, start=digit.start // digit.size)
    return [which, _Digit(digit.size, digit.stride, digit.dim, digit.size)]


def _place(digits: list[_Digit], step: int, count: int, dim: int, below: list[int] | None) -> bool:
    """Assign a window dim (`count` elements, `step` apart) to its digit, and split the digit if necessary.

    Args:
        below: the steps of the dims that follow, if sizes are open; a digit is then split only for one of these, even if `step` divides
            its extent. None if sizes are not open.

    Returns:
        Whether the dim could be assigned.
    """
    for position, digit in enumerate(digits):
        if not digit.stride <= step < digit.stride * digit.extent:
            continue
        ratio, rest = divmod(step, digit.stride)
        if rest or digit.dim >= 0:
            return False
        is_split = below is None or any(digit.stride <= other < step for other in below)
        if ratio > 1 and digit.extent % ratio == 0 and is_split:
            digits[position : position + 1] = [_Digit(digit.extent // ratio, step, dim, count), _Digit(ratio, digit.stride)]
        else:
            digit.dim, digit.size, digit.step = dim, count, ratio
        return True
    return False


def contiguous_stride(size: Shape) -> Shape:
    """Row-major strides in elements, as torch computes them (with 1 for a size of 0)."""
    strides: list[int] = []
    below = 1
    for extent in reversed(size):
        strides.insert(0, below)
        below *= max(extent, 1)
    return tuple(strides)


def _reshaped(array: Any, shape: Shape) -> Any:
    return array if array.shape == shape else lax.reshape(array, shape)


_PARTS = {np.dtype(np.complex64): np.dtype(np.float32), np.dtype(np.complex128): np.dtype(np.float64)}


def reinterpreted(root: Any, dtype: np.dtype[Any]) -> Any:
    """The root reinterpreted as another dtype; its last dim grows or shrinks by the ratio of the element sizes."""
    if root.dtype == dtype:
        return root
    if root.ndim == 0:
        root = root.reshape(1)
    *outer, last = root.shape
    if root.dtype in _PARTS:  # jax bit-casts neither complex numbers nor bools
        parts = lax.concatenate([lax.real(root)[..., None], lax.imag(root)[..., None]], root.ndim)
        return reinterpreted(parts.reshape(*outer, 2 * last), dtype)
    if dtype in _PARTS:
        parts = reinterpreted(root, _PARTS[dtype])
        pairs = parts.reshape(*outer, parts.shape[-1] // 2, 2)
        return lax.complex(pairs[..., 0], pairs[..., 1])
    if root.dtype == np.bool_:
        return reinterpreted(root.astype(np.uint8), dtype)
    if dtype == np.bool_:
        return reinterpreted(root, np.dtype(np.uint8)) != 0
    narrow, wide = sorted((root.dtype.itemsize, dtype.itemsize))
    ratio = wide // narrow
    if root.dtype.itemsize < dtype.itemsize:
        root = root.reshape(*outer, last // ratio, ratio)
    out = lax.bitcast_convert_type(root, dtype)
    return out.reshape(*outer, last * ratio) if dtype.itemsize < root.dtype.itemsize else out

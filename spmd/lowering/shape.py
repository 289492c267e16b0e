"""Ops that rearrange elements into new tensors. Views have no lowering: they are strides."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.lowering._padded_windows import apart
from spmd.lowering._registry import lower


@lower("cat")
def cat(tensors: Any, dim: int = 0) -> Any:
    kept = [t for t in tensors if t.shape != (0,)]
    return jnp.concatenate(kept or tensors, axis=dim if kept else 0)


@lower("stack")
def stack(tensors: Any, dim: int = 0) -> Any:
    return jnp.stack(tensors, axis=dim)


@lower("repeat")
def repeat(self: Any, repeats: Any) -> Any:
    return jnp.tile(self, repeats)


@lower("flip")
def flip(self: Any, dims: Any) -> Any:
    return jnp.flip(self, dims) if self.ndim else self


@lower("roll")
def roll(self: Any, shifts: Any, dims: Any = ()) -> Any:
    return jnp.roll(self, shifts, dims or None) if dims else jnp.roll(self.reshape(-1), shifts[0]).reshape(self.shape)


@lower("tril")
def tril(self: Any, diagonal: int = 0) -> Any:
    return jnp.tril(self, diagonal)


@lower("triu")
def triu(self: Any, diagonal: int = 0) -> Any:
    return jnp.triu(self, diagonal)


@lower("slice_backward")
def slice_backward(grad_output: Any, input_sizes: Any, dim: int, start: int, end: int, step: int) -> Any:
    """Zeros of `input_sizes` with the gradient in the slice, as a single pad."""
    size = input_sizes[dim]
    start = min(max(start + size if start < 0 else start, 0), size)
    count = grad_output.shape[dim]
    spread = (count - 1) * step + 1 if count else 0
    padding = [(0, 0, 0)] * len(input_sizes)
    padding[dim] = (start, size - start - spread, step - 1)
    return lax.pad(grad_output, jnp.zeros((), grad_output.dtype), padding)


def _require_position(sizes: Any, dim: int, index: int) -> None:
    size = sizes[dim]
    if not -size <= index < size:
        raise IndexError(f"select(): index {index} out of range for tensor of size {list(sizes)} at dimension {dim % len(sizes)}")


@lower("select_backward", check=lambda grad_output, input_sizes, dim, index: _require_position(input_sizes, dim, index))
def select_backward(grad_output: Any, input_sizes: Any, dim: int, index: int) -> Any:
    dim, index = dim % len(input_sizes), index % input_sizes[dim]
    padding = [(0, 0, 0)] * len(input_sizes)
    padding[dim] = (index, input_sizes[dim] - index - 1, 0)
    return lax.pad(jnp.expand_dims(grad_output, dim), jnp.zeros((), grad_output.dtype), padding)


@lower("constant_pad_nd")
def constant_pad_nd(self: Any, pad: Any, value: Any = 0) -> Any:
    padding = [(0, 0, 0)] * self.ndim
    for i in range(len(pad) // 2):
        padding[self.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    filling = jnp.asarray(value, self.dtype)
    return lax.pad(self if isinstance(value, int | float) and value == 0 else apart(self, filling), filling, padding)


@lower("slice_scatter")
def slice_scatter(self: Any, src: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    return self.at[(slice(None),) * (dim % self.ndim) + (slice(start, end, step),)].set(src)


@lower("select_scatter", check=lambda self, src, dim, index: _require_position(self.shape, dim, index))
def select_scatter(self: Any, src: Any, dim: int, index: int) -> Any:
    dim = dim % self.ndim
    return lax.dynamic_update_index_in_dim(self, jnp.expand_dims(src, dim), index % self.shape[dim], dim)


@lower("diagonal_scatter")
def diagonal_scatter(self: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """The last dim of `src` is the diagonal. Computed as a `where` over a mask of the two dims."""
    dim1, dim2 = dim1 % self.ndim, dim2 % self.ndim
    rows, columns = (lax.broadcasted_iota(jnp.int32, self.shape, d) for d in (dim1, dim2))
    along = jnp.expand_dims(src, (0,)) if src.ndim == 1 else jnp.expand_dims(jnp.moveaxis(src, -1, 0), 1)
    spread = jnp.swapaxes(along, 0, 1) if src.ndim == 1 else along  # [diagonal, 1, the other dims in order]
    size = self.shape[dim1]
    before = max(-offset, 0)
    padded = lax.pad(spread, jnp.zeros((), src.dtype), [(before, size - before - spread.shape[0], 0)] + [(0, 0, 0)] * (spread.ndim - 1))
    return jnp.where(columns - rows == offset, jnp.moveaxis(padded, (0, 1), (dim1, dim2)), self)


def padded(self: Any, padding: Any, mode: str) -> Any:
    """Pad the last dims by (before, after) pairs, the last dim first. A negative count crops."""
    pairs = [(0, 0)] * (self.ndim - len(padding) // 2) + [(padding[i], padding[i + 1]) for i in range(len(padding) - 2, -1, -2)]
    out = jnp.pad(self, [(max(before, 0), max(after, 0)) for before, after in pairs], mode=mode)
    return out[tuple(slice(max(-before, 0), n - max(-after, 0)) for (before, after), n in zip(pairs, out.shape, strict=True))]


def _lower_pad(name: str, mode: str) -> None:
    def pad(self: Any, padding: Any) -> Any:
        return padded(self, padding, mode)

    def pad_backward(grad_output: Any, self: Any, padding: Any) -> Any:
        return jax.vjp(lambda x: padded(x, padding, mode), self)[1](grad_output)[0]

    for rank in ("1d", "2d", "3d"):
        lower(f"{name}_pad{rank}")(pad)
        lower(f"{name}_pad{rank}_backward")(pad_backward)


_lower_pad("reflection", "reflect")
_lower_pad("replication", "edge")

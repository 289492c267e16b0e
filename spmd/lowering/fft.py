"""Fourier transforms: the three ATen primitives on which `torch.fft`, `stft` and `istft` are built."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from spmd.lowering._registry import lower

_NONE, _BY_ROOT, _BY_COUNT = 0, 1, 2
_MAX_DIMS = 3  # that one XLA transform supports


def _normalised(out: Any, count: int, normalization: int) -> Any:
    if normalization == _NONE:
        return out
    return out * (1.0 / count if normalization == _BY_COUNT else 1.0 / math.sqrt(count))


def _transformed(x: Any, dim: Any, forward: bool) -> Any:
    """The unnormalised complex transform over `dim`."""
    for first in range(0, len(dim), _MAX_DIMS):
        group = tuple(dim[first : first + _MAX_DIMS])
        x = jnp.fft.fftn(x, axes=group, norm="backward") if forward else jnp.fft.ifftn(x, axes=group, norm="forward")
    return x


def _count(shape: tuple[int, ...], dim: Any) -> int:
    return math.prod(shape[d] for d in dim)


@lower("_fft_c2c")
def _fft_c2c(self: Any, dim: Any, normalization: int, forward: bool) -> Any:
    return _normalised(_transformed(self, dim, forward), _count(self.shape, dim), normalization)


@lower("_fft_r2c")
def _fft_r2c(self: Any, dim: Any, normalization: int, onesided: bool) -> Any:
    count = _count(self.shape, dim)
    if not onesided:
        return _normalised(_transformed(self.astype(jnp.promote_types(self.dtype, jnp.complex64)), dim, True), count, normalization)
    half = jnp.fft.rfft(self, axis=dim[-1], norm="backward")
    return _normalised(_transformed(half, dim[:-1], True), count, normalization)


@lower("_fft_c2r")
def _fft_c2r(self: Any, dim: Any, normalization: int, last_dim_size: int) -> Any:
    count = _count(self.shape, dim[:-1]) * last_dim_size
    half = _transformed(self, dim[:-1], False)
    return _normalised(jnp.fft.irfft(half, last_dim_size, axis=dim[-1], norm="forward"), count, normalization)

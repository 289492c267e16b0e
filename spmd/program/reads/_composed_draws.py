"""Dropout and random numbers as compositions that take program numbers. See `_number_arguments`.

They draw what the operators of the device draw (`lowering/random`). The formulas are those of torch, in `aten/src/ATen/native/`
Dropout.cpp and Distributions.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F

from spmd.base._convert import exact_dtypes
from spmd.device._generator import next_key
from spmd.device._numbers import carried
from spmd.device._random_stream import typed_key
from spmd.device._storage import wrap
from spmd.program.reads._number_arguments import composes, is_int, require, require_floats, require_number

_INT32 = torch.iinfo(torch.int32)
_ALPHA = 1.7580993408473766  # of alpha dropout: SELU's lambda * alpha


def _drawn_dtype(like: torch.Tensor) -> torch.dtype:
    """The dtype in which the device draws the elements of a tensor like `like`."""
    return like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32


def _random(shape: Any, like: torch.Tensor, draw: Callable[..., torch.Tensor], generator: Any) -> torch.Tensor:
    return draw(shape, dtype=_drawn_dtype(like), device=like.device, generator=generator)


def _of_elements(input: torch.Tensor) -> Sequence[int]:
    return input.shape


def _of_channels(input: torch.Tensor) -> Sequence[int]:
    return (*input.shape[:2], *(1 for _ in input.shape[2:]))


def _dropped(
    input: torch.Tensor,
    p: Any,
    train: bool,
    *,
    in_place: bool = False,
    drawn: Callable[[torch.Tensor], Sequence[int]] = _of_elements,
    is_alpha: bool = False,
) -> torch.Tensor:
    """Dropout with probability `p`; `drawn`: the shape of the draws, which broadcasts to that of the input."""
    require_number(p)
    require_floats(input)
    require(p >= 0, p <= 1)
    if not train or not input.numel():
        return input
    require(p != 0, p != 1, drawn is not _of_channels or input.dim() > 1)
    keep = torch.rand(drawn(input), dtype=torch.float32, device=input.device) < 1 - p
    found = _alpha_dropped(input, p, keep) if is_alpha else torch.where(keep, input * _constant(1 / (1 - p), input), _constant(0, input))
    return input.copy_(found) if in_place else found


def _alpha_dropped(input: torch.Tensor, p: Any, keep: torch.Tensor) -> torch.Tensor:
    scale = 1 / ((_ALPHA * _ALPHA * p + 1) * (1 - p)) ** 0.5
    return torch.where(keep, input * scale + _ALPHA * scale * p, _constant(-_ALPHA * scale * (1 - p), input))


def _constant(number: Any, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), number, dtype=like.dtype, device=like.device)


def _dropout(name: str, training_by_default: bool | None = None, **options: Any) -> None:
    """Register the dropouts of a name: torch's, and that of `F` if its `training` has a default."""

    @composes(getattr(torch, name))
    def of_torch(input: torch.Tensor, p: Any, train: bool) -> torch.Tensor:
        return _dropped(input, p, train, **options)

    @composes(getattr(torch, f"{name}_"))
    def of_torch_in_place(input: torch.Tensor, p: Any, train: bool) -> torch.Tensor:
        return _dropped(input, p, train, in_place=True, **options)

    if training_by_default is None:
        return

    @composes(getattr(F, name))
    def of_functional(input: torch.Tensor, p: Any = 0.5, training: bool = training_by_default, inplace: bool = False) -> torch.Tensor:
        return _dropped(input, p, training, in_place=inplace, **options)


_dropout("dropout", training_by_default=True)
_dropout("feature_dropout", drawn=_of_channels)
_dropout("alpha_dropout", training_by_default=False, is_alpha=True)
_dropout("feature_alpha_dropout", training_by_default=False, drawn=_of_channels, is_alpha=True)


def _dropout_of_channels(fn: Any, num_dims: int) -> None:
    @composes(fn)
    def of_channels(input: torch.Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        require(input.dim() == num_dims)  # other inputs have no batch dim, or are warned of
        return _dropped(input, p, training, in_place=inplace, drawn=_of_channels)


for _fn, _num_dims in ((F.dropout1d, 3), (F.dropout2d, 4), (F.dropout3d, 5)):
    _dropout_of_channels(_fn, _num_dims)


@composes(method="normal_")
def normal_(self: torch.Tensor, mean: Any = 0, std: Any = 1, *, generator: Any = None) -> torch.Tensor:
    """`Tensor.normal_`."""
    require_number(mean, std)
    require_floats(self)
    require(std >= 0)
    return self.copy_(_random(self.shape, self, torch.randn, generator) * std + mean)


@composes(torch.normal)
def normal(mean: Any, std: Any = 1, size: Any = None, *, generator: Any = None, dtype: Any = None, device: Any = None) -> torch.Tensor:
    """`torch.normal`, where the mean or the deviation is a number."""
    require_number(mean, std)
    require(isinstance(std, torch.Tensor) or std >= 0)
    given = next((value for value in (mean, std) if isinstance(value, torch.Tensor)), None)
    if given is not None:
        require(size is None, not isinstance(std, torch.Tensor))  # torch checks the deviations in a tensor
        require_floats(given)
        return (_random(given.shape, given, torch.randn, generator) * std + mean).to(given.dtype)
    require(size is not None)
    like = torch.empty(0, dtype=dtype, device=device)
    require_floats(like)
    return (_random(tuple(size), like, torch.randn, generator) * std + mean).to(like.dtype)


@composes(method="uniform_")
def uniform_(self: torch.Tensor, start: Any = 0, to: Any = 1, *, generator: Any = None) -> torch.Tensor:
    """`Tensor.uniform_`."""
    require_number(start, to)
    require_floats(self)
    limit = torch.finfo(self.dtype).max
    require(start <= to, start >= -limit, to <= limit, to - start <= limit)
    return self.copy_(_random(self.shape, self, torch.rand, generator) * (to - start) + start)


@composes(method="exponential_")
def exponential_(self: torch.Tensor, lambd: Any = 1, *, generator: Any = None) -> torch.Tensor:
    """`Tensor.exponential_`."""
    require_number(lambd)
    require_floats(self)
    require(lambd > 0)
    return self.copy_(torch.empty_like(self, dtype=_drawn_dtype(self)).exponential_(generator=generator) / lambd)


@composes(method="log_normal_")
def log_normal_(self: torch.Tensor, mean: Any = 1, std: Any = 2, *, generator: Any = None) -> torch.Tensor:
    """`Tensor.log_normal_`."""
    require_number(mean, std)
    require_floats(self)
    require(std > 0)
    return self.copy_((_random(self.shape, self, torch.randn, generator) * std + mean).exp())


@composes(method="bernoulli_")
def bernoulli_(self: torch.Tensor, p: Any = 0.5, *, generator: Any = None) -> torch.Tensor:
    """`Tensor.bernoulli_` of a number."""
    require_number(p)
    require_floats(self)
    require(p >= 0, p <= 1)
    return self.copy_(_random(self.shape, self, torch.rand, generator) < p)


@composes(torch.randint)
def randint(low: Any, high: Any = None, size: Any = None, *, generator: Any = None, dtype: Any = None, device: Any = None) -> torch.Tensor:
    """`torch.randint`, also in its form without `low`."""
    if size is None and high is not None and not is_int(high):
        low, high, size = 0, low, high
    elif high is None:
        low, high = 0, low
    require_number(low, high)
    if size is None:
        raise NotImplementedError  # torch's own error
    device = torch.get_default_device() if device is None else torch.device(device)
    require(is_int(low), is_int(high), device.type == "jax")
    require(dtype in (None, torch.int64, torch.int32), low < high)
    require(low >= _INT32.min, high <= _INT32.max)  # the device draws others from 64 bits
    with exact_dtypes():
        key = typed_key(next_key(generator))
        drawn = jax.random.randint(key, tuple(size), _bound(low), _bound(high), jnp.int32)
        return wrap(drawn.astype(jnp.int64)).to(torch.int64 if dtype is None else dtype)


def _bound(number: Any) -> jax.Array:
    return jnp.asarray(carried(number) if type(number) is torch.SymFloat else number).astype(jnp.int64)

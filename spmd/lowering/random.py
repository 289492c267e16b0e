"""Ops that draw from the device's random stream.

The adapter passes each call its own key, derived only from the seed and a counter, and threefry computes every element from its
position. Results therefore depend neither on the mesh nor on the sharding of the array. In-place forms with a functional twin
(`uniform_` of `uniform`) are derived; `normal_` has none, so it has its own lowering.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from spmd.base._convert import cast, to_torch_dtype
from spmd.lowering._registry import is_static, lower
from spmd.lowering.norm import wide


def _float_of(dtype: Any) -> Any:
    """The dtype to draw in: float32 for 16-bit floats (and integers), else the dtype itself."""
    return dtype if dtype in (jnp.float32, jnp.float64) else jnp.dtype(jnp.float32)


def _uniform_of(key: Any, like: Any) -> Any:
    """Uniform numbers in [0, 1) with the shape of `like`, in the dtype to draw in."""
    return jax.random.uniform(key, like.shape, _float_of(like.dtype))


def _open_uniform_of(key: Any, like: Any) -> Any:
    """Uniform numbers in (0, 1], which have a finite logarithm."""
    return 1 - _uniform_of(key, like)


def _parameter_check(name: str) -> Callable[..., None]:
    """A check of a distribution's parameters. It calls torch's in-place CPU op `name` on an empty tensor, which raises torch's errors."""

    def check(self: Any, *numbers: Any, **named: Any) -> None:
        if all(number is None or is_static(number) for number in (*numbers, *named.values())):
            nothing = torch.empty(0, dtype=to_torch_dtype(self.dtype), device="cpu")
            getattr(nothing, name)(*numbers, **named, generator=torch.Generator())

    return check


@lower("normal_", "normal_functional", random=True)
def normal_(key: Any, self: Any, mean: float = 0.0, std: float = 1.0) -> Any:
    if jnp.issubdtype(self.dtype, jnp.complexfloating):
        return jax.random.normal(key, self.shape, self.dtype) * std + mean
    return jax.random.normal(key, self.shape, _float_of(self.dtype)) * std + mean


@lower("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor", random=True)
def normal_tensors(key: Any, mean: Any, std: Any = 1.0) -> Any:
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    dtype = _float_of(mean.dtype if isinstance(mean, jax.Array) else std.dtype)
    return jax.random.normal(key, shape, dtype) * std + mean


@lower("uniform", random=True, check=_parameter_check("uniform_"))
def uniform(key: Any, self: Any, start: float = 0.0, to: float = 1.0) -> Any:
    """Uniform in [from, to). `from` is a keyword of Python, so it is always passed by position."""
    drawn = _uniform_of(key, self)
    return (drawn * (to - start) + start).astype(self.dtype)


@lower("random", random=True)
def random_(key: Any, self: Any) -> Any:
    """Uniform over the integers from 0 up to the largest that the dtype represents exactly."""
    return _integers(key, self, 0, _end_of(self.dtype))


@lower("random.to", random=True, check=_parameter_check("random_"))
def random_to(key: Any, self: Any, to: int) -> Any:
    return _integers(key, self, 0, to)


@lower("random.from", random=True, check=_parameter_check("random_"))
def random_from(key: Any, self: Any, start: int, to: int | None) -> Any:
    """Uniform over [from, to), or up to and including the dtype's largest integer if `to` is None."""
    return _integers(key, self, start, _end_of(self.dtype) if to is None else to)


def _end_of(dtype: Any) -> int:
    """One past the largest integer up to which the dtype represents every integer."""
    if jnp.issubdtype(dtype, jnp.floating):
        return 2 ** (int(jnp.finfo(dtype).nmant) + 1) + 1
    return 2 if dtype == jnp.bool_ else int(jnp.iinfo(dtype).max) + 1


def _integers(key: Any, like: Any, start: int, stop: int) -> Any:
    """Uniform integers in [start, stop) as the array's dtype."""
    if stop - start >= 2**63:  # more than randint's range: 64 random bits, modulo the width
        bits = jax.random.bits(key, like.shape, jnp.uint64)
        width = stop - start
        drawn = bits if width >= 2**64 else bits % jnp.uint64(width)
        return (lax.bitcast_convert_type(drawn, jnp.int64) + start).astype(like.dtype)
    dtype = jnp.int32 if start >= -(2**31) and stop <= 2**31 - 1 else jnp.int64
    if stop == 2**63:  # randint's bound must fit in int64
        return (jax.random.randint(key, like.shape, start, stop - 1, jnp.int64)).astype(like.dtype)
    return jax.random.randint(key, like.shape, start, stop, dtype).astype(like.dtype)


@lower("bernoulli", random=True)
def bernoulli(key: Any, self: Any) -> Any:
    """1 with the probabilities in `self`, else 0."""
    return bernoulli_p(key, self, self)


@lower("bernoulli.Tensor", "bernoulli.p", random=True, check=_parameter_check("bernoulli_"))
def bernoulli_p(key: Any, self: Any, p: Any = 0.5) -> Any:
    """1 with probability `p`, else 0, in the shape and dtype of `self`."""
    return (_uniform_of(key, self) < p).astype(self.dtype)


@lower("exponential", random=True, check=_parameter_check("exponential_"))
def exponential(key: Any, self: Any, lambd: float = 1.0) -> Any:
    return -jnp.log(_open_uniform_of(key, self)) / lambd


@lower("cauchy", random=True, check=_parameter_check("cauchy_"))
def cauchy(key: Any, self: Any, median: float = 0.0, sigma: float = 1.0) -> Any:
    return median + sigma * jax.random.cauchy(key, self.shape, _float_of(self.dtype))


@lower("geometric", random=True, check=_parameter_check("geometric_"))
def geometric(key: Any, self: Any, p: float) -> Any:
    """Number of trials up to and including the first success: 1, 2, ..."""
    trials = jnp.ceil(jnp.log(_open_uniform_of(key, self)) / jnp.log1p(jnp.asarray(-p, _float_of(self.dtype))))
    return jnp.maximum(trials, 1).astype(self.dtype)


@lower("log_normal", random=True, check=_parameter_check("log_normal_"))
def log_normal(key: Any, self: Any, mean: float = 1.0, std: float = 2.0) -> Any:
    return jnp.exp(jax.random.normal(key, self.shape, _float_of(self.dtype)) * std + mean)


@lower("poisson", random=True)
def poisson(key: Any, self: Any, generator: Any = None) -> Any:
    return jax.random.poisson(key, wide(self), self.shape, jnp.int32).astype(self.dtype)


@lower("binomial", random=True)
def binomial(key: Any, count: Any, prob: Any, generator: Any = None) -> Any:
    return jax.random.binomial(key, wide(count), wide(prob), count.shape, _float_of(count.dtype)).astype(count.dtype)


@lower("_standard_gamma", random=True)
def _standard_gamma(key: Any, self: Any, generator: Any = None) -> Any:
    return jax.random.gamma(key, wide(self), self.shape, _float_of(self.dtype)).astype(self.dtype)


@lower("_standard_gamma_grad")
def _standard_gamma_grad(self: Any, output: Any) -> Any:
    gradient: Any = lax.random_gamma_grad  # its type stub requires a dtype, which the function does not accept
    return gradient(wide(self), wide(output))


@lower("_sample_dirichlet", random=True)
def _sample_dirichlet(key: Any, self: Any, generator: Any = None) -> Any:
    return jax.random.dirichlet(key, wide(self), self.shape[:-1], _float_of(self.dtype)).astype(self.dtype)


@lower("randperm", "randperm.generator", random=True)
def randperm(key: Any, n: int, *, dtype: Any = None) -> Any:
    return jax.random.permutation(key, jnp.arange(n, dtype=jnp.int32)).astype(dtype or jnp.int64)


def _require_drawable(self: Any, num_samples: int, replacement: bool = False) -> None:
    if not jnp.issubdtype(self.dtype, jnp.floating):
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {self.dtype}")
    if num_samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not replacement and num_samples > self.shape[-1]:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    if self.shape[-1] > 2**24:
        raise RuntimeError("number of categories cannot exceed 2^24")


@lower("multinomial", random=True, check=_require_drawable)
def multinomial(key: Any, self: Any, num_samples: int, replacement: bool = False) -> Any:
    """Indices drawn with the weights in the last dim, by the largest of log weight plus Gumbel noise.

    With replacement, each draw has its own noise. Without, the draws are the `num_samples` largest for one noise.
    """
    weights = wide(self)
    logits = jnp.log(weights)
    if replacement:
        return jax.random.categorical(key, logits[..., None, :], axis=-1, shape=(*self.shape[:-1], num_samples)).astype(jnp.int64)
    noisy = logits + jax.random.gumbel(key, logits.shape, logits.dtype)
    return lax.top_k(noisy, num_samples)[1].astype(jnp.int64)


@lower("dropout", whole=True, random=True)
def dropout(key: Any, input: Any, p: float, train: bool) -> Any:
    return input if not train or p == 0.0 else with_dropout(key, input, p, input.shape)


def with_dropout(key: Any, input: Any, p: float, drawn: tuple[int, ...]) -> Any:
    """Dropout: each element is zero with probability `p`, else scaled by 1 / (1 - p).

    Args:
        drawn: shape of the draws, which broadcasts to that of the input.
    """
    if p == 1.0:
        return input * jnp.zeros((), input.dtype)  # like torch, NaN for infinite elements
    keep = jax.random.bernoulli(key, jnp.float32(1.0 - p), drawn)
    return jnp.where(keep, input * (1.0 / (1.0 - p)), jnp.zeros((), input.dtype))


@lower("native_dropout", random=True)
def native_dropout(key: Any, input: Any, p: float, train: bool | None) -> Any:
    if train is False or p == 0.0:
        return input, jnp.ones(input.shape, bool)
    keep = jax.random.bernoulli(key, jnp.float32(1.0 - p), input.shape)
    return jnp.where(keep, input * (1.0 / (1.0 - p)) if p < 1.0 else input, jnp.zeros((), input.dtype)), keep


@lower("native_dropout_backward")
def native_dropout_backward(grad_output: Any, mask: Any, scale: float) -> Any:
    return grad_output * cast(mask, grad_output.dtype) * scale


@lower("feature_dropout", whole=True, random=True)
def feature_dropout(key: Any, input: Any, p: float, train: bool) -> Any:
    """Dropout of whole channels: one draw per element of [N, C]."""
    if not train or p == 0.0 or input.size == 0:
        return input
    return with_dropout(key, input, p, input.shape[:2] + (1,) * (input.ndim - 2))


@lower("alpha_dropout", whole=True, random=True)
def alpha_dropout(key: Any, input: Any, p: float, train: bool) -> Any:
    return _alpha_dropout(key, input, p, train, input.shape)


@lower("feature_alpha_dropout", whole=True, random=True)
def feature_alpha_dropout(key: Any, input: Any, p: float, train: bool) -> Any:
    return _alpha_dropout(key, input, p, train, input.shape[:2] + (1,) * (input.ndim - 2))


_ALPHA = 1.7580993408473766  # SELU's lambda * alpha; its negative side saturates at -lambda * alpha


def _alpha_dropout(key: Any, input: Any, p: float, train: bool, drawn: tuple[int, ...]) -> Any:
    """Set dropped elements to SELU's saturation value, then scale and shift the result back to mean 0 and variance 1."""
    if not train or p == 0.0 or input.size == 0:
        return input
    if p == 1.0:
        return jnp.zeros_like(input)
    keep = jax.random.bernoulli(key, jnp.float32(1.0 - p), drawn)
    scale = 1.0 / ((_ALPHA * _ALPHA * p + 1) * (1 - p)) ** 0.5
    dropped = jnp.asarray(-_ALPHA * scale * (1 - p), input.dtype)
    return jnp.where(keep, input * scale + _ALPHA * scale * p, dropped)


@lower("rrelu_with_noise", random=True, updates=("noise",))
def rrelu_with_noise(
    key: Any, self: Any, noise: Any, lower: Any = 0.125, upper: Any = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    """(out, new noise). Negative elements are multiplied by slopes from [lower, upper), which `noise` keeps for the backward."""
    x = wide(self)
    lower, upper = (jnp.asarray(bound, x.dtype) for bound in (lower, upper))
    if not training:
        return jnp.where(x >= 0, x, x * ((lower + upper) / 2)), None
    drawn = _uniform_of(key, self) * (upper - lower) + lower
    slope = jnp.where(x <= 0, drawn, jnp.ones((), drawn.dtype))
    return x * slope, slope


@lower("rrelu_with_noise_functional", random=True)
def rrelu_with_noise_functional(
    key: Any, self: Any, noise: Any, lower: Any = 0.125, upper: Any = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    out, slope = rrelu_with_noise(key, self, noise, lower, upper, training)
    return out, noise if slope is None else slope


@lower("rrelu_with_noise_backward")
def rrelu_with_noise_backward(grad_output: Any, self: Any, noise: Any, lower: Any, upper: Any, training: bool, self_is_result: bool) -> Any:
    if training:
        return wide(grad_output) * wide(noise)
    gradient = wide(grad_output)
    return jnp.where(self > 0, gradient, gradient * jnp.asarray((lower + upper) / 2, gradient.dtype))

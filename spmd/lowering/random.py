"""Ops that draw from the device's random stream.

The adapter hands each call its own key, derived from seed and count alone, and the threefry generator gives every element
its number by position: results depend neither on the mesh nor on how the array is sharded. In-place forms with a
functional twin (`uniform_` of `uniform`) are derived; `normal_` has none and is lowered itself.
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
    """Numbers in [0, 1) with the array's shape, in the dtype to draw in."""
    return jax.random.uniform(key, like.shape, _float_of(like.dtype))


def _open_uniform_of(key: Any, like: Any) -> Any:
    """Numbers in (0, 1]: safe for a logarithm."""
    return 1 - _uniform_of(key, like)


def _in_range(name: str) -> Callable[..., None]:
    """The check of a fill's bounds: torch's own, of the CPU's in-place form on a tensor without elements."""

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


@lower("uniform", random=True, check=_in_range("uniform_"))
def uniform(key: Any, self: Any, start: float = 0.0, to: float = 1.0) -> Any:
    """In [from, to); `from` is no name in Python, and always given by position."""
    drawn = _uniform_of(key, self)
    return (drawn * (to - start) + start).astype(self.dtype)


@lower("random", random=True)
def random_(key: Any, self: Any) -> Any:
    """Uniform over the integers that the dtype represents exactly, from zero."""
    return _integers(key, self, 0, _end_of(self.dtype))


@lower("random.to", random=True, check=_in_range("random_"))
def random_to(key: Any, self: Any, to: int) -> Any:
    return _integers(key, self, 0, to)


@lower("random.from", random=True, check=_in_range("random_"))
def random_from(key: Any, self: Any, start: int, to: int | None) -> Any:
    """Uniform over [from, to), up to the dtype's largest integer where `to` is None."""
    return _integers(key, self, start, _end_of(self.dtype) if to is None else to)


def _end_of(dtype: Any) -> int:
    """One past the largest integer up to which the dtype represents every integer."""
    if jnp.issubdtype(dtype, jnp.floating):
        return 2 ** (int(jnp.finfo(dtype).nmant) + 1) + 1
    return 2 if dtype == jnp.bool_ else int(jnp.iinfo(dtype).max) + 1


def _integers(key: Any, like: Any, start: int, stop: int) -> Any:
    """Uniform integers in [start, stop) as the array's dtype."""
    if stop - start >= 2**63:  # wider than randint's span: draw 64 bits, of which the low ones are as uniform
        bits = jax.random.bits(key, like.shape, jnp.uint64)
        width = stop - start
        drawn = bits if width >= 2**64 else bits % jnp.uint64(width)
        return (lax.bitcast_convert_type(drawn, jnp.int64) + start).astype(like.dtype)
    dtype = jnp.int32 if start >= -(2**31) and stop <= 2**31 - 1 else jnp.int64
    if stop == 2**63:  # randint's bound must be an int64 itself
        return (jax.random.randint(key, like.shape, start, stop - 1, jnp.int64)).astype(like.dtype)
    return jax.random.randint(key, like.shape, start, stop, dtype).astype(like.dtype)


@lower("bernoulli", random=True)
def bernoulli(key: Any, self: Any) -> Any:
    """Ones with the probabilities in `self`."""
    return bernoulli_p(key, self, self)


@lower("bernoulli.Tensor", "bernoulli.p", random=True, check=_in_range("bernoulli_"))
def bernoulli_p(key: Any, self: Any, p: Any = 0.5) -> Any:
    """Ones with probability `p`, in the shape and dtype of `self`."""
    return (_uniform_of(key, self) < p).astype(self.dtype)


@lower("exponential", random=True, check=_in_range("exponential_"))
def exponential(key: Any, self: Any, lambd: float = 1.0) -> Any:
    return -jnp.log(_open_uniform_of(key, self)) / lambd


@lower("cauchy", random=True, check=_in_range("cauchy_"))
def cauchy(key: Any, self: Any, median: float = 0.0, sigma: float = 1.0) -> Any:
    return median + sigma * jax.random.cauchy(key, self.shape, _float_of(self.dtype))


@lower("geometric", random=True, check=_in_range("geometric_"))
def geometric(key: Any, self: Any, p: float) -> Any:
    """Number of trials up to and with the first success: 1, 2, ..."""
    trials = jnp.ceil(jnp.log(_open_uniform_of(key, self)) / jnp.log1p(jnp.asarray(-p, _float_of(self.dtype))))
    return jnp.maximum(trials, 1).astype(self.dtype)


@lower("log_normal", random=True, check=_in_range("log_normal_"))
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
    gradient: Any = lax.random_gamma_grad  # its stub asks for a dtype that the function itself does not take
    return gradient(wide(self), wide(output))


@lower("_sample_dirichlet", random=True)
def _sample_dirichlet(key: Any, self: Any, generator: Any = None) -> Any:
    return jax.random.dirichlet(key, wide(self), self.shape[:-1], _float_of(self.dtype)).astype(self.dtype)


@lower("randperm", random=True)
def randperm(key: Any, n: int, *, dtype: Any = None) -> Any:
    return jax.random.permutation(key, jnp.arange(n, dtype=jnp.int32)).astype(dtype or jnp.int64)


def _can_draw(self: Any, num_samples: int, replacement: bool = False) -> None:
    if not jnp.issubdtype(self.dtype, jnp.floating):
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {self.dtype}")
    if num_samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not replacement and num_samples > self.shape[-1]:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    if self.shape[-1] > 2**24:
        raise RuntimeError("number of categories cannot exceed 2^24")


@lower("multinomial", random=True, check=_can_draw)
def multinomial(key: Any, self: Any, num_samples: int, replacement: bool = False) -> Any:
    """Indices drawn with the weights in the last dim: the largest of log weight plus Gumbel noise, one noise per draw
    with replacement, the `num_samples` largest of one noise without."""
    weights = wide(self)
    logits = jnp.log(weights)
    if replacement:
        return jax.random.categorical(key, logits[..., None, :], axis=-1, shape=(*self.shape[:-1], num_samples)).astype(jnp.int64)
    noisy = logits + jax.random.gumbel(key, logits.shape, logits.dtype)
    return lax.top_k(noisy, num_samples)[1].astype(jnp.int64)


@lower("dropout", whole=True, random=True)
def dropout(key: Any, input: Any, p: float, train: bool) -> Any:
    return input if not train or p == 0.0 else thinned(key, input, p, input.shape)


def thinned(key: Any, input: Any, p: float, drawn: tuple[int, ...]) -> Any:
    """Zero with chance `p`, else scaled up by what is lost; one draw per element of `drawn`, which broadcasts to the input."""
    if p == 1.0:
        return input * jnp.zeros((), input.dtype)  # NaN of what is infinite
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
    """Whole channels at a time: one draw per [N, C]."""
    if not train or p == 0.0 or input.size == 0:
        return input
    return thinned(key, input, p, input.shape[:2] + (1,) * (input.ndim - 2))


@lower("alpha_dropout", whole=True, random=True)
def alpha_dropout(key: Any, input: Any, p: float, train: bool) -> Any:
    return _alpha_dropout(key, input, p, train, input.shape)


@lower("feature_alpha_dropout", whole=True, random=True)
def feature_alpha_dropout(key: Any, input: Any, p: float, train: bool) -> Any:
    return _alpha_dropout(key, input, p, train, input.shape[:2] + (1,) * (input.ndim - 2))


_ALPHA = 1.7580993408473766  # SELU's lambda * alpha: what its negative side saturates at


def _alpha_dropout(key: Any, input: Any, p: float, train: bool, drawn: tuple[int, ...]) -> Any:
    """Dropped elements go to SELU's saturation value, then the result is scaled back to mean 0 and variance 1."""
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
    """Negative elements times a slope drawn from [lower, upper), which `noise` keeps for the backward; (out, new noise)."""
    x = wide(self)
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
    return jnp.where(self > 0, wide(grad_output), wide(grad_output) * ((lower + upper) / 2))

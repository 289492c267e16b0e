"""Normalisations: batch, instance, group, layer, root-mean-square and weight norm, with their backward ops.

Statistics of 16-bit floats are computed in float32. Those of batch norm are means over the whole batch dim, so they are global
for a batch sharded over devices. Running statistics are new values of arguments (`updates=`).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from spmd.lowering._registry import lower

_RUNNING = ("running_mean", "running_var")


def wide(x: Any) -> Any:
    """16-bit floats as float32, in which sums and statistics are computed; other arrays and None unchanged."""
    return x.astype(jnp.float32) if x is not None and x.dtype in (jnp.bfloat16, jnp.float16) else x


def _moments(x: Any, axes: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Mean (dims kept), x - mean, and biased variance (dims kept)."""
    mean = jnp.mean(x, axes, keepdims=True)
    centred = x - mean
    return mean, centred, jnp.mean(centred * centred, axes, keepdims=True)


def _affine(normalised: Any, weight: Any, bias: Any) -> Any:
    """weight * normalised + bias. Weight and bias are None or broadcastable."""
    out = normalised if weight is None else normalised * weight
    return out if bias is None else out + bias


def _per_channel(x: Any, ndim: int) -> Any:
    """A [C] array to broadcast against [N, C, ...]."""
    return None if x is None else wide(x).reshape((1, -1) + (1,) * (ndim - 2))


def _updated(running: Any, new: Any, momentum: Any) -> Any:
    """The running statistic, moved towards that of the batch by `momentum`."""
    return None if running is None else ((1 - momentum) * wide(running) + momentum * new).astype(running.dtype)


def _unbiased(variance: Any, count: int) -> Any:
    return variance * (count / (count - 1)) if count > 1 else variance * jnp.nan


def _require_both(input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, *_: Any) -> None:
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var must either both be None or neither be None")


@lower("native_batch_norm", "_native_batch_norm_legit", updates=_RUNNING, check=_require_both)
def native_batch_norm(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float, eps: float
) -> Any:
    """(out, batch mean, 1 / batch std, new running mean, new running variance).

    Without training, the batch statistics are empty and the running ones None.
    """
    x = wide(input)
    scale, shift = _per_channel(weight, x.ndim), _per_channel(bias, x.ndim)
    if not training:
        invstd = lax.rsqrt(_per_channel(running_var, x.ndim) + eps)
        out = _affine((x - _per_channel(running_mean, x.ndim)) * invstd, scale, shift)
        none = jnp.zeros((0,), x.dtype)
        return out, none, none, None, None
    axes = (0, *range(2, x.ndim))
    mean, centred, variance = _moments(x, axes)
    invstd = lax.rsqrt(variance + eps)
    mean_C, var_C, count = mean.reshape(-1), variance.reshape(-1), x.size // max(x.shape[1], 1)
    new_mean = _updated(running_mean, mean_C, momentum)
    new_var = _updated(running_var, _unbiased(var_C, count), momentum)
    return _affine(centred * invstd, scale, shift), mean_C, invstd.reshape(-1), new_mean, new_var


@lower("_native_batch_norm_legit.no_stats")
def _native_batch_norm_legit_no_stats(input: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    return native_batch_norm(input, weight, bias, None, None, True, momentum, eps)[:3]


@lower("_native_batch_norm_legit_no_training")
def _native_batch_norm_legit_no_training(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> Any:
    return native_batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)[:3]


@lower("native_batch_norm_backward")
def native_batch_norm_backward(
    grad_out: Any,
    input: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: float,
    output_mask: Any,
) -> Any:
    g, x = wide(grad_out), wide(input)
    axes = (0, *range(2, x.ndim))
    mean = _per_channel(save_mean if train else running_mean, x.ndim)
    invstd = _per_channel(save_invstd, x.ndim) if train else lax.rsqrt(_per_channel(running_var, x.ndim) + eps)
    normalised = (x - mean) * invstd
    sum_g = jnp.sum(g, axes, keepdims=True)
    sum_gx = jnp.sum(g * normalised, axes, keepdims=True)
    grad_input = None
    if output_mask[0]:
        count = max(x.size // max(x.shape[1], 1), 1)
        centred = g - sum_g / count - normalised * (sum_gx / count) if train else g
        grad_input = _affine(centred * invstd, _per_channel(weight, x.ndim), None)
    return grad_input, sum_gx.reshape(-1) if output_mask[1] else None, sum_g.reshape(-1) if output_mask[2] else None


@lower("instance_norm", whole=True, updates=_RUNNING)
def instance_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """Normalise each channel of each sample by its own statistics. Running statistics move towards the mean of these over the batch."""
    x = wide(input)
    scale, shift = _per_channel(weight, x.ndim), _per_channel(bias, x.ndim)
    if not use_input_stats:
        normalised = (x - _per_channel(running_mean, x.ndim)) * lax.rsqrt(_per_channel(running_var, x.ndim) + eps)
        return _affine(normalised, scale, shift).astype(input.dtype), None, None
    axes = tuple(range(2, x.ndim))
    mean, centred, variance = _moments(x, axes)
    count = x.size // max(x.shape[0] * x.shape[1], 1)
    new_mean = _updated(running_mean, jnp.mean(mean, 0).reshape(-1), momentum)
    new_var = _updated(running_var, _unbiased(jnp.mean(variance, 0).reshape(-1), count), momentum)
    return _affine(centred * lax.rsqrt(variance + eps), scale, shift).astype(input.dtype), new_mean, new_var


def _grouped(x: Any, groups: int) -> Any:
    """[N, C, ...] as [N, groups, C / groups, ...]; only the channel dim is split."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


@lower("native_group_norm")
def native_group_norm(input: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float) -> Any:
    """(out, mean [N, group], 1 / std [N, group])."""
    x = _grouped(wide(input), group)
    mean, centred, variance = _moments(x, tuple(range(2, x.ndim)))
    rstd = lax.rsqrt(variance + eps)
    out = (centred * rstd).reshape(input.shape)
    out = _affine(out, _per_channel(weight, input.ndim), _per_channel(bias, input.ndim))
    return out, mean.reshape(N, group), rstd.reshape(N, group)


@lower("native_group_norm_backward")
def native_group_norm_backward(
    grad_out: Any, input: Any, mean: Any, rstd: Any, weight: Any, N: int, C: int, HxW: int, group: int, output_mask: Any
) -> Any:
    x = _grouped(wide(input), group)
    per_group = (N, group) + (1,) * (x.ndim - 2)
    invstd = wide(rstd).reshape(per_group)
    normalised = (x - wide(mean).reshape(per_group)) * invstd
    g = wide(grad_out)
    axes = (0, *range(2, input.ndim))
    grad_weight = jnp.sum(g * normalised.reshape(input.shape), axes) if output_mask[1] else None
    grad_bias = jnp.sum(g, axes) if output_mask[2] else None
    if not output_mask[0]:
        return None, grad_weight, grad_bias
    scaled = _grouped(_affine(g, _per_channel(weight, input.ndim), None), group)
    grad_input = _normalised_gradient(scaled, normalised, invstd, tuple(range(2, x.ndim)))
    return grad_input.reshape(input.shape), grad_weight, grad_bias


def _normalised_gradient(g: Any, normalised: Any, invstd: Any, axes: tuple[int, ...]) -> Any:
    """Gradient of (x - mean) / std over `axes`."""
    along = jnp.mean(g * normalised, axes, keepdims=True)
    return invstd * (g - jnp.mean(g, axes, keepdims=True) - normalised * along)


def _inner(x: Any, normalized_shape: Any) -> tuple[int, ...]:
    """The trailing dims that `normalized_shape` covers."""
    return tuple(range(x.ndim - len(normalized_shape), x.ndim))


@lower("layer_norm", whole=True)
def layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enable: bool = True
) -> Any:
    return native_layer_norm(input, normalized_shape, weight, bias, eps)[0].astype(input.dtype)


@lower("native_layer_norm")
def native_layer_norm(input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    """(out, mean, 1 / std). In the statistics, the normalised dims are kept with size 1."""
    x = wide(input)
    mean, centred, variance = _moments(x, _inner(x, normalized_shape))
    rstd = lax.rsqrt(variance + eps)
    return _affine(centred * rstd, wide(weight), wide(bias)), mean, rstd


@lower("native_layer_norm_backward")
def native_layer_norm_backward(
    grad_out: Any, input: Any, normalized_shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, output_mask: Any
) -> Any:
    g, x, invstd = wide(grad_out), wide(input), wide(rstd)
    inner, outer = _inner(x, normalized_shape), tuple(range(x.ndim - len(normalized_shape)))
    normalised = (x - wide(mean)) * invstd
    grad_input = _normalised_gradient(_affine(g, wide(weight), None), normalised, invstd, inner) if output_mask[0] else None
    grad_weight = jnp.sum(g * normalised, outer) if output_mask[1] and weight is not None else None
    return grad_input, grad_weight, jnp.sum(g, outer) if output_mask[2] and bias is not None else None


@lower("rms_norm", whole=True)
def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    return _rms_norm(input, normalized_shape, weight, eps)[0].astype(input.dtype)


@lower("_fused_rms_norm", whole=True)
def _fused_rms_norm(input: Any, normalized_shape: Any, weight: Any, eps: float | None) -> Any:
    out, rstd = _rms_norm(input, normalized_shape, weight, eps)
    return out.astype(input.dtype), rstd


def _rms_norm(input: Any, normalized_shape: Any, weight: Any, eps: float | None) -> tuple[Any, Any]:
    x = wide(input)
    mean_square = jnp.mean(x * x, _inner(x, normalized_shape), keepdims=True)
    rstd = lax.rsqrt(mean_square + (float(jnp.finfo(x.dtype).eps) if eps is None else eps))
    return _affine(x * rstd, wide(weight), None), rstd


@lower("_weight_norm", whole=True)
def _weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    return _weight_norm_interface(v, g, dim)[0].astype(v.dtype)


@lower("_weight_norm_interface")
def _weight_norm_interface(v: Any, g: Any, dim: int = 0) -> Any:
    """(v scaled to norm g, norm of v). Norms are over all dims but `dim`, or over all dims if `dim` is -1."""
    x = wide(v)
    axes = tuple(i for i in range(x.ndim) if dim == -1 or i != dim % x.ndim)
    norm = jnp.sqrt(jnp.sum(x * x, axes, keepdims=dim != -1))
    return x * (wide(g) / norm), norm


@lower("_weight_norm_interface_backward")
def _weight_norm_interface_backward(grad_w: Any, saved_v: Any, saved_g: Any, saved_norms: Any, dim: int) -> Any:
    g_w, v, g, norm = wide(grad_w), wide(saved_v), wide(saved_g), wide(saved_norms)
    axes = tuple(i for i in range(v.ndim) if i != dim % v.ndim)
    along = jnp.sum(g_w * v, axes, keepdims=True)
    return g / norm * (g_w - v * (along / (norm * norm))), along / norm

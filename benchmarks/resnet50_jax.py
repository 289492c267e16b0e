"""The step of `resnet50.py` hand-written in JAX: images as [N, H, W, C], parameters as a flat dict in torch's names."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from optimizers_jax import SGD

OPTIMIZER = SGD(0.05, 0.9, 1e-4)
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
MOMENTUM, EPS, SMOOTHING = 0.1, 1e-5, 0.1
Params = dict[str, Any]


def conv(x_NHWC: jax.Array, params: Params, name: str, stride: int = 1) -> jax.Array:
    weight_OIHW = params[f"{name}.weight"]
    pad = weight_OIHW.shape[-1] // 2
    numbers = ("NHWC", "OIHW", "NHWC")
    return lax.conv_general_dilated(x_NHWC, weight_OIHW, (stride, stride), [(pad, pad)] * 2, dimension_numbers=numbers)


def batch_norm(x_NHWC: jax.Array, params: Params, buffers: Params, updated: Params, name: str) -> jax.Array:
    """Normalize by the statistics of the global batch. The updated running statistics are written to `updated`."""
    wide = x_NHWC.astype(jnp.float32)
    mean = jnp.mean(wide, (0, 1, 2))
    centred = wide - mean
    variance = jnp.mean(centred * centred, (0, 1, 2))
    count = x_NHWC.size // x_NHWC.shape[-1]
    for key, value in (("mean", mean), ("var", variance * (count / (count - 1)))):
        updated[f"{name}.running_{key}"] = (1 - MOMENTUM) * buffers[f"{name}.running_{key}"] + MOMENTUM * value
    updated[f"{name}.num_batches_tracked"] = buffers[f"{name}.num_batches_tracked"] + 1
    scale = lax.rsqrt(variance + EPS) * params[f"{name}.weight"]
    return (centred * scale + params[f"{name}.bias"]).astype(x_NHWC.dtype)


def max_pool(x_NHWC: jax.Array) -> jax.Array:
    return lax.reduce_window(x_NHWC, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))


def bottleneck(x: jax.Array, params: Params, buffers: Params, updated: Params, name: str, stride: int) -> jax.Array:
    out = jax.nn.relu(batch_norm(conv(x, params, f"{name}.conv1"), params, buffers, updated, f"{name}.bn1"))
    out = jax.nn.relu(batch_norm(conv(out, params, f"{name}.conv2", stride), params, buffers, updated, f"{name}.bn2"))
    out = batch_norm(conv(out, params, f"{name}.conv3"), params, buffers, updated, f"{name}.bn3")
    if f"{name}.downsample.0.weight" in params:
        x = batch_norm(conv(x, params, f"{name}.downsample.0", stride), params, buffers, updated, f"{name}.downsample.1")
    return jax.nn.relu(out + x)


def loss(params: Params, buffers: Params, config: Any, x_NCHW: jax.Array, y_N: jax.Array, constrain: Any) -> tuple[jax.Array, Params]:
    """Mean cross entropy with label smoothing, and the new running statistics."""
    updated: Params = {}
    x = jnp.transpose(x_NCHW, (0, 2, 3, 1))
    x = max_pool(jax.nn.relu(batch_norm(conv(x, params, "conv1", 2), params, buffers, updated, "bn1")))
    for stage, count in enumerate(config.blocks):
        for block in range(count):
            x = bottleneck(x, params, buffers, updated, f"layer{stage + 1}.{block}", 2 if stage and not block else 1)
    logits_NV = jnp.mean(x, (1, 2)) @ params["fc.weight"].T + params["fc.bias"]
    log_p_NV = jax.nn.log_softmax(logits_NV.astype(jnp.float32))
    is_label = y_N[:, None] == jnp.arange(log_p_NV.shape[-1], dtype=y_N.dtype)
    target_NV = jnp.where(is_label, 1 - SMOOTHING, 0.0) + SMOOTHING / log_p_NV.shape[-1]
    return -jnp.mean(jnp.sum(log_p_NV * target_NV, -1)), updated

"""The step of `megatron.py` hand-written in JAX, with parameters as a flat dict in torch's names and layouts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from optimizers_jax import AdamW

OPTIMIZER = AdamW(1e-3, (0.9, 0.999), 1e-8, 1e-2)
BUFFERS = ()
Params = dict[str, Any]


def linear(x: jax.Array, params: Params, name: str) -> jax.Array:
    """Linear layer with weights [out, in], which XLA:CPU multiplies twice as fast as [in, out]."""
    return jnp.einsum("...i,oi->...o", x, params[f"{name}.weight"]) + params[f"{name}.bias"]


def norm(x_BTD: jax.Array, params: Params, name: str) -> jax.Array:
    wide = x_BTD.astype(jnp.float32)
    centred = wide - jnp.mean(wide, -1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-5)
    return (centred * scale * params[f"{name}.weight"] + params[f"{name}.bias"]).astype(x_BTD.dtype)


def mlp(x_BTD: jax.Array, params: Params, name: str) -> jax.Array:
    return linear(jax.nn.gelu(linear(x_BTD, params, f"{name}.up"), approximate=False), params, f"{name}.down")


def loss(params: Params, buffers: Params, config: Any, x_BTD: jax.Array, y_BTD: jax.Array, constrain: Any) -> tuple[jax.Array, Params]:
    """Mean squared error. `constrain` applies the sharding of variant "sequence" to a block's output."""
    out_BTD = x_BTD
    for layer in range(config.layers):
        if config.variant == "plain":
            out_BTD = mlp(out_BTD, params, f"{layer}")
        else:
            out_BTD = constrain(out_BTD + mlp(norm(out_BTD, params, f"{layer}.norm"), params, f"{layer}"))
    return jnp.mean((out_BTD - y_BTD) ** 2), buffers

"""The step of `depth.py` by hand in JAX: the blocks of `gpt2_jax.py` in a `lax.scan`, their weights stacked [layers, ...] all the time."""

from __future__ import annotations

from typing import Any

import gpt2_jax
import jax
import jax.numpy as jnp
from gpt2_jax import OPTIMIZER, Params

BLOCK = "transformer.h.0."


def loss(params: Params, stacked: Params, tokens_BT: jax.Array, heads: int, hold: Any) -> jax.Array:
    """Mean cross entropy of the next token; `stacked`: the blocks' weights by their name in the first one."""
    table_VD = params["transformer.wte.weight"]
    x_BTD = hold(jnp.take(table_VD, tokens_BT, axis=0)) + params["transformer.wpe.weight"][: tokens_BT.shape[1]]

    def block(x_BTD: jax.Array, own: Params) -> tuple[jax.Array, None]:
        return hold(gpt2_jax.hf_block(x_BTD, own, BLOCK[:-1], heads)), None

    x_BTD, _ = jax.lax.scan(block, hold(x_BTD), stacked)
    logits_BTV = jnp.einsum("btd,vd->btv", gpt2_jax.norm(x_BTD, params, "transformer.ln_f"), table_VD).astype(jnp.float32)
    y_BT = jnp.concatenate([tokens_BT[:, 1:], jnp.full_like(tokens_BT[:, :1], -100)], 1)
    is_label = y_BT[..., None] == jnp.arange(logits_BTV.shape[-1], dtype=y_BT.dtype)
    losses_BT = jax.nn.logsumexp(logits_BTV, -1) - jnp.sum(jnp.where(is_label, logits_BTV, 0.0), -1)
    is_counted = y_BT != -100
    return jnp.sum(jnp.where(is_counted, losses_BT, 0.0)) / jnp.sum(is_counted)


def step(state: Any, tokens_BT: jax.Array, heads: int, hold: Any) -> tuple[Any, jax.Array]:
    """One update of ((params, stacked), optimizer state), clipped to a norm of 1 as the PyTorch script does."""
    both, opt = state
    value, grads = jax.value_and_grad(lambda both: loss(*both, tokens_BT, heads, hold))(both)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / (norm + 1e-6)), grads)
    both, opt = OPTIMIZER.update(both, grads, opt)
    return (both, opt), value

"""The step of `depth.py` hand-written in JAX: the layers in a `lax.scan` with weights stacked permanently as [layers, ...], or unrolled."""

from __future__ import annotations

from typing import Any

import gpt2_jax
import jax
import jax.numpy as jnp
from depth_models import HEADS, NAMES
from gpt2_jax import OPTIMIZER, Params


def rms_norm(x_BTD: jax.Array, weight_D: jax.Array) -> jax.Array:
    return x_BTD * jax.lax.rsqrt(jnp.mean(jnp.square(x_BTD), -1, keepdims=True) + 1e-6) * weight_D


def llama_block(x_BTD: jax.Array, own: Params, name: str) -> jax.Array:
    """Hugging Face's Llama decoder layer, with weights [out, in]."""
    B, T, D = x_BTD.shape
    size = D // HEADS
    angles_TK = jnp.tile(jnp.outer(jnp.arange(T), 10000.0 ** (-jnp.arange(0, size, 2) / size)), 2).astype(jnp.float32)
    cos_T1K, sin_T1K = jnp.cos(angles_TK)[:, None], jnp.sin(angles_TK)[:, None]

    def rotated(x_BTHK: jax.Array) -> jax.Array:
        low, high = jnp.split(x_BTHK, 2, -1)
        return x_BTHK * cos_T1K + jnp.concatenate([-high, low], -1) * sin_T1K

    y_BTD = rms_norm(x_BTD, own[f"{name}.input_layernorm.weight"])
    q, k, v = ((y_BTD @ own[f"{name}.self_attn.{n}_proj.weight"].T).reshape(B, T, HEADS, size) for n in "qkv")
    x_BTD = x_BTD + gpt2_jax.attention(rotated(q), rotated(k), v).reshape(B, T, D) @ own[f"{name}.self_attn.o_proj.weight"].T
    y_BTD = rms_norm(x_BTD, own[f"{name}.post_attention_layernorm.weight"])
    gate, up, down = (own[f"{name}.mlp.{n}_proj.weight"].T for n in ("gate", "up", "down"))
    return x_BTD + (jax.nn.silu(y_BTD @ gate) * (y_BTD @ up)) @ down


def loss(params: Params, stacked: Params, tokens_BT: jax.Array, model: str, layers: int, constrain: Any) -> jax.Array:
    """Mean cross entropy of the next token. `stacked`: stacked weights by their names in the first layer, or {} to unroll the layers."""
    names = NAMES[model]
    x_BTD = constrain(jnp.take(params[f"{names.embedding}.weight"], tokens_BT, axis=0))
    if model == "gpt2":
        x_BTD = x_BTD + params["transformer.wpe.weight"][: tokens_BT.shape[1]]

    def block(x_BTD: jax.Array, own: Params, name: str) -> jax.Array:
        return constrain(gpt2_jax.hf_block(x_BTD, own, name, HEADS) if model == "gpt2" else llama_block(x_BTD, own, name))

    x_BTD = constrain(x_BTD)
    if stacked:
        x_BTD, _ = jax.lax.scan(lambda x_BTD, own: (block(x_BTD, own, f"{names.blocks}.0"), None), x_BTD, stacked)
    else:
        for layer in range(layers):
            x_BTD = block(x_BTD, params, f"{names.blocks}.{layer}")
    last_BTD = gpt2_jax.norm(x_BTD, params, names.norm) if model == "gpt2" else rms_norm(x_BTD, params[f"{names.norm}.weight"])
    logits_BTV = jnp.einsum("btd,vd->btv", last_BTD, params[f"{names.head}.weight"]).astype(jnp.float32)
    y_BT = jnp.concatenate([tokens_BT[:, 1:], jnp.full_like(tokens_BT[:, :1], -100)], 1)
    is_label = y_BT[..., None] == jnp.arange(logits_BTV.shape[-1], dtype=y_BT.dtype)
    losses_BT = jax.nn.logsumexp(logits_BTV, -1) - jnp.sum(jnp.where(is_label, logits_BTV, 0.0), -1)
    is_counted = y_BT != -100
    return jnp.sum(jnp.where(is_counted, losses_BT, 0.0)) / jnp.sum(is_counted)


def step(state: Any, tokens_BT: jax.Array, model: str, layers: int, constrain: Any) -> tuple[Any, jax.Array]:
    """One update of ((params, stacked), optimizer state), with gradients clipped to norm 1 as in the PyTorch script."""
    both, opt = state
    value, grads = jax.value_and_grad(lambda both: loss(*both, tokens_BT, model, layers, constrain))(both)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / (norm + 1e-6)), grads)
    both, opt = OPTIMIZER.update(both, grads, opt)
    return (both, opt), value

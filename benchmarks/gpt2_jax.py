"""The step of `gpt2.py` hand-written in JAX, with parameters as a flat dict in torch's names and layouts."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from optimizers_jax import AdamW

OPTIMIZER = AdamW(1e-3, (0.9, 0.95), 1e-8, 0.1)
BUFFERS = ()
Params = dict[str, Any]


def norm(x_BTD: jax.Array, params: Params, name: str) -> jax.Array:
    wide = x_BTD.astype(jnp.float32)
    mean = jnp.mean(wide, -1, keepdims=True)
    centred = wide - mean
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-5)
    return (centred * scale * params[f"{name}.weight"] + params[f"{name}.bias"]).astype(x_BTD.dtype)


def linear(x: jax.Array, params: Params, name: str) -> jax.Array:
    """Linear layer with weights [out, in]."""
    return jnp.einsum("...i,oi->...o", x, params[f"{name}.weight"]) + params[f"{name}.bias"]


def conv1d(x: jax.Array, params: Params, name: str) -> jax.Array:
    """Hugging Face's Conv1D, a linear layer with weights [in, out]."""
    return x @ params[f"{name}.weight"] + params[f"{name}.bias"]


def attention(q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array) -> jax.Array:
    """Causal attention with the softmax in float32. On a GPU in bfloat16 it uses cuDNN's fused kernel."""
    if jax.default_backend() == "gpu" and q_BTHK.dtype == jnp.bfloat16:
        return jax.nn.dot_product_attention(q_BTHK, k_BTHK, v_BTHK, is_causal=True, implementation="cudnn")
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK, preferred_element_type=jnp.float32) / math.sqrt(q_BTHK.shape[-1])
    seq = q_BTHK.shape[1]
    scores_BHTS = jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), scores_BHTS, -jnp.inf)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores_BHTS).astype(v_BTHK.dtype), v_BTHK)


def own_block(x_BTD: jax.Array, params: Params, name: str, heads: int) -> jax.Array:
    B, T, _ = x_BTD.shape
    qkv_BTH3K = linear(norm(x_BTD, params, f"{name}.attention_norm"), params, f"{name}.attention.qkv").reshape(B, T, heads, 3, -1)
    y_BTD = attention(*(qkv_BTH3K[:, :, :, i] for i in range(3))).reshape(B, T, -1)
    x_BTD = x_BTD + linear(y_BTD, params, f"{name}.attention.out")
    h_BTF = jax.nn.gelu(linear(norm(x_BTD, params, f"{name}.mlp_norm"), params, f"{name}.mlp.up"))
    return x_BTD + linear(h_BTF, params, f"{name}.mlp.down")


def hf_block(x_BTD: jax.Array, params: Params, name: str, heads: int) -> jax.Array:
    B, T, D = x_BTD.shape
    qkv_BTD = jnp.split(conv1d(norm(x_BTD, params, f"{name}.ln_1"), params, f"{name}.attn.c_attn"), 3, -1)
    y_BTD = attention(*(part.reshape(B, T, heads, -1) for part in qkv_BTD)).reshape(B, T, D)
    x_BTD = x_BTD + conv1d(y_BTD, params, f"{name}.attn.c_proj")
    h_BTF = jax.nn.gelu(conv1d(norm(x_BTD, params, f"{name}.ln_2"), params, f"{name}.mlp.c_fc"))
    return x_BTD + conv1d(h_BTF, params, f"{name}.mlp.c_proj")


def forward(params: Params, config: Any, tokens_BT: jax.Array, constrain: Any) -> jax.Array:
    names = {"own": ("tokens", "positions", "blocks", "norm"), "hf": tuple(f"transformer.{n}" for n in ("wte", "wpe", "h", "ln_f"))}
    tokens, positions, blocks, last = names[config.variant]
    block = own_block if config.variant == "own" else hf_block
    table_VD = params[f"{tokens}.weight"]
    x_BTD = constrain(jnp.take(table_VD, tokens_BT, axis=0)) + params[f"{positions}.weight"][: tokens_BT.shape[1]]
    for layer in range(config.layers):
        x_BTD = constrain(block(x_BTD, params, f"{blocks}.{layer}", config.heads))
    return jnp.einsum("btd,vd->btv", norm(x_BTD, params, last), table_VD)


def loss(params: Params, buffers: Params, config: Any, x_BT: jax.Array, y_BT: jax.Array, constrain: Any) -> tuple[jax.Array, Params]:
    """Mean cross entropy. It selects the label's logit by comparison, so that a sharded vocabulary stays sharded.

    `constrain` applies the sharding constraint of `gpt2.ACTIVATIONS`.
    """
    if config.variant == "hf":  # the labels are the shifted tokens; the last position has no label
        y_BT = jnp.concatenate([x_BT[:, 1:], jnp.full_like(x_BT[:, :1], -100)], 1)
    logits_BTV = forward(params, config, x_BT, constrain).astype(jnp.float32)
    is_label = y_BT[..., None] == jnp.arange(logits_BTV.shape[-1], dtype=y_BT.dtype)
    losses_BT = jax.nn.logsumexp(logits_BTV, -1) - jnp.sum(jnp.where(is_label, logits_BTV, 0.0), -1)
    is_counted = y_BT != -100
    return jnp.sum(jnp.where(is_counted, losses_BT, 0.0)) / jnp.sum(is_counted), buffers

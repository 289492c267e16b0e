"""Scaled dot-product attention, kept whole."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from spmd.lowering._registry import lower


@lower("scaled_dot_product_attention", whole=True, random=True)
def scaled_dot_product_attention(
    key_: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(q k^T * scale + mask) v; query [..., Hq, T, D], key [..., H, S, D], value [..., H, S, Dv]."""
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = jnp.repeat(key, groups, axis=-3), jnp.repeat(value, groups, axis=-3)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.matmul(query * factor, jnp.swapaxes(key, -1, -2), preferred_element_type=jnp.promote_types(query.dtype, jnp.float32))
    if is_causal:
        t, s = scores.shape[-2:]
        scores = jnp.where(jnp.tril(jnp.ones((t, s), bool)), scores, -jnp.inf)
    if attn_mask is not None:
        scores = jnp.where(attn_mask, scores, -jnp.inf) if attn_mask.dtype == jnp.bool_ else scores + attn_mask
    weights = jax.nn.softmax(scores, axis=-1)
    if dropout_p > 0.0:
        keep = jax.random.bernoulli(key_, 1.0 - dropout_p, weights.shape)
        weights = jnp.where(keep, weights / (1.0 - dropout_p), 0.0)
    return jnp.matmul(weights.astype(value.dtype), value)

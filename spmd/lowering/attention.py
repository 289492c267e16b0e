"""Scaled dot-product attention as one op, and the fused forms of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`.

On NVIDIA GPUs, 16-bit attention of shapes that cuDNN supports runs as cuDNN's fused kernel. In compiled steps for TPUs, bfloat16
attention of shapes that jax's splash attention supports runs as that kernel. Otherwise attention is two batched matmuls around a
softmax, which XLA shards over batch and heads.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.lowering import _splash, fused_attention
from spmd.lowering._registry import lower
from spmd.lowering.matmul import linear
from spmd.lowering.norm import layer_norm, wide
from spmd.lowering.random import with_dropout
from spmd.lowering.softmax import safe_softmax


@lower("scaled_dot_product_attention", whole=True, random=True, told=("platform",))
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
    platform: str | None = None,
) -> Any:
    """softmax(q k^T * scale + mask) v; query [..., Hq, T, D], key [..., H, S, D], value [..., H, S, Dv].

    The result is zero for a query whose keys are all masked, as in torch.
    """
    if is_causal and attn_mask is not None:
        raise RuntimeError("_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    can_fuse = dropout_p == 0.0 and attn_mask is None
    if can_fuse and platform == "tpu" and _splash.takes(query, key, value):
        return fused_attention.attention(query, key, value, is_causal, factor)
    if can_fuse and (platform or jax.default_backend()) == "gpu" and _cudnn_takes(query, key, value, is_causal):
        return lax.platform_dependent(
            query,
            key,
            value,
            cuda=lambda q, k, v: _cudnn(q, k, v, is_causal, factor),
            # checkpoint: otherwise residuals of the branch that is not taken would occupy memory until the backward
            default=jax.checkpoint(lambda q, k, v: _attention(key_, q, k, v, None, 0.0, is_causal, factor)[0]),
        )
    return _attention(key_, query, key, value, attn_mask, dropout_p, is_causal, factor)[0]


def _cudnn_takes(query: Any, key: Any, value: Any, is_causal: bool) -> bool:
    """Whether cuDNN's fused attention supports these dtypes and shapes."""
    return (
        query.dtype in (jnp.bfloat16, jnp.float16)
        and query.dtype == key.dtype == value.dtype
        and query.ndim == key.ndim == value.ndim == 4
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[1] % max(key.shape[1], 1) == 0
        and query.shape[3] == key.shape[3] == value.shape[3]
        and query.shape[3] % 8 == 0
        and query.shape[3] <= 128
        and (not is_causal or query.shape[2] == key.shape[2])  # cuDNN's causal mask starts at the top left only then
    )


def _cudnn(query: Any, key: Any, value: Any, is_causal: bool, factor: float) -> Any:
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    out = jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, scale=factor, implementation="cudnn")
    return jnp.swapaxes(out, 1, 2)


def _attention(rng: Any, query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, factor: float) -> tuple[Any, Any]:
    """(out, weights) by two matmuls. For 16-bit floats, scores and softmax are in float32."""
    groups = query.shape[-3] // key.shape[-3] if query.ndim > 2 and key.shape[-3] else 1
    if groups > 1 and key.ndim == query.ndim:  # grouped queries: an additional dim instead of repeated keys and values
        query = query.reshape(*query.shape[:-3], key.shape[-3], groups, *query.shape[-2:])
        key, value = key[..., None, :, :], value[..., None, :, :]
        if mask is not None and mask.ndim > 2:
            heads = mask.shape[-3]
            mask = jnp.expand_dims(mask, -3) if heads == 1 else mask.reshape(*mask.shape[:-3], heads // groups, groups, *mask.shape[-2:])
    else:
        groups = 1
    scores = fused_attention.scores(query, key, is_causal, factor)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + mask
    weights = jax.nn.softmax(scores, axis=-1) if mask is None else safe_softmax(scores, -1)
    if dropout_p > 0.0:
        weights = with_dropout(rng, weights, dropout_p, weights.shape)
    # value^T @ weights^T, because for weights @ value the TPU compiler first copied the strided value in float32 (6 MiB per layer of GPT-2)
    out = jnp.swapaxes(jnp.matmul(jnp.swapaxes(value, -1, -2), jnp.swapaxes(weights.astype(value.dtype), -1, -2)), -1, -2)
    if groups > 1:
        out = out.reshape(*out.shape[:-4], -1, *out.shape[-2:])
    return out, weights


@lower("_scaled_dot_product_attention_math", whole=True, random=True)
def _scaled_dot_product_attention_math(
    rng: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Any = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    out, weights = _attention(rng, query, key, value, attn_mask, dropout_p, is_causal, factor)
    return out, weights.reshape(*query.shape[:-1], key.shape[-2]).astype(query.dtype)


def _key_mask(mask: Any, mask_type: int | None) -> Any:
    """Mask of the visible keys from torch's mask of the hidden ones: [T, S] (type 0), [B, S] (type 1) or [B, H, T, S]."""
    if mask is None:
        return None
    hidden = mask.astype(bool)
    if hidden.ndim == 2:
        hidden = hidden[:, None, None, :] if mask_type == 1 else hidden[None, None]
    return ~hidden


def _multi_head(
    query: Any, key: Any, value: Any, num_head: int, qkv_weight: Any, qkv_bias: Any, mask: Any, mask_type: int | None
) -> tuple[Any, Any]:
    """(outputs of the heads side by side [B, T, D], weights [B, H, T, S]). The three projections are stacked in one weight."""
    projections = jnp.split(qkv_weight, 3), jnp.split(qkv_bias, 3)
    q, k, v = (
        linear(x, w, b).reshape(*x.shape[:-1], num_head, -1).swapaxes(-2, -3)
        for x, w, b in zip((query, key, value), *projections, strict=True)
    )
    out, weights = _attention(None, q, k, v, _key_mask(mask, mask_type), 0.0, False, 1.0 / math.sqrt(q.shape[-1]))
    return out.swapaxes(-2, -3).reshape(*query.shape), weights


@lower("_native_multi_head_attention")
def _native_multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim: int,
    num_head: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    mask: Any = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    """The fast path of `nn.MultiheadAttention` in evaluation: (out [B, T, D], weights or None)."""
    heads, weights = _multi_head(query, key, value, num_head, qkv_weight, qkv_bias, mask, mask_type)
    out = linear(heads, proj_weight, proj_bias)
    if not need_weights:
        return out, None
    return out, (jnp.mean(weights, 1) if average_attn_weights else weights).astype(query.dtype)


@lower("_transformer_encoder_layer_fwd")
def _transformer_encoder_layer_fwd(
    src: Any,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Any,
    norm_bias_1: Any,
    norm_weight_2: Any,
    norm_bias_2: Any,
    ffn_weight_1: Any,
    ffn_bias_1: Any,
    ffn_weight_2: Any,
    ffn_bias_2: Any,
    mask: Any = None,
    mask_type: int | None = None,
) -> Any:
    """The fast path of `nn.TransformerEncoderLayer` in evaluation: attention and feed-forward, each with a residual and a norm."""

    def attended(x: Any) -> Any:
        return linear(_multi_head(x, x, x, num_heads, qkv_weight, qkv_bias, mask, mask_type)[0], proj_weight, proj_bias)

    def fed_forward(x: Any) -> Any:
        hidden = linear(x, ffn_weight_1, ffn_bias_1)
        hidden = jax.nn.gelu(hidden, approximate=False) if use_gelu else jax.nn.relu(hidden)
        return linear(hidden, ffn_weight_2, ffn_bias_2)

    def first(x: Any) -> Any:
        return layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x: Any) -> Any:
        return layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attended(first(src))
        return x + fed_forward(second(x))
    x = first(src + attended(src))
    return second(x + fed_forward(x))


@lower("_transform_bias_rescale_qkv")
def _transform_bias_rescale_qkv(qkv: Any, qkv_bias: Any, num_heads: int) -> Any:
    """[B, T, 3 D] to q / sqrt(d), k and v, each [B, H, T, d]."""
    q, k, v = (x.reshape(*x.shape[:-1], num_heads, -1).swapaxes(-2, -3) for x in jnp.split(wide(qkv) + wide(qkv_bias), 3, axis=-1))
    return q / math.sqrt(q.shape[-1]), k, v

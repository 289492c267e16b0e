"""Attention as two jax primitives, `attention_p` and `attention_grad_p`, which a platform can compute without storing the scores.

By default they lower to two matmuls around a softmax; `spmd.lowering._splash` has TPU kernels for them. Each stays one equation
until the program is lowered, so that the partitioner can first determine how its arguments are sharded
(`spmd.program.xla._partition`).

    B batch   H query heads   K key/value heads, each for H/K query heads   T queries   S keys   D head size
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

attention_p = Primitive("attention")
attention_grad_p = Primitive("attention_grad")


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def attention(query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool, scale: float) -> jax.Array:
    """softmax(q k^T * scale) v; query [B, H, T, D], key and value [B, K, S, D]. A causal mask starts at the top left, as in torch."""
    return attention_p.bind(query, key, value, is_causal=is_causal, scale=scale)[0]


def _forward(query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool, scale: float) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out, logsumexp = attention_p.bind(query, key, value, is_causal=is_causal, scale=scale)
    return out, (query, key, value, out, logsumexp)


def _backward(is_causal: bool, scale: float, residuals: tuple[jax.Array, ...], grad: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(attention_grad_p.bind(*residuals, grad, is_causal=is_causal, scale=scale))


attention.defvjp(_forward, _backward)


def scores(query: jax.Array, key: jax.Array, is_causal: bool, scale: float) -> jax.Array:
    """q k^T * scale in float32 or wider, [..., T, S]; -inf where the causal mask hides the key."""
    product = jnp.matmul(query, jnp.swapaxes(key, -1, -2), preferred_element_type=_accumulation_dtype(query)) * scale
    if is_causal:
        rows = lax.broadcasted_iota(jnp.int32, product.shape[-2:], 0)
        columns = lax.broadcasted_iota(jnp.int32, product.shape[-2:], 1)
        product = jnp.where(columns <= rows, product, -jnp.inf)
    return product


def _accumulation_dtype(query: Any) -> Any:
    return jnp.promote_types(query.dtype, jnp.float32)


def _grouped(x: jax.Array, num_groups: int) -> jax.Array:
    """[B, H, ...] as [B, K, H/K, ...]."""
    return x.reshape(x.shape[0], num_groups, -1, *x.shape[2:])


def plain_attention(query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool, scale: float) -> list[jax.Array]:
    """Reference for `attention_p`: [out [B, H, T, D], logsumexp of the scores [B, H, T], in float32 or wider]."""
    grouped = scores(_grouped(query, key.shape[1]), key[:, :, None], is_causal, scale)
    logsumexp = jax.nn.logsumexp(grouped, axis=-1, keepdims=True)
    out = jnp.matmul(jnp.exp(grouped - logsumexp).astype(value.dtype), value[:, :, None])
    return [out.reshape(query.shape), logsumexp.reshape(query.shape[:-1])]


def plain_attention_grad(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    logsumexp: jax.Array,
    grad: jax.Array,
    *,
    is_causal: bool,
    scale: float,
) -> list[jax.Array]:
    """Reference for `attention_grad_p`: gradients of query, key and value from that of `out`. The weights are recomputed."""
    q, o, g = (_grouped(x, key.shape[1]) for x in (query, out, grad))
    weights = jnp.exp(scores(q, key[:, :, None], is_causal, scale) - _grouped(logsumexp, key.shape[1])[..., None])
    product = partial(jnp.einsum, preferred_element_type=weights.dtype)
    grad_weights = product("bkgtd,bksd->bkgts", g, value) - product("bkgtd,bkgtd->bkgt", g, o)[..., None]
    grad_scores = (weights * grad_weights * scale).astype(query.dtype)
    grad_query = product("bkgts,bksd->bkgtd", grad_scores, key).reshape(query.shape)
    grad_key = product("bkgts,bkgtd->bksd", grad_scores, q)
    grad_value = product("bkgts,bkgtd->bksd", weights.astype(value.dtype), g)
    return [grad_query.astype(query.dtype), grad_key.astype(key.dtype), grad_value.astype(value.dtype)]


def _shapes(query: Any, key: Any, value: Any, **_: Any) -> list[Any]:
    return [query.update(weak_type=False), query.update(shape=query.shape[:-1], dtype=_accumulation_dtype(query), weak_type=False)]


def _grad_shapes(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> list[Any]:
    return [x.update(weak_type=False) for x in (query, key, value)]


def _derivative(plain: Callable[..., list[jax.Array]]) -> Callable[..., Any]:
    """JVP rule of a primitive: the derivative of its reference, for second and higher derivatives."""

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...], **params: Any) -> Any:
        filled = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(partial(plain, **params), tuple(primals), tuple(filled))

    return rule


def _batched(primitive: Primitive) -> Callable[..., Any]:
    """Batching rule of a primitive, which merges the new dim into the batch dim."""

    def rule(args: tuple[Any, ...], dims: tuple[Any, ...], **params: Any) -> Any:
        size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
        first = [batching.bdim_at_front(x, d, size) for x, d in zip(args, dims, strict=True)]
        results = primitive.bind(*(x.reshape(-1, *x.shape[2:]) for x in first), **params)
        return [r.reshape(size, -1, *r.shape[1:]) for r in results], [0] * len(results)

    return rule


for _primitive, _plain, _shapes_of in ((attention_p, plain_attention, _shapes), (attention_grad_p, plain_attention_grad, _grad_shapes)):
    _primitive.multiple_results = True
    _primitive.def_impl(_plain)
    _primitive.def_abstract_eval(_shapes_of)
    ad.primitive_jvps[_primitive] = _derivative(_plain)
    batching.primitive_batchers[_primitive] = _batched(_primitive)
    mlir.register_lowering(_primitive, mlir.lower_fun(_plain, multiple_results=True))

"""Attention as two operations of jax, `attention_p` and `attention_grad_p`, that a platform may compute without holding the scores.

Their own meaning is the two products around a softmax; `spmd.lowering._splash` has TPU kernels for them. They are one equation
each until a program is lowered, so that what needs to know how their arguments will be sharded can ask the partitioner first
(`spmd.program.xla._partition`).

    B batch   H heads of queries   K heads of keys and values, each for H/K heads of queries   T queries   S keys   D width of a head
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
    """softmax(q k^T * scale) v; query [B, H, T, D], key and value [B, K, S, D]; causal from the top left, as in torch."""
    return attention_p.bind(query, key, value, is_causal=is_causal, scale=scale)[0]


def _forward(query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool, scale: float) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out, norm = attention_p.bind(query, key, value, is_causal=is_causal, scale=scale)
    return out, (query, key, value, out, norm)


def _backward(is_causal: bool, scale: float, kept: tuple[jax.Array, ...], grad: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(attention_grad_p.bind(*kept, grad, is_causal=is_causal, scale=scale))


attention.defvjp(_forward, _backward)


def scores(query: jax.Array, key: jax.Array, is_causal: bool, scale: float) -> jax.Array:
    """q k^T * scale in float32 or wider, [..., T, S]; minus infinity where a query may not see the key."""
    found = jnp.matmul(query, jnp.swapaxes(key, -1, -2), preferred_element_type=_accumulated(query)) * scale
    if is_causal:
        rows = lax.broadcasted_iota(jnp.int32, found.shape[-2:], 0)
        columns = lax.broadcasted_iota(jnp.int32, found.shape[-2:], 1)
        found = jnp.where(columns <= rows, found, -jnp.inf)
    return found


def _accumulated(query: Any) -> Any:
    return jnp.promote_types(query.dtype, jnp.float32)


def _grouped(x: jax.Array, num_groups: int) -> jax.Array:
    """[B, H, ...] as [B, K, H/K, ...]."""
    return x.reshape(x.shape[0], num_groups, -1, *x.shape[2:])


def plain_attention(query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool, scale: float) -> list[jax.Array]:
    """What `attention_p` means: [out [B, H, T, D], log of the softmax's denominators [B, H, T], in float32 or wider]."""
    found = scores(_grouped(query, key.shape[1]), key[:, :, None], is_causal, scale)
    norm = jax.nn.logsumexp(found, axis=-1, keepdims=True)
    out = jnp.matmul(jnp.exp(found - norm).astype(value.dtype), value[:, :, None])
    return [out.reshape(query.shape), norm.reshape(query.shape[:-1])]


def plain_attention_grad(
    query: jax.Array, key: jax.Array, value: jax.Array, out: jax.Array, norm: jax.Array, grad: jax.Array, *, is_causal: bool, scale: float
) -> list[jax.Array]:
    """What `attention_grad_p` means: gradients of query, key and value from that of `out`; the weights are computed anew."""
    q, o, g = (_grouped(x, key.shape[1]) for x in (query, out, grad))
    weights = jnp.exp(scores(q, key[:, :, None], is_causal, scale) - _grouped(norm, key.shape[1])[..., None])
    product = partial(jnp.einsum, preferred_element_type=weights.dtype)
    of_weights = product("bkgtd,bksd->bkgts", g, value) - product("bkgtd,bkgtd->bkgt", g, o)[..., None]
    of_scores = (weights * of_weights * scale).astype(query.dtype)
    of_query = product("bkgts,bksd->bkgtd", of_scores, key).reshape(query.shape)
    of_key = product("bkgts,bkgtd->bksd", of_scores, q)
    of_value = product("bkgts,bkgtd->bksd", weights.astype(value.dtype), g)
    return [of_query.astype(query.dtype), of_key.astype(key.dtype), of_value.astype(value.dtype)]


def _shapes(query: Any, key: Any, value: Any, **_: Any) -> list[Any]:
    return [query.update(weak_type=False), query.update(shape=query.shape[:-1], dtype=_accumulated(query), weak_type=False)]


def _grad_shapes(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> list[Any]:
    return [x.update(weak_type=False) for x in (query, key, value)]


def _derivative(plain: Callable[..., list[jax.Array]]) -> Callable[..., Any]:
    """Of the plain meaning: what second and higher derivatives ask for."""

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...], **params: Any) -> Any:
        filled = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(partial(plain, **params), tuple(primals), tuple(filled))

    return rule


def _batched(primitive: Primitive) -> Callable[..., Any]:
    """One batch more is a larger batch."""

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

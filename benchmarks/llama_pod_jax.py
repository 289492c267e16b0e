"""The step of `llama_pod.py` hand-written in JAX: a checkpointed `lax.scan` over stacked layers, FSDP shardings, and a Pallas kernel."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Params = dict[str, Any]
BETAS, EPS, RATE, DECAY = (0.9, 0.999), 1e-8, 1e-3, 1e-2


def shapes(config: Any, layers: int) -> tuple[Params, Params]:
    """Shapes of the weights outside the layers, and of the stacked layer weights [layers, ...]. Linear weights are [out, in]."""
    width, hidden, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    keys = width * config.num_key_value_heads // config.num_attention_heads
    linears = {"q": (width, width), "k": (keys, width), "v": (keys, width), "o": (width, width)}
    linears |= {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden), "norm_1": (width,), "norm_2": (width,)}
    own = {"tokens": (vocabulary, width), "head": (vocabulary, width), "norm": (width,)}
    return own, {name: (layers, *shape) for name, shape in linears.items()}


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * weight


def rotated(x_BHTK: jax.Array, cos_TK: jax.Array, sin_TK: jax.Array) -> jax.Array:
    low, high = jnp.split(x_BHTK, 2, -1)
    return x_BHTK * cos_TK + jnp.concatenate([-high, low], -1) * sin_TK


def plain_attention(q_BHTK: jax.Array, k_BHTK: jax.Array, v_BHTK: jax.Array) -> jax.Array:
    """Causal attention for devices without the Pallas kernel."""
    scores_BHTS = jnp.einsum("bhtk,bhsk->bhts", q_BHTK, k_BHTK) * q_BHTK.shape[-1] ** -0.5
    positions = jnp.arange(scores_BHTS.shape[-1])
    masked_BHTS = jnp.where(positions[:, None] >= positions, scores_BHTS, -jnp.inf)
    return jnp.einsum("bhts,bhsk->bhtk", jax.nn.softmax(masked_BHTS, axis=-1), v_BHTK)


def forward(params: Params, stacked: Params, tokens_BT: jax.Array, config: Any, mesh: Mesh, kernel: Any = None) -> jax.Array:
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    B, T = tokens_BT.shape
    size = config.hidden_size // heads
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    angles_TK = jnp.outer(jnp.arange(T), 500000.0 ** (-jnp.arange(0, size, 2) / size))
    angles_TK = jnp.concatenate([angles_TK, angles_TK], -1)
    cos_TK, sin_TK = jnp.cos(angles_TK).astype(jnp.bfloat16), jnp.sin(angles_TK).astype(jnp.bfloat16)
    kernel = kernel or functools.partial(flash_attention, causal=True, sm_scale=size**-0.5)
    spec = PartitionSpec("fsdp")
    attend = jax.shard_map(kernel, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)

    def layer(x_BTD: jax.Array, p: Params) -> tuple[jax.Array, None]:
        y_BTD = norm(x_BTD, p["norm_1"])
        q, k, v = ((y_BTD @ p[n].T).reshape(B, T, -1, size).swapaxes(1, 2) for n in "qkv")
        q, k = rotated(q, cos_TK, sin_TK), rotated(k, cos_TK, sin_TK)
        k, v = (jnp.repeat(each, heads // groups, 1) for each in (k, v))
        x_BTD = x_BTD + attend(q, k, v).swapaxes(1, 2).reshape(B, T, -1) @ p["o"].T
        y_BTD = norm(x_BTD, p["norm_2"])
        x_BTD = x_BTD + (jax.nn.silu(y_BTD @ p["gate"].T) * (y_BTD @ p["up"].T)) @ p["down"].T
        return jax.lax.with_sharding_constraint(x_BTD, rows), None

    x_BTD = jax.lax.with_sharding_constraint(jnp.take(params["tokens"], tokens_BT, axis=0), rows)
    x_BTD, _ = jax.lax.scan(jax.checkpoint(layer), x_BTD, stacked)
    return norm(x_BTD, params["norm"]) @ params["head"].T


def loss(both: Any, tokens_BT: jax.Array, config: Any, mesh: Mesh, kernel: Any = None) -> jax.Array:
    """Mean cross entropy of the next token."""
    logits_BTV = forward(*both, tokens_BT, config, mesh, kernel)[:, :-1].astype(jnp.float32)
    labels_BT = tokens_BT[:, 1:]
    picked_BT = jnp.take_along_axis(logits_BTV, labels_BT[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits_BTV, -1) - picked_BT)


def step(state: Any, tokens_BT: jax.Array, config: Any, mesh: Mesh, kernel: Any = None) -> tuple[Any, jax.Array]:
    """One AdamW update, with moments in the parameters' dtype as in torch. `kernel` replaces the Pallas attention kernel for TPUs."""
    both, first, second, count = state
    value, grads = jax.value_and_grad(loss)(both, tokens_BT, config, mesh, kernel)
    count = count + 1
    first = jax.tree.map(lambda m, g: m + (1 - BETAS[0]) * (g - m), first, grads)
    second = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, second, grads)
    size, scale = RATE / (1 - BETAS[0] ** count), jnp.sqrt(1 - BETAS[1] ** count)

    def updated(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return (p * (1 - RATE * DECAY) - size * m / (jnp.sqrt(v) / scale + EPS)).astype(p.dtype)

    return (jax.tree.map(updated, both, first, second), first, second, count), value

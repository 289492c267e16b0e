"""The GPT-2 training step, Megatron-sharded: collectives and memory of the compiled program are those of JAX by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

import mesh
import spmd
from spmd.program.xla import _hlo
from tests.models import GPT2

VOCAB, DIM, HEADS, DEPTH, LENGTH, BATCH = 512, 128, 4, 2, 64, 8
LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01
SPECS: dict[str, tuple[str | None, ...]] = {
    "tokens.weight": ("model", None),
    "up.weight": ("model", None),
    "up.bias": ("model",),
    "down.weight": (None, "model"),
    "proj.weight": (None, "model"),
}


def spec_of(name: str, rank: int) -> tuple[str | None, ...]:
    return next((spec for end, spec in SPECS.items() if name.endswith(end)), (None,) * rank)


def ours(grid: mesh.Mesh) -> Any:
    """The program of the torch step, for tensors without values."""
    with torch.device("meta"):
        model = GPT2(VOCAB, DIM, HEADS, DEPTH, LENGTH)
    model.to_empty(device="jax")
    for name, parameter in model.named_parameters():
        spmd.mark_sharding(parameter, grid, spec_of(name, parameter.dim()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)

    @spmd.compile
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        return loss

    x, y = (spmd.mark_sharding(torch.empty(BATCH, LENGTH, dtype=torch.int64, device="jax"), grid, ("data", None)) for _ in range(2))
    return step.program(x, y), {name: tuple(p.shape) for name, p in model.named_parameters()}


def loss_by_hand(p: dict[str, Any], x: Any, y: Any) -> Any:
    """GPT-2's loss; weights [out, in] under torch's names."""

    def norm(h: Any, name: str) -> Any:
        h = h - h.mean(-1, keepdims=True)
        return h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(h: Any, name: str) -> Any:
        return h @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    h = jnp.take(p["tokens.weight"], x, axis=0) + p["positions.weight"]
    for i in range(DEPTH):
        at = f"blocks.{i}."
        q, k, v = (part.reshape(BATCH, LENGTH, HEADS, -1) for part in jnp.split(linear(norm(h, at + "norm1"), at + "qkv"), 3, -1))
        scores = jnp.einsum("bthk,bshk->bhts", q, k) / jnp.sqrt(jnp.float32(DIM // HEADS))
        scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -jnp.inf)
        attended = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores, -1), v).reshape(BATCH, LENGTH, DIM)
        h = h + linear(attended, at + "proj")
        h = h + linear(jax.nn.gelu(linear(norm(h, at + "norm2"), at + "up"), approximate=True), at + "down")
    logits = norm(h, "norm") @ p["tokens.weight"].T
    picked = jnp.sum(logits * jax.nn.one_hot(y, VOCAB, dtype=logits.dtype), -1)
    counts = y != -100  # torch's mean is over the targets that count
    return jnp.sum(jnp.where(counts, jax.nn.logsumexp(logits, -1) - picked, 0)) / jnp.sum(counts)


def by_hand(grid: mesh.Mesh, shapes: dict[str, tuple[int, ...]]) -> jax.stages.Compiled:
    """The step in JAX: AdamW by hand, state donated, shardings pinned."""

    def step(p: Any, m: Any, v: Any, count: Any, x: Any, y: Any, lr: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_by_hand)(p, x, y)
        count = count + 1
        m = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, m, grads)
        v = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, v, grads)
        c1, c2 = 1 - BETA1**count, 1 - BETA2**count
        p = jax.tree.map(lambda p, m, v: p * (1 - lr * DECAY) - lr * (m / c1) / (jnp.sqrt(v / c2) + EPS), p, m, v)
        return p, m, v, count, loss

    def shape(sizes: tuple[int, ...], spec: Any, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=mesh.ShardingSpec(grid, spec).to_jax())

    with jax.enable_x64(True):  # ids are int64, as torch's
        params = {name: shape(sizes, spec_of(name, len(sizes))) for name, sizes in shapes.items()}
        pinned = {name: s.sharding for name, s in params.items()}
        ids = shape((BATCH, LENGTH), ("data", None), jnp.int64)
        jitted = jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=(pinned, pinned, pinned, None, None))
        return jitted.lower(params, params, params, shape((), ()), ids, ids, shape((), ())).compile()


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("topology", [None, "v5e:2x4"], ids=["virtual", "v5e:2x4"])
def test_collectives_and_peak_memory_are_those_of_jax_by_hand(topology: str | None) -> None:
    if topology is not None:
        pytest.importorskip("libtpu", reason="the TPU compiler: pip install 'spmd-mesh[tpu]'")
    grid = mesh.Mesh(range(8), (4, 2), ("data", "model"), topology=topology)
    program, shapes = ours(grid)
    hand = by_hand(grid, shapes)
    theirs = _hlo.collectives(hand.as_text() or "", ("data", "model"), (4, 2))
    assert program.collectives().by_axis() == theirs.by_axis()
    sent = [sum(c.count * c.num_bytes for c in report) for report in (program.collectives(), theirs)]
    assert sent[0] == pytest.approx(sent[1], rel=0.03)
    assert program.memory().peak_bytes <= 1.03 * _hlo.memory(hand).peak_bytes

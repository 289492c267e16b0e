"""Operators around attention send what the same program sends when it is written by hand in JAX: no more, and no all-gather.

Batch lies along one axis, heads (or the vocabulary) along another. Each case is a loss with gradients of all its inputs, in
torch and in JAX. Merging dims that are sharded over different axes, as C++'s own decompositions do, would gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mesh
import spmd
from spmd.program.xla import _hlo
from tests.oracle import assert_same

pytestmark = pytest.mark.multidevice(num=8)
B, H, T, D, V = 8, 4, 6, 8, 32
C = H * D
HEADS = ("data", "model", None, None)  # of [B, H, T, D]
VISIBLE = np.tril(np.ones((T, T), bool), 1)


class Case(NamedTuple):
    """`torch_loss` and `jax_loss` take arrays of these shapes, or these very arrays; each comes with its spec."""

    torch_loss: Callable[..., torch.Tensor]
    jax_loss: Callable[..., jax.Array]
    inputs: tuple[tuple[Any, tuple[Any, ...]], ...]


def _attended(q: Any, k: Any, v: Any, visible: Any = None) -> Any:
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k) / np.sqrt(D).astype(np.float32)
    return jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(scores if visible is None else jnp.where(visible, scores, -jnp.inf)), v)


def _attended_in_groups(q: Any, k: Any, v: Any) -> Any:
    grouped = q.reshape(B, H // 2, 2, T, D)
    scores = jnp.einsum("bhgtd,bhsd->bhgts", grouped, k) / np.sqrt(D).astype(np.float32)
    return jnp.einsum("bhgts,bhsd->bhgtd", jax.nn.softmax(scores), v).reshape(B, H, T, D)


def _nll(logits: Any, labels: Any, smoothing: float = 0.0) -> Any:
    """Mean over the positions whose label is not -100; the vocabulary last, summed under a mask so that it stays where it is."""
    picked, kept = labels[..., None] == jnp.arange(V), labels != -100
    if smoothing:
        logp = jax.nn.log_softmax(logits)
        losses = -(1 - smoothing) * jnp.sum(jnp.where(picked, logp, 0.0), -1) - smoothing * jnp.mean(logp, -1)
    else:
        losses = jax.nn.logsumexp(logits, -1) - jnp.sum(jnp.where(picked, logits, 0.0), -1)
    return jnp.sum(jnp.where(kept, losses, 0.0)) / jnp.sum(kept, dtype=np.float32)


def _torch_block(split: Callable[[Any], Any], merge: Callable[[Any], Any]) -> Callable[..., Any]:
    def block(x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> Any:
        q, k, v = (split(F.linear(x, w)).transpose(1, 2) for w in (wq, wk, wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(merge(out.transpose(1, 2)), wo).square().sum()

    return block


def _jax_block(x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> Any:
    q, k, v = (jnp.swapaxes((x @ w.T).reshape(B, T, H, D), 1, 2) for w in (wq, wk, wv))
    out = _attended(q, k, v, np.tril(np.ones((T, T), bool)))
    return jnp.sum((jnp.swapaxes(out, 1, 2).reshape(B, T, C) @ wo.T) ** 2)


QKV = (((B, H, T, D), HEADS),) * 3
BLOCK = (((B, T, C), ("data", None, None)), *(((C, C), ("model", None)),) * 3, ((C, C), (None, "model")))
LOGITS = ((B, T, V), ("data", None, "model"))
LABELS = (np.arange(B * T).reshape(B, T) * 7 % V, ("data", None))

CASES: dict[str, Case] = {
    "matmul of four dims": Case(
        lambda q, k: (q @ k.transpose(-1, -2)).square().sum(), lambda q, k: jnp.sum((q @ jnp.swapaxes(k, -1, -2)) ** 2), QKV[:2]
    ),
    "matmul of five dims": Case(
        lambda q, k: torch.matmul(q.unflatten(2, (2, 3)), k.unsqueeze(2).mT).square().sum(),
        lambda q, k: jnp.sum((q.reshape(B, H, 2, 3, D) @ jnp.swapaxes(k, -1, -2)[:, :, None]) ** 2),
        QKV[:2],
    ),
    "einsum": Case(
        lambda q, k, v: torch.einsum("bhts,bhsd->bthd", torch.einsum("bhtd,bhsd->bhts", q, k), v).square().sum(),
        lambda q, k, v: jnp.sum(jnp.einsum("bhts,bhsd->bthd", jnp.einsum("bhtd,bhsd->bhts", q, k), v) ** 2),
        QKV,
    ),
    "einsum over heads": Case(
        lambda x, w: torch.einsum("bhtd,hdc->btc", x, w).square().sum(),
        lambda x, w: jnp.sum(jnp.einsum("bhtd,hdc->btc", x, w) ** 2),
        (QKV[0], ((H, D, C), ("model", None, None))),
    ),
    "attention": Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v).square().sum(), lambda q, k, v: jnp.sum(_attended(q, k, v) ** 2), QKV
    ),
    "attention with a mask": Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.from_numpy(VISIBLE).to("jax")).square().sum(),
        lambda q, k, v: jnp.sum(_attended(q, k, v, VISIBLE) ** 2),
        QKV,
    ),
    "attention with grouped queries": Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True).square().sum(),
        lambda q, k, v: jnp.sum(_attended_in_groups(q, k, v) ** 2),
        (QKV[0], *(((B, H // 2, T, D), HEADS),) * 2),
    ),
    "cross_entropy over a sharded vocabulary": Case(
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()), lambda x, y: _nll(x, y), (LOGITS, LABELS)
    ),
    "cross_entropy with the vocabulary second": Case(
        lambda x, y: F.cross_entropy(x.transpose(1, 2), y), lambda x, y: _nll(x, y), (LOGITS, LABELS)
    ),
    "cross_entropy with label smoothing": Case(
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1),
        lambda x, y: _nll(x, y, 0.1),
        (LOGITS, LABELS),
    ),
    "head and cross_entropy": Case(
        lambda x, w, y: F.cross_entropy(F.linear(x, w).view(-1, V), y.view(-1)),
        lambda x, w, y: _nll(x @ w.T, y),
        (((B, T, C), ("data", None, None)), ((V, C), ("model", None)), LABELS),
    ),
    "unflatten, attention, flatten": Case(_torch_block(lambda x: x.unflatten(-1, (H, D)), lambda x: x.flatten(2)), _jax_block, BLOCK),
    "view, attention, reshape": Case(_torch_block(lambda x: x.view(B, T, H, D), lambda x: x.reshape(B, T, C)), _jax_block, BLOCK),
    "view, attention, contiguous and view": Case(
        _torch_block(lambda x: x.view(B, T, -1, D), lambda x: x.contiguous().view(B, T, -1)), _jax_block, BLOCK
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_collectives_are_those_of_jax_by_hand_and_gather_nothing(name: str, mesh_4x2: mesh.Mesh) -> None:
    case = CASES[name]
    rng = np.random.default_rng(0)
    values = [given if isinstance(given, np.ndarray) else rng.normal(scale=0.3, size=given).astype(np.float32) for given, _ in case.inputs]
    wanted = tuple(i for i, value in enumerate(values) if value.dtype == np.float32)
    layouts = [mesh.ShardingSpec(mesh_4x2, mesh.PartitionSpec(*spec)).to_jax() for _, spec in case.inputs]
    tensors = [spmd.mark_sharding(torch.from_numpy(v).to("jax"), mesh_4x2, spec) for v, (_, spec) in zip(values, case.inputs, strict=True)]
    for i in wanted:
        tensors[i].requires_grad_()

    @spmd.compile
    def ours(*inputs: torch.Tensor) -> Any:
        loss = case.torch_loss(*inputs)
        return loss, *torch.autograd.grad(loss, [inputs[i] for i in wanted])

    by_hand = jax.jit(jax.value_and_grad(case.jax_loss, argnums=wanted))
    arrays = [jax.device_put(v, layout) for v, layout in zip(values, layouts, strict=True)]
    results = ours(*tensors)
    compiled = by_hand.lower(*arrays).compile()
    loss, gradients = compiled(*arrays)
    assert_same(results, tuple(torch.from_numpy(np.array(x)) for x in (loss, *gradients)), (1e-4, 1e-5))
    expected = _hlo.collectives(compiled.as_text(), mesh_4x2.axis_names, mesh_4x2.mesh_shape).by_axis()
    assert ours.collectives().by_axis() == expected
    assert not [kind for kind, _ in expected if kind != "all-reduce"]

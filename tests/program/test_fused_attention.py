"""Attention by kernels: equal to its plain meaning, split as the partitioner would split it, only in programs for TPUs."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import mesh
import spmd
from spmd.base._convert import exact_dtypes
from spmd.lowering import _splash, fused_attention
from spmd.program.trace import _capture
from spmd.program.xla import _partition
from tests.oracle import assert_same

WIDTH = 64  # of a head
BATCH, HEADS, LENGTH = 4, 8, 128


def drawn(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def arrays(num_kv_heads: int, num_queries: int, num_keys: int, dtype: Any) -> list[jax.Array]:
    """Query, key, value and the gradient of the result."""
    of_query, of_key = (2, 4, num_queries, WIDTH), (2, num_kv_heads, num_keys, WIDTH)
    return [drawn(seed, shape, dtype) for seed, shape in enumerate((of_query, of_key, of_key, of_query))]


def differentiated(fn: Callable[..., jax.Array], query: jax.Array, key: jax.Array, value: jax.Array, grad: jax.Array) -> list[jax.Array]:
    out, vjp = jax.vjp(fn, query, key, value)
    return [out, *vjp(grad)]


def as_torch(array: jax.Array) -> torch.Tensor:
    """In float32 if it has fewer bits."""
    return torch.tensor(jax.device_get(array.astype(jnp.promote_types(array.dtype, jnp.float32))))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_plain_meaning_and_its_gradient_equal_cpu(num_kv_heads: int, is_causal: bool) -> None:
    with exact_dtypes():
        given = arrays(num_kv_heads, 5, 7, jnp.float64)
        got = differentiated(lambda q, k, v: fused_attention.attention(q, k, v, is_causal, 0.3), *given)
        q, k, v, g = (as_torch(x).requires_grad_() for x in given)
        found = [as_torch(x) for x in got]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3, enable_gqa=True)
    assert_same(found, [out, *torch.autograd.grad(out, (q, k, v), g)])


def test_second_derivatives_and_vmap_are_those_of_the_plain_meaning() -> None:
    q, k, v, g = arrays(2, 5, 7, jnp.float32)

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return fused_attention.plain_attention(q, k, v, is_causal=True, scale=0.3)[0]

    def fused(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return fused_attention.attention(q, k, v, True, 0.3)

    def second(fn: Callable[..., jax.Array]) -> Any:
        return jax.grad(lambda q: sum(jnp.vdot(x, x) for x in jax.vjp(fn, q, k, v)[1](g)))(q)

    def mapped(fn: Callable[..., jax.Array]) -> Any:
        many = jnp.stack([q, 2 * q, -q])
        return jax.vmap(jax.grad(lambda q, v: jnp.vdot(fn(q, k, v), g)), (0, None))(many, v)

    for of in (second, mapped):
        assert_same(as_torch(of(fused)), as_torch(of(plain)), (2e-5, 2e-5))


@pytest.mark.parametrize(("num_kv_heads", "num_queries", "num_keys", "is_causal"), [(4, 128, 128, True), (2, 256, 128, False)])
def test_kernels_equal_the_plain_meaning(num_kv_heads: int, num_queries: int, num_keys: int, is_causal: bool) -> None:
    q, k, v, g = arrays(num_kv_heads, num_queries, num_keys, jnp.bfloat16)
    said: dict[str, Any] = {"is_causal": is_causal, "scale": WIDTH**-0.5}
    exact = [x.astype(jnp.float32) for x in (q, k, v, g)]
    out, norm = fused_attention.plain_attention(*exact[:3], **said)
    grads = fused_attention.plain_attention_grad(*exact[:3], out, norm, exact[3], **said)
    got = _splash.forward(q, k, v, interpret=True, **said)
    got_grads = _splash.backward(q, k, v, *got, g, interpret=True, **said)
    assert_same([as_torch(x) for x in (*got, *got_grads)], [as_torch(x) for x in (out, norm, *grads)], (2e-2, 1e-2))


@pytest.mark.parametrize(
    ("shape", "dtype", "is_taken"),
    [
        ((2, 4, 1024, 64), jnp.bfloat16, True),
        ((2, 4, 1024, 64), jnp.float32, False),
        ((2, 4, 1100, 64), jnp.bfloat16, False),
        ((2, 4, 1024, 48), jnp.bfloat16, False),
        ((2, 4, 512, 64), jnp.bfloat16, False),
        ((4, 1024, 64), jnp.bfloat16, False),
    ],
)
def test_kernels_are_chosen_by_type_and_shape(shape: tuple[int, ...], dtype: Any, is_taken: bool) -> None:
    assert _splash.takes(*(jax.ShapeDtypeStruct(shape, dtype),) * 3) == is_taken


class Block(nn.Module):
    """Causal self-attention with grouped queries."""

    def __init__(self, num_kv_heads: int) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.query = nn.Linear(HEADS * WIDTH, HEADS * WIDTH, bias=False)
        self.key = nn.Linear(HEADS * WIDTH, num_kv_heads * WIDTH, bias=False)
        self.value = nn.Linear(HEADS * WIDTH, num_kv_heads * WIDTH, bias=False)
        self.out = nn.Linear(HEADS * WIDTH, HEADS * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (heads, WIDTH)).transpose(1, 2)
            for linear, heads in ((self.query, HEADS), (self.key, self.num_kv_heads), (self.value, self.num_kv_heads))
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(heads.transpose(1, 2).flatten(2))


def marked(model: Block, grid: mesh.Mesh) -> Block:
    for name, parameter in model.named_parameters():
        spmd.mark_sharding(parameter, grid, (None, "model") if name.startswith("out") else ("model", None))
    return model


def trained(num_kv_heads: int, grid: mesh.Mesh, batch: int) -> list[torch.Tensor]:
    """Loss and gradients of one step."""
    torch.manual_seed(0)
    model = marked(Block(num_kv_heads).to(torch.bfloat16).to("jax"), grid)
    x = torch.randn(batch, LENGTH, HEADS * WIDTH, dtype=torch.bfloat16).to("jax")

    @spmd.compile(keep_grads=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        return loss

    loss = step(spmd.mark_sharding(x, grid, ("data", None, None)))
    return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("num_kv_heads", "shape", "batch"),
    [
        (4, (2, 4), 4),
        pytest.param(2, (2, 4), 4, marks=pytest.mark.slow),  # two devices share a head of keys
        (1, (2, 4), 4),  # all do
        (8, (4, 2), 6),  # a batch that its axis does not divide
    ],
)
def test_step_with_kernels_equals_the_plain_step(
    num_kv_heads: int, shape: tuple[int, int], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = mesh.Mesh(range(8), shape, ("data", "model"))
    plain = trained(num_kv_heads, grid, batch)
    interpreted = {p: dataclasses.replace(kernel, run=partial(kernel.run, interpret=True)) for p, kernel in _partition._KERNELS.items()}
    ran: list[int] = []
    lowered = _partition.lowered

    def for_tpu(jitted: Any, args: Any, grid: Any, platform: str) -> Any:
        found = lowered(jitted, args, grid, "tpu")
        ran.append(found.as_text().count("sdy.manual_computation"))
        return found

    monkeypatch.setattr(_splash, "_LEAST_SCORES", 0)
    monkeypatch.setattr(_partition, "_KERNELS", interpreted)
    monkeypatch.setattr(_partition, "lowered", for_tpu)
    monkeypatch.setattr(_capture, "likely_platform", lambda buffers: "tpu")
    with_kernels = trained(num_kv_heads, grid, batch)
    assert len(plain) == 5 and ran[0] > 0
    assert_same(with_kernels, plain)


def program_over(topology: str, shape: tuple[int, int], num_kv_heads: int, length: int = 1024) -> Any:
    grid = mesh.Mesh(range(shape[0] * shape[1]), shape, ("data", "model"), topology=topology)
    with torch.device("meta"):
        model = Block(num_kv_heads).to(torch.bfloat16)
    marked(model.to_empty(device="jax"), grid)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.empty(BATCH, length, HEADS * WIDTH, dtype=torch.bfloat16, device="jax")
    return spmd.compile(step).program(spmd.mark_sharding(x, grid, ("data", None, None)))


def traffic(program: Any) -> list[tuple[str, tuple[str, ...], int]]:
    return sorted((item.kind, item.axes, item.count * item.num_bytes) for item in program.collectives())


KERNEL = 'custom_call_target="tpu_custom_call"'


def test_program_for_one_chip_has_the_kernels() -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler: pip install 'spmd-mesh[tpu]'")
    assert program_over("v5e:2x4", (1, 1), HEADS).hlo().count(KERNEL) == 3  # forward, gradient of queries, of keys and values


def test_tpu_program_has_the_kernels_and_gathers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler: pip install 'spmd-mesh[tpu]'")
    program = program_over("v5e:2x4", (2, 4), HEADS, length=4096)
    assert program.hlo().count(KERNEL) == 3
    assert not any(item.kind == "all-gather" for item in program.collectives())
    monkeypatch.setattr(_capture, "likely_platform", lambda buffers: "cpu")
    plain = program_over("v5e:2x4", (2, 4), HEADS, length=4096)
    assert KERNEL not in plain.hlo()
    assert traffic(program) == traffic(plain)
    assert program.memory().temp_bytes < plain.memory().temp_bytes / 2


def test_a_program_for_tpus_leaves_what_runs_here_alone() -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler: pip install 'spmd-mesh[tpu]'")
    program_over("v5e:2x4", (2, 4), HEADS)
    q = torch.randn(1, HEADS, 1024, WIDTH, dtype=torch.bfloat16)
    eager = F.scaled_dot_product_attention(*(q.to("jax"),) * 3, is_causal=True, enable_gqa=True)
    assert_same(eager, F.scaled_dot_product_attention(q, q, q, is_causal=True))


def positions(length: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of queries and of keys."""
    place = torch.arange(length, device=x.device)
    return place[:, None], place[None, :]


def packed(length: int, x: torch.Tensor) -> torch.Tensor:
    """As transformers makes it of positions that never start anew: [B, 1, T, T], each batch by itself."""
    sequence = torch.cat([torch.zeros(1, device=x.device), torch.arange(length, device=x.device).diff() != 1]).cumsum(0).expand(len(x), -1)
    query, key = positions(length, x)
    return ((query >= key) & (sequence[:, :, None] == sequence[:, None, :]))[:, None]


KNOWN_MASKS: dict[str, tuple[Callable[[int, torch.Tensor], torch.Tensor], bool | None]] = {
    "positions": (lambda length, x: (positions(length, x)[0] >= positions(length, x)[1]).expand(len(x), 1, -1, -1), True),
    "positions of each batch": (packed, True),
    "nothing hidden": (lambda length, x: torch.ones(length, length, dtype=torch.bool, device=x.device), False),
    "window": (lambda length, x: (positions(length, x)[0] >= positions(length, x)[1]) & (positions(length, x)[1] > 5), None),
    "of an input": (lambda length, x: (positions(length, x)[0] >= positions(length, x)[1]) & (x[:, :1, :1, :1] < 100), None),
}


@pytest.mark.parametrize("name", KNOWN_MASKS)
def test_a_mask_is_left_out_where_it_is_known_to_say_no_more_than_is_causal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask_of, is_causal = KNOWN_MASKS[name]
    fused: list[bool] = []
    attention = fused_attention.attention
    monkeypatch.setattr(fused_attention, "attention", lambda *args: fused.append(args[3]) or attention(*args))
    monkeypatch.setattr(_capture, "likely_platform", lambda buffers: "tpu")
    monkeypatch.setattr(_splash, "_LEAST_SCORES", 0)

    def attended(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask_of(x.shape[2], x))

    num_batches = 2 + list(KNOWN_MASKS).index(name)  # of its own: what was traced for one shape is not traced again
    x = torch.randn(num_batches, 2, LENGTH, WIDTH, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    found = spmd.compile(attended)(x.to("jax").requires_grad_())
    assert fused == ([] if is_causal is None else [is_causal])
    assert_same(found, attended(x))

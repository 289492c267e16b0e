"""Dims that their axes do not divide: padded in storage, and nowhere to be seen."""

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import mesh
import spmd
from tests.oracle import assert_same, assert_same_model

pytestmark = pytest.mark.multidevice(num=8)

VOCABULARY, WIDTH = 1003, 16


class LanguageModel(nn.Module):
    """Embedding and output layer share one matrix [vocabulary, width], as in GPT-2."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(self.mix(self.embed(ids))), self.embed.weight, self.bias)


def pair(grid: mesh.Mesh, vocabulary: int = VOCABULARY) -> tuple[LanguageModel, LanguageModel]:
    """(on the CPU, on the mesh with the vocabulary split over `model`)."""
    torch.manual_seed(0)
    host = LanguageModel(vocabulary)
    device = copy.deepcopy(host).to("jax")
    spmd.mark_sharding(device.embed.weight, grid, ("model", None))
    spmd.mark_sharding(device.bias, grid, ("model",))
    return host, device


def train(model: LanguageModel, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    optimizer.zero_grad()
    logits = model(ids)
    loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids.reshape(-1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss, logits.argmax(-1)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (1, 8)])
def test_training_with_an_uneven_vocabulary_equals_cpu_torch(shape: tuple[int, int], name: str) -> None:
    grid = mesh.Mesh(range(8), shape, ("data", "model"))
    host, device = pair(grid)
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (host, device)]
    step = spmd.compile(lambda ids: train(device, optimizers[1], ids))
    for seed in range(4):
        ids = torch.randint(0, VOCABULARY, (8, 5), generator=torch.Generator().manual_seed(seed))
        expected = train(host, optimizers[0], ids)
        found = step(spmd.mark_sharding(ids.to("jax"), grid, ("data", None)))
        assert_same(found[0], expected[0])
        assert torch.equal(found[1].cpu(), expected[1])
    assert (step.num_traces, step.num_executables) == (1, 1)
    assert_same_model(device, host)
    for state in optimizers[1].state.values():
        for value in state.values():
            assert not value.dim() or value.shape[0] in (VOCABULARY, WIDTH)


@pytest.mark.parametrize("spec", [("model", None), (None, "data")])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Rprop, torch.optim.RMSprop, torch.optim.NAdam])
def test_a_parameter_without_a_gradient_has_its_value_after_the_first_step(kind: Any, spec: Any) -> None:
    grid = mesh.Mesh(range(8), (2, 4), ("data", "model"))
    unused, used = (spmd.mark_sharding(torch.arange(15.0).reshape(5, 3).to("jax"), grid, spec).requires_grad_() for _ in range(2))
    optimizer = kind([unused, used], 0.1)

    @spmd.compile
    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (used * 2).sum()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(2):
        step()
        assert torch.equal(unused.detach().cpu(), torch.arange(15.0).reshape(5, 3))


def collectives_of(vocabulary: int) -> Any:
    grid = mesh.Mesh(range(8), (2, 4), ("data", "model"))
    _, device = pair(grid, vocabulary)
    optimizer = OPTIMIZERS["adamw"](device.parameters())
    step = spmd.compile(lambda ids: train(device, optimizer, ids)[0])
    step(spmd.mark_sharding(torch.zeros(8, 5, dtype=torch.int64).to("jax"), grid, ("data", None)))
    return step.collectives().by_axis()


def test_padding_costs_no_communication() -> None:
    assert collectives_of(1003) == collectives_of(1004)


def test_shards_are_equal_and_their_unpadded_data_is_the_tensor(mesh_4x2: mesh.Mesh) -> None:
    host = torch.arange(21.0).reshape(7, 3)
    before = spmd.metrics.counters().get("upload_bytes", 0)
    t = spmd.mark_sharding(host.to("jax"), mesh_4x2, ("data", "model"))
    assert spmd.metrics.counters()["upload_bytes"] - before == 8 * 2 * 2 * 4  # the bytes of the shards, padding included
    assert t.shape == (7, 3)
    assert t.sharding_spec is not None
    assert t.sharding_spec.shard_shape((7, 3)) == (2, 2)
    found = torch.full((7, 3), -1.0)
    for shard in t.local_shards:
        assert shard.data.shape == (2, 2)
        found[shard.indices] = shard.unpadded_data
    assert torch.equal(found, host)
    assert torch.equal(t.cpu(), host)


@pytest.mark.parametrize(
    "op",
    [
        lambda t: t.sum(),
        lambda t: t.mean(0),
        lambda t: t.amax(0),
        lambda t: t.amin(),
        lambda t: t.argmin(0),
        lambda t: t.softmax(0),
        lambda t: t.log_softmax(0),
        lambda t: t.sort(0, descending=True).values,
        lambda t: t.cumsum(0),
        lambda t: t.prod(0),
        lambda t: t.std(0),
        lambda t: t.flip(0),
        lambda t: t.T @ t,
        lambda t: torch.cat([t, t]),
        lambda t: t.reshape(-1)[::2],
        lambda t: torch.linalg.vector_norm(t),
        lambda t: (t != 0).all(),
        lambda t: torch.topk(t, 3, 0).values,
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_no_operation_sees_the_padding(mesh_4x2: mesh.Mesh, op: Any, compiled: bool) -> None:
    host = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)) - 5
    t = spmd.mark_sharding(host.to("jax"), mesh_4x2, ("data", "model"))
    found = spmd.compile(op)(t) if compiled else op(t)
    torch.testing.assert_close(found.cpu(), op(host))


def test_writes_in_place_and_through_views(mesh_4x2: mesh.Mesh) -> None:
    host = torch.arange(10.0)
    t = spmd.mark_sharding(host.clone().to("jax"), mesh_4x2, ("data",))
    for x in (host, t):
        x[3:].mul_(2)
        x.add_(1)
        x[-1] = 7
    assert torch.equal(t.cpu(), host)
    assert [s.data.shape for s in t.local_shards] == [(3,)] * 8
    assert torch.equal(copy.deepcopy(t).cpu(), host)
    spmd.mark_sharding(t, mesh_4x2, ("model",))
    assert torch.equal(t.cpu(), host)
    spmd.mark_sharding(t, mesh_4x2, (("data", "model"),))
    assert [s.data.shape for s in t.local_shards] == [(2,)] * 8
    assert torch.equal(t.cpu(), host)


def test_a_kept_gradient_has_its_parameters_shape_and_layout(mesh_4x2: mesh.Mesh) -> None:
    host, device = pair(mesh_4x2)
    ids = torch.arange(8).reshape(2, 4)
    host(ids).square().mean().backward()
    spmd.compile(lambda x: device(x).square().mean().backward(), keep_grads=True)(ids.to("jax"))
    grad = device.embed.weight.grad
    assert grad is not None
    assert grad.shape == (VOCABULARY, WIDTH)
    assert_same(grad, host.embed.weight.grad)


def test_a_constraint_on_an_uneven_activation(mesh_4x2: mesh.Mesh) -> None:
    host = torch.randn(7, 5)
    found = spmd.compile(lambda x: spmd.mark_sharding(x * 2, mesh_4x2, ("data", "model")).softmax(0))(host.to("jax"))
    torch.testing.assert_close(found.cpu(), (host * 2).softmax(0))


def test_uneven_error_refuses(mesh_4x2: mesh.Mesh) -> None:
    model = nn.Linear(4, 10).to("jax")
    with pytest.raises(mesh.SpecError) as refused:
        spmd.mark_sharding(model.weight, mesh_4x2, ("data", None), uneven="error")
    assert str(refused.value) == (
        "parameter 'weight' of shape (10, 4) cannot be sharded by ('data', None)\n"
        "  dim 0 has 10 elements, axis 'data' has size 4, and uneven=\"error\" was asked for\n"
        '  fix: drop uneven="error" to pad to (12, 4), or shard dim 1 (4)'
    )

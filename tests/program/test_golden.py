"""Golden plans: the compiled step communicates as the program written by hand in JAX does, kind by kind, axis by axis.

XLA:CPU leaves a reduce-scatter as an all-reduce whose result is sliced; tests/fsdp compiles for TPU, where it is one.
"""

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn

import mesh
import spmd
from tests.program import golden
from tests.program.golden import Hand, Transformer

pytestmark = pytest.mark.multidevice(num=8)
M = "model"
MEGATRON = [
    ("{q,k,v,up}.weight", (M, None)),
    ("{q,k,v,up}.bias", (M,)),
    ("{out,down}.weight", (None, M)),
    ("{out,down}.bias", None),
    ("{tokens,head}.weight", (M, None)),
    ("{norm,norm1,norm2}.*", None),
]


def twin(**annotations: Any) -> tuple[Transformer, Transformer]:
    """The same model on the host and, with annotations of activations, on the device."""
    torch.manual_seed(0)
    host = Transformer()
    torch.manual_seed(0)
    return host, Transformer(**annotations).to("jax")


def host_losses(host: Transformer, steps: int) -> list[float]:
    step = golden.torch_step(host, torch.optim.SGD(host.parameters(), lr=golden.LR))
    return [step(*golden.batch()).item() for _ in range(steps)]


def annotation(grid: mesh.Mesh, spec: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: spmd.mark_sharding(tensor, grid, spec)


SEQUENCE = {"between": ("data", M, None), "inside": ("data", None, None), "split": ("data", None, M)}
# (mesh, spec of the tokens, annotated activations, collectives by kind and axes)
# Forward and backward of 3 layers sum over "model" 6 times each, less the first layer's backward, which only the embedding
# and the norms before it need; the cross-entropy over a split vocabulary sums 3 times, the look-up in a split table once.
PLANS: dict[str, tuple[str, Any, dict[str, Any], dict[tuple[str, tuple[str, ...]], int]]] = {
    "Megatron, one axis": ("model=8", (None, None), {}, {("all-reduce", (M,)): 16}),
    "Megatron, two axes": ("data=2,model=4", ("data", None), {}, {("all-reduce", (M,)): 16, ("all-reduce", ("data",)): 2}),
    "Megatron, sequence parallel": (
        "data=2,model=4",
        ("data", None),
        SEQUENCE,
        {("all-gather", (M,)): 14, ("all-reduce", (M,)): 16, ("all-reduce", ("data",)): 2},
    ),
}


@pytest.mark.parametrize("plan", PLANS)
def test_tensor_parallel_steps_communicate_as_jax_by_hand(plan: str) -> None:
    axes, tokens, activations, expected = PLANS[plan]
    grid = mesh.Mesh.from_string(axes)
    host, device = twin(**{name: annotation(grid, spec) for name, spec in activations.items()})
    report = spmd.shard_module(device, grid, MEGATRON)
    specs = {placement.name: tuple(placement.sharding.partition_spec) for placement in report}
    hand = Hand(grid, specs, tokens, **activations).compiled(host)
    step, losses = golden.ours(device, grid, tokens, steps=2)
    assert step.collectives().by_axis() == golden.collectives(hand, grid) == expected
    assert losses == pytest.approx(host_losses(host, 2), rel=1e-5)
    assert step.flops() == golden.flops(hand)


GATHERS, AGAIN = 52, 18  # parameters of the model; those of three blocks that a backward reads whole (six matrices each)
SHARDED: dict[str, tuple[str, Any, bool, dict[tuple[str, tuple[str, ...]], int]]] = {
    "FSDP, weights kept": ("fsdp=8", ("fsdp", None), False, {("all-gather", ("fsdp",)): GATHERS, ("all-reduce", ("fsdp",)): 2}),
    "FSDP": ("fsdp=8", ("fsdp", None), True, {("all-gather", ("fsdp",)): GATHERS + AGAIN, ("all-reduce", ("fsdp",)): 2}),
    "hybrid": (
        "replica=2,fsdp=4",
        (("replica", "fsdp"), None),
        True,
        {
            ("all-gather", ("fsdp",)): GATHERS + AGAIN,
            ("all-reduce", ("replica", "fsdp")): 2,
            ("all-reduce", ("fsdp",)): 1,
            ("all-reduce", ("replica",)): 1,
        },
    ),
}


@pytest.mark.parametrize("plan", SHARDED)
def test_fully_sharded_steps_communicate_as_jax_by_hand(plan: str) -> None:
    axes, tokens, reshard, expected = SHARDED[plan]
    grid = mesh.Mesh.from_string(axes)
    host, device = twin()
    for block in device.blocks:
        spmd.fully_shard(block, grid, reshard_after_forward=reshard)
    spmd.fully_shard(device, grid, reshard_after_forward=False)
    specs = {name: p.partition_spec for name, p in device.named_parameters()}
    gathered = {name: tuple(mesh.without_axes(spec, ("fsdp",))) for name, spec in specs.items()}
    hand = Hand(grid, {n: tuple(s) for n, s in specs.items()}, tokens, gathered=gathered, remat_gathers=reshard).compiled(host)
    step, losses = golden.ours(device, grid, tokens, steps=2)
    assert step.collectives().by_axis() == golden.collectives(hand, grid) == expected
    assert losses == pytest.approx(host_losses(host, 2), rel=1e-5)
    assert step.flops() == golden.flops(hand)


# An EmbeddingBag's table split by rows: each device looks its own rows up, the sums are added. Split by columns: each device
# looks all ids up in its columns, and what is computed from them is gathered or summed as its reader needs.
TABLES: dict[str, tuple[tuple[Any, ...], dict[tuple[str, tuple[str, ...]], int]]] = {
    "rows": (("model", None), {("all-reduce", ("data",)): 1, ("all-reduce", ("model",)): 1}),
    "columns": ((None, "model"), {("all-gather", ("model",)): 1, ("all-reduce", ("data",)): 1, ("all-reduce", ("model",)): 1}),
}
ROWS, COLUMNS, BAGS, IDS = 64, 32, 16, 4


class Ranker(nn.Module):
    """Bags of ids -> a score, as recommenders do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, COLUMNS, mode="sum")
        self.score = nn.Linear(COLUMNS, 1)

    def forward(self, ids_BN: torch.Tensor) -> torch.Tensor:
        return self.score(self.table(ids_BN)).squeeze(-1)


def ranker_by_hand(host: Ranker, grid: mesh.Mesh, spec: Any, ids: torch.Tensor, wanted: torch.Tensor) -> Any:
    at = lambda *entries: NamedSharding(grid.to_jax(), P(*entries))  # noqa: E731
    weights = {name: jnp.asarray(p.detach().numpy()) for name, p in host.named_parameters()}
    shardings = {"table.weight": at(*spec), "score.weight": at(None, None), "score.bias": at(None)}

    def loss_of(w: Any, ids_BN: jax.Array, wanted_B: jax.Array) -> jax.Array:
        bags_BC = jnp.take(w["table.weight"], ids_BN, axis=0).sum(1)
        return jnp.mean(((bags_BC @ w["score.weight"].T + w["score.bias"])[:, 0] - wanted_B) ** 2)

    def step(w: Any, ids_BN: jax.Array, wanted_B: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(w, ids_BN, wanted_B)
        return {name: value - golden.LR * grads[name] for name, value in w.items()}, loss

    arrays = jax.device_put(weights, shardings), jax.device_put(ids.numpy(), at("data", None)), jax.device_put(wanted.numpy(), at("data"))
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, at())).lower(*arrays).compile()


@pytest.mark.parametrize("table", TABLES)
def test_a_split_embedding_bag_communicates_as_jax_by_hand(table: str, mesh_4x2: mesh.Mesh) -> None:
    spec, expected = TABLES[table]
    torch.manual_seed(0)
    host = Ranker()
    device = copy.deepcopy(host).to("jax")
    ids, wanted = torch.randint(0, ROWS, (BAGS, IDS)), torch.randn(BAGS)
    spmd.shard_module(device, mesh_4x2, [("table.weight", spec), ("score.*", None)])
    hand = ranker_by_hand(host, mesh_4x2, spec, ids, wanted)

    def train(model: Ranker, optimizer: torch.optim.Optimizer, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(ids), wanted)
        loss.backward()
        optimizer.step()
        return loss

    optimizers = [torch.optim.SGD(m.parameters(), lr=golden.LR) for m in (host, device)]
    step = spmd.compile(lambda ids, wanted: train(device, optimizers[1], ids, wanted))
    at_mesh = spmd.mark_sharding(ids.to("jax"), mesh_4x2, ("data", None)), spmd.mark_sharding(wanted.to("jax"), mesh_4x2, ("data",))
    losses = [step(*at_mesh).item() for _ in range(2)]
    assert losses == pytest.approx([train(host, optimizers[0], ids, wanted).item() for _ in range(2)], rel=1e-5)
    assert step.collectives().by_axis() == golden.collectives(hand, mesh_4x2) == expected

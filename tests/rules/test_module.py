"""`shard_module`: every way to say the rules gives the same layouts, findings are raised, and models train as unsharded."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import mesh
import spmd
from tests.oracle import MLP, array_of, assert_same, assert_same_model, batch, train, twins

pytestmark = pytest.mark.multidevice(num=8)

MEGATRON = {"up.weight": ("model", None), "up.bias": ("model",), "down.weight": (None, "model"), "down.bias": (None,)}
WAYS: dict[str, Any] = {
    "pairs": [("up.weight", ("model", None)), ("up.bias", ("model",)), ("down.weight", (None, "model")), ("down.bias", None)],
    "Rules": mesh.Rules(("up.*", lambda name, shape, mesh: ("model", *(None,) * (len(shape) - 1))), ("down.weight", (None, "model"))),
    "dict": {"up.weight": ("model", None), "up.bias": ("model",), "down.weight": (None, "model")},
    "function": lambda name, parameter: MEGATRON[name],
    "DTensor plan": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "Hugging Face plan": {"up": "colwise", "down": "rowwise"},
    "placements": [
        ("up.*", [Replicate(), Shard(0)]),
        ("down.weight", [Replicate(), Shard(1)]),
    ],
    "placements by function": lambda name, p: (
        {"up": [Replicate(), Shard(0)], "down": [Replicate(), Shard(p.dim() - 1)]}[name.split(".")[0]] if name != "down.bias" else None
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_say_it_gives_the_same_layouts(way: str, mesh_4x2: mesh.Mesh) -> None:
    model = MLP().to("jax")
    report = spmd.shard_module(model, mesh_4x2, WAYS[way])
    assert {name: tuple(p.partition_spec) for name, p in model.named_parameters()} == MEGATRON
    assert {p.name: tuple(p.sharding.partition_spec) for p in report} == MEGATRON
    assert report.findings == ()


@pytest.mark.parametrize("way", WAYS)
def test_a_sharded_model_trains_as_the_unsharded_one(way: str, mesh_4x2: mesh.Mesh) -> None:
    host, device = twins()
    spmd.shard_module(device, mesh_4x2, WAYS[way])
    x, y = batch(8, 8), batch(8, 8, seed=2)
    on_device = [spmd.mark_sharding(t.to("jax"), mesh_4x2, ("data", None)) for t in (x, y)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (host, device)]
    step = spmd.compile(lambda x, y: train(device, optimizers[1], x, y))
    for _ in range(3):
        assert_same(step(*on_device).detach(), train(host, optimizers[0], x, y).detach())
    assert_same_model(device, host)


def test_one_call_marks_buffers_too_and_leaves_tied_weights_tied(mesh_4x2: mesh.Mesh) -> None:
    model = nn.Module()
    model.embed, model.head, model.norm = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False), nn.BatchNorm1d(8)
    model.head.weight = model.embed.weight
    model.to("jax")
    report = spmd.shard_module(
        model, mesh_4x2, [("head.weight", ("model", None)), ("norm.running_*", ("model",)), ("norm.{weight,bias}", None)]
    )
    assert model.head.weight is model.embed.weight
    assert tuple(model.embed.weight.partition_spec) == ("model", None)
    assert tuple(model.norm.running_mean.partition_spec) == ("model",)
    assert tuple(model.norm.num_batches_tracked.partition_spec) == ()
    assert report["embed.weight"].rule == "head.weight"


def test_strict_raises_before_anything_is_marked(mesh_4x2: mesh.Mesh) -> None:
    model = MLP().to("jax")
    rules = [("up.weight", ("model", None)), ("nothing.weight", None)]
    with pytest.raises(mesh.RulesError, match="rule 'nothing.weight' matches no name"):
        spmd.shard_module(model, mesh_4x2, rules)
    assert not any(isinstance(p, spmd.XLAShardedTensor) for p in model.parameters())
    report = spmd.shard_module(model, mesh_4x2, rules, strict=False)
    assert [f.kind for f in report.errors] == ["unmatched"]
    assert tuple(model.up.weight.partition_spec) == ("model", None)


def test_a_large_parameter_left_whole_is_an_error_of_any_size_asked_for(mesh_4x2: mesh.Mesh) -> None:
    model = MLP().to("jax")
    with pytest.raises(mesh.RulesError, match="'down.weight' of shape \\(8, 16\\), 512 B, is replicated"):
        spmd.shard_module(model, mesh_4x2, [("up.*", lambda n, s, m: ("model", *(None,) * (len(s) - 1)))], large_bytes=512)


class Attention(nn.Module):
    def __init__(self, num_heads: int, kv_heads: int, head_dim: int, packed: bool = False) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = num_heads, kv_heads, head_dim
        width = num_heads * head_dim
        if packed:
            self.qkv = nn.Linear(width, (num_heads + 2 * kv_heads) * head_dim)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, n * head_dim) for n in (num_heads, kv_heads, kv_heads))


HEADS = [
    ((4, 2, 8), "data=2,model=4", "heads", "2 heads of 8, split into 4 shards"),
    ((4, 4, 8), "data=2,model=4", None, ""),
    ((6, 6, 8), "data=2,model=4", "heads", "6 heads of 8"),
    ((3, 3, 8, True), "data=4,model=2", "heads", "3 query and 3 key-value heads"),
    ((3, 3, 2, True), "data=1,model=6", "heads", "6 shards"),
]


@pytest.mark.parametrize(("sizes", "grid", "kind", "part"), HEADS, ids=str)
def test_heads_that_the_axis_does_not_divide_are_found(sizes: Any, grid: str, kind: str | None, part: str) -> None:
    rules: Any = [("{q_proj,k_proj,v_proj,qkv}.weight", ("model", None)), ("bias", None)]
    model = nn.ModuleDict({"attention": Attention(*sizes)}).to("jax")
    report = spmd.shard_module(model, mesh.Mesh.from_string(grid), rules, strict=False)
    assert ([f.kind for f in report.errors][:1] or [None])[0] == kind
    assert all(part in str(finding) for finding in report.errors[:1])


def test_a_packed_projection_is_noted_and_one_that_is_cut_within_a_part_is_an_error() -> None:
    grid = mesh.Mesh.from_string("data=2,model=4")
    model = nn.ModuleDict({"attention": Attention(4, 4, 8, packed=True), "gate_up_proj": nn.Linear(4, 12)}).to("jax")
    report = spmd.shard_module(
        model, grid, [("qkv.weight", ("model", None)), ("gate_up_proj.weight", ("model", None)), ("bias", None)], strict=False
    )
    assert [(f.kind, f.is_error) for f in report.findings] == [("packed", False), ("packed", True)]
    assert "packs gate and up, 6 each, which 4 shards do not divide" in report.findings[1].what


class Block(nn.Module):
    """A norm and a gated pair, [B, T, D] in and out."""

    def __init__(self, dim: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.w1, self.w3, self.w2 = nn.Linear(dim, hidden), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x_BTD: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        h_BTD = self.norm(x_BTD)
        out_BTD = x_BTD + self.w2(F.silu(self.w1(h_BTD)) * self.w3(h_BTD))
        return out_BTD if scale is None else out_BTD * scale


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 16)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embed(ids_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.head(x_BTD)


SEQUENCE_PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.norm": SequenceParallel(),
    "layers.*.w1": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.w3": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.w2": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*": PrepareModuleInputOutput(
        input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), output_layouts=(Shard(1),), desired_output_layouts=(Shard(1),)
    ),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def test_a_sequence_parallel_plan_trains_as_the_unsharded_model_and_splits_activations(mesh_4x2: mesh.Mesh) -> None:
    host, device = twins(Stack)
    spmd.shard_module(device, mesh_4x2, SEQUENCE_PLAN)
    assert {n: tuple(p.partition_spec) for n, p in device.layers[0].named_parameters()} == {
        "norm.weight": (None,),
        "norm.bias": (None,),
        "w1.weight": ("model", None),
        "w1.bias": ("model",),
        "w3.weight": ("model", None),
        "w3.bias": ("model",),
        "w2.weight": (None, "model"),
        "w2.bias": (None,),
    }
    assert tuple(device.embed.weight.partition_spec) == ("model", None)
    ids = torch.randint(0, 16, (8, 4), generator=torch.Generator().manual_seed(0))
    seen: list[Any] = []
    handle = device.layers[0].norm.register_forward_hook(lambda m, a, out: seen.append(array_of(out).sharding.shard_shape(out.shape)))
    device(spmd.mark_sharding(ids.to("jax"), mesh_4x2, ("data", None)))
    assert seen == [(2, 2, 8)]
    handle.remove()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (host, device)]

    def loss_of(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        return loss

    step = spmd.compile(lambda ids: loss_of(device, optimizers[1], ids))
    on_device = spmd.mark_sharding(ids.to("jax"), mesh_4x2, ("data", None))
    for _ in range(3):
        assert_same(step(on_device).detach(), loss_of(host, optimizers[0], ids).detach())
    assert_same_model(device, host)
    assert (step.num_executables, step.retraces) == (1, [])


def test_prepare_module_input_and_output_lay_out_values_by_position_and_keyword(mesh_4x2: mesh.Mesh) -> None:
    host, block = twins(Block)
    entered: list[Any] = []
    plan = {
        "": PrepareModuleInput(
            input_layouts=(Replicate(),),
            desired_input_layouts=(Shard(1),),
            input_kwarg_layouts={"scale": Replicate()},
            desired_input_kwarg_layouts={"scale": Shard(2)},
        ),
    }
    spmd.shard_module(block, mesh_4x2, plan)
    block.register_forward_pre_hook(
        lambda m, args, kwargs: entered.extend(array_of(t).sharding.shard_shape(t.shape) for t in (*args, *kwargs.values())),
        with_kwargs=True,
    )
    x, scale = batch(4, 4, 8), batch(4, 4, 8, seed=2)
    out = block(x.to("jax"), scale=scale.to("jax"))
    assert entered == [(1, 2, 8), (1, 4, 4)]
    assert_same(out.detach(), host(x, scale=scale).detach())
    spmd.shard_module(block, mesh_4x2, {"": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(2))})
    assert array_of(block(x.to("jax"))).sharding.shard_shape((4, 4, 8)) == (1, 4, 4)


REFUSED = [
    ({"up": ColwiseParallel(), "down": ("model", None)}, "a plan mixes styles and specs"),
    ({"up": "columnwise"}, "'up' has style 'columnwise'"),
    ("megatronn", "'megatronn' is not a preset"),
    ("megatron", "no Megatron rules are known for MLP"),
    ("auto", "MLP has no tensor-parallel plan"),
    (3, "rules of type int are not supported"),
    ([("up.weight", [Shard(0)])], "1 placements, 2 axes"),
    ([("up.weight", [Partial(), Shard(0)])], "reduce the tensor first"),
    ([("up.weight", [Replicate(), Shard(2)])], "invalid for a tensor of rank 2"),
]


@pytest.mark.parametrize(("rules", "text"), REFUSED, ids=[t for _, t in REFUSED])
def test_rules_that_mean_nothing_are_refused(rules: Any, text: str, mesh_4x2: mesh.Mesh) -> None:
    with pytest.raises(spmd.SpmdError, match="fix: ") as raised:
        spmd.shard_module(MLP().to("jax"), mesh_4x2, rules)
    assert text in str(raised.value)


def test_a_mesh_without_a_model_axis_is_refused_and_one_axis_needs_no_name() -> None:
    plan = {"up": "colwise", "down": "rowwise"}
    with pytest.raises(spmd.SpmdError, match="has no axis for tensor parallelism"):
        spmd.shard_module(MLP().to("jax"), mesh.Mesh(range(8), (4, 2), ("a", "b")), plan)
    for grid, axis in ((mesh.Mesh(range(8), (8,), ("a",)), None), (mesh.Mesh(range(8), (4, 2), ("a", "b")), "b")):
        model = MLP().to("jax")
        spmd.shard_module(model, grid, plan, axis=axis)
        assert tuple(model.up.weight.partition_spec) == (axis or "a", None)

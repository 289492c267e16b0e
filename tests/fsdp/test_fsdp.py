"""`fully_shard`: where parameters, gradients and state lie, what that saves, and that losses are those of the unsharded model."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.placement_types import Shard
from torch.utils.checkpoint import checkpoint

import mesh
import spmd
from spmd.device._storage import buffer_of
from tests.oracle import array_of, assert_same, assert_same_model, batch, train

pytestmark = pytest.mark.multidevice(num=8)
WIDTH, DEPTH, ROWS = 256, 6, 8


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, width)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


def shard(model: Any, grid: mesh.Mesh, **options: Any) -> Any:
    for layer in model.layers:
        spmd.fully_shard(layer, grid, **options)
    return spmd.fully_shard(model, grid, **options)


def pair(grid: mesh.Mesh, make: Callable[[], nn.Module] = Stack, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    host = make()
    return host, shard(copy.deepcopy(host).to("jax"), grid, **options)


def on_mesh(grid: mesh.Mesh, width: int = 16, rows: int = 16) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """(batch on the host, the same split over every axis)."""
    host = batch(rows, width), batch(rows, width, seed=2)
    return host, tuple(spmd.mark_sharding(t.to("jax"), grid, (tuple(grid.axis_names), None)) for t in host)


@pytest.fixture
def fsdp_8() -> mesh.Mesh:
    return mesh.Mesh(range(8), (8,), ("fsdp",))


GRIDS = ["fsdp=8", "replica=2,fsdp=4", "data=4,other=2"]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)], ids=["AdamW", "SGD"])
def test_losses_and_parameters_are_those_of_the_unsharded_model(grid: str, stage: int, optimizer: Any) -> None:
    where = mesh.Mesh.from_string(grid)
    host, device = pair(where, stage=stage)
    at_host, at_mesh = on_mesh(where)
    optimizers = [optimizer(m.parameters(), lr=1e-2) for m in (host, device)]
    step = spmd.compile(lambda x, y: train(device, optimizers[1], x, y))
    for _ in range(3):
        assert_same(step(*at_mesh).detach(), train(host, optimizers[0], *at_host).detach())
    assert_same_model(device, host, (1e-4, 1e-5))
    assert (step.num_executables, step.retraces) == (1, [])
    axis = "data" if "data" in grid else "fsdp"
    weight = device.layers[0].linear.weight
    assert tuple(weight.partition_spec) == ((axis, None) if stage == 3 else (None, None))
    for key in optimizers[1].state[weight]:
        state = optimizers[1].state[weight][key]
        assert state.dim() == 0 or tuple(mesh.ShardingSpec.from_jax(spmd_array(state).sharding, 2).partition_spec) == (axis, None)


def spmd_array(tensor: torch.Tensor) -> Any:
    return array_of(tensor.as_subclass(spmd.XLAShardedTensor))


BYTES = {  # stage -> share of (parameters, optimizer state) that a device of N holds
    0: (1.0, 1.0),
    1: (1.0, 1 / 8),
    2: (1.0, 1 / 8),
    3: (1 / 8, 1 / 8),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_device_holds_its_share_of_parameters_and_adam_state(stage: int, fsdp_8: mesh.Mesh) -> None:
    torch.manual_seed(0)
    model = Stack(WIDTH, 2).to("jax")
    if stage:
        shard(model, fsdp_8, stage=stage)
    else:
        spmd.shard_module(model, fsdp_8, [("**", None)])
    _, (x, y) = on_mesh(fsdp_8, WIDTH, ROWS)
    optimizer = torch.optim.AdamW(model.parameters())
    step = spmd.compile(lambda x, y: train(model, optimizer, x, y))
    step(x, y)
    num_bytes = sum(p.nbytes for p in model.parameters())
    parameters, state = BYTES[stage]
    assert step.memory().argument_bytes == pytest.approx(num_bytes * (parameters + 2 * state), rel=0.1)


@pytest.mark.parametrize("reshard", [True, False])
def test_every_weight_is_gathered_once_forward_and_if_asked_once_backward(reshard: bool, fsdp_8: mesh.Mesh) -> None:
    _, model = pair(fsdp_8, lambda: Stack(WIDTH, DEPTH), reshard_after_forward=reshard)
    _, (x, y) = on_mesh(fsdp_8, WIDTH, ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = spmd.compile(lambda x, y: train(model, optimizer, x, y))
    step(x, y)
    gathers = [c.count for c in step.collectives() if c.kind == "all-gather" and (WIDTH, WIDTH) in c.shapes]
    assert sum(gathers) == (DEPTH + 1) * (2 if reshard else 1)


def test_a_checkpointed_layer_gathers_again_for_its_recomputation(fsdp_8: mesh.Mesh) -> None:
    host, device = pair(fsdp_8, lambda: Stack(checkpointed=True))
    at_host, at_mesh = on_mesh(fsdp_8)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (host, device)]
    step = spmd.compile(lambda x, y: train(device, optimizers[1], x, y))
    for _ in range(2):
        assert_same(step(*at_mesh).detach(), train(host, optimizers[0], *at_host).detach())
    weights = [c.count for c in step.collectives() if c.kind == "all-gather" and (16, 16) in c.shapes]
    assert sum(weights) == 2 * 3 + 2


def test_eager_training_and_evaluation_work_too(fsdp_8: mesh.Mesh) -> None:
    host, device = pair(fsdp_8)
    at_host, at_mesh = on_mesh(fsdp_8)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (host, device)]
    assert_same(train(device, optimizers[1], *at_mesh).detach(), train(host, optimizers[0], *at_host).detach())
    assert_same_model(device, host)
    with torch.no_grad():
        assert_same(device(at_mesh[0]), host(at_host[0]))
    weight = device.layers[0].linear.weight
    assert isinstance(weight, nn.Parameter) and array_of(weight).sharding.shard_shape((16, 16)) == (2, 16)
    assert {n for n, _ in device.named_parameters()} == {n for n, _ in host.named_parameters()}


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_mixed_precision_computes_and_gathers_in_bfloat16_and_keeps_float32_parameters(reduce_dtype: Any, fsdp_8: mesh.Mesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, output_dtype=torch.float32)
    host, device = pair(fsdp_8, mp_policy=policy)
    at_host, at_mesh = on_mesh(fsdp_8)
    seen: list[Any] = []
    device.layers[1].linear.register_forward_hook(lambda m, a, out: seen.append((m.weight.dtype, out.dtype)))
    optimizer = torch.optim.SGD(device.parameters(), lr=0.1)
    step = spmd.compile(lambda x, y: train(device, optimizer, x, y))
    loss = step(*at_mesh)
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert loss.dtype == torch.float32 and all(p.dtype == torch.float32 for p in device.parameters())
    expected = copy.deepcopy(host)
    hosts = torch.optim.SGD(expected.parameters(), lr=0.1)
    hosts.zero_grad()
    reference = F.mse_loss(expected(at_host[0]), at_host[1])
    reference.backward()
    hosts.step()
    assert_same(loss.detach(), reference.detach(), (2e-2, 2e-2))
    assert_same_model(device, expected, (2e-2, 2e-2))


def test_frozen_and_ignored_parameters_and_placements_by_hand(fsdp_8: mesh.Mesh) -> None:
    torch.manual_seed(0)
    host = Stack()
    host.layers[0].requires_grad_(False)
    device = copy.deepcopy(host).to("jax")
    ignored = [device.layers[1].norm.weight]
    shard(device, fsdp_8, ignored_params=ignored, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
    assert tuple(device.layers[0].linear.weight.partition_spec) == (None, "fsdp")
    assert not isinstance(ignored[0], spmd.XLAShardedTensor)
    at_host, at_mesh = on_mesh(fsdp_8)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (host, device)]
    step = spmd.compile(lambda x, y: train(device, optimizers[1], x, y))
    for _ in range(2):
        assert_same(step(*at_mesh).detach(), train(host, optimizers[0], *at_host).detach())
    assert_same_model(device, host)


def test_tied_weights_stay_tied_and_belong_to_one_unit(fsdp_8: mesh.Mesh) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.layers = nn.Embedding(32, 16), nn.ModuleList([Layer(16)])
            self.head = nn.Linear(16, 32, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    host, device = pair(fsdp_8, Tied)
    assert device.head.weight is device.tokens.weight
    ids = torch.arange(32) % 32
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (host, device)]

    def loss_of(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids), ids)
        loss.backward()
        optimizer.step()
        return loss

    step = spmd.compile(lambda ids: loss_of(device, optimizers[1], ids))
    on_device = spmd.mark_sharding(ids.to("jax"), fsdp_8, ("fsdp",))
    for _ in range(2):
        assert_same(step(on_device).detach(), loss_of(host, optimizers[0], ids).detach())
    assert_same_model(device, host)


def test_over_tensor_parallel_annotations_it_splits_further(mesh_4x2: mesh.Mesh) -> None:
    torch.manual_seed(0)
    host = Stack()
    device = copy.deepcopy(host).to("jax")
    spmd.shard_module(device, mesh_4x2, [("linear.weight", ("model", None)), ("linear.bias", ("model",))])
    shard(device, mesh_4x2)
    assert tuple(device.layers[0].linear.weight.partition_spec) == ("model", "data")
    assert tuple(device.layers[0].linear.bias.partition_spec) == (("model", "data"),)
    at_host = batch(16, 16), batch(16, 16, seed=2)
    at_mesh = [spmd.mark_sharding(t.to("jax"), mesh_4x2, ("data", None)) for t in at_host]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (host, device)]
    step = spmd.compile(lambda x, y: train(device, optimizers[1], x, y))
    for _ in range(2):
        assert_same(step(*at_mesh).detach(), train(host, optimizers[0], *at_host).detach())
    assert {axes for kind, axes in step.collectives().by_axis() if kind == "all-gather"} == {("data",), ("model",)}


def test_a_copy_and_a_pickle_of_a_sharded_module_are_units_too(fsdp_8: mesh.Mesh) -> None:
    _, device = pair(fsdp_8)
    _, at_mesh = on_mesh(fsdp_8)
    expected = device(at_mesh[0]).detach().cpu()
    for twin in (copy.deepcopy(device), pickle.loads(pickle.dumps(device)).to("jax")):
        assert_same(twin(at_mesh[0]).detach(), expected)
        weight = twin.layers[0].linear.weight
        assert tuple(weight.partition_spec) == ("fsdp", None)
        assert weight is not device.layers[0].linear.weight
        with pytest.raises(spmd.SpmdError, match="Stack is already a unit of fully_shard"):
            spmd.fully_shard(twin, fsdp_8)


def test_what_cannot_be_is_refused(fsdp_8: mesh.Mesh, mesh_4x2: mesh.Mesh) -> None:
    with pytest.raises(spmd.SpmdError, match="has no axis 'tensor'(?s:.*)fix: axis='fsdp'"):
        spmd.fully_shard(Stack().to("jax"), fsdp_8, axis="tensor")
    with pytest.raises(spmd.SpmdError, match="has no axis for FSDP"):
        spmd.fully_shard(Stack().to("jax"), mesh.Mesh(range(8), (4, 2), ("x", "y")))
    with pytest.raises(mesh.SpecError, match="uses axis 'data' more than once"):
        shard(Stack().to("jax"), mesh_4x2, axis=("data", "data"), shard_placement_fn=lambda p: Shard(0) if p.dim() == 2 else None)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reshard_after_forward": "no"}, "reshard_after_forward of fully_shard must be True, False or None, got 'no'"),
        ({"reshard_after_forward": 2}, "reshard_after_forward of fully_shard must be True, False or None, got 2"),
        ({"stage": True}, "fully_shard has no stage True"),
        ({"axis": ()}, r"must be the name of a mesh axis or a tuple of names, got \(\)"),
        ({"axis": 0}, "must be the name of a mesh axis or a tuple of names, got 0"),
        ({"axis": ("fsdp", 1)}, r"must be the name of a mesh axis or a tuple of names, got \('fsdp', 1\)"),
        ({"ignored_params": 3}, "ignored_params of fully_shard must be a set of parameters, got 3"),
        ({"ignored_params": torch.ones(2)}, "ignored_params of fully_shard must be a set of parameters, got a Tensor"),
        ({"ignored_params": ["0.weight"]}, "ignored_params of fully_shard has '0.weight' where a parameter is expected"),
        ({"shard_placement_fn": Shard(0)}, "shard_placement_fn of fully_shard must be a function of a parameter"),
    ],
)
def test_options_of_other_types_are_refused_before_anything_is_marked(options: dict[str, Any], text: str, fsdp_8: mesh.Mesh) -> None:
    model = Stack().to("jax")
    with pytest.raises(spmd.SpmdError, match=f"{text}(?s:.*)fix: "):
        spmd.fully_shard(model, fsdp_8, **options)
    assert not any(isinstance(p, spmd.XLAShardedTensor) for p in model.parameters())
    spmd.fully_shard(model, fsdp_8)


def test_a_stage_that_is_none_and_an_outer_unit_before_an_inner_one_are_refused(fsdp_8: mesh.Mesh) -> None:
    with pytest.raises(spmd.SpmdError, match=r"fully_shard has no stage 4(?s:.*)fix: stage=3"):
        spmd.fully_shard(Stack().to("jax"), fsdp_8, stage=4)  # pyright: ignore[reportArgumentType]
    outer = spmd.fully_shard(Stack().to("jax"), fsdp_8)
    with pytest.raises(spmd.SpmdError, match=r"is inside a Stack that is already a unit of fully_shard(?s:.*)inner modules first"):
        spmd.fully_shard(outer.get_submodule("layers.0"), fsdp_8)


def test_a_parameter_that_the_axis_does_not_divide_stays_whole(fsdp_8: mesh.Mesh) -> None:
    device = shard(Stack(12).to("jax"), fsdp_8)
    assert tuple(device.layers[0].linear.weight.partition_spec) == (None, None)
    assert device(torch.ones(8, 12).to("jax")).shape == (8, 12)


def test_a_placement_by_hand_may_pad(fsdp_8: mesh.Mesh) -> None:
    host, device = pair(fsdp_8, lambda: Stack(12), shard_placement_fn=lambda p: Shard(0))
    weight = device.layers[0].linear.weight
    assert tuple(weight.partition_spec) == ("fsdp", None) and weight.shape == (12, 12)
    at_host, at_mesh = on_mesh(fsdp_8, 12)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (host, device)]
    step = spmd.compile(lambda x, y: train(device, optimizers[1], x, y))
    for _ in range(2):
        assert_same(step(*at_mesh).detach(), train(host, optimizers[0], *at_host).detach())
    assert_same_model(device, host)


def program_on_pod(width: int, depth: int, **options: Any) -> Any:
    """The step of a model without memory, compiled for 8 chips."""
    pytest.importorskip("libtpu", reason="the TPU compiler: pip install 'spmd-mesh[tpu]'")
    pod = mesh.Mesh(range(8), (8,), ("fsdp",), topology="v5e:2x4")
    with torch.device("meta"):
        model = Stack(width, depth)
    model.to_empty(device="jax")
    shard(model, pod, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = spmd.compile(lambda x, y: train(model, optimizer, x, y))
    return step.program(*(spmd.mark_sharding(torch.empty(64, width, device="jax"), pod, ("fsdp", None)) for _ in range(2)))


@pytest.mark.parametrize(("reduce_dtype", "summed"), [(None, "bf16"), (torch.float32, "f32")])
def test_on_tpu_gathers_and_reduce_scatters_are_in_the_dtypes_of_the_policy(reduce_dtype: Any, summed: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, output_dtype=torch.float32)
    found = program_on_pod(1024, 3, mp_policy=policy).collectives()
    assert {c.dtype for c in found if c.kind == "all-gather" and any(len(shape) == 2 for shape in c.shapes)} == {"bf16"}
    sums = {c.dtype for c in found if c.kind == "reduce-scatter" and any(len(shape) == 2 for shape in c.shapes)}
    # Asked for bf16, the TPU compiler still sums one of the four in f32: the one whose f32 product and cast it turns round.
    assert summed in sums and (summed == "bf16" or sums == {"f32"})


def test_on_tpu_gathering_again_needs_less_memory_than_keeping_weights() -> None:
    width, depth = 8192, 6
    weights = (depth + 1) * width * width * 4
    kept, again = (program_on_pod(width, depth, reshard_after_forward=reshard).memory() for reshard in (False, True))
    assert again.argument_bytes == pytest.approx(weights / 8, rel=0.1)
    assert again.temp_bytes < kept.temp_bytes < weights


def lazy_steps(model: Any, x: torch.Tensor, y: torch.Tensor) -> spmd.Lazy:
    """Three steps, each with its loss still there when it ends, and with it the graph."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with spmd.lazy() as lazy:
        for _ in range(3):
            train(model, optimizer, x, y)
    return lazy


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_that_waits_is_one_program_that_returns_no_whole_parameter(fsdp_8: mesh.Mesh, stage: int, frozen: bool) -> None:
    host, device = pair(fsdp_8, lambda: Stack(64), stage=stage)
    for model in (host, device):
        model.layers[0].requires_grad_(not frozen)
    hosts, devices = on_mesh(fsdp_8, 64)
    lazy = lazy_steps(device, *devices)
    optimizer = torch.optim.AdamW(host.parameters(), lr=1e-3)
    for _ in range(3):
        train(host, optimizer, *hosts)
    assert_same_model(device, host)
    assert lazy.num_executables == 2, lazy.retraces  # the first creates the optimizer's state
    memory = lazy.program.memory()
    gradients = sum(buffer_of(p.grad).get().addressable_shards[0].data.nbytes for p in device.parameters() if p.grad is not None)
    assert memory.output_bytes - memory.alias_bytes <= gradients + 4096  # 0-dim state and the loss


def test_checkpointed_layers_that_wait_are_computed_again(fsdp_8: mesh.Mesh) -> None:
    """XLA would merge the second computation with the first."""
    tanhs = []
    for checkpointed in (False, True):
        _, device = pair(fsdp_8, lambda checkpointed=checkpointed: Stack(checkpointed=checkpointed))
        tanhs.append(lazy_steps(device, *on_mesh(fsdp_8)[1]).program.hlo().count(" tanh("))
    assert tanhs == [3, 6]


def test_only_a_module_is_a_unit(mesh_4x2: mesh.Mesh) -> None:
    x: Any = torch.zeros(8, 8).to("jax")
    with pytest.raises(spmd.SpmdError, match="fully_shard takes a module, got a Tensor(?s:.*)fix: spmd.fully_shard"):
        spmd.fully_shard(x, mesh_4x2)
    with pytest.raises(spmd.SpmdError, match="shard_module takes a module, got a Tensor(?s:.*)fix: spmd.shard_module"):
        spmd.shard_module(x, mesh_4x2, "fsdp")

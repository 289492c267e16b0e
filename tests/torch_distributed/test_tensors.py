"""`distribute_tensor`, `distribute_module` and `parallelize_module` on a mesh of type "jax": layouts, values, collectives of a step."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor, full, randn, zeros
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import mesh
import spmd
from tests.oracle import assert_same, assert_same_model, batch, train

pytestmark = pytest.mark.multidevice(num=8)
GRID = mesh.Mesh(range(8), (2, 4), ("dp", "tp"))


@pytest.fixture
def grid() -> DeviceMesh:
    return init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))


def spec(t: Any) -> tuple[Any, ...]:
    assert t.sharding_spec.mesh == GRID
    return tuple(t.sharding_spec.partition_spec)


def test_a_distributed_tensor_is_the_whole_one_and_says_its_layout(grid: DeviceMesh) -> None:
    host = batch(8, 16)
    t: Any = distribute_tensor(host, grid, [Shard(0), Shard(1)])
    assert isinstance(t, spmd.XLAShardedTensor) and not isinstance(t, DTensor)
    assert (spec(t), t.shape, t.placements, t.device_mesh) == (("dp", "tp"), (8, 16), (Shard(0), Shard(1)), grid)
    assert torch.equal(t.full_tensor().cpu(), host) and t.to_local() is t
    moved = t.redistribute(placements=[Replicate(), Shard(0)])
    assert (spec(moved), moved.placements) == (("tp", None), (Replicate(), Shard(0)))
    assert torch.equal(moved.cpu().as_subclass(torch.Tensor), host)


def test_on_a_part_of_a_mesh_the_other_axes_stay_as_they_are(grid: DeviceMesh) -> None:
    t: Any = distribute_tensor(batch(8, 16), grid["tp"], [Shard(1)])
    assert (spec(t), t.placements, t.device_mesh) == ((None, "tp"), (Shard(1),), grid["tp"])
    again: Any = distribute_tensor(t, grid["dp"], [Shard(1)])
    assert again is t
    assert (spec(t), t.placements) == ((None, ("tp", "dp")), (Shard(1),))
    assert spec(t.redistribute(grid["tp"], [Replicate()])) == (None, "dp")
    assert t.full_tensor().as_subclass(spmd.XLAShardedTensor).sharding_spec.is_replicated


def test_without_placements_a_tensor_is_replicated_and_the_current_mesh_is_meant(grid: DeviceMesh) -> None:
    with grid:
        assert spec(distribute_tensor(batch(8))) == (None,)


def test_tensors_are_made_whole_with_the_values_of_torchs_own(grid: DeviceMesh) -> None:
    assert spec(zeros(4, 8, device_mesh=grid, placements=[Shard(0), Shard(1)])) == ("dp", "tp")
    filled: Any = full((4,), 3.0, device_mesh=grid["dp"], placements=[Shard(0)])
    assert (spec(filled), filled.cpu().tolist()) == (("dp",), [3.0] * 4)
    torch.manual_seed(0)
    drawn = randn(4, 8, device_mesh=grid, placements=[Shard(0), Shard(1)])
    torch.manual_seed(0)
    assert torch.equal(drawn.cpu(), torch.randn(4, 8, device="jax").cpu())


def test_from_local_takes_the_whole_as_to_local_gives_it(grid: DeviceMesh) -> None:
    t: Any = DTensor.from_local(batch(8, 4), grid["tp"], [Shard(0)])
    assert (spec(t), t.shape) == (("tp", None), (8, 4))


def test_what_one_program_cannot_mean_is_refused(grid: DeviceMesh) -> None:
    with pytest.raises(spmd.SpmdError, match=r"DTensor.from_local was given a shard \(2, 4\) of a tensor \(8, 4\)"):
        DTensor.from_local(batch(2, 4), grid["tp"], [Shard(0)], shape=torch.Size((8, 4)), stride=(4, 1))
    with pytest.raises(mesh.SpecError, match="on axis .dp. asks for an unreduced tensor"):
        distribute_tensor(batch(8), grid, [Partial(), Replicate()])
    with pytest.raises(mesh.SpecError, match="1 placements do not fit the mesh"):
        distribute_tensor(batch(8), grid, [Shard(0)])
    with pytest.raises(spmd.SpmdError, match="found non-leaf tensor"):
        distribute_tensor(batch(8).requires_grad_() * 2, grid)
    with pytest.raises(spmd.SpmdError, match=r"a plan needs a mesh of one axis(?s:.*)device_mesh\['tp'\]"):
        parallelize_module(nn.Linear(8, 8), grid, ColwiseParallel())


def test_a_module_is_distributed_by_functions_and_the_rest_replicated(grid: DeviceMesh) -> None:
    def partition(name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(distribute_tensor(module.weight, device_mesh, [Shard(0)]))

    def enter(module: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(x, device_mesh, [Replicate()]) for x in inputs)

    def leave(module: nn.Module, output: Any, device_mesh: DeviceMesh) -> Any:
        return output.redistribute(device_mesh, [Replicate()]).to_local()

    host = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16))
    model: Any = distribute_module(copy.deepcopy(host), grid["tp"], partition, enter, leave)
    assert [spec(p) for p in model.parameters()] == [("tp", None), (None,), (None,), (None,)]
    assert_same(model(batch(4, 8).to("jax")), host(batch(4, 8)))


def test_in_a_compiled_function_a_tensor_is_distributed_and_a_collective_gives_it_back(grid: DeviceMesh) -> None:
    def mean(x: torch.Tensor) -> tuple[Any, Any]:
        loss = distribute_tensor(x, grid["dp"], [Shard(0)]).square().mean()
        copied = loss.clone()
        dist.all_reduce(copied, group=grid["dp"].get_group())
        return loss, copied

    step: Any = spmd.compile(mean)
    x = batch(8, 4).to("jax")
    for _ in range(2):
        assert_same(step(x), (batch(8, 4).square().mean(),) * 2)
    assert step.retraces == [] and not isinstance(x, spmd.XLAShardedTensor)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PLAN: dict[str, ParallelStyle] = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel(), "head": ColwiseParallel()}
UP, DOWN = ("tp", None), (None, "tp")
BY_HAND: dict[str, Any] = {"up.weight": UP, "up.bias": ("tp",), "down.weight": DOWN, "head.weight": UP, "head.bias": ("tp",)}
SEQUENCE: dict[str, ParallelStyle] = {
    "layers.*": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),)),
    "layers.*.norm": SequenceParallel(),
    "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    "": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate()),
}


def stepped(model: Any, grid: DeviceMesh) -> tuple[Any, list[float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = spmd.compile(lambda x, y: train(model, optimizer, x, y))
    x, y = (distribute_tensor(t, grid["dp"], [Shard(0)]) for t in (batch(4, 8, 16), batch(4, 8, 16, seed=2)))
    return step, [step(x, y).item() for _ in range(3)]


@pytest.mark.parametrize("plan", [PLAN, SEQUENCE], ids=["tensor", "sequence"])
def test_a_plan_trains_as_the_whole_model_with_the_collectives_of_marks_by_hand(grid: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    torch.manual_seed(0)
    host = Model()
    model: Any = parallelize_module(copy.deepcopy(host).to("jax"), grid["tp"], plan)
    assert [spec(p) for p in (*model.layers[0].up.parameters(), model.layers[0].down.weight)] == [("tp", None), ("tp",), (None, "tp")]
    by_hand = copy.deepcopy(host).to("jax")
    if plan is PLAN:
        for name, parameter in by_hand.named_parameters():
            spmd.mark_sharding(parameter, GRID, next((e for n, e in BY_HAND.items() if name.endswith(n)), (None,) * parameter.dim()))
    else:
        spmd.shard_module(by_hand, GRID, plan)
    at_host = copy.deepcopy(host)
    optimizer = torch.optim.AdamW(at_host.parameters(), lr=1e-2)
    want = [train(at_host, optimizer, batch(4, 8, 16), batch(4, 8, 16, seed=2)).item() for _ in range(3)]
    found: list[Any] = []
    for m in (model, by_hand):
        step, losses = stepped(m, grid)
        assert_same(torch.tensor(losses), torch.tensor(want))
        found.append(sorted((c.kind, c.count, c.num_bytes) for c in step.collectives()))
    assert found[0] == found[1]
    assert_same_model(model, at_host)


class Doubled(ParallelStyle):
    """A style of a program's own, in torch's words."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def partition(name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
            for key, parameter in list(module.named_parameters(recurse=False)):
                module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, device_mesh, [Shard(0)])))

        def enter(module: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> Any:
            return tuple(x if isinstance(x, DTensor) else DTensor.from_local(x, device_mesh, [Replicate()]) for x in inputs)

        def leave(module: nn.Module, output: Any, device_mesh: DeviceMesh) -> Any:
            return (output * 2).redistribute(device_mesh, [Replicate()]).to_local()

        return distribute_module(module, device_mesh, partition, enter, leave)


def test_a_style_of_the_programs_own_runs_as_it_is_written(grid: DeviceMesh) -> None:
    host = nn.Linear(8, 16)
    model: Any = parallelize_module(copy.deepcopy(host), grid["tp"], Doubled())
    assert spec(model.weight) == ("tp", None)
    step: Any = spmd.compile(lambda x: model(x))
    assert_same(step(batch(4, 8).to("jax")), host(batch(4, 8)) * 2)

"""torch's `fully_shard` and `DistributedDataParallel` on device 'jax', and torch's checkpoints: losses of CPU torch, spmd's collectives."""

# pyright: reportPrivateImportUsage=none

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mesh
import spmd
from tests.oracle import assert_same, assert_same_model, batch, train

pytestmark = pytest.mark.multidevice(num=8)
WIDTH = 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sharded(model: Any, grid: DeviceMesh | None, **options: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, mesh=grid, **options)
    return fully_shard(model, mesh=grid, **options)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return batch(8, WIDTH), batch(8, 3, seed=2)


def stepped(model: Any, at: tuple[torch.Tensor, torch.Tensor], num_steps: int = 3) -> tuple[list[float], Any, Any]:
    """(losses, the step or None on the host, the optimizer)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    is_host = at[0].device.type == "cpu"
    step: Any = (lambda x, y: train(model, optimizer, x, y)) if is_host else spmd.compile(lambda x, y: train(model, optimizer, x, y))
    return [step(*at).item() for _ in range(num_steps)], None if is_host else step, optimizer


def on_device() -> Any:
    return tuple(t.to("jax") for t in data())


def talk(step: Any) -> list[Any]:
    return sorted((c.kind, c.count, c.num_bytes) for c in step.collectives())


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["fsdp", "hybrid"])
def test_fully_shard_trains_as_the_whole_model_with_the_collectives_of_spmds_own(shape: tuple[int, ...]) -> None:
    grid = init_device_mesh("jax", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    torch.manual_seed(0)
    host = Stack()
    model, by_hand = sharded(copy.deepcopy(host), grid), copy.deepcopy(host).to("jax")
    where = mesh.Mesh(range(8), shape, grid.mesh_dim_names)
    for unit in (*by_hand.layers, by_hand):
        spmd.fully_shard(unit, where, axis="shard", reshard_after_forward=unit is not by_hand, shard_placement_fn=lambda p: Shard(0))
    weight = model.layers[0].up.weight
    assert isinstance(model, FSDPModule) and isinstance(model, Stack) and type(model.layers[0]).__name__ == "FSDPLayer"
    assert weight.sharding_spec == mesh.ShardingSpec(where, ("shard", None))
    assert weight.placements == (Replicate(), Shard(0))[-len(shape) :] and weight.device_mesh == grid
    want = stepped(host, data())[0]
    losses, step, _ = stepped(model, on_device())
    x, y = on_device()
    laid_out = (spmd.mark_sharding(x, where, (where.axis_names, None)), y)
    losses_by_hand, step_by_hand, _ = stepped(by_hand, laid_out)
    for found in (losses, losses_by_hand):
        assert_same(torch.tensor(found), torch.tensor(want))
    assert_same_model(model, host)
    assert (step.retraces, talk(step)) == (step_by_hand.retraces, talk(step_by_hand))


def test_fully_shard_joins_a_plan_on_another_axis() -> None:
    grid = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    host = Stack()
    model: Any = parallelize_module(copy.deepcopy(host), grid["tp"], {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})
    sharded(model, grid["dp"], mp_policy=MixedPrecisionPolicy())
    assert tuple(model.layers[0].up.weight.partition_spec) == (("tp", "dp"), None)
    assert tuple(model.layers[0].down.weight.partition_spec) == ("dp", "tp")
    assert_same(torch.tensor(stepped(model, on_device())[0]), torch.tensor(stepped(host, data())[0]))


def test_without_a_mesh_all_devices_are_meant() -> None:
    dist.init_process_group("spmd", init_method="spmd://")
    model = sharded(Stack(), None)
    assert model.head.weight.sharding_spec == mesh.ShardingSpec(mesh.Mesh(range(8), (8,), ("fsdp",)), ("fsdp", None))


def test_what_a_unit_can_be_told_does_nothing_or_is_refused() -> None:
    model = sharded(Stack(), init_device_mesh("jax", (8,)))
    for tell in (model.reshard, model.unshard, model.layers[0].unshard):
        tell()
    model.unshard(async_op=True).wait()
    model.set_requires_gradient_sync(False)
    model.set_modules_to_forward_prefetch([model.layers[0]])
    model.set_gradient_divide_factor(1.0)
    assert len(model.layers[:1]) == 1
    with pytest.raises(spmd.SpmdError, match=r"set_gradient_divide_factor\(8.0\)(?s:.*)fix: loss = loss / 8.0"):
        model.set_gradient_divide_factor(8.0)
    with pytest.raises(spmd.SpmdError, match="nothing would be sharded"):
        FullyShardedDataParallel(nn.Linear(8, 8).to("jax"))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"reshard_after_forward": 2}, "reshard_after_forward=2"),
        ({"offload_policy": CPUOffloadPolicy()}, "CPUOffload"),
    ]
    for options, words in refused:
        with pytest.raises(spmd.SpmdError, match=words):
            fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("jax", (8,)), **options)


def test_a_method_that_is_registered_runs_as_forward_does() -> None:
    model: Any = fully_shard(Stack(), mesh=init_device_mesh("jax", (8,)), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.encode = lambda x: model.head(x)
    register_fsdp_forward_method(model, "encode")
    assert model.encode(batch(8, WIDTH).to("jax")).dtype == torch.bfloat16
    assert isinstance(model.head.weight, nn.Parameter) and model.head.weight.dtype == torch.float32


def test_ddp_splits_the_batch_over_all_devices_and_keeps_its_names() -> None:
    torch.manual_seed(0)
    host = Stack()
    model = DistributedDataParallel(copy.deepcopy(host).to("jax"))
    assert isinstance(model, DistributedDataParallel) and next(iter(model.state_dict())) == "module.layers.0.up.weight"
    want = stepped(host, data())[0]
    losses, step, _ = stepped(model, on_device())
    assert_same(torch.tensor(losses), torch.tensor(want))
    assert_same_model(model.module, host)
    (sums,) = step.collectives()
    assert (sums.kind, sums.axes) == ("all-reduce", ("data",))
    with model.no_sync(), pytest.raises(spmd.SpmdError, match="none can be replaced"):
        model.register_comm_hook(None, print)
    assert_same_model(copy.deepcopy(model).eval().module, host)
    pickle.dumps(model.train())


def test_ddp_of_a_model_on_the_host_is_torchs() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert type(DistributedDataParallel(nn.Linear(2, 2))) is DistributedDataParallel


def test_a_checkpoint_of_torchs_is_loaded_into_another_mesh(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = sharded(Stack(), init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))["dp"])
    _, _, optimizer = stepped(model, on_device(), 2)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1], "steps": 2}, checkpoint_id=tmp_path)
    torch.manual_seed(1)
    other = sharded(Stack(), init_device_mesh("jax", (8,), mesh_dim_names=("all",)))
    second = torch.optim.AdamW(other.parameters(), lr=1e-2)
    found = get_state_dict(other, second)
    state: dict[str, Any] = {"model": found[0], "optimizer": found[1], "steps": 0}
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(other, second, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert state["steps"] == 2
    assert tuple(other.head.weight.partition_spec) == ("all", None)
    for mine, saved in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.detach().cpu(), saved.detach().cpu())
    assert_same(second.state[other.head.weight]["exp_avg"], optimizer.state[model.head.weight]["exp_avg"])
    whole: dict[str, Any] = get_state_dict(other, second, options=StateDictOptions(full_state_dict=True, cpu_offload=True))[0]
    assert {t.device.type for t in whole.values()} == {"cpu"}


def test_a_state_dict_shows_placements_and_is_assigned_to_a_model_on_meta() -> None:
    """As PyTorch's example of FSDP2 saves whole tensors, and loads them."""
    dist.init_process_group("spmd", init_method="spmd://", device_id=torch.device("jax", 0))
    torch.manual_seed(0)
    host = Stack()
    model = sharded(copy.deepcopy(host), None)
    whole = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
    for name, parameter in host.named_parameters():
        assert torch.equal(whole[name], parameter)
    with torch.device("meta"):
        other = sharded(Stack(), None)
    shown: dict[str, Any] = other.state_dict()
    loaded = {n: nn.Parameter(distribute_tensor(t, shown[n].device_mesh, shown[n].placements)) for n, t in whole.items()}
    other.load_state_dict(loaded, assign=True)
    assert shown["head.weight"].placements == (Shard(0),)
    assert other.head.weight.sharding_spec == model.head.weight.sharding_spec
    assert_same_model(other, host)
    set_model_state_dict(other, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert_same(torch.tensor(stepped(other, on_device())[0]), torch.tensor(stepped(host, data())[0]))


def test_a_state_dict_in_a_file_is_plain_and_a_copy_of_a_model_trains_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    host = Stack()
    model = sharded(copy.deepcopy(host), init_device_mesh("jax", (8,)))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt")  # weights only: no DeviceMesh is in the file
    assert {type(value) for value in loaded.values()} == {torch.Tensor}
    for twin in (copy.deepcopy(model), copy.copy(model)):
        assert isinstance(twin, FSDPModule) and isinstance(twin.layers[0], FSDPModule)
    twin = copy.deepcopy(model)
    assert_same(torch.tensor(stepped(twin, on_device())[0]), torch.tensor(stepped(copy.deepcopy(host), data())[0]))
    assert_same_model(model, host)
    twin.load_state_dict(loaded)
    assert_same_model(twin, host)


@pytest.mark.parametrize("wrapped", [lambda m: sharded(m, None), lambda m: DistributedDataParallel(m, device_ids=[0])], ids=["fsdp", "ddp"])
def test_a_batch_on_the_host_is_moved_as_in_torch(wrapped: Any) -> None:
    dist.init_process_group("spmd", init_method="spmd://")
    torch.manual_seed(0)
    host = Stack()
    model = wrapped(copy.deepcopy(host).to("jax"))
    assert_same(model(data()[0]), host(data()[0]))
    with pytest.raises(RuntimeError, match="expected all tensors on device 'jax'"):
        DistributedDataParallel(copy.deepcopy(host).to("jax"))(data()[0])

"""DTensor's language: placements to specs and back, modules laid out by functions; on any number of devices."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import mesh
import spmd
from spmd.sharding._dtensor_placements import placements_of
from spmd.xla_names._distribute import spec_from_placements
from tests.grids import grid, line
from tests.oracle import MLP, assert_same, batch

PLACED = [
    ([Shard(0), Shard(1)], ("data", "model")),
    ([Shard(1), Shard(0)], ("model", "data")),
    ([Replicate(), Shard(0)], ("model", None)),
    ([Shard(-1), Replicate()], (None, "data")),
    ([Shard(0), Shard(0)], (("data", "model"), None)),
    ([Replicate(), Replicate()], (None, None)),
    (None, (None, None)),
]
each_placement = pytest.mark.parametrize(("placements", "spec"), PLACED, ids=[str(s) for _, s in PLACED])


@each_placement
@pytest.mark.parametrize("where", ["cpu", "jax"])
def test_a_tensor_is_laid_out_by_placements(placements: Any, spec: Any, where: str) -> None:
    tensor = batch(8, 16).to(where).requires_grad_()
    out = spmd.xla_distribute_tensor(tensor, grid(), placements)
    assert (out is tensor) == (where == "jax")
    assert out.partition_spec == spec and out.is_leaf and out.requires_grad
    assert out.placements == tuple(Shard(p.dim % 2) if p.is_shard() else p for p in placements or [Replicate()] * 2)
    assert_same(out.detach(), batch(8, 16))


@each_placement
def test_redistributed_values_and_gradients_are_the_same(placements: Any, spec: Any) -> None:
    host = batch(8, 16)
    x = spmd.mark_sharding(host.to("jax").requires_grad_(), grid(), ("data", None))
    out = x.redistribute(grid(), placements)
    assert out is not x and out.partition_spec == spec and x.partition_spec == ("data", None)
    full = out.full_tensor()
    assert type(full) is torch.Tensor and full.untyped_storage() is not None
    assert_same(full.detach(), host)
    assert out.to_local() is out
    (full * 2).sum().backward()
    assert_same(x.grad, torch.full((8, 16), 2.0))


def test_a_redistribution_is_part_of_a_program() -> None:
    x = spmd.mark_sharding(batch(8, 16).to("jax"), line(), ("data", None))
    step = spmd.compile(lambda x: x.redistribute(line(), [Shard(1)]) * 2)
    out = step(x)
    assert_same(out, batch(8, 16) * 2)
    if mesh.device_count() > 1:
        assert set(step.collectives().counts()) == {"all-to-all"}


def test_a_computed_value_is_whole_and_redistributed_in_a_program() -> None:
    x = spmd.mark_sharding(batch(8, 16).to("jax").requires_grad_(), grid(), ("data", "model"))
    unmarked = x.detach() * 1

    def forms(x: Any) -> Any:
        y = x.mT @ x + 1
        assert unmarked.full_tensor().shape == (8, 16)
        (gradient,) = torch.autograd.grad(y.full_tensor().square().sum(), x)
        other = (y * 2).redistribute(placements=[Replicate(), Shard(1)])
        return y.full_tensor(), gradient, other, y.to_local(), y.device_mesh.mesh_dim_names, unmarked.full_tensor()

    eager, compiled = forms(x), spmd.compile(forms)(x)
    for made in (eager, compiled):
        assert [type(t) for t in made[:3]] == [torch.Tensor, spmd.XLAShardedTensor, spmd.XLAShardedTensor]
        assert made[2].placements == (Replicate(), Shard(1)) and made[4] == ("data", "model")
    host = batch(8, 16).requires_grad_()
    y = host.mT @ host + 1
    wanted = [y.detach(), torch.autograd.grad(y.square().sum(), host)[0], (y * 2).detach(), y.detach(), host.detach()]
    assert_same([t.detach() for t in (*compiled[:4], compiled[5])], wanted)


def test_placements_that_a_program_cannot_know_are_refused() -> None:
    x = spmd.mark_sharding(batch(8, 16).to("jax"), grid(), ("data", "model"))
    other, unmarked = spmd.mark_sharding(batch(8, 16).to("jax"), line(), (None, "data")), x * 1
    for read in (lambda x: (x + 1).placements, lambda x: unmarked.placements):
        with pytest.raises(
            mesh.SpecError, match=r"are not known\n  it is not marked(?s:.*)called at (?s:.*)fix: choose them, and keep them"
        ):
            spmd.compile(read)(x)
    with pytest.raises(mesh.SpecError, match=r"over no mesh, or over several(?s:.*)fix: t.redistribute\(device_mesh, \[Replicate"):
        spmd.compile(lambda x: (x + other).full_tensor())(x)


def test_a_device_mesh_of_torch_describes_the_tensor() -> None:
    x = spmd.mark_sharding(batch(8, 16).to("jax"), grid(), ("data", "model"))
    found = x.device_mesh
    assert found.mesh.tolist() == grid().get_logical_mesh().tolist() and found.mesh_dim_names == ("data", "model")
    assert x.redistribute(found, [Replicate(), Shard(0)]).partition_spec == ("model", None)


@pytest.mark.parametrize(
    ("placements", "error", "message"),
    [
        ([Shard(0)], ValueError, "1 placements do not fit"),
        ([Shard(0), Shard(2)], IndexError, r"does not fit tensor float32\[8, 16\](?s:.*)it has 2 dims"),
        ([Shard(0), Partial()], NotImplementedError, "asks for an unreduced tensor"),
        ([Shard(0), _StridedShard(0, split_factor=2)], spmd.SpmdError, r"on axis 'model' has no equivalent spec(?s:.*)fix: use Shard"),
    ],
)
def test_placements_that_do_not_fit_are_refused(placements: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        spec_from_placements(batch(8, 16).to("jax"), grid(), placements)


def test_placements_and_specs_are_two_forms_of_one_thing() -> None:
    for placements, spec in PLACED[:-1]:
        sharding = mesh.ShardingSpec(grid(), spec)
        assert placements_of(sharding) == tuple(Shard(p.dim % 2) if p.is_shard() else p for p in placements)
        assert spec_from_placements(batch(8, 16).to("jax"), grid(), placements_of(sharding)) == sharding
    with pytest.raises(mesh.SpecError, match="has no sharding and so no placements"):
        spmd.XLAShardedTensor(batch(2)).placements  # noqa: B018


def by_name(name: str, module: nn.Module, where: Any) -> None:
    if isinstance(module, nn.Linear):
        for parameter in module.parameters():
            spmd.xla_distribute_tensor(parameter, where, [Shard(0)])


@pytest.mark.parametrize("partition", [by_name, spmd.auto_policy, None])
def test_a_module_laid_out_by_a_function_computes_the_same(partition: Any) -> None:
    host, device = MLP(), MLP()
    device.load_state_dict(host.state_dict())
    x = batch(8, 8)
    seen: list[Any] = []

    def before(module: nn.Module, inputs: Any, where: Any) -> Any:
        return (spmd.mark_sharding(inputs[0], where, ("data", None)),)

    def after(module: nn.Module, output: Any, where: Any) -> Any:
        seen.append((module, where))
        return spmd.clear_sharding(output)

    out = spmd.xla_distribute_module(device, line(), partition, before, after)
    assert out is device
    result = device(x.to("jax"))
    assert_same(result, host(x))
    result.square().sum().backward()
    host(x).square().sum().backward()
    assert_same([p.grad for p in device.parameters()], [p.grad for p in host.parameters()])
    assert seen == [(device, line())]
    marked = [isinstance(p, spmd.XLAShardedTensor) for p in device.parameters()]
    assert all(marked) if partition is not None else not any(marked)
    if partition is spmd.auto_policy and mesh.device_count() > 1:
        assert not device.up.weight.sharding_spec.is_replicated and device.up.weight.partition_spec == ("data", None)


def test_functions_of_two_arguments_are_taken_and_others_refused() -> None:
    model = spmd.xla_distribute_module(MLP(), line(), None, lambda inputs, where: (inputs[0] + 1,), lambda output, where: output * 2)
    plain = MLP()
    plain.load_state_dict({k: v.cpu() for k, v in model.state_dict().items()})
    assert_same(model(batch(8, 8).to("jax")), plain(batch(8, 8) + 1) * 2)
    with pytest.raises(spmd.SpmdError, match=r"input_fn takes 1 arguments(?s:.*)def input_fn\(module, inputs, device_mesh\)"):
        spmd.xla_distribute_module(MLP(), line(), None, lambda inputs: inputs)

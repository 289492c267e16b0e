"""Manual sharding: each device on its own piece, values and gradients as the whole would give them; on any number of devices."""

from typing import Any

import pytest
import torch

import mesh
import spmd
from spmd.xla_names._manual import ManualTensor
from tests.grids import grid, line
from tests.oracle import assert_same, batch

SPECS = [("data", "model"), ("data", None), (None, "model"), (("data", "model"), None), (None, None)]
each_spec = pytest.mark.parametrize("spec", SPECS, ids=str)


@each_spec
def test_pieces_go_through_operations_and_come_back(spec: Any) -> None:
    host = batch(8, 16).requires_grad_()
    x = host.detach().to("jax").requires_grad_()
    where = grid()
    piece = mesh.ShardingSpec(where, spec).shard_shape((8, 16))
    part = spmd.enable_manual_sharding(x, spec, mesh=where)
    assert tuple(part.shape) == piece and part.sharding_type is mesh.ShardingType.MANUAL
    result = (part.sin() * 3 + part).exp()
    assert isinstance(result, ManualTensor) and "ManualTensor" in repr(result)
    whole = spmd.disable_manual_sharding(result, spec, (8, 16), mesh=where)
    assert not isinstance(whole, ManualTensor) and whole.partition_spec == mesh.ShardingSpec(where, spec).partition_spec
    want = (host.sin() * 3 + host).exp()
    assert_same(whole.detach(), want.detach())
    weight = batch(8, 16, seed=4)
    (whole * weight.to("jax")).sum().backward()
    (want * weight).sum().backward()
    assert_same(x.grad, host.grad)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@each_spec
def test_gradients_of_gradients_are_those_of_the_whole(spec: Any, compiled: bool) -> None:
    where = grid()

    def step(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        part = x if x.is_cpu else spmd.enable_manual_sharding(x, spec, mesh=where)
        part = part.sin().exp()
        whole = part if x.is_cpu else spmd.disable_manual_sharding(part, spec, (8, 16), mesh=where)
        (first,) = torch.autograd.grad(whole.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return second.detach(), torch.autograd.grad(second.sum(), x)[0]

    assert_same((spmd.compile(step) if compiled else step)(batch(8, 16).double().to("jax")), step(batch(8, 16).double()))


@each_spec
def test_the_same_inside_a_program_communicates_nothing(spec: Any) -> None:
    where = grid()
    x = spmd.mark_sharding(batch(8, 16).to("jax"), where, spec)

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        part = spmd.enable_manual_sharding(x, spec, mesh=where)
        return spmd.disable_manual_sharding(part.tanh() * 2, spec, x.shape, mesh=where)

    assert_same(step(x), batch(8, 16).tanh() * 2)
    assert step.collectives().counts() == {}


def test_a_reduction_is_that_of_the_piece_alone() -> None:
    where = line()
    host = batch(8, 4)
    part = spmd.enable_manual_sharding(host.to("jax"), ("data", None), mesh=where)
    sums = part.sum(0, keepdim=True)
    whole = spmd.disable_manual_sharding(sums, ("data", None), (where.size(), 4), mesh=where)
    assert_same(whole, host.reshape(where.size(), -1, 4).sum(1))


def test_a_replicated_operand_may_join_and_its_gradient_is_the_sum() -> None:
    where = line()
    host, other = batch(8, 4), batch(4, seed=7).requires_grad_()
    shared = other.detach().to("jax").requires_grad_()
    part = spmd.enable_manual_sharding(host.to("jax"), ("data", None), mesh=where)
    scale = spmd.enable_manual_sharding(shared, (None,), mesh=where)
    spmd.disable_manual_sharding(part * scale, ("data", None), (8, 4), mesh=where).square().sum().backward()
    (host * other).square().sum().backward()
    assert_same(shared.grad, other.grad)
    constant = torch.full((4,), 2.0, device="jax")
    assert_same(spmd.disable_manual_sharding(part * constant, ("data", None), (8, 4), mesh=where), host * 2)


@pytest.mark.parametrize("read", ["cpu", "item", "tolist", "numpy", "__bool__", "__float__"])
def test_a_piece_has_no_global_value(read: str) -> None:
    part = spmd.enable_manual_sharding(batch(8).to("jax"), ("data",), mesh=line()).sum()
    with pytest.raises(spmd.SpmdError, match="a different value on each device(?s:.*)disable_manual_sharding"):
        getattr(part, read)()


@pytest.mark.multidevice(num=2)
def test_what_does_not_fit_is_refused() -> None:
    where = line()
    part = spmd.enable_manual_sharding(batch(8, 8).to("jax"), ("data", None), mesh=where)
    split = spmd.mark_sharding(batch(8, 8).to("jax"), where, (None, "data"))
    for other in (split, split.global_tensor):
        with pytest.raises(spmd.SpmdError, match="combines a manual tensor with a tensor that is split"):
            part @ other
    with pytest.raises(spmd.SpmdError, match="over different meshes"):
        part + spmd.enable_manual_sharding(batch(8, 8).to("jax"), ("model", None), mesh=line("model"))
    with pytest.raises(spmd.SpmdError, match="that is not manual"):
        spmd.disable_manual_sharding(split, ("data", None), (8, 8), mesh=where)
    with pytest.raises(spmd.SpmdError, match=r"do not make up \(64, 8\)"):
        spmd.disable_manual_sharding(part, ("data", None), (64, 8), mesh=where)
    with pytest.raises(mesh.SpecError, match="rank"):
        spmd.enable_manual_sharding(batch(8, 8).to("jax"), ("data",), mesh=where)

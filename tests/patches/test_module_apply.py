"""A module that moves to the device and back keeps its parameters the objects they are."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mesh
import spmd
from spmd import DroppedValueError
from tests.oracle import assert_same, batch, descend, twins


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.down = nn.Linear(4, 4, bias=False)
        self.down.weight = self.up.weight


def test_tied_weights_stay_tied_there_and_back() -> None:
    model = Tied()
    weight, value = model.up.weight, model.up.weight.detach().clone()
    for device in ("jax", "cpu", "jax"):
        model.to(device)
        assert model.up.weight is model.down.weight is weight
        assert weight.device.type == device
        assert torch.equal(weight.cpu(), value)
        assert len(list(model.parameters())) == 2


def test_an_optimizer_made_before_the_move_updates_the_moved_parameters() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.to("jax")
    before = model.weight.detach().cpu()
    model(torch.ones(1, 3).to("jax")).sum().backward()
    optimizer.step()
    assert torch.allclose(model.weight.detach().cpu(), before - 1)


def test_gradients_attributes_and_flags_move_with_their_parameter() -> None:
    model = nn.Linear(3, 3)
    model.weight.note = "mine"  # pyright: ignore[reportAttributeAccessIssue]
    model.bias.requires_grad_(False)
    model(torch.ones(1, 3)).sum().backward()
    model.to("jax")
    assert model.weight.grad is not None
    assert model.weight.grad.device.type == "jax"
    assert torch.equal(model.weight.grad.cpu(), torch.ones(3, 3))
    assert model.weight.note == "mine"  # pyright: ignore[reportAttributeAccessIssue]
    assert not model.bias.requires_grad


def test_a_parameter_that_torch_cannot_swap_is_replaced_as_torch_does() -> None:
    model = nn.Linear(3, 3)
    weight = model.weight
    watched = weakref.ref(weight)  # torch.utils.swap_tensors refuses tensors with weak references
    model.to("jax")
    assert model.weight.device.type == "jax"
    assert watched() is weight
    assert weight.device.type == "cpu"


def test_a_change_of_dtype_keeps_the_sharding(mesh_4x2: mesh.Mesh) -> None:
    model = nn.Linear(8, 8).to("jax")
    weight = spmd.mark_sharding(model.weight, mesh_4x2, ("model", None))
    model.bfloat16()
    assert model.weight is weight
    assert weight.dtype == torch.bfloat16
    assert weight.partition_spec == mesh.PartitionSpec("model", None)
    assert {shard.data.shape for shard in weight.local_shards} == {(4, 8)}


@pytest.mark.parametrize("change", ["double", "bfloat16", "half"])
def test_a_change_of_dtype_keeps_a_sharding_of_uneven_dims(change: str, mesh_4x2: mesh.Mesh) -> None:
    host, model = nn.Linear(6, 5), nn.Linear(6, 5)
    with torch.no_grad():  # integers whose sums every dtype holds
        host.weight.copy_(torch.arange(30.0).reshape(5, 6) - 15)
        host.bias.copy_(torch.arange(5.0))
    model.load_state_dict(host.state_dict())
    spmd.mark_sharding(model.to("jax").weight, mesh_4x2, ("data", "model"))
    getattr(model, change)(), getattr(host, change)()
    assert model.weight.local_shards[0].data.shape == (2, 3)  # pyright: ignore[reportAttributeAccessIssue]
    x = torch.ones(2, 6, dtype=host.weight.dtype)
    for run in (model, spmd.compile(lambda x: model(x))):
        found = run(x.to("jax"))
        assert found.dtype == host.weight.dtype
        assert found.tolist() == host(x).tolist()


def test_a_marked_parameter_comes_back_as_an_ordinary_one(mesh_4x2: mesh.Mesh) -> None:
    model = nn.Linear(8, 8).to("jax")
    spmd.mark_sharding(model.weight, mesh_4x2, ("model", None))
    model.cpu()
    assert type(model.weight) is nn.Parameter
    assert model.weight.device.type == "cpu"


@pytest.mark.parametrize("source", ["meta", "cpu"])
def test_to_empty_moves_every_parameter(source: str) -> None:
    model = nn.Linear(3, 3, device=source).to_empty(device="jax")
    assert {p.device.type for p in model.parameters()} == {"jax"}
    nn.init.ones_(model.weight)
    assert torch.equal(model.weight.cpu(), torch.ones(3, 3))


def test_lazy_modules_get_their_shapes_on_the_device() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()).to("jax")
    assert model(torch.ones(2, 4).to("jax")).shape == (2, 3)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"jax"}
    assert type(model[0].weight) is nn.Parameter


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "cpu": nn.Module.cpu,
    "half": nn.Module.half,
    "double": nn.Module.double,
    "there and back": lambda model: model.cpu().to("jax"),
    "in another dtype": lambda model: model.cpu().double().to("jax"),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_gradient_that_was_not_kept_is_none_that_is_kept_after_a_conversion(name: str) -> None:
    host, device = twins()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (host, device)]
    step = spmd.compile(lambda x: descend(device, optimizers[1], x))
    x = batch(8, 8, seed=0)
    assert_same(step(x.to("jax")), descend(host, optimizers[0], x))
    host.load_state_dict({key: value.cpu() for key, value in device.state_dict().items()})
    assert CONVERSIONS[name](device) is device
    dtype = next(device.parameters()).dtype
    host.to(dtype)
    for p, ours in zip(host.parameters(), device.parameters(), strict=True):
        assert_same(ours, p)
        assert ours.grad is not None
        assert (ours.grad.dtype, ours.grad.shape, ours.grad.device) == (dtype, p.shape, ours.device)
        with pytest.raises(DroppedValueError, match="not kept"):
            ours.grad.cpu().sum()
    optimizers[1].zero_grad()
    assert all(p.grad is None for p in device.parameters())
    if dtype != torch.float16:
        device(x.to(next(device.parameters()))).sum().backward()
        optimizers[0].zero_grad()
        host(x.to(dtype)).sum().backward()
        for p, ours in zip(host.parameters(), device.parameters(), strict=True):
            assert p.grad is not None and ours.grad is not None
            assert_same(ours.grad, p.grad)


def test_on_the_host_nothing_is_added_to_a_gradient_that_was_not_kept() -> None:
    model = nn.Linear(3, 3).to("jax")
    spmd.compile(lambda x: model(x).sum().backward())(torch.ones(2, 3).to("jax"))
    model.cpu()
    for read in (lambda: model(torch.ones(2, 3)).sum().backward(), model.weight.grad.numpy, lambda: repr(model.weight.grad)):  # pyright: ignore[reportOptionalMemberAccess]
        with pytest.raises(DroppedValueError, match=r"call optimizer.zero_grad\(\) before the next backward"):
            read()


class OnSphere(torch.nn.Parameter):
    """A parameter of a class of one's own, as of geoopt."""

    radius = 2.0


def test_a_parameter_of_a_users_class_stays_of_that_class() -> None:
    model = torch.nn.Module()
    model.point = point = OnSphere(torch.ones(3))
    for device in ("jax", "cpu", "jax"):
        model.to(device)
        assert model.point is point and type(point) is OnSphere and point.device.type == device and point.requires_grad


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "to the device": lambda model: model.to("jax"),
    "there and back": lambda model: model.to("jax").cpu(),
    "in another dtype": lambda model: model.to("jax", torch.float64),
    "without values": lambda model: model.to_empty(device="jax"),
    "replaced, as it cannot be swapped": lambda model: (watched.append(weakref.ref(model.weight)), model.to("jax")),
    "fully_shard": lambda model: spmd.fully_shard(model.to("jax"), mesh.Mesh(range(1), (1,), ("data",))),
    "marked before": lambda model: (
        spmd.mark_sharding(model.weight, mesh.Mesh(range(1), (1,), ("data",)), ("data", None)),
        model.to("jax"),
    ),
}
watched: list[weakref.ref[Any]] = []


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("compiled", [False, True])
def test_hooks_of_parameters_run_after_a_move_and_their_handles_remove_them(name: str, compiled: bool) -> None:
    def run(move: Callable[[nn.Module], object], compile: Callable[..., Any]) -> tuple[list[Any], list[str]]:
        model, log = nn.Linear(2, 2), list[str]()

        def noted(text: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
            return lambda tensor: (log.append(text), change(tensor))[1]

        def tripled(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(3)

        first = model.weight.register_hook(noted("times ten", lambda g: g * 10))
        model.weight.register_hook(noted("plus one", lambda g: g + 1))
        last = model.weight.register_post_accumulate_grad_hook(noted("accumulated", tripled))
        move(model)
        x, found = torch.ones(1, 2).to(model.weight), list[Any]()

        def backward(x: torch.Tensor) -> None:
            model(x).sum().backward()

        step = backward if x.is_cpu else compile(backward)
        for remove in (first.remove, last.remove, lambda: None):
            model.zero_grad()
            step(x)
            found.append(None if model.weight.grad is None else model.weight.grad.tolist())
            remove()
        return found, log

    assert run(MOVES[name], spmd.compile(keep_grads=True) if compiled else lambda fn: fn) == run(lambda _: None, lambda fn: fn)

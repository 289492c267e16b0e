"""`p.data = new`, inside and outside of compiled functions: as on the CPU, or refused."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.utils as utils

import mesh
import spmd
from tests.oracle import assert_same, assert_same_model, batch, twins


def halved(model: nn.Module, x: torch.Tensor) -> Any:
    before = model(x)
    for p in model.parameters():
        p.data = p.data * 0.5
    return before.detach(), model(x).detach()


def by_vector(model: nn.Module, x: torch.Tensor) -> Any:
    utils.vector_to_parameters(utils.parameters_to_vector(model.parameters()) * x.mean(), model.parameters())
    return model(x).detach()


def swapped(model: Any, x: torch.Tensor) -> Any:
    a, b = model.up.weight.data, model.down.weight.data.t()
    model.up.weight.data, model.down.weight.data = b.clone(), a.t().clone()
    return model(x).detach()


def trained(model: nn.Module, x: torch.Tensor) -> Any:
    loss = model(x).square().mean()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.data = p.data - 0.1 * grad
    return loss.detach()


CASES: list[Callable[..., Any]] = [halved, by_vector, swapped, trained]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("fn", CASES, ids=lambda f: f.__name__)
def test_every_call_updates_the_parameters(fn: Callable[..., Any], compiled: bool) -> None:
    host, device = twins()
    step = spmd.compile(lambda x: fn(device, x)) if compiled else lambda x: fn(device, x)
    for i in range(3):
        x = batch(4, 8, seed=i)
        assert_same(step(x.to("jax")), fn(host, x))
        assert_same_model(device, host)
    if compiled:
        assert step.num_traces == 1  # pyright: ignore[reportFunctionMemberAccess]


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("fn", [halved, by_vector, trained], ids=lambda f: f.__name__)
def test_on_eight_devices_the_layout_stays(fn: Callable[..., Any], mesh_4x2: mesh.Mesh) -> None:
    host, device = twins()
    for name, p in device.named_parameters():
        spmd.mark_sharding(p, mesh_4x2, ("model", None) if name.endswith("weight") else ("model",))
    step = spmd.compile(lambda x: fn(device, x))
    for i in range(2):
        x = batch(8, 8, seed=i)
        assert_same(step(x.to("jax")), fn(host, x))
        assert_same_model(device, host)
    assert device.up.weight.sharding_spec.partition_spec == mesh.PartitionSpec("model", None)


def test_between_calls_a_program_is_traced_for_the_new_memory() -> None:
    host, device = twins()
    step = spmd.compile(lambda x: device(x).detach())
    x = batch(4, 8)
    for _ in range(2):
        assert_same(step(x.to("jax")), host(x).detach())
        for model in (host, device):
            model.up.weight.data = model.up.weight.data * 2


def of_another_shape(w: nn.Parameter, v: nn.Parameter) -> None:
    w.data = w.data[:2]


def of_another_parameter(w: nn.Parameter, v: nn.Parameter) -> None:
    w.data = v.data


def one_for_two(w: nn.Parameter, v: nn.Parameter) -> None:
    new = w.data * 2
    w.data, v.data = new, new


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (of_another_shape, r"was torch.float32 of shape \(4, 4\), and becomes torch.float32 of shape \(2, 4\)\n  fix: use a view of it"),
        (of_another_parameter, r"another tensor shares its new memory\n  fix: update it in place: .*\.data\.copy_\(new\)"),
        (one_for_two, r"another tensor shares its new memory\n  fix: update it in place: .*\.data\.copy_\(new\)"),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_what_is_no_update_in_place_is_refused_and_leaves_all_as_it_was(fn: Callable[..., Any], why: str) -> None:
    w, v = (nn.Parameter(batch(4, 4, seed=i).to("jax")) for i in (1, 2))
    with pytest.raises(spmd.TraceError, match=why):
        spmd.compile(lambda: fn(w, v))()
    assert_same((w.detach(), v.detach()), (batch(4, 4, seed=1), batch(4, 4, seed=2)))


def test_an_alias_made_between_calls_is_noticed() -> None:
    w = nn.Parameter(batch(4).to("jax"))

    def fn() -> None:
        w.data = w.data * 2

    step = spmd.compile(fn)
    step()
    step()
    before = w.data  # on the CPU it keeps the values that w has now
    with pytest.raises(spmd.TraceError, match="another tensor shares its old memory"):
        step()
    assert_same(before, batch(4) * 4)
    del before
    step()
    assert_same(w.detach(), batch(4) * 8)


@pytest.mark.multidevice(num=8)
def test_a_parameter_of_a_marked_parameter_is_marked_alike(mesh_4x2: mesh.Mesh) -> None:
    w = spmd.mark_sharding(nn.Parameter(batch(8, 4).to("jax")), mesh_4x2, ("model", None))
    same = nn.Parameter(w)
    still = nn.Parameter(w, requires_grad=False)
    assert type(same) is type(w) and isinstance(same, nn.Parameter) and same.is_leaf
    assert (same.requires_grad, still.requires_grad) == (True, False)
    assert same.sharding_spec == w.sharding_spec  # pyright: ignore[reportAttributeAccessIssue]
    with torch.no_grad():
        same.add_(1)
    assert_same((w.detach(), still), (batch(8, 4) + 1, batch(8, 4) + 1))


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("old", [False, True], ids=["parametrization", "hook"])
def test_weight_norm_of_a_marked_layer(old: bool, compiled: bool, mesh_4x2: mesh.Mesh) -> None:
    host, device = twins(lambda: nn.Linear(4, 8))
    spmd.mark_sharding(device.weight, mesh_4x2, ("model", None))
    norm = utils.weight_norm if old else utils.parametrizations.weight_norm
    with pytest.warns(FutureWarning, match="weight_norm") if old else contextlib.nullcontext():
        host, device = norm(host), norm(device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (host, device)]

    def fn(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = spmd.compile(lambda x: fn(device, optimizers[1], x)) if compiled else lambda x: fn(device, optimizers[1], x)
    for i in range(3):
        x = batch(8, 4, seed=i)
        assert_same(step(x.to("jax")), fn(host, optimizers[0], x))
        assert_same_model(device, host)


def test_a_call_advances_the_versions_of_what_it_writes() -> None:
    """Autograd refuses a graph that saved a tensor which a later call has written. Only the first call did, by its trace."""
    found = []
    for device in ("cpu", "jax"):
        weight, extra = torch.nn.Parameter(torch.full((2,), 3.0, device=device)), torch.ones(2, device=device)
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step(x: torch.Tensor, weight: Any = weight, extra: Any = extra, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            (weight * x).sum().backward()
            optimizer.step()
            extra.add_(1)
            x.mul_(2)

        run: Any = spmd.compile(step) if device == "jax" else step
        x = torch.ones(2, device=device)
        run(x)
        loss = (weight * weight).sum()
        run(x)
        weight.grad = None
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        run(x)
        found.append([tensor._version for tensor in (weight, extra, x)])
    assert found[0] == found[1]

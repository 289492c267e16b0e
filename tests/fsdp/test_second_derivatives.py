"""`fully_shard`: second derivatives through gathered parameters are those of the unsharded model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import mesh
import spmd
from tests.oracle import assert_same, batch

pytestmark = pytest.mark.multidevice(num=8)


def pair(**options: Any) -> tuple[nn.Module, nn.Module, mesh.Mesh]:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    device, grid = copy.deepcopy(host).to("jax"), mesh.Mesh(range(8), (8,), ("fsdp",))
    for layer in (device[0], device[2]):
        spmd.fully_shard(layer, grid, **options)
    return host, spmd.fully_shard(device, grid, **options), grid


def of_inputs(model: nn.Module, x: torch.Tensor) -> Any:
    """Gradients of a loss with a penalty on the gradient of the input (WGAN-GP)."""
    x = x.detach().requires_grad_()
    out = model(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return torch.autograd.grad(out.mean() + ((g.norm(dim=1) - 1) ** 2).mean(), list(model.parameters()))


def of_parameters(model: nn.Module, x: torch.Tensor) -> Any:
    """Gradients of a loss with a penalty on the gradients of the parameters."""
    loss, parameters = model(x).square().mean(), list(model.parameters())
    grads = torch.autograd.grad(loss, parameters, create_graph=True)
    return torch.autograd.grad(loss + sum(g.square().sum() for g in grads), parameters)


def by_backward(model: nn.Module, x: torch.Tensor) -> Any:
    """`backward` alone. The loss does not reach the last bias, which gets no gradient."""
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    g.square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return grads


def lazily(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor) -> Any:
        with spmd.lazy():
            return fn(x)

    return run


HOW: dict[str, Callable[..., Any]] = {"eager": lambda fn: fn, "compiled": spmd.compile, "lazy": lazily}
OPTIONS: list[dict[str, Any]] = [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"reshard_after_forward": False}]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("step", [of_inputs, of_parameters, by_backward])
def test_gradient_penalties_are_those_of_the_unsharded_model(step: Callable[..., Any], options: dict[str, Any], how: str) -> None:
    host, device, grid = pair(**options)
    run = HOW[how](lambda x: step(device, x))
    for seed in (1, 2):
        x = batch(8, 6, seed=seed)
        want, got = step(host, x), run(spmd.mark_sharding(x.to("jax"), grid, ("fsdp", None)))
        assert [g is None for g in got] == [g is None for g in want]
        assert_same([g for g in got if g is not None], [g for g in want if g is not None])


def test_a_policy_applies_to_second_derivatives_too() -> None:
    host, device, _ = pair(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64))
    want = of_parameters(host.double(), batch(8, 6).double())
    got = spmd.compile(lambda x: of_parameters(device, x))(batch(8, 6).to("jax"))
    assert_same(got, tuple(g.float() for g in want))


def test_a_hessian_is_that_of_the_unsharded_model() -> None:
    host, device, _ = pair()
    x = batch(2, 6)
    got = spmd.compile(lambda x: torch.autograd.functional.hessian(lambda x: device(x).square().sum(), x))(x.to("jax"))
    assert_same(got, torch.autograd.functional.hessian(lambda x: host(x).square().sum(), x))

"""Gradients whose formula in torch reads values: equal to the CPU's, eagerly, in a program, on 8 devices, and again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import spmd
from tests.grids import grid
from tests.lowering.against_cpu import assert_equal, on_jax

nan, inf = float("nan"), float("inf")
Fn = Callable[[torch.Tensor], torch.Tensor]


def written_behind(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[..., 1:].cumprod_(-1)
    return y


OPS: dict[str, Fn] = {
    "max": torch.max,
    "min": torch.min,
    "median": torch.median,
    "nanmedian": torch.nanmedian,
    "prod": torch.prod,
    "prod of a dim": lambda x: x.prod(0),
    "prod of the last dim": lambda x: x.prod(-1, keepdim=True),
    "prod in float64": lambda x: x.prod(dtype=torch.float64),
    "cumprod": lambda x: x.cumprod(-1),
    "cumprod of the first dim": lambda x: x.cumprod(0),
    "cumprod in float64": lambda x: x.cumprod(-1, dtype=torch.float64),
    "cumprod_": lambda x: x.clone().cumprod_(0),
    "cumprod_ of a view": written_behind,
    "amax": torch.amax,
    "aminmax": lambda x: torch.stack(torch.aminmax(x)),
    "renorm": lambda x: x.reshape(1, -1).renorm(inf, 0, 1.0),
    "vander": lambda x: torch.linalg.vander(x.reshape(-1), N=3),
}
ROWS = [
    *([1.0, 3.0, 2.0, 4.0], [3.0, 3.0, 1.0, 3.0], [0.0, 2.0, 3.0, 5.0], [2.0, 0.0, 3.0, 0.0], [-0.0, 0.0, 1.0, 2.0]),
    *([nan, 2.0, 3.0, 1.0], [nan, nan, 1.0, 0.0], [inf, 2.0, inf, 1.0], [-inf, 0.0, 2.0, 0.0], [0.0, 0.0, inf, nan]),
]
SHAPES: dict[str, tuple[int, ...]] = {"a row": (4,), "a column of rows": (2, 2), "a number": ()}


def gradients(op: Fn, x: torch.Tensor, weight: torch.Tensor, again: bool = False) -> list[Any]:
    """The result, its gradient, and where `again` is, that gradient's."""
    x = x.detach().requires_grad_()
    y = op(x)
    weights = weight[: y.numel()].reshape(y.shape).to(y.dtype)
    (grad,) = torch.autograd.grad((y * weights).sum(), x, create_graph=again)
    found = [y.detach(), grad.detach()]
    if again:
        found.extend(torch.autograd.grad((grad * weight[: x.numel()].reshape(x.shape)).sum(), x) if grad.requires_grad else [])
    return found


@pytest.mark.parametrize("name", OPS)
def test_gradient_equals_the_cpus(name: str) -> None:
    step = spmd.compile(lambda x, weight: gradients(OPS[name], x, weight))
    weight = torch.linspace(0.5, 2.0, 12)
    for shape in SHAPES.values():
        for row in ROWS:
            x = torch.tensor(row)[: torch.Size(shape).numel()].reshape(shape)
            if "view" in name and not x.dim():
                continue
            expected = gradients(OPS[name], x, weight)
            assert_equal(gradients(OPS[name], on_jax(x), on_jax(weight)), expected)
            assert_equal(step(on_jax(x), on_jax(weight)), expected)
    assert step.num_traces <= len(SHAPES)


@pytest.mark.parametrize("name", ["prod", "prod of a dim", "cumprod", "cumprod_", "max", "median"])
def test_second_gradient_equals_the_cpus(name: str) -> None:
    step = spmd.compile(lambda x, weight: gradients(OPS[name], x, weight, again=True))
    weight = torch.linspace(0.5, 2.0, 12)
    for row in ROWS[:5]:
        x = torch.tensor(row)
        expected = gradients(OPS[name], x, weight, again=True)
        assert_equal(gradients(OPS[name], on_jax(x), on_jax(weight), again=True), expected)
        assert_equal(step(on_jax(x), on_jax(weight)), expected)


@pytest.mark.parametrize("name", ["max", "nanmedian", "prod", "prod of a dim", "cumprod", "cumprod of the first dim", "cumprod_"])
def test_gradient_of_a_sharded_tensor_equals_the_cpus(name: str) -> None:
    x = torch.linspace(-1, 1, 64).reshape(8, 8).contiguous()
    x[2, 3] = 0.0
    weight = torch.linspace(0.5, 2.0, 64)
    expected = gradients(OPS[name], x, weight)
    marked = spmd.mark_sharding(on_jax(x), grid(), ("data", "model"))
    assert_equal(gradients(OPS[name], marked, on_jax(weight)), expected)
    assert_equal(spmd.compile(lambda x, weight: gradients(OPS[name], x, weight))(marked, on_jax(weight)), expected)


def filled(fill: Callable[..., Any], *args: torch.Tensor) -> list[Any]:
    """`fill(x, value, mask, index)` and its gradients by x and value."""
    x, value, mask, index = args
    x, value = x.detach().requires_grad_(), value.detach().requires_grad_()
    y = fill(x, value, mask, index)
    weight = torch.arange(1.0, 1 + y.numel(), device=y.device).reshape(y.shape)
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), (x, value), allow_unused=True)]


def assigned(x: torch.Tensor, where: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    x = x * 1
    x[where] = value
    return x


FILLS: dict[str, Callable[..., Any]] = {
    "masked_fill": lambda x, value, mask, index: x.masked_fill(mask, value),
    "masked_fill_": lambda x, value, mask, index: (x * 1).masked_fill_(mask, value),
    "masked_fill, broadcast": lambda x, value, mask, index: x[:1].masked_fill(mask, value),
    "masked_fill, another dtype": lambda x, value, mask, index: x.double().masked_fill(mask, value),
    "masked_fill, no gradient": lambda x, value, mask, index: x.masked_fill(mask, value.detach()),
    "index_fill": lambda x, value, mask, index: x.index_fill(-1, index, value),
    "index_fill_": lambda x, value, mask, index: (x * 1).index_fill_(0, index, value),
    "x[mask] = value": lambda x, value, mask, index: assigned(x, mask, value),
    "x[index] = value": lambda x, value, mask, index: assigned(x, index, value),
    "x[mask] = value of rows": lambda x, value, mask, index: assigned(x[:, None] * x, mask, value),
}


@pytest.mark.parametrize("name", FILLS)
def test_filling_with_a_tensors_value_has_its_gradient(name: str) -> None:
    step = spmd.compile(lambda x, value, mask, index: filled(FILLS[name], x, value, mask, index))
    for shift in range(2):
        x, value = torch.tensor([1.0, 2.0, 3.0, 4.0]) + shift, torch.tensor(7.0 + shift)
        mask, index = torch.tensor([True, False, True, bool(shift)]), torch.tensor([2, shift, 2])
        expected = filled(FILLS[name], x, value, mask, index)
        args = on_jax((x, value, mask, index))
        assert_equal(filled(FILLS[name], *args), expected)
        assert_equal(step(*args), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward-mode rules use it
def test_functorch_has_torchs_own_formulas() -> None:
    x = torch.tensor([1.0, 0.0, 3.0, 3.0])
    for transform in (
        lambda x: torch.func.grad(torch.max)(x),
        lambda x: torch.func.jvp(torch.prod, (x,), (torch.ones_like(x),)),
        lambda x: torch.func.hessian(lambda x: x.cumprod(0).sum())(x),
        lambda x: torch.func.vmap(torch.func.grad(lambda x: x.median()))(x.reshape(2, 2)),
        lambda x: torch.func.grad(lambda v: x.masked_fill(x > 1, v).sum())(x[0]),
    ):
        assert_equal(transform(on_jax(x)), transform(x))
        assert_equal(spmd.compile(transform)(on_jax(x)), transform(x))


def test_primals_and_tangents_may_be_views() -> None:
    def tangents(x: torch.Tensor) -> list[Any]:
        jvp, y = torch.func.jvp, x + 1
        return [
            jvp(torch.sin, (x[0],), (x[1],)),
            jvp(torch.sin, (x[:, 1],), (x[:, 2],)),
            jvp(torch.sin, (x.t(),), (x.t().contiguous(),)),
            jvp(lambda a: a.add_(1).mul_(2), (x[:, 0].clone(),), (x[:, 1],)),
            jvp(torch.func.grad(lambda a: a.sin().sum()), (x[1],), (x[2],)),
            torch.func.vmap(lambda a, b: jvp(torch.sin, (a,), (b,)))(x, y.t()),
            torch.func.vmap(lambda b: jvp(torch.sin, (x[0],), (b,))[1])(y.t()),
        ]

    x = torch.arange(9.0).reshape(3, 3) / 9
    assert_equal(tangents(on_jax(x)), tangents(x))
    assert_equal(spmd.compile(tangents)(on_jax(x)), tangents(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_has_torchs_own_formulas() -> None:
    def tangents(x: torch.Tensor) -> list[Any]:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            results = (dual.max(), dual.prod(), dual.cumprod(0), dual.median(), dual.masked_fill(x > 1, x[0]))
            return [forward_ad.unpack_dual(y).tangent for y in results]

    x = torch.tensor([1.0, 3.0, 0.0])
    assert_equal(tangents(on_jax(x)), tangents(x))


# What a program can select by: values that were computed from constants alone.
KNOWN: dict[str, Fn] = {
    "combinations": torch.combinations,
    "a triangle": lambda x: (x[:, None] * x)[torch.ones(4, 4, device=x.device).triu(1).bool()],
    "positions": lambda x: x[(torch.arange(4, device=x.device) % 2).nonzero()[:, 0]],
    "masked_select": lambda x: (x[:, None] * x).masked_select(torch.tensor([True, False, True, False], device=x.device)),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 3], device=x.device)),
    "unique": lambda x: x * torch.tensor([1, 1, 2], device=x.device).unique().sum(),
    "argwhere": lambda x: x[torch.argwhere(torch.eye(4, device=x.device)[0] > 0)],
    "many values": lambda x: assigned(x, torch.tensor([True, False, True, False], device=x.device), x[:2] * 2),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_constant_mask_selects_in_a_program(name: str) -> None:
    step = spmd.compile(lambda x: gradients(KNOWN[name], x, torch.arange(1.0, 17.0, device=x.device)))
    for shift in range(2):
        x = torch.tensor([1.0, 2.0, 3.0, 4.0]) + shift
        assert_equal(step(on_jax(x)), gradients(KNOWN[name], x, torch.arange(1.0, 17.0)))


def test_a_mask_that_may_change_is_no_constant() -> None:
    holder = torch.nn.Module()
    holder.register_buffer("mask", torch.tensor([True, False]))
    holder.to("jax")
    step = spmd.compile(lambda x: x[holder.mask])
    assert_equal(step(on_jax(torch.tensor([1.0, 2.0]))), torch.tensor([1.0]))
    holder.mask.logical_not_()  # which the host knows
    assert_equal(step(on_jax(torch.tensor([1.0, 2.0]))), torch.tensor([2.0]))
    holder.mask.copy_(on_jax(torch.tensor([1.0, 2.0])) > 1)
    with pytest.raises(spmd.TraceError, match="depends on values"):
        step(on_jax(torch.tensor([1.0, 2.0])))

"""Functions without a second derivative: differentiating one twice is refused by every road to it; once, with a graph, is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from spmd.device._once_differentiable import once_differentiable
from tests.oracle import assert_same, batch

TEXT = "tripled was differentiated twice(?s:.*)called at (?s:.*)no second derivative(?s:.*)fix: x \\* 3"


@once_differentiable("tripled", fix="x * 3")
class Tripled(torch.autograd.Function):
    """Also passes a second tensor on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return x * 3, y * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        assert not torch.is_grad_enabled()
        return grads[0] * 3, None if not ctx.needs_input_grad[1] else grads[1]


def tripled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, second = Tripled.apply(x, y)  # pyright: ignore[reportGeneralTypeIssues]
    return first + second


PATHS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # how the function's input depends on a leaf
    "leaf": lambda x: x,
    "computed": lambda x: x.tanh(),
    "view": lambda x: x[1:],
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("last", ["grad", "backward"])
@pytest.mark.parametrize("path", PATHS)
def test_a_second_derivative_is_refused(path: str, last: str, compiled: bool) -> None:
    def step(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(tripled(PATHS[path](x), torch.zeros_like(PATHS[path](x))).sum(), x, create_graph=True)
        loss = g.square().sum() + x.sum()
        return loss.backward() if last == "backward" else torch.autograd.grad(loss, x)

    with pytest.raises(spmd.SpmdError, match=TEXT):
        (spmd.compile(step) if compiled else step)(batch(3, 4).to("jax"))


def test_the_incoming_gradient_is_on_the_path_too() -> None:
    x, weight = batch(3, 4).to("jax").requires_grad_(), batch(3, 4, seed=2).to("jax").requires_grad_()
    (g,) = torch.autograd.grad((tripled(x, x) * weight).sum(), x, create_graph=True)
    with pytest.raises(spmd.SpmdError, match=TEXT):
        torch.autograd.grad(g.sum(), weight)


def test_a_first_derivative_with_a_graph_is_given() -> None:
    x = batch(3, 4).to("jax").requires_grad_()
    assert_same(torch.autograd.grad(tripled(x.tanh(), x).sum(), x, create_graph=True)[0].detach(), (3 * (1 - x.tanh() ** 2) + 1).detach())
    (g,) = torch.autograd.grad(tripled(x, x.detach()).sum() + (x**3).sum(), x, create_graph=True)
    other = x * 2
    assert_same(torch.autograd.grad((other * g.detach()).sum(), x)[0], 2 * g.detach())


def in_scan(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return spmd.scan(lambda c, r: (c, (r @ w).tanh()), x.new_zeros(()), x)[1]


def in_cond(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > -1e9, lambda x, w: (x @ w).tanh(), lambda x, w: x @ w, (x, w))  # pyright: ignore[reportReturnType]


def hop_scan(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.scan import scan

    return scan(lambda c, r: (c + 0, (r @ w).tanh()), torch.zeros_like(x[0]), x)[1]  # pyright: ignore[reportArgumentType]


REAL: dict[str, tuple[Callable[..., torch.Tensor], bool, str]] = {  # name -> (function, compiled, text of its error)
    "scan": (in_scan, True, "scan or scan_layers was differentiated twice(?s:.*)fix: for x in xs"),
    "torch's scan": (hop_scan, True, "scan was differentiated twice(?s:.*)fix: for x in xs"),
    "cond": (in_cond, True, "torch.cond was differentiated twice(?s:.*)fix: torch.where"),
    "assume_pure": (
        spmd.assume_pure(lambda x, w: (x @ w).tanh()),
        False,
        "a function of assume_pure was differentiated twice(?s:.*)fix: fn",
    ),
}


@pytest.mark.parametrize("kind", ["grad", "backward", "hessian"])
@pytest.mark.parametrize("name", REAL)
def test_loops_and_branches_of_a_program_refuse_it(name: str, kind: str) -> None:
    fn, compiled, text = REAL[name]

    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        if kind == "hessian":
            return torch.autograd.functional.hessian(lambda x: fn(x, w).square().sum(), x)
        (g,) = torch.autograd.grad(fn(x, w).square().sum(), x, create_graph=True)
        loss = g.square().sum()
        return torch.autograd.grad(loss, (x, w)) if kind == "grad" else loss.backward()

    with pytest.raises(spmd.SpmdError, match=text):
        (spmd.compile(step) if compiled else step)(batch(2, 3).to("jax"), batch(3, 3, seed=2).to("jax"))

"""Outputs of a graph without a gradient in a call: what only they reach has none, and what is infinite there does not spread."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import spmd
import spmd.dynamo._compile_graph as backend
from tests.oracle import assert_same, assert_same_model, batch, twins

pytestmark = pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")  # by Dynamo


@pytest.fixture(autouse=True)
def _count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_made", type(backend._made)())


class Ones(torch.autograd.Function):
    """A derivative that is no multiple of the gradient, of one of two results."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, torch.ones_like(grad)


class Exponential(torch.autograd.Function):
    """A derivative that is no zero where the gradients are; the second input has none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, y * 3

    @staticmethod
    def backward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return one + other.exp(), None


class Heads(nn.Module):
    """A trunk, and heads that share it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.other, self.scale = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.tanh(self.trunk(x))
        return self.one(h), self.other(h) * self.scale, self.scale * 2


Make = Callable[[Heads, torch.Tensor], tuple[torch.Tensor, ...]]
CASES: dict[str, Make] = {
    "heads": lambda net, x: net(x),
    "infinite": lambda net, x: (net.one(net.trunk(x)), net.other(net.trunk(x)) * torch.inf, (net.scale * 0).log()),
    "divided by zero": lambda net, x: (net.one(x * net.scale.sum()), net.one(x) / (net.scale * 0), net.other(x)),
    "a step": lambda net, x: (net.trunk(x).floor(), net.trunk(x), net.one(x)),
    "checkpoint": lambda net, x: (*checkpoint(net, x, use_reentrant=False)[:2], net.scale * 1),
    "derivative of one's own": lambda net, x: (Ones.apply(net.one(x), net.other(x)), net.trunk(x), net.other(x) * 2),
    "its gradients": lambda net, x: (*Exponential.apply(net.one(x), net.other(x)), net.one(x) * 1),
    "views": lambda net, x: (*net.one(x).chunk(2, 1), net.trunk(x)),
    "sum and difference": lambda net, x: (net.one(x) - net.other(x), net.one(x) + net.scale, net.trunk(x)),
    "branches": lambda net, x: (torch.where(x[:, :4] > 0, net.one(x), net.other(x)), net.other(x).cumsum(0), net.trunk(x).softmax(0)),
}
GIVEN = [(0,), (1,), (2,), (0, 2), (0, 1, 2)]


def _gradients(net: Heads, results: tuple[torch.Tensor, ...], given: tuple[int, ...]) -> list[Any]:
    net.zero_grad()
    torch.stack([results[i].sin().sum() for i in given]).sum().backward()
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_pytorchs_for_each_set_of_outputs_that_have_one(case: str, dynamic: bool | None) -> None:
    host, model = (net.double() for net in twins(Heads))
    fast = torch.compile(CASES[case], backend="spmd", fullgraph=True, dynamic=dynamic)
    x = batch(5, 8).double()
    for given in GIVEN:
        got, want = _gradients(model, fast(model, x.to("jax")), given), _gradients(host, CASES[case](host, x), given)
        assert [g is None for g in got] == [w is None for w in want]
        for g, w in zip(got, want, strict=True):
            if w is not None:
                torch.testing.assert_close(g.cpu(), w, rtol=1e-13, atol=1e-13, equal_nan=True)  # float64: last bits


def test_weight_decay_moves_no_parameter_without_a_gradient_and_its_hooks_do_not_run() -> None:
    host, model = twins(Heads)
    seen: list[str] = []
    for net in (host, model):
        net.other.weight.register_hook(lambda grad: seen.append("hook"))
        net.other.weight.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    theirs, ours = (torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5) for net in (host, model))
    fast = torch.compile(model, backend="spmd", fullgraph=True)
    for i in range(2):
        for net, run, optimizer in ((host, host, theirs), (model, fast, ours)):
            optimizer.zero_grad()
            run(batch(4, 8, seed=i).to(net.scale.device))[0].square().sum().backward()
            optimizer.step()
    assert_same_model(model, host)
    assert not seen and model.other.weight.grad is None


def test_backward_through_one_output_after_the_other_adds_up() -> None:
    host, model = twins(Heads)
    fast = torch.compile(model, backend="spmd", fullgraph=True)
    for net, run in ((host, host), (model, fast)):
        results = run(batch(4, 8).to(net.scale.device))
        results[0].sum().backward(retain_graph=True)
        assert net.other.weight.grad is None
        results[1].sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in host.parameters()])


def test_an_output_that_is_used_and_whose_gradient_is_none_has_none() -> None:
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            return None

    for make in (lambda w: w * 2, torch.compile(lambda w: w * 2, backend="spmd")):
        w = batch(3).to("jax").requires_grad_()
        Stop.apply(make(w)).sum().backward()
        assert w.grad is None


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_a_checkpoint_around_a_compiled_model_recomputes_it(num_outputs: int) -> None:
    host, model = twins(Heads)
    fast = torch.compile(model, backend="spmd", fullgraph=True)
    for net, run in ((host, host), (model, fast)):  # the first call traces, which the checkpoint does not see
        for i in range(2):
            results = checkpoint(run, batch(4, 8, seed=i).to(net.scale.device), use_reentrant=False)
            torch.stack([r.square().sum() for r in results[:num_outputs]]).sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in host.parameters()])


def test_a_backward_pass_frees_what_only_it_reached() -> None:
    host, model = twins(Heads)
    fast = torch.compile(model, backend="spmd", fullgraph=True)
    for net, run in ((host, host), (model, fast)):
        one, other, _ = run(batch(4, 8).to(net.scale.device))
        torch.autograd.grad(one.sum(), [net.one.weight, net.trunk.weight])
        torch.autograd.grad(other.sum(), [net.scale])
        for output in (one, other):
            with pytest.raises(RuntimeError, match="second time"):
                output.sum().backward()


def on_leaves(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo itself looks there
@pytest.mark.parametrize("before", [on_leaves, torch.tanh])
def test_a_second_derivative_is_refused(before: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """One node for all outputs, and a node for each group of inputs."""

    def two(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * 2).tanh(), (x * y).sin()

    for fn in (lambda x, y: two(x, y)[1], two):
        graph = torch.compile(fn, backend="spmd", fullgraph=True)
        x, y = batch(2, 3).to("jax").requires_grad_(), batch(2, 3, seed=2).to("jax").requires_grad_()
        out = graph(before(x), before(y))
        loss = out.sum() if isinstance(out, torch.Tensor) else out[0].sum() + out[1].sum()
        grads = torch.autograd.grad(loss, (x, y), create_graph=True)
        host = [t.detach().cpu().requires_grad_() for t in (x, y)]
        want = fn(*map(before, host))
        want = want.sum() if isinstance(want, torch.Tensor) else want[0].sum() + want[1].sum()
        assert_same(tuple(g.detach() for g in grads), torch.autograd.grad(want, host))
        for of in (x, y):
            with pytest.raises(spmd.SpmdError, match="a graph of torch.compile was differentiated twice(?s:.*)fix: spmd.compile"):
                torch.autograd.grad(grads[0].square().sum(), of, retain_graph=True)

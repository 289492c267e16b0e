"""Sizes that vary under torch.compile(backend="spmd"): one program for many where that is exact, one for each where it is not proved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd.dynamo._compile_graph as backend
from spmd.dynamo import graphs
from tests.oracle import assert_same, batch, twins

SIZES = (3, 70, 64)
LOOSE = (2e-5, 2e-5)  # sums over a hundred rows, in another order


class Net(nn.Module):
    """Rows that have no part in each other, and a table of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.table = nn.Embedding(5, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.norm(self.up(x + self.table((x[:, 0] > 0).long())))))


Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], Any]
EXACT: dict[str, Loss] = {
    "rows": lambda net, x, y: net(x),
    "mean": lambda net, x, y: F.mse_loss(net(x), y),
    "sum": lambda net, x, y: (net(x) * y).sum(),
    "cross entropy": lambda net, x, y: F.cross_entropy(net(x), y.argmax(1)),
    "log softmax": lambda net, x, y: (F.log_softmax(net(x), -1) * y).sum(1).mean(),
    "size": lambda net, x, y: net(x).sum(0) / x.shape[0] + x.shape[0],
    "maximum": lambda net, x, y: net(x).amax(0),
    "minimum": lambda net, x, y: (net(x) + 10).amin(0),
    "product over rows": lambda net, x, y: net(x).t() @ y,
    "reshaped": lambda net, x, y: net(x).reshape(-1, 4).softmax(-1).sum(0),
    "attention": lambda net, x, y: F.scaled_dot_product_attention(*[net(x).view(-1, 4, 2)] * 3).sum(),
    "split": lambda net, x, y: torch.cat(net(x).chunk(2, 1)[::-1], 1),
    "frobenius": lambda net, x, y: net(x).square().sum().sqrt(),
    "positions": lambda net, x, y: net(x) * (torch.arange(x.shape[0], device=x.device) / x.shape[0])[:, None],
    "logarithm": lambda net, x, y: (net(x).square() + 1e-3).log().mean(),
}
BY_SIZE: dict[str, Loss] = {
    "deviation": lambda net, x, y: net(x).std(0),
    "running sum": lambda net, x, y: net(x).cumsum(0),
    "softmax over rows": lambda net, x, y: net(x).softmax(0).cumsum(0),
    "flipped": lambda net, x, y: net(x).flip(0),
    "rolled": lambda net, x, y: net(x).roll(1, 0),
    "one after the other": lambda net, x, y: net(x)[1:] - net(x)[:-1],
    "each with each": lambda net, x, y: net(x) @ net(x).t(),
    "transposed and flat": lambda net, x, y: net(x).t().reshape(-1),
    "last row": lambda net, x, y: net(x)[-1],
    "square of the size": lambda net, x, y: net(x).sum() / x.shape[0] ** 2,
    "positions to the last": lambda net, x, y: net(x) * (torch.arange(x.shape[0], device=x.device) / (x.shape[0] - 1))[:, None],
    "sorted": lambda net, x, y: net(x).sort(0).values,
    "product": lambda net, x, y: net(x).prod(0),
    "a view": lambda net, x, y: (net(x), x.view(-1)),
}


def _some(cases: dict[str, Loss], *quick: str) -> list[Any]:
    """All of them, those that are not `quick` in the whole sweep alone."""
    return [pytest.param(fn, id=name, marks=() if name in quick else pytest.mark.slow) for name, fn in cases.items()]


@pytest.fixture(autouse=True)
def _count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_made", type(backend._made)())


def _first(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


def _compare(fn: Loss, sizes: tuple[int, ...]) -> None:
    """Values and gradients are CPU torch's at each size."""
    host, model = twins(Net)
    fast = torch.compile(fn, backend="spmd", fullgraph=True, dynamic=True)
    for i, size in enumerate(sizes):
        x, y = batch(size, 8, seed=i), batch(size, 8, seed=i + 50)
        given, here = x.to("jax").requires_grad_(), x.clone().requires_grad_()
        got, want = fast(model, given, y.to("jax")), fn(host, here, y)
        assert_same(_first(got).detach(), _first(want).detach(), LOOSE)
        for result in (got, want):
            _first(result).square().sum().backward()
        want_grads: list[Any] = [here.grad, *(p.grad for p in host.parameters())]
        got_grads: list[Any] = [given.grad, *(p.grad for p in model.parameters())]
        for g, w in zip(got_grads, want_grads, strict=True):
            scale = max(1.0, float(w.abs().max()))
            assert_same(g.cpu() / scale, w / scale, LOOSE)
        host.zero_grad()
        model.zero_grad()


@pytest.mark.parametrize("fn", _some(EXACT, "rows", "mean", "cross entropy", "maximum"))
def test_rows_that_are_padding_have_no_part(fn: Loss) -> None:
    _compare(fn, SIZES)
    assert [graph.sizes for graph in graphs()] == [None]
    assert sum(graph.num_programs for graph in graphs()) == 2  # 64 and 128


@pytest.mark.parametrize("fn", _some(BY_SIZE, "deviation", "flipped", "last row"))
def test_what_is_not_proved_to_be_exact_is_compiled_for_each_size(fn: Loss) -> None:
    _compare(fn, (20, 30))
    assert all(graph.sizes is not None for graph in graphs())
    assert sum(graph.num_programs for graph in graphs()) == 2


def test_dropout_draws_as_many_numbers_as_the_eager_device() -> None:
    drop = torch.compile(lambda x: F.dropout(x, 0.5), backend="spmd", dynamic=True)
    for size in (3, 5):
        x = batch(size, 8).to("jax")
        torch.manual_seed(0)
        want = F.dropout(x, 0.5)
        torch.manual_seed(0)
        assert_same(drop(x), want)


def test_values_that_are_not_finite_in_a_row_that_is_padding_do_not_spread() -> None:
    fast = torch.compile(lambda x, w: (x * w).log().sum(), backend="spmd", dynamic=True)
    for size in (3, 5):
        x, w, given = batch(size, 8).square() + 0.1, torch.ones(8, requires_grad=True), torch.ones(8).to("jax").requires_grad_()
        fast(x.to("jax"), given).backward()
        (x * w).log().sum().backward()
        assert_same(given.grad, w.grad)


def test_a_python_float_whose_value_torch_needs_is_a_constant_and_too_many_are_none(caplog: pytest.LogCaptureFixture) -> None:
    fast = torch.compile(lambda x, scale: x.add(x.abs(), alpha=scale), backend="spmd", dynamic=True)  # is it 1, asks the derivative
    for i in range(20):
        assert_same(fast(batch(3, 8).to("jax").requires_grad_(), i + 0.5), batch(3, 8) + batch(3, 8).abs() * (i + 0.5))
    assert "each of which was a program" in caplog.text

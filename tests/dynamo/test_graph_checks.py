"""A graph refuses the values that CPU torch refuses: indices before the call where the host knows them, others at the next read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import spmd
from tests.device.indexing import OPS, PLACES, outcome
from tests.grids import grid

Fn = Callable[..., Any]


def compiled(fn: Fn, *, dynamic: bool | None = None) -> Fn:
    return torch.compile(fn, backend="spmd", fullgraph=True, dynamic=dynamic)


@pytest.mark.parametrize("name", OPS)
def test_an_index_of_the_host_is_accepted_or_refused_as_by_the_cpu(name: str) -> None:
    w = torch.arange(12.0).reshape(4, 3)
    run = torch.compile(lambda w, i: OPS[name](w, i[1:]), backend="spmd", dynamic=False)
    for values in (PLACES["inside"], *PLACES.values(), PLACES["inside"]):
        given = torch.tensor([77, *values])
        expected, got = outcome(OPS[name], w, given[1:]), outcome(run, w.to("jax"), given.to("jax"))
        if isinstance(expected, Exception):
            assert type(got) is type(expected), values
            assert str(values[0] if values[0] < 0 else values[1]) in str(got)
        else:
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "lay", [lambda i: i, lambda i: i.mT.contiguous().mT, lambda i: F.pad(i, (1, 1))[:, 1:-1]], ids=["dense", "t", "part"]
)
def test_the_bound_of_an_index_may_be_a_size(lay: Fn, dynamic: bool) -> None:
    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x.gather(1, i) * 2

    run = compiled(fn, dynamic=dynamic)
    for size in (4, 5, 9, 7) if dynamic else (4, 4):
        x = torch.arange(2.0 * size).reshape(2, size)
        for largest in (size - 1, size):
            index = lay(torch.tensor([[0, largest], [1, 0]]))
            expected, got = outcome(fn, x, index), outcome(run, x.to("jax"), index.to("jax"))
            if isinstance(expected, Exception):
                assert type(got) is type(expected)
                assert str(expected) in str(got)
            else:
                torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("lay", [lambda i: i, lambda i: i.mT.contiguous().mT], ids=["dense", "transposed"])
def test_only_the_rows_that_are_used_of_a_cpu_index_are_checked(lay: Fn) -> None:
    run = compiled(lambda w, i: w[i[1:]], dynamic=False)
    w, index = torch.arange(10.0), torch.arange(9).reshape(3, 3)
    for row, column in ((0, 2), (2, 0), (2, 2)):
        given = lay(index.index_put((torch.tensor(row), torch.tensor(column)), torch.tensor(99)))
        expected, got = outcome(lambda w, i: w[i[1:]], w, given), outcome(run, w.to("jax"), given)
        if isinstance(expected, Exception):
            assert type(got) is type(expected) and str(expected) in str(got)
        else:
            torch.testing.assert_close(got, expected)


# function, arguments that pass, arguments that fail
CASES: dict[str, tuple[Fn, list[Any], list[Any]]] = {
    "division": (lambda a, b: a // b, [[7, 5, 3], [1, 2, 3]], [[7, 5, 3], [1, 2, 0]]),
    "probabilities": (lambda p, q: F.binary_cross_entropy(p, q), [[0.1, 0.9], [0.0, 1.0]], [[0.1, 1.9], [0.0, 1.0]]),
    "cholesky": (lambda a, b: torch.linalg.cholesky(torch.diag(a * b)), [[2.0, 3.0], [1.0, 1.0]], [[2.0, 3.0], [1.0, -1.0]]),
    "masked_scatter": (
        lambda m, v: torch.zeros(3, device=v.device).masked_scatter(m > 0, v),
        [[0, 1, 1], [5.0, 6.0]],
        [[1, 1, 1], [5.0, 6.0]],
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_value_is_accepted_or_refused_as_by_the_cpu(name: str, dynamic: bool) -> None:
    fn, *values = CASES[name]
    run = compiled(fn, dynamic=dynamic)
    good, bad = ([torch.tensor(v) for v in pair] for pair in values)
    for args in (good, bad, good):
        expected = outcome(fn, *args)
        got = outcome(run, *(a.to("jax") + torch.zeros((), dtype=a.dtype, device="jax") for a in args))  # the host does not know them
        if isinstance(expected, Exception):
            assert isinstance(got, type(expected))
            assert isinstance(got, spmd.CheckFailed)
        else:
            torch.testing.assert_close(got, expected)


def test_rows_that_are_padding_are_not_checked() -> None:
    run = compiled(lambda a, b: a // b, dynamic=True)
    for size in (3, 5, 9, 6):
        a, b = torch.arange(size) + 10, torch.arange(size) + 1
        assert run(a.to("jax"), b.to("jax")).tolist() == (a // b).tolist()
        b[-1] = 0
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            run(a.to("jax"), b.to("jax")).cpu()


def test_what_a_graph_writes_before_an_error_is_written() -> None:
    """As on the CPU, where the operations before the one that raises have run."""

    def fn(count: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return a // b

    run, count = compiled(fn), torch.zeros(2, device="jax")
    a, b = torch.tensor([4, 6], device="jax"), torch.tensor([2, 0], device="jax")
    assert run(count, a, b + 1).tolist() == [1, 6]
    result = run(count, a, b)
    with pytest.raises(spmd.CheckFailed, match="ZeroDivisionError"):
        result.cpu()
    assert run(count, a, b + 1).tolist() == [1, 6]
    assert count.tolist() == [3, 3]


def test_gradients_of_several_outputs_beside_a_check() -> None:
    def fn(p: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.binary_cross_entropy(p, t), p * 2

    t = torch.tensor([0.0, 1.0])
    expected, got = (torch.tensor([0.2, 0.7], device=at, requires_grad=True) for at in ("cpu", "jax"))
    for p, run in ((expected, fn), (got, compiled(fn))):
        loss, twice = run(p, t.to(p.device))
        (loss + twice.sum()).backward()
    torch.testing.assert_close(got.grad.cpu(), expected.grad)


def test_indices_that_the_device_computes_are_checked_where_it_is_configured() -> None:
    run = compiled(lambda w, i: w[i + 1])
    w, inside, outside = torch.arange(8.0).to("jax"), torch.tensor([0, 1]).to("jax"), torch.tensor([0, 7]).to("jax")
    assert run(w, outside).tolist() == [1, 7]  # clamped, as documented
    spmd.configure(check_indices=True)
    try:
        assert run(w, inside).tolist() == [1, 2]
        with pytest.raises(IndexError, match="index 8 is out of bounds"):
            run(w, outside).cpu()
    finally:
        spmd.configure(check_indices=False)
    assert run(w, outside).tolist() == [1, 7]


def test_sharded_values_and_indices() -> None:
    x = spmd.mark_sharding(torch.arange(64.0).reshape(8, 8).to("jax") / 64, grid(), ("data", "model"))
    loss = compiled(F.binary_cross_entropy)
    torch.testing.assert_close(loss(x, x).cpu(), F.binary_cross_entropy(*[x.cpu()] * 2))
    with pytest.raises(spmd.CheckFailed, match="between 0 and 1"):
        loss(x + 1, x).cpu()
    rows = compiled(lambda x, i: F.embedding(i, x))
    assert torch.equal(rows(x, torch.tensor([1, 7]).to("jax")).cpu(), x.cpu()[[1, 7]])
    with pytest.raises(IndexError, match="index out of range in self: 8"):
        rows(x, torch.tensor([1, 8]).to("jax"))

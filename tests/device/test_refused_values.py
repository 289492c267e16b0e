"""Values that CPU torch refuses: raised at once where the host knows them, by a check of the device where it does not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import spmd
from tests.grids import line

Op = Callable[[torch.Tensor], Any]
# name: (operation, values that it takes, values that it refuses)
OPS: dict[str, tuple[Op, list[float], list[float]]] = {
    "//": (lambda n: 7 // n.int(), [1, 2], [1, 0]),
    "%": (lambda n: 7 % n.int(), [1, 2], [1, 0]),
    "remainder": (lambda n: torch.arange(2, device=n.device).remainder(n.int()), [1, 2], [0, 1]),
    "remainder_": (lambda n: torch.arange(2, device=n.device).remainder_(n.int()), [1, 2], [0, 1]),
    "fmod": (lambda n: torch.arange(2, device=n.device).fmod(n.to(torch.int8)), [1, 2], [0, 1]),
    "trunc": (lambda n: torch.div(torch.arange(2, device=n.device), n.int(), rounding_mode="trunc"), [1, 2], [0, 1]),
    "floats": (lambda n: (7 // n, 7 % n, 7 / n.int()), [0, 2], []),
    "no elements": (lambda n: torch.arange(0, device=n.device) // n.int()[:1], [0, 1], []),
    "multinomial": (lambda p: torch.multinomial(p, 1), [0.2, 0.1], [0.2, -0.1]),
    "multinomial of nothing": (lambda p: torch.multinomial(p, 1), [0.0, 0.1], [0.0, 0.0]),
    "multinomial, infinite": (lambda p: torch.multinomial(p, 1), [0.0, 0.1], [1.0, torch.inf]),
    "bernoulli": (lambda p: torch.bernoulli(p), [0.0, 1.0], [0.5, 1.5]),
    "bernoulli_": (lambda p: torch.empty_like(p).bernoulli_(p), [0.0, 1.0], [0.5, -0.5]),
    "normal": (lambda s: torch.normal(0.0, s), [0.0, 1.0], [0.5, -0.5]),
    "normal of tensors": (lambda s: torch.normal(s, s), [0.0, 1.0], [0.5, torch.nan]),
    "histc of a range": (lambda x: x.histc(4, 0, 1), [0.0, torch.nan], []),
    "poisson": (lambda r: torch.poisson(r), [0.0, 1.0], [0.5, -0.5]),
    "quantile": (lambda q: torch.arange(4.0, device=q.device).quantile(q), [0.0, 1.0], [0.5, 1.5]),
    "nanquantile": (lambda q: torch.arange(4.0, device=q.device).requires_grad_().nanquantile(q, 0), [0.0, 1.0], [0.5, torch.nan]),
    "BCELoss": (lambda p: F.binary_cross_entropy(p, torch.ones_like(p)), [0.0, 1.0], [0.5, 1.5]),
    "masked_scatter": (lambda m: m.masked_scatter(m > 0, m[:1] + 2), [0.0, 1.0], [1.0, 1.0]),
    "masked_scatter_": (lambda m: m.clone().masked_scatter_(m > 0, m[:1] + 2), [1.0, 0.0], [1.0, 1.0]),
    "masked_scatter of a row": (lambda m: m.expand(2, 2).masked_scatter(m > 0, m + 2), [0.0, 1.0], [1.0, 1.0]),
    "masked_scatter of nothing": (lambda m: m.masked_scatter(m > 0, m[:0]), [0.0, 0.0], [0.0, 1.0]),
    "masked_scatter of as many": (lambda m: m.masked_scatter(m > 0, m + 2), [1.0, 1.0], []),
    "repeat_interleave": (lambda n: n.repeat_interleave(n.long(), output_size=3), [1.0, 2.0], [1.0, 1.0]),
    "BCELoss, target": (lambda t: F.binary_cross_entropy(torch.ones_like(t), t), [0.0, 1.0], [0.5, 2.0]),
}


def of_device(values: list[float]) -> torch.Tensor:
    """Numbers that the host does not know."""
    return torch.tensor(values).to("jax") + torch.zeros((), device="jax")


def read(results: Any) -> None:
    pytree.tree_map(torch.Tensor.cpu, results)


@pytest.mark.parametrize("name", OPS)
def test_values_are_accepted_or_refused_as_by_the_cpu(name: str) -> None:
    op, accepted, refused = OPS[name]
    step = spmd.compile(lambda x: op(x))

    def waiting(x: torch.Tensor) -> Any:
        with spmd.lazy():
            return op(x)

    for run in (op, step, waiting):
        read(run(of_device(accepted)))
        if refused:
            with pytest.raises(RuntimeError) as expected:
                op(torch.tensor(refused))
            with pytest.raises(spmd.CheckFailed) as found:
                read(run(of_device(refused)))
            assert isinstance(found.value, RuntimeError) and str(expected.value).split("  (")[0] in str(found.value)
            assert "test_refused_values.py" in str(found.value)
    assert step.num_traces == 1


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_mask_must_select_as_many_elements_as_there_are_values(count: int, accumulate: bool) -> None:
    def put(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return x.index_put_((x > 0,), values, accumulate=accumulate)

    values, step = torch.arange(float(count)) + 5, spmd.compile(put)
    for numbers in ([1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0]):
        x = torch.tensor(numbers)
        try:
            expected: Any = put(x.clone(), values)
        except RuntimeError as error:
            expected = error
        eager = of_device(numbers)
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(put(eager, values.to("jax")).cpu(), expected)
            torch.testing.assert_close(step(of_device(numbers), values.to("jax")).cpu(), expected)
            continue
        with pytest.raises(RuntimeError) as found:
            put(eager, values.to("jax"))
        assert str(found.value) == str(expected) and eager.tolist() == numbers
        with pytest.raises(spmd.CheckFailed, match="cannot be broadcast to indexing result") as checked:
            read(step(of_device(numbers), values.to("jax")))
        assert isinstance(checked.value, RuntimeError)


def test_a_mask_that_the_host_knows_raises_at_its_line() -> None:
    x, mask, source = torch.zeros(2).to("jax"), torch.tensor([True, True]), torch.ones(1).to("jax")
    with pytest.raises(RuntimeError, match="^Number of elements of source < number of ones in mask$"):
        x.masked_scatter_(mask.to("jax"), source)
    assert x.tolist() == [0, 0]
    with pytest.raises(RuntimeError, match="^Number of elements of source < number of ones in mask"):
        spmd.compile(lambda x, s: x.masked_scatter(torch.tensor([True, True], device="jax"), s))(x, source)


def test_values_that_the_host_knows_raise_at_their_line() -> None:
    n = torch.tensor([1, 0])
    more_bits = 2**40  # an int32 has none of them
    for divided in (
        *(lambda a: a // 0, lambda a: a % 0, lambda a: a // n.to("jax"), lambda a: torch.fmod(a, n.to("jax"))),
        *(lambda a: a.int() // more_bits, lambda a: a.int() % more_bits),
    ):
        with pytest.raises(RuntimeError, match="^ZeroDivisionError$"):
            divided(torch.arange(2).to("jax"))
    assert torch.div(torch.arange(2, dtype=torch.int32).to("jax"), more_bits + 1, rounding_mode="trunc").tolist() == [0, 1]


def test_padding_is_no_divisor() -> None:
    """Neither that of a size that varies, nor that of a dim which its axis does not divide."""
    sizes = {0: spmd.Dim("n", max=32)}
    step = spmd.compile(lambda x, n: (x // n).sum(), dynamic={"x": sizes, "n": sizes})
    for size in (3, 5, 9, 17):
        x, n = torch.arange(size), torch.arange(1, size + 1)
        assert step((2 * x).to("jax"), n.to("jax")).item() == int((2 * x // n).sum())
    n = torch.arange(1, 11)
    marked = spmd.mark_sharding(n.to("jax") + torch.zeros((), dtype=torch.int64, device="jax"), line(), ("data",))
    assert spmd.compile(lambda n: 100 // n)(marked).tolist() == (100 // n).tolist()


def test_a_padded_mask_selects_nothing_more() -> None:
    sizes = {0: spmd.Dim("n", max=32)}
    step = spmd.compile(lambda x, s: x.masked_scatter(x > -1, s), dynamic={"x": sizes, "s": sizes})
    for size in (3, 5, 9, 17):
        assert step(torch.zeros(size).to("jax"), torch.arange(float(size)).to("jax")).tolist() == list(range(size))


def test_a_branch_refuses_nothing_that_it_does_not_compute() -> None:
    step = spmd.compile(lambda n: torch.cond((n > 0).all(), lambda n: 100 // n, lambda n: n.clone(), (n,)))
    assert step(of_device([0, 1]).int()).tolist() == [0, 1]


@pytest.mark.parametrize("values", [[1.0, torch.inf], [torch.nan, 1.0]])
def test_the_range_of_a_histogram_is_finite(values: list[float]) -> None:
    for given in (torch.tensor(values), torch.tensor(values).to("jax"), of_device(values)):
        for run in (lambda x: x.histc(4), spmd.compile(lambda x: x.histc(4))) if given.device.type == "jax" else (lambda x: x.histc(4),):
            with pytest.raises(RuntimeError, match="torch.histc: range of .* is not finite"):
                run(given).cpu()

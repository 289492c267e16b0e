"""Branches that only raise are checks: the step compiles, a failure raises the same class at the next read, and later calls are right."""

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch._higher_order_ops.scan import scan

import spmd
from tests.device.asserting import (
    asked_of_an_item,
    asserted,
    asserted_of_two,
    caught_inside,
    checked_by_torch,
    clipped,
    in_a_branch,
    inside_with,
    sides,
    with_anomaly_detection,
    with_two_sides,
    written_first,
)
from tests.grids import grid
from tests.lowering.against_cpu import assert_equal, on_jax
from tests.sweeps import part_of
from tests.waits import waiting

Two = Callable[[torch.Tensor, torch.Tensor], Any]
nan, inf = float("nan"), float("inf")


# function, arguments that pass, arguments that fail
CASES: dict[str, tuple[Two, Any, Any]] = {
    "assert": (asserted, ([1, 2], [1, 2]), ([-1, -2], [1, 2])),
    "assert a and b": (asserted_of_two, ([1, 2], [1, 2]), ([1, 2], [1, nan])),
    "an item": (asked_of_an_item, ([1, 2], [1, 2]), ([9, 2], [1, 2])),
    "in a with": (inside_with, ([1, 2], [1, 2]), ([1, 2], [1, nan])),
    "clip_grad_norm_": (clipped, ([1, 2], [1, 2]), ([1, 2], [1, inf])),
    "torch._assert": (checked_by_torch, ([1, 2], [1, 2]), ([-1, 2], [1, 2])),
    "torch._assert_async": (checked_by_torch, ([1, 2], [1, 2]), ([1, 2], [1, -1])),
    "detect_anomaly": (with_anomaly_detection, ([1, 2], [1, 2]), ([-1, 2], [1, 2])),
    "gaussian_nll_loss": (lambda x, v: F.gaussian_nll_loss(x, x + 1, v), ([1, 2], [1, 2]), ([1, 2], [1, -2])),
    "a distribution's parameter": (lambda x, v: D.Normal(x, v).log_prob(x), ([1, 2], [1, 2]), ([1, 2], [1, -2])),
    "a distribution's sample": (lambda x, v: D.Beta(v, v).log_prob(x), ([0.5, 0.2], [1, 2]), ([1.5, 0.2], [1, 2])),
    "probabilities": (lambda x, v: D.Categorical(v).log_prob(x.long()), ([0, 1], [1, 2]), ([0, 1], [1, -2])),
    "a covariance": (lambda x, v: D.MultivariateNormal(x, torch.diag(v)).log_prob(x), ([1, 2], [1, 2]), ([1, 2], [1, -2])),
    "kl_divergence": (lambda x, v: D.kl_divergence(D.Gamma(x, v), D.Gamma(v, x)), ([1, 2], [1, 2]), ([1, 2], [1, -2])),
    "cholesky": (lambda x, v: torch.linalg.cholesky(torch.diag(v)) @ x, ([1, 2], [1, 2]), ([1, 2], [1, -2])),
    "solve": (lambda x, v: torch.linalg.solve(torch.diag(v), x), ([1, 2], [1, 2]), ([1, 2], [1, 0])),
    **{
        f"{name}(check_errors=True)": (
            lambda x, v, name=name: getattr(torch.linalg, name)(torch.diag(v), check_errors=True)[0],
            ([1, 2], [1, 2]),
            ([1, 2], [0, 0]),
        )
        for name in ("inv_ex", "cholesky_ex", "lu_factor_ex", "ldl_factor_ex")
    },
    "solve_ex(check_errors=True)": (
        lambda x, v: torch.linalg.solve_ex(torch.diag(v), x, check_errors=True)[0],
        ([1, 2], [1, 2]),
        ([1, 2], [1, 0]),
    ),
    "torch.cholesky": (lambda x, v: torch.cholesky(torch.diag(v)) @ x, ([1, 2], [1, 2]), ([1, 2], [1, -2])),
    "svdvals": (lambda x, v: torch.linalg.svdvals(torch.diag(v)), ([1, 2], [1, 2]), ([1, 2], [1, nan])),
    "eigvalsh": (lambda x, v: torch.linalg.eigvalsh(x * v[:, None]), ([1, 2, 3], [1, 2, 3]), ([1, 2, 3], [1, nan, 3])),
    "eig": (lambda x, v: torch.linalg.eig(torch.diag(v))[0].real, ([1, 2], [1, 2]), ([1, 2], [1, inf])),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected", "ignore:torch.cholesky is deprecated")
@pytest.mark.parametrize("name", CASES)
def test_a_check_that_fails_raises_the_same_class_at_the_next_read(name: str) -> None:
    fn, passing, failing = CASES[name]
    step = spmd.compile(fn)
    good, bad = ([torch.tensor(v, dtype=torch.float32) for v in pair] for pair in (passing, failing))
    with pytest.raises(Exception) as eager:
        fn(*bad)
    for _ in range(2):
        assert_equal(step(*on_jax(good)), fn(*good))
        result = step(*on_jax(bad))
        with pytest.raises(eager.type, match="a check on the device failed") as failed:
            result.cpu()
        assert isinstance(failed.value, spmd.CheckFailed)
        assert ".py:" in str(failed.value)
    assert step.num_traces <= 2  # the second: kl_divergence keeps the formula that it found


@pytest.fixture(autouse=True)
def validation() -> Generator[None]:
    """torch.compile turns the validation of distributions off for the whole process when it is first used."""
    before = D.Distribution._validate_args
    D.Distribution.set_default_validate_args(True)
    yield
    D.Distribution.set_default_validate_args(before)


def test_a_failure_is_raised_by_a_later_call_where_nothing_is_read() -> None:
    step = spmd.compile(asserted)
    one = torch.ones(2, device="jax")
    with pytest.raises(AssertionError, match="must be positive"):
        for _ in range(20):
            step(-one, one)


def test_state_is_kept_where_a_later_call_raises_the_failure() -> None:
    """The call that raises it changes nothing: neither tensors nor Python objects. The next one is right."""
    p, counts = torch.ones(2, device="jax", requires_grad=True), [0]
    optimizer = torch.optim.SGD([p], 1.0)

    @spmd.compile
    def step(n: torch.Tensor) -> None:
        optimizer.zero_grad()
        (p * (6 // n)).sum().backward()
        optimizer.step()
        counts[0] += 1

    three, zero = (torch.tensor([3, n], device="jax") + 0 for n in (3, 0))
    step(three)
    step(zero)
    with pytest.raises(spmd.CheckFailed, match="ZeroDivisionError"):
        for _ in range(20):
            step(three)
    number = counts[0]
    assert p[0].item() == 1 - 2 * number
    step(three)
    assert (counts[0], p[0].item()) == (number + 1, -1 - 2 * number)


def test_checks_of_sharded_values() -> None:
    step = spmd.compile(lambda x: D.Normal(x, x).log_prob(x).sum())
    x = torch.linspace(1, 2, 64).reshape(8, 8)
    assert_equal(step(spmd.mark_sharding(on_jax(x), grid(), ("data", "model"))), D.Normal(x, x).log_prob(x).sum())
    x[7, 7] = -1.0
    result = step(spmd.mark_sharding(on_jax(x), grid(), ("data", "model")))
    with pytest.raises(ValueError, match="a check on the device failed"):
        result.item()


DISTRIBUTIONS: dict[str, Two] = {
    "Normal": D.Normal,
    "Laplace": D.Laplace,
    "Categorical": lambda x, v: D.Categorical(logits=x),
    "Bernoulli": lambda x, v: D.Bernoulli(logits=x),
    "OneHotCategorical": lambda x, v: D.OneHotCategorical(logits=x),
    "Binomial": lambda x, v: D.Binomial(3, logits=x),
    "Multinomial": lambda x, v: D.Multinomial(5, logits=x),
    "Beta": lambda x, v: D.Beta(v, v + 1),
    "Dirichlet": lambda x, v: D.Dirichlet(v),
    "Gamma": lambda x, v: D.Gamma(v, v),
    "Exponential": lambda x, v: D.Exponential(v),
    "Poisson": lambda x, v: D.Poisson(v),
    "StudentT": lambda x, v: D.StudentT(v, x),
    "Uniform": lambda x, v: D.Uniform(x, x + v),
    "MultivariateNormal": lambda x, v: D.MultivariateNormal(x, torch.diag(v)),
    "LowRankMultivariateNormal": lambda x, v: D.LowRankMultivariateNormal(x, v[:, None], v),
    "Independent": lambda x, v: D.Independent(D.Normal(x, v), 1),
    "MixtureSameFamily": lambda x, v: D.MixtureSameFamily(D.Categorical(logits=x), D.Normal(x, v)),
    "TransformedDistribution": lambda x, v: D.TransformedDistribution(D.Normal(x, v), [D.TanhTransform(cache_size=1)]),
    "RelaxedBernoulli": lambda x, v: D.RelaxedBernoulli(v[0], logits=x),
    "VonMises, no sample": lambda x, v: D.VonMises(x, v),
}


ROUNDINGS = 16 * torch.finfo(torch.float64).eps  # a program that is fused leaves out roundings that each operation makes alone


# which draw by an operator that another one has, and check arguments in the same way
ALIKE = ("Laplace", "Bernoulli", "OneHotCategorical", "Exponential", "Uniform", "Independent", "RelaxedBernoulli")


@pytest.mark.parametrize("name", part_of(DISTRIBUTIONS, lambda _, name: name not in ALIKE))
def test_distributions_work_compiled_as_eagerly(name: str) -> None:
    def probability(x: torch.Tensor, v: torch.Tensor, draws: int) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        distribution = DISTRIBUTIONS[name](x, v)
        sample = x if "VonMises" in name else distribution.sample(torch.Size([draws]))
        density = distribution.log_prob(sample)
        grads = torch.autograd.grad(density.sum(), x) if density.requires_grad else []
        return [sample.detach(), density.detach(), *grads]

    x, v = (torch.tensor(values, dtype=torch.float64, device="jax") for values in ([0.3, -0.4, 1.2], [0.5, 1.0, 2.0]))
    step = spmd.compile(probability)
    for shift in range(2):
        torch.manual_seed(shift)
        expected = probability(x + shift, v, 2)
        torch.manual_seed(shift)
        for got, want in zip(step(x + shift, v, 2), expected, strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got.cpu(), want.cpu(), rtol=ROUNDINGS, atol=ROUNDINGS)


@pytest.mark.parametrize("fn", [caught_inside, with_two_sides, written_first])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_branch_that_does_more_takes_a_side_in_each_call(fn: Callable[[torch.Tensor], torch.Tensor], sign: int) -> None:
    step, x = spmd.compile(fn), torch.full((2,), float(sign))
    try:
        expected: Any = fn(x.clone())
    except Exception as error:
        with waiting(step), pytest.raises(type(error)):
            step(on_jax(x.clone()))
    else:
        with waiting(step):
            assert_equal(step(on_jax(x.clone())), expected)


def test_a_branch_in_a_body_is_refused() -> None:
    with pytest.raises(spmd.TraceError, match="needed as a Python"):
        spmd.compile(in_a_branch)(torch.ones(2, device="jax"))


def test_the_side_that_raises_is_read_from_the_code() -> None:
    assert sides() == [(True, OverflowError), (False, AssertionError), (False, KeyError), None]


def test_one_hot_needs_the_number_of_classes_in_a_program() -> None:
    x = torch.tensor([0, 2])
    assert_equal(F.one_hot(on_jax(x)), F.one_hot(x))
    assert_equal(spmd.compile(lambda x: F.one_hot(x, 4))(on_jax(x)), F.one_hot(x, 4))
    assert_equal(
        spmd.compile(lambda x: x[:, None] * F.one_hot(torch.arange(3, device="jax")[1:]))(on_jax(x)), x[:, None] * torch.eye(3)[1:].long()
    )
    assert_equal(spmd.compile(lambda x: F.one_hot(x))(on_jax(x)), F.one_hot(x))  # the host knows what it sent
    with pytest.raises(spmd.TraceError, match="num_classes=n"):
        spmd.compile(lambda x: F.one_hot(x))(on_jax(x) + 0)


def test_bincount_has_minlength_bins_in_a_program_that_has_no_values() -> None:
    def counted(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = x.long()
        return torch.bincount(n, minlength=5), torch.bincount(n, x, 5)

    x, step = torch.tensor([0.0, 3.0, 1.0, 3.0]), spmd.compile(counted)
    for by in (0, 1):
        assert_equal(step(on_jax(x + by)), counted(x + by))
    for by in (2, -1):  # one bin more on the CPU, and an error
        result = step(on_jax(x + by))
        with pytest.raises(spmd.CheckFailed, match=r"x contains a value outside \[0, 5\)"):
            result[0].cpu()
    assert_equal(spmd.compile(lambda n: torch.bincount(n, minlength=2))(on_jax(x.long())), torch.bincount(x.long()))  # the host knows them
    with pytest.raises(spmd.TraceError, match="depends on values"):  # no check leaves this loop
        spmd.compile(lambda x: spmd.scan(lambda c, row: (c, counted(row)), x, x[None]))(on_jax(x))


def divided(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return x.long() // v.long()


def looked_up(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.embedding(v.long(), x[:, None])


def chosen(fn: Two) -> Two:
    """`fn` in one branch. In the other it gets values that it accepts."""
    return lambda x, v: torch.cond(x.sum() > 0, fn, lambda x, v: -fn(x, torch.ones_like(v)), (x, v))


BODIES: dict[str, Callable[[Two], Two]] = {
    "accumulate": lambda fn: spmd.accumulate(2)(fn),
    "cond": lambda fn: lambda x, v: chosen(fn)(x[1], v[1]),
    "cond in accumulate": lambda fn: spmd.accumulate(2)(chosen(fn)),
    "scan": lambda fn: lambda x, v: scan(lambda c, row: (c + 1, fn(*row)), x[0], (x, v))[1],
}


@pytest.mark.parametrize(("fn", "wrong"), [(divided, 0), (looked_up, 2)])
@pytest.mark.parametrize("name", BODIES)
def test_a_check_leaves_the_body_of_a_loop_or_branch(name: str, fn: Two, wrong: int) -> None:
    """What the branch that is not taken would do is not checked."""
    body = BODIES[name](fn)
    step = spmd.compile(body)
    x, good = torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.ones(2, 2, dtype=torch.int64)
    bad = torch.tensor([[1, 1], [1, wrong]])
    for _ in range(2):
        assert_equal(step(*on_jax((x, good))), body(x, good))
        result = step(*on_jax((x, bad)))
        with pytest.raises(RuntimeError if fn is divided else IndexError, match="a check on the device failed"):
            result.cpu()
        if "cond" in name:
            assert_equal(step(*on_jax((-x, bad))), body(-x, bad))


def test_a_check_in_each_of_several_steps_of_one_call() -> None:
    step = spmd.compile(looked_up, steps_per_call=2)
    x = torch.tensor([[3.0, 4.0], [5.0, 6.0]])
    assert_equal(step(*on_jax((x, torch.tensor([[1, 0], [0, 0]])))), torch.tensor([[4.0, 3.0], [5.0, 5.0]])[:, :, None])
    with pytest.raises(IndexError, match="index out of range in self: 2"):
        step(*on_jax((x, torch.tensor([[1, 0], [2, 0]])))).cpu()


class Alike(torch.nn.Module):
    """As the kernels of Gaussian processes: whether both are the same decides what is computed."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[bool, ...]:
        pairs = ((x / 2 + 1, y / 2 + 1), (x, y), (x[1:].exp(), y[1:].exp()), (x, x.clone()))
        return tuple(torch.equal(*pair) for pair in pairs)


def test_tensors_that_are_computed_alike_are_equal_in_a_program() -> None:
    x, other = on_jax(torch.tensor([1.0, 2.0])), on_jax(torch.tensor([1.0, 2.0]))
    step = spmd.compile(lambda x: (x + 0, Alike()(x, x)))
    assert step(x)[1] == Alike()(x, x) == (True,) * 4
    result = step(on_jax(torch.tensor([1.0, nan])))  # NaN is not equal to itself
    with pytest.raises(spmd.CheckFailed, match="x contains NaN"):
        result[0].cpu()
    alike, equal = spmd.compile(lambda x, y: Alike()(x, y)), spmd.compile(lambda x: torch.equal(x.exp(), x.exp2()))
    with waiting(alike), waiting(equal):
        assert alike(x, other) == (True,) * 4
        assert alike(x, other * 2) == (False, False, False, True)
        assert equal(x) is False
    assert spmd.compile(lambda n: torch.equal(n * 2 + 1, n * 2 + 1))(on_jax(torch.tensor([1, 2])) + 0) is True

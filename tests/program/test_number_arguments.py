"""Numbers that vary are inputs of a program also where torch's C++ takes a plain number; values, gradients and draws stay torch's."""

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import spmd
from tests.oracle import assert_same

Fn = Callable[[torch.Tensor, float], torch.Tensor]
LABELS = torch.arange(6) % 4
COMPOSED: dict[str, Fn] = {
    "power": lambda x, n: (x.abs() + 1) ** n,
    "power of a number": lambda x, n: n**x,
    "torch.pow": lambda x, n: torch.pow(x.abs() + 1, exponent=n) + torch.pow(n, x) + pow(x.abs() + 1, n),
    "pow of ints": lambda x, n: x.round() ** round(4 * n),
    "operators": lambda x, n: operator.pow(x.abs(), n) + operator.mul(n, x) - operator.iadd(x * 1, n),
    "pow_": lambda x, n: (x.abs() + 1).pow_(n) * operator.ipow(x.abs() + 1, n) + raised_in_place(x.abs() + 1, n),
    "lerp": lambda x, n: torch.lerp(x, x * 2, n) + x.lerp(x * 3, weight=n),
    "xlogy": lambda x, n: torch.xlogy(x, n) + torch.special.xlogy(n, x.abs() + 1),
    "celu": F.celu,
    "softshrink": lambda x, n: F.softshrink(x, lambd=n),
    "pad": lambda x, n: F.pad(x, (1, 2), value=n),
    "nan_to_num": lambda x, n: (x + x.new_tensor([0, math.nan, math.inf, -math.inf] * 2)).nan_to_num(n, posinf=2 * n, neginf=-n),
    "quantile": lambda x, n: torch.quantile(x, n) + x.quantile(n, dim=1).sum(),
    "huber_loss": lambda x, n: F.huber_loss(x, x.sin(), delta=n),
    "smooth_l1_loss": lambda x, n: F.smooth_l1_loss(x, x.sin(), beta=n, reduction="sum"),
    "HuberLoss": lambda x, n: torch.nn.HuberLoss(delta=n)(x, x.sin()),
    "margin_ranking_loss": lambda x, n: F.margin_ranking_loss(x, x.sin(), x.sign(), margin=n),
    "hinge_embedding_loss": lambda x, n: F.hinge_embedding_loss(x, x.sign(), margin=n, reduction="none"),
    "cosine_embedding_loss": lambda x, n: F.cosine_embedding_loss(x, x.sin(), x[:, 0].sign(), margin=n / 10),
    "triplet_margin_loss": lambda x, n: F.triplet_margin_loss(x, x.sin(), x.cos(), margin=n, swap=True),
    "TripletMarginLoss": lambda x, n: torch.nn.TripletMarginLoss(margin=n)(x, x.sin(), x.cos()),
    "multi_margin_loss": lambda x, n: F.multi_margin_loss(x, LABELS.to(x.device), margin=n),
    "label_smoothing": lambda x, n: F.cross_entropy(x, LABELS.to(x.device), label_smoothing=n),
    "label_smoothing with weights": lambda x, n: F.cross_entropy(
        x, LABELS.to(x.device), torch.arange(8.0, device=x.device), ignore_index=2, label_smoothing=n
    ),
    "label_smoothing, not reduced": lambda x, n: F.cross_entropy(
        x.T[None].expand(1, 8, 6), LABELS[None].to(x.device), reduction="none", label_smoothing=n
    ),
    "label_smoothing of probabilities": lambda x, n: F.cross_entropy(x, x.cos().softmax(1), label_smoothing=n),
    "CrossEntropyLoss": lambda x, n: torch.nn.CrossEntropyLoss(label_smoothing=n)(x, LABELS.to(x.device)),
    "batch_norm": lambda x, n: normalised(x, n),
    "roll": lambda x, n: torch.roll(x, round(10 * n), 1) * x + x.roll(round(10 * n)),
    "tril": lambda x, n: torch.tril(x, round(10 * n) - 4) + x.triu(diagonal=round(10 * n) - 4),
    "arange": lambda x, n: x * torch.arange(round(10 * n), round(10 * n) + 8, device=x.device),
    "narrow": lambda x, n: x.narrow(1, round(5 * n), 3) * torch.narrow(x, dim=-1, start=round(5 * n), length=3),
    "select": lambda x, n: x.select(1, round(5 * n)) * torch.select(x, 0, -1 - round(5 * n))[:6],
}


def raised_in_place(x: torch.Tensor, n: float) -> torch.Tensor:
    same = x
    x **= n
    return same


def normalised(x: torch.Tensor, momentum: float) -> torch.Tensor:
    mean, variance = torch.zeros(8, device=x.device), torch.ones(8, device=x.device)
    result = F.batch_norm(x, mean, variance, training=True, momentum=momentum)
    return result + mean.detach() * 3 + variance.detach()


class Schedule:
    """A number that every step changes."""

    def __init__(self, start: float, factor: float) -> None:
        self.value, self.factor = start, factor

    def next(self) -> float:
        self.value *= self.factor
        return self.value


def data(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-2.3, 2.2, 48).view(6, 8).sin().mul(2).to(dtype)


def losses(fn: Fn, device: str, *, start: float = 0.95, factor: float = 0.8, steps: int = 4, dtype: Any = torch.float32) -> tuple[Any, Any]:
    """Results and gradients of some steps, and the function that ran them."""
    numbers = Schedule(start, factor)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        result = fn(x, numbers.next())
        return result.detach(), torch.autograd.grad((result * result).sum(), x)[0]

    run: Any = spmd.compile(step) if device == "jax" else step
    return [run(data(dtype).to(device)) for _ in range(steps)], run


@pytest.mark.parametrize("name", COMPOSED)
def test_a_number_where_torch_takes_a_plain_one_is_an_input(name: str) -> None:
    (ours, run), (torchs, _) = losses(COMPOSED[name], "jax"), losses(COMPOSED[name], "cpu")
    assert_same(ours, torchs)
    assert run.num_traces == 2


def test_a_power_with_16_bits_is_that_of_the_plain_number() -> None:
    step = spmd.compile(lambda x, n: (x**n, n**x))
    for n in (1.111, 2.222, 3.333):
        x = torch.linspace(0.5, 3, 9, dtype=torch.bfloat16).to("jax")
        assert [t.tolist() for t in step(x, n)] == [(x**n).tolist(), (n**x).tolist()]
    assert step.num_traces == 2


@pytest.mark.parametrize("name", ["power", "power of a number", "huber_loss", "label_smoothing", "softshrink"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_is_that_of_the_tensor(name: str, dtype: torch.dtype) -> None:
    (ours, run), (torchs, _) = losses(COMPOSED[name], "jax", dtype=dtype), losses(COMPOSED[name], "cpu", dtype=dtype)
    assert [t.dtype for step in ours for t in step] == [t.dtype for step in torchs for t in step]
    assert_same(ours, torchs)
    assert run.num_traces == 2


DRAWN: dict[str, Fn] = {
    "dropout": F.dropout,
    "torch.dropout": lambda x, n: torch.dropout(x, n, True),
    "dropout in place": lambda x, n: F.dropout(x * 1, p=n, inplace=True),
    "dropout1d": lambda x, n: F.dropout1d(x.view(2, 3, 8), n),
    "dropout2d": lambda x, n: F.dropout2d(x.view(2, 3, 4, 2), n),
    "alpha_dropout": lambda x, n: F.alpha_dropout(x, n, training=True),
    "feature_alpha_dropout": lambda x, n: F.feature_alpha_dropout(x.view(2, 3, 8), n, training=True),
    "Dropout": lambda x, n: torch.nn.Dropout(n)(x),
    "normal_": lambda x, n: torch.empty_like(x).normal_(n, std=n) * x,
    "normal": lambda x, n: torch.normal(0.0, n, (6, 8), device=x.device) * x,
    "normal of tensors": lambda x, n: torch.normal(x.detach(), n) * x + torch.normal(n, x.detach().abs()) * 0,
    "uniform_": lambda x, n: torch.empty_like(x).uniform_(-n, n) * x,
    "exponential_": lambda x, n: torch.empty_like(x).exponential_(n) * x,
    "log_normal_": lambda x, n: torch.empty_like(x).log_normal_(std=n) * x,
    "bernoulli_": lambda x, n: torch.empty_like(x).bernoulli_(n) * x,
    "randint": lambda x, n: torch.randint(round(100 * n), (6, 8), device=x.device) * x,
    "randint from": lambda x, n: torch.randint(-2, high=round(100 * n), size=(6, 8), dtype=torch.int32, device=x.device) * x,
}


@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_are_those_of_the_plain_number(name: str) -> None:
    """A plain number is one of the program, without other draws: the constants of eager code."""
    torch.manual_seed(3)
    ours, run = losses(DRAWN[name], "jax")
    torch.manual_seed(3)
    numbers = Schedule(0.95, 0.8)
    for result, gradient in ours:
        x = data().to("jax").requires_grad_()
        expected = DRAWN[name](x, numbers.next())
        assert_same(result, expected.detach().cpu())
        assert_same(gradient, torch.autograd.grad((expected * expected).sum(), x)[0].cpu())
    assert run.num_traces == (2 if name != "normal of tensors" else 4)  # torch checks the deviations in a tensor


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_a_dropout_of_nothing_or_of_all_is_a_program_of_its_own(probability: float) -> None:
    values = [0.5, 0.4, probability, 0.3, probability]
    step = spmd.compile(lambda x, p: F.dropout(x, p))
    for p in values:
        found = step(torch.ones(4000, device="jax"), p).cpu()
        share = (found == 0).float().mean().item()
        assert abs(share - p) < 0.05 and (p == 1 or math.isclose(found.max().item(), 1 / (1 - p), rel_tol=1e-6))
    assert step.num_traces == 3


def test_dropout_does_nothing_in_evaluation() -> None:
    step = spmd.compile(lambda x, p, training: F.dropout(x, p, training) * 2)
    for p in (0.5, 0.4, 0.3):
        assert_same(step(torch.ones(9, device="jax"), p, False), torch.full((9,), 2.0))
    assert step.num_traces == 2


REFUSED: dict[str, Fn] = {
    "dropout": lambda x, n: F.dropout(x, n * 4),
    "torch.dropout": lambda x, n: torch.dropout(x, -n, True),
    "huber_loss": lambda x, n: F.huber_loss(x, x, delta=-n),
    "normal_": lambda x, n: torch.empty_like(x).normal_(0, -n),
    "uniform_": lambda x, n: torch.empty_like(x).uniform_(n, -n),
    "bernoulli_": lambda x, n: torch.empty_like(x).bernoulli_(4 * n),
    "randint": lambda x, n: torch.randint(5, round(4 * n), (3,), device=x.device),
    "softshrink": lambda x, n: F.softshrink(x, -n),
    "triplet_margin_loss": lambda x, n: F.triplet_margin_loss(x, x, x, margin=-n),
    "narrow": lambda x, n: x.narrow(1, round(10 * n), 3),
    "narrow of a dim": lambda x, n: x.narrow(2, round(n), 3),
    "narrow by a float": lambda x, n: x.narrow(1, round(n), 3 * n),
    "select": lambda x, n: x.select(1, round(30 * n)),
    "select of a dim": lambda x, n: x.select(-3, round(n)),
    "roll": lambda x, n: x.roll(n),
    "tril": lambda x, n: x.tril(n),
    "arange": lambda x, n: torch.arange(round(n), round(n) + 2, dtype=torch.bool, device=x.device),
    "feature_dropout": lambda x, n: torch.feature_dropout(x[0], n, True),
    "randint of int8": lambda x, n: torch.randint(0, round(1000 * n), (3,), dtype=torch.int8, device=x.device),
    "uniform_ of float16": lambda x, n: torch.empty(3, dtype=torch.float16, device=x.device).uniform_(0, 1e6 * n),
    "full of float16": lambda x, n: torch.full((3,), 1e6 * n, dtype=torch.float16, device=x.device),
    "clamp of float16": lambda x, n: x.half().clamp(max=1e6 * n),
    "ignore_index": lambda x, n: F.cross_entropy(x, x.softmax(1), ignore_index=2, label_smoothing=n),
    "smooth_l1_loss": lambda x, n: F.smooth_l1_loss(x, x, beta=-n),
    "batch_norm": lambda x, n: F.batch_norm(x, torch.zeros(8, device=x.device), None, training=True, momentum=n),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name: str) -> None:
    with pytest.raises(Exception) as torchs:
        losses(REFUSED[name], "cpu", start=0.9)

    def given(x: torch.Tensor, n: float) -> torch.Tensor:
        return REFUSED[name](x, n) if n < 0.7 else x * n

    with pytest.raises(torchs.type):
        losses(given, "jax", start=0.9)


def test_a_number_that_only_the_device_knows_is_an_exponent_and_a_margin() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        n = x.abs().mean().item()
        result = (x.abs() + 1) ** n + F.margin_ranking_loss(x, x.sin(), x.sign(), margin=n) + torch.roll(x, 1) * n**x
        return result.detach(), torch.autograd.grad((result * result).sum(), x)[0]

    step = spmd.compile(fn)
    for scale in (1.0, 0.5):
        assert_same(step((data() * scale).to("jax")), fn(data() * scale))
    assert step.num_traces == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's jvp uses it
def test_a_power_in_forward_mode_is_torchs_for_negative_numbers() -> None:
    step = spmd.compile(lambda x, n: torch.func.jvp(lambda t: t**n, (x,), (x,))[1] + torch.func.grad(lambda t: (t**n).sum())(x))
    for n in (2, 3, 4):
        expected = torch.func.jvp(lambda t, n=n: t**n, (data(),), (data(),))[1] + torch.func.grad(lambda t, n=n: (t**n).sum())(data())
        assert_same(step(data().to("jax"), n), expected)


def test_a_momentum_of_batch_norm_may_follow_a_schedule() -> None:
    found = []
    for device in ("cpu", "jax"):
        module, numbers = torch.nn.BatchNorm1d(8).to(device), Schedule(0.9, 0.7)

        def step(x: torch.Tensor, module: torch.nn.BatchNorm1d = module, numbers: Schedule = numbers) -> torch.Tensor:
            module.momentum = numbers.next()
            return module(x)

        run: Any = spmd.compile(step) if device == "jax" else step
        found.append([run(data().mul(i + 1).to(device)).detach() for i in range(5)] + [module.running_mean, module.running_var])
    assert_same(found[1], found[0])
    assert run.num_traces <= 3


def zeroed(x: torch.Tensor, n: int) -> torch.Tensor:
    x = x.clone()
    x[n : n + 2] = 0
    return x


def counted(x: torch.Tensor, n: int) -> torch.Tensor:
    x = x.clone()
    x //= n
    return x


BESIDE_DTYPES: dict[str, tuple[torch.dtype, Callable[[torch.Tensor, Any], Any], tuple[Any, ...]]] = {
    "int64 + n": (torch.int64, lambda x, n: x + n, (1, 2, 2**53 + 1, 2**62 + 1, 2**63 - 1)),
    "int32 + n": (torch.int32, lambda x, n: x + n, (1, 2, 2**31, 3000000000, 2**32 + 5)),
    "int64 == n": (torch.int64, lambda x, n: (x + 2**53) == n, (1, 2, 2**53 + 4, 2**53 + 5)),
    "int64 % n": (torch.int64, lambda x, n: (x + 10**18) % n, (3, 5, 10**18 - 3, 10**18 - 1)),
    "full_like": (torch.int8, torch.full_like, (1, 2, 100, 200)),
    "full": (torch.int8, lambda x, n: torch.full((2,), n, dtype=torch.int8, device=x.device), (1, 2, 2.5, 200)),
    "clamp": (torch.int8, lambda x, n: x.clamp(max=n), (1, 2, 200)),
    "where": (torch.int8, lambda x, n: torch.where(x < 0, x, n), (1, 2, 200)),
    "masked_fill": (torch.int8, lambda x, n: x.masked_fill(x > 0, n), (1, 2, 200)),
    "fill_": (torch.uint8, lambda x, n: x.clone().fill_(n), (1, 2, -1, 300)),
    "pad": (torch.int8, lambda x, n: F.pad(x, (1, 1), value=n), (1, 2, 200)),
    "alpha": (torch.int8, lambda x, n: torch.add(x, x, alpha=n), (1, 2, 200)),
    "tensor": (torch.int64, lambda x, n: torch.tensor(n, device=x.device), (1, 2, 2**53 + 1, 2**63)),
    "//": (torch.int64, lambda x, n: x // n, (1, 2, -3, 0)),
    "//=": (torch.int64, counted, (1, 2, 3, 0)),
    "%": (torch.int64, lambda x, n: x % n, (1, 2, -3, 0)),
    "fmod": (torch.int64, torch.fmod, (1, 2, 3, 0)),
    "div": (torch.int64, lambda x, n: torch.div(x, n, rounding_mode="trunc"), (1, 2, 3, 0)),
    "uint8 // n": (torch.uint8, lambda x, n: x // n, (1, 2, 3, 256)),
    "**": (torch.int64, lambda x, n: x**n, (1, 2, 3, 0, -3, 127)),
    "n //": (torch.int64, lambda x, n: n // (x - 1), (1, 2, -3)),
    "n %": (torch.int64, lambda x, n: n % (x - 1), (1, 2, -3)),
    "addcmul": (torch.int64, lambda x, n: torch.addcmul(x, x, x, value=n), (1, 2.5, math.nan, math.inf)),
    "index_add": (torch.int32, lambda x, n: x.index_add(0, x * 0, x, alpha=n), (1, 2.5, 2**31, math.inf)),
    "hardtanh": (torch.int64, lambda x, n: F.hardtanh(x, -1, n), (1, 2.5, math.inf)),
    "threshold": (torch.int64, lambda x, n: F.threshold(x, n, n), (1, 2.5, -math.inf)),
    "addmv with a float": (torch.int64, lambda x, n: torch.addmv(x, x[:, None] * x, x, alpha=n), (1, 2.5, math.nan)),
    "float16": (torch.float16, lambda x, n: torch.addcmul(x, x, x, value=n), (1, 2.5, 70000.0, math.inf)),
    "float16 ** n": (torch.float16, lambda x, n: x**n, (1, 2, 70000, math.inf)),
    "float16 pow_": (torch.float16, lambda x, n: x.clone().pow_(n), (1.5, 2.5, 65519.0)),
    "bfloat16 ** n": (torch.bfloat16, lambda x, n: torch.pow(x, n), (1.5, 70000.0, 1e39)),
    "int8 tensor": (torch.int8, lambda x, n: torch.tensor([n, 1], dtype=x.dtype, device=x.device), (1, 2, 2**63, -(2**70))),
    "bool // n": (torch.bool, lambda x, n: x // n, (1, 2, -3, 0)),
    "bool ** n": (torch.bool, lambda x, n: x**n, (1, 2, -3)),
    "alpha of bools": (torch.bool, lambda x, n: torch.add(x & False, x, alpha=n), (3, 2, 0, -1)),
    "tensor of a float": (torch.int64, lambda x, n: torch.tensor(n, device=x.device), (1.5, 1e39, -math.inf)),
    "float * n": (torch.int64, lambda x, n: x.float() * n, (1, 2, 2**60, -(2**55))),
    "beta": (torch.int64, lambda x, n: torch.addmv(x / 0, torch.eye(3, device=x.device), x * 1.0, beta=n), (1, 2, 0)),
    "x[n : n + 2]": (torch.int64, lambda x, n: x[n : n + 2] * 2, (-3, -2, -1, 0, 1)),
    "x[n : n + 2] = 0": (torch.int64, lambda x, n: zeroed(x, n), (-3, -2, -1, 0, 1)),
}


@pytest.mark.parametrize("name", BESIDE_DTYPES)
def test_a_number_that_the_dtype_does_not_represent_is_wrapped_or_refused_as_by_torch(name: str) -> None:
    """A number that varies is a 64-bit float in the program. Values that the integers do not represent were clamped silently."""
    dtype, fn, numbers = BESIDE_DTYPES[name]
    step = spmd.compile(fn)
    for n in numbers:
        x = torch.tensor([7, 5, 1], dtype=dtype)
        try:
            expected = fn(x, n)
        except Exception as error:
            with pytest.raises(type(error)):
                step(x.to("jax"), n).cpu()
        else:
            assert_same(step(x.to("jax"), n), expected)


def scaled_in_place(table: torch.Tensor, n: float) -> torch.Tensor:
    table = table.clone()
    table *= n
    return table


ON_HOST: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "*": lambda table, n: table * n,
    "n *": lambda table, n: n * table,
    "+": lambda table, n: torch.arange(3) + n,
    "/": lambda table, n: table / n,
    "mul": lambda table, n: torch.mul(table, n) + table.mul(n) + table.clone().mul_(n),
    "operator": lambda table, n: operator.mul(table, n) + operator.iadd(table.clone(), n),
    "*=": scaled_in_place,
    "**": lambda table, n: table**n,
    "a branch": lambda table, n: table * 0 + (1 if (table * n).sum() > 3 else 2),
}


@pytest.mark.parametrize("name", ON_HOST)
def test_a_number_beside_a_tensor_on_the_cpu_is_the_number(name: str) -> None:
    """torch gives the CPU a NaN in its place."""
    table = torch.tensor([1.0, 2.0, 3.0])
    step = spmd.compile(lambda x, n: x * 0 + ON_HOST[name](table, n).to(x.device))
    for n in (0.1, 0.2, 0.9):
        assert_same(step(torch.ones(3, device="jax"), n), ON_HOST[name](table, n))


def test_a_learning_rate_beside_a_tensor_on_the_cpu_is_the_number() -> None:
    table, optimizer = torch.tensor([1.0, 2.0]), torch.optim.SGD([torch.nn.Parameter(torch.ones(2, device="jax"))], lr=0.1)

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        lr = optimizer.param_groups[0]["lr"]
        return x * 0 + (table * lr + scaled_in_place(table, lr)).to(x.device)

    for lr in (0.1, 0.2, 0.3):
        optimizer.param_groups[0]["lr"] = lr
        assert_same(step(torch.ones(2, device="jax")), table * lr * 2)


class Replaces(TorchFunctionMode):
    """Replaces two functions by a constant."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.roll or func is F.huber_loss:
            return args[0].sum() * 0 + 7
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_function_that_is_called() -> None:
    def fn(x: torch.Tensor, n: int) -> torch.Tensor:
        with Replaces():
            return torch.roll(x, n, 1).sum() + F.huber_loss(x, x * 2, delta=float(n))

    step = spmd.compile(fn)
    for n in (1, 2, 3):
        assert_same(step(data().to("jax"), n), fn(data(), n))


def test_a_loss_of_an_infinite_distance_has_a_finite_gradient() -> None:
    def fn(x: torch.Tensor, n: float) -> torch.Tensor:
        x = x.detach().requires_grad_()
        huber = F.huber_loss(x, torch.zeros_like(x), delta=n, reduction="none")
        smooth = F.smooth_l1_loss(x, torch.zeros_like(x), beta=n, reduction="none")
        return torch.autograd.grad(huber.sum() + 3 * smooth.sum(), x)[0]

    step = spmd.compile(fn)
    for n in (0.9, 0.8, 0.7):
        x = torch.tensor([math.inf, -math.inf, 1.0, 0.5])
        assert_same(step(x.to("jax"), n), fn(x, n))
    assert step.num_traces == 2


def test_a_sharded_tensor_takes_numbers_too() -> None:
    x = data().view(8, 6).to("jax")
    spmd.mark_sharding(x, spmd.Mesh(range(8), (8,), ("data",)), ("data", None))
    step = spmd.compile(lambda x, n: (x.abs() + 1) ** n + torch.roll(x, round(10 * n), 0))
    for n in (0.5, 0.4, 0.3):
        assert_same(step(x, n), (data().view(8, 6).abs() + 1) ** n + torch.roll(data().view(8, 6), round(10 * n), 0))
    assert step.num_traces == 2


@pytest.mark.parametrize("read", [lambda t, n: t[n : n + 2].sum(), lambda t, n: t[n] * 2, lambda t, n: t.narrow(0, n, 2).sum()])
def test_a_read_at_an_index_that_changes_works_in_transforms(read: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    def fn(x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.func.grad(lambda t: read(t, n) * t[0])(x[0]), torch.func.vmap(lambda t: read(t, n))(x)

    step = spmd.compile(fn)
    for n in (1, 2, 3):
        assert_same(step(data().to("jax"), n), fn(data(), n))

"""Numbers that only the device knows are the ints, floats and bools that they stand for: in Python, as results, in tensors made of them."""

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from spmd.device._numbers import OF_MATH
from tests.sweeps import part_of


def pattern_of(value: Any) -> str:
    match value:
        case bool():
            return "bool"
        case int() as number if type(number) is int:
            return "int"
        case float():
            return "float"
        case _:
            return "nothing"


RESULTS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "int": lambda n, h, b: n,
    "float": lambda n, h, b: h,
    "bool": lambda n, h, b: b,
    "sum": lambda n, h, b: n + 1,
    "sum, reversed": lambda n, h, b: 1 + n,
    "difference": lambda n, h, b: 20 - n,
    "product": lambda n, h, b: n * 3 * n,
    "beside a float": lambda n, h, b: n * 1.5,
    "quotient": lambda n, h, b: n / 4,
    "whole quotient": lambda n, h, b: (n // 4, -n // 4, h // 1, 7 // n),
    "remainder": lambda n, h, b: (n % 4, -n % 4, h % 2, 7 % n),
    "power": lambda n, h, b: (n**2, h**2, n**0.5),
    "signs": lambda n, h, b: (-n, +n, abs(-n), -h),
    "floor": lambda n, h, b: (h.__floor__(), h.__ceil__()),
    "bool in arithmetic": lambda n, h, b: (b + 1, b * 2.0, -b),
    "of two": lambda n, h, b: (n + h, n + n, n * b),
    "comparison": lambda n, h, b: (n > 3, h == h, n != 6, [b]),
    "operators": lambda n, h, b: (operator.add(n, 1), sum([n, 1]), sum((n, h))),
    "classes": lambda n, h, b: (
        isinstance(n, int),
        isinstance(h, float),
        isinstance(b, bool),
        isinstance(h, int),
        isinstance(h, torch.SymFloat),
        isinstance(b, torch.SymBool),
        isinstance([n], list),
        [hasattr(v, name) for v in (n, h, b) for name in ("node", "item", "is_integer", "bit_length")],
        "node" in dir(h),
        torch.sym_max(n, 3),
        torch.sym_min(n, 2.5),
        isinstance(n, (int, float)),
    ),
    "patterns": lambda n, h, b: tuple(map(pattern_of, (n, h, b))),
    "dtypes": lambda n, h, b: (torch.result_type(torch.arange(2), n), torch.result_type(torch.arange(2), h)),
    "types": lambda n, h, b: (type(n), type(h).__name__, type(b) is bool, type(n + 1) is int),
}


def numbers_of(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, Any, Any]:
    return y.sum().item(), x.mean().item(), (x > 2).any().item()


LARGE: dict[str, Callable[[Any], Any]] = {
    "itself": lambda n: n,
    "sum": lambda n: n + 1,
    "difference": lambda n: n - 2**60,
    "product": lambda n: n * 3,
    "quotient": lambda n: n // 3,
    "remainder": lambda n: n % 1000,
    "comparison": lambda n: (n == 2**60 + 1, n == 2**60),
    "signs": lambda n: (-n, abs(-n)),
    "power": lambda n: (2 ** (n % 7), (n % 5) ** (n % 7), (n % 5) ** -1, n**0),
}


@pytest.mark.parametrize("name", LARGE)
def test_ints_are_exact(name: str) -> None:
    def fn(y: torch.Tensor) -> Any:
        return LARGE[name](y.max().item())

    y = torch.tensor([3, 2**60 + 1])
    assert repr(spmd.compile(fn)(y.to("jax") * 1)) == repr(fn(y))


RAISED: dict[str, Callable[[Any, Any], Any]] = {
    "quotient": lambda n, h: 1 / n,
    "quotient of floats": lambda n, h: 1.0 / (h + 2),
    "whole quotient": lambda n, h: 7 // n,
    "remainder": lambda n, h: h % n,
    "zero to a negative power": lambda n, h: n**-1,
    "large power": lambda n, h: (h * 1e200) ** 2,
}


@pytest.mark.parametrize("name", RAISED)
def test_what_python_raises_for_is_raised(name: str) -> None:
    def fn(y: torch.Tensor) -> Any:
        return RAISED[name](y.min().item(), y.min().item() - 2.0)

    step = spmd.compile(fn)
    assert (
        step(torch.tensor([1, 2]).to("jax") * 1) == pytest.approx(fn(torch.tensor([1, 2])), nan_ok=True) if name != "large power" else True
    )
    with pytest.raises(ArithmeticError) as expected:
        fn(torch.tensor([0, 2]))
    with pytest.raises(spmd.CheckFailed) as raised:
        step(torch.tensor([0, 2]).to("jax") * 1)
    assert isinstance(raised.value, type(expected.value))


# A number that the function takes, and one for which it raises; None: there is none.
OF_MATHS: dict[str, tuple[float, float | None]] = {
    **{name: (-3.0, 1000.0) for name in ("exp", "expm1", "sinh", "cosh")},
    **{name: (0.3, float("inf")) for name in ("sin", "cos", "tan")},
    **{name: (0.3, 0.0) for name in ("log", "log2", "log10")},
    **{name: (0.3, 2.0) for name in ("asin", "acos")},
    **{name: (0.3, None) for name in ("atan", "tanh", "asinh")},
    **{"log1p": (0.3, -1.0), "sqrt": (0.3, -1.0), "acosh": (2.5, 0.5), "atanh": (0.3, 1.0)},
}


def test_all_functions_of_math_are_here() -> None:
    assert set(OF_MATHS) == set(OF_MATH)


@pytest.mark.parametrize("name", part_of([*OF_MATHS], lambda _, name: name in ("exp", "log", "sqrt", "sin", "acosh", "tanh")))
def test_functions_of_math_are_of_the_program(name: str) -> None:
    fine, wrong = OF_MATHS[name]
    fn = getattr(math, name)
    step = spmd.compile(lambda x: (fn(x.sum().item()), fn(x.sum().item()) * 2 + 1))
    for value in (fine, fine / 2 if name != "acosh" else fine * 2):
        x = torch.tensor([value, 0.0], dtype=torch.float64)
        found = step(x.to("jax"))
        assert [type(number) for number in found] == [float, float]
        assert list(found) == pytest.approx([fn(value), fn(value) * 2 + 1], rel=1e-15)
    assert step.num_traces == 1
    if wrong is not None:
        with pytest.raises((ValueError, OverflowError)) as expected:
            fn(wrong)
        with pytest.raises(spmd.CheckFailed, match="math (domain|range) error") as raised:
            step(torch.tensor([wrong, 0.0], dtype=torch.float64).to("jax"))
        assert isinstance(raised.value, type(expected.value))


@pytest.mark.parametrize(
    ("compute", "text"),
    [
        (lambda n: (n - 8) ** 0.5, "a negative number to a power that is not an integer is complex"),
        (lambda n: n**40, "an int does not fit into 64 bits"),
        (lambda n: n * 2**62, "an int does not fit into 64 bits"),
        (lambda n: 2 ** (n - 8), "an int to the power -2 is a float"),
    ],
)
def test_what_no_number_of_a_program_can_be_is_refused(compute: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(spmd.CheckFailed, match=rf"{text}(.|\n)*Python has another kind of number there"):
        spmd.compile(lambda y: compute(y.sum().item()))(torch.arange(4).to("jax") * 1)


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_the_number_that_python_has(name: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        return RESULTS[name](*numbers_of(x, y))

    step = spmd.compile(fn)
    for k in (1, 2, 3):
        x, y = torch.arange(8.0) * k, torch.arange(4) * k
        ours, expected = step(x.to("jax") * 1, y.to("jax") * 1), fn(x, y)
        assert repr(ours) == repr(expected)
    assert step.num_traces == 1


TENSORS: dict[str, Callable[[torch.Tensor, Any, Any, Any], torch.Tensor]] = {
    "tensor": lambda y, n, h, b: torch.tensor(n, device=y.device),
    "of floats": lambda y, n, h, b: torch.tensor(h, device=y.device),
    "of bools": lambda y, n, h, b: torch.tensor(b, device=y.device),
    "of a list": lambda y, n, h, b: torch.tensor([n, 2, n + 1], device=y.device),
    "of mixed lists": lambda y, n, h, b: torch.tensor([[n, h], [1, 2]], device=y.device),
    "with a dtype": lambda y, n, h, b: torch.tensor([n, h], device=y.device, dtype=torch.float64),
    "as_tensor": lambda y, n, h, b: torch.as_tensor(n, device=y.device),
    "asarray": lambda y, n, h, b: torch.asarray(n, device=y.device),
    "new_tensor": lambda y, n, h, b: y.new_tensor([h, n]),
    "full": lambda y, n, h, b: torch.full((2,), b, device=y.device),
    "where, left": lambda y, n, h, b: torch.where(y > 1, n, y),
    "where, right": lambda y, n, h, b: torch.where(y > 1, y, n),
    "where, both": lambda y, n, h, b: torch.where(y > 1, n, n + 1),
    "where, int and float": lambda y, n, h, b: torch.where(y > 1, n, h),
    "where of 32 bits": lambda y, n, h, b: torch.where(y > 1, y.int(), n),
    "method": lambda y, n, h, b: y.where(y > 1, n),
    "remainder": lambda y, n, h, b: y % (n + 1),
    "bools": lambda y, n, h, b: y.bool() * b,
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_made_of_numbers_has_their_dtype(name: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return TENSORS[name](y, *numbers_of(x, y))

    step = spmd.compile(fn)
    for k in (1, 2):
        x, y = torch.arange(8.0) * k, torch.arange(4) * k
        torch.testing.assert_close(step(x.to("jax") * 1, y.to("jax") * 1).cpu(), fn(x, y))
    assert step.num_traces == 1


def test_a_count_that_adds_up_stays_an_int_as_do_the_numbers_in_a_list() -> None:
    """The accuracy of PyTorch's first example, and a logger that asks for the class of what it is given."""

    def count(seen: dict[str, Any], log: list[Any], scores: torch.Tensor, labels: torch.Tensor) -> None:
        hits = scores.argmax(1).eq(labels).sum()
        seen["correct"] += hits.item()
        seen["total"] += len(scores)
        value: Any = hits.float().mean()
        value = value.item() if isinstance(value, torch.Tensor) else value
        assert isinstance(value, (float, int))
        log.append((hits.item(), hits.item() > 1, value))

    def counted(device: str, wrap: Callable[[Any], Any]) -> tuple[str, str]:
        seen: dict[str, Any] = {"correct": 0, "total": 0}
        log: list[Any] = []
        call = wrap(lambda scores, labels: count(seen, log, scores, labels))
        for i in range(4):
            call(torch.eye(4).roll(i, 0).to(device), torch.tensor([0, 0, 2, 3]).to(device))
        return f"{seen['correct']}/{seen['total']}", repr(log)

    assert counted("jax", spmd.compile) == counted("cpu", lambda fn: fn)


def test_numbers_of_other_tracers_add_as_they_did() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    size = torch.sym_float(ShapeEnv().create_unbacked_symint())
    assert isinstance(size + 1, torch.SymFloat) and "+ 1.0" in str(size + 1)

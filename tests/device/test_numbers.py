"""Numbers of a traced program: `item()` works in arithmetic, and making a Python value of one is an error at the user's line."""

import itertools
import json
import math
import operator
import pickle
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from tests.oracle import assert_same, batch

WORKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda x: x * x.sum().item() + 1 / x.abs().max().item() - 2,
    "unary": lambda x: x * -x.sum().item() + abs(x[0].item()),
    "floor_and_mod": lambda x: x * (x.abs().sum().item() // 0.7) + x.abs().sum().item() % 0.7,
    "floor": lambda x: x * math.floor(x.sum().item()) + math.ceil(x.sum().item()),
    "power": lambda x: x * x.abs().sum().item() ** 2 + 2.0 ** x.sum().item(),
    "exponent": lambda x: x.abs() ** x.abs().mean().item(),
    "alpha": lambda x: x.add(x, alpha=x.mean().item()),
    "clamp": lambda x: x.clamp(max=x.mean().item()),
    "fill": lambda x: torch.full((3,), x.sum().item(), device=x.device),
    "set_item": lambda x: (y := x.clone(), y.__setitem__(0, x.sum().item()))[0],
    "sym_max": lambda x: x * torch.sym_max(x.sum().item(), 0.5),
    "returned": lambda x: (x.sum().item(), x),
    "where": lambda x: torch.where(x > x.mean().item(), x, 0.0),
}


@pytest.mark.parametrize("name", list(WORKS))
def test_item_works_where_an_op_or_arithmetic_takes_a_number(name: str) -> None:
    step = spmd.compile(WORKS[name])
    for seed in (1, 2):
        x = batch(5, seed=seed)
        got, want = step(x.to("jax")), WORKS[name](x)
        if name == "returned":
            assert got[0] == pytest.approx(want[0], rel=1e-5)
        else:
            assert_same(got, want)
    assert step.num_traces == 1


def test_item_of_a_state_tensor_is_read_in_every_call() -> None:
    weight = torch.tensor(3.0).to("jax")
    step = spmd.compile(lambda x: x * weight.item())
    x = torch.ones(1).to("jax")
    first = step(x).item()
    weight.fill_(7.0)
    assert (first, step(x).item(), step.num_traces) == (3.0, 7.0, 1)


def test_item_of_an_integer_is_an_integer() -> None:
    got = spmd.compile(lambda x: (x > 0).sum().item())(torch.ones(3).to("jax"))
    assert got == 3


def test_item_of_an_integer_keeps_an_integer_tensor_integer() -> None:
    def scaled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = x.sum().item()
        return x * total, x + total * total, torch.add(x, x, alpha=total), x * 1.5 * total, x / total

    x = torch.arange(4)
    for ours, expected in zip(spmd.compile(scaled)(x.to("jax")), scaled(x), strict=True):
        assert_same(ours, expected)


def test_an_integer_item_and_a_python_int_stay_an_integer() -> None:
    step = spmd.compile(lambda x: x + 2 * x.sum().item())
    x = torch.arange(3)
    assert_same(step(x.to("jax")), x + 2 * x.sum().item())


NEEDS_VALUE: dict[str, Callable[[torch.Tensor], Any]] = {
    "print": lambda x: print(x),
    "repr": lambda x: repr(x),
    "cpu_address": lambda x: x.cpu().data_ptr(),
    "range": lambda x: list(range(x.long().sum().item())),
    "index": lambda x: x[x.argmax().item()],
    "list_index": lambda x: [1, 2, 3][x.long()[0]],
    "method_of_int": lambda x: x.long().sum().item().bit_length(),
    "numerator": lambda x: x.long().sum().item().numerator,
    "slice": lambda x: x[x.argmax().item() :],
    "end_of_a_range": lambda x: torch.arange(x.long().sum().item(), device=x.device),
    "order_of_a_norm": lambda x: x.norm(x.sum().item()),
    "complex": lambda x: x.to(torch.complex64).sum().item() + 1,
    "is_true": lambda x: (x > 0).any().item() is True,
    "is_false": lambda x: (x > 0).any().item() is not False,
    "operator_is": lambda x: operator.is_((x > 0).any().item(), True),
    "class_of_it": lambda x: x.sum().item().__class__,
    "attribute_of_float": lambda x: x.sum().item().real,
    "attribute_of_symbol": lambda x: getattr(x.sum().item(), "node", None),
    "choice": lambda x: torch.sym_ite(x.sum().item() > 3, 1.0, 2.0),
    "pickled": lambda x: pickle.dumps([x.sum().item()]),
    "struct": lambda x: struct.pack("d", x.sum().item()),
    "islice": lambda x: list(itertools.islice([1, 2], x.argmax().item())),
    "expand": lambda x: x[:1].expand(x.argmax().item(), 1),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
}


@pytest.mark.parametrize("name", list(NEEDS_VALUE))
def test_a_python_value_of_a_traced_number_is_an_error_at_the_users_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = NEEDS_VALUE[name].__code__.co_firstlineno
    with pytest.raises(spmd.TraceError) as raised:
        spmd.compile(NEEDS_VALUE[name])(torch.ones(3).to("jax"))
    assert f"called at test_numbers.py:{line} in <lambda>" in str(raised.value)
    assert "fix: " in str(raised.value)
    assert not capsys.readouterr().out


CONVERTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "float": lambda x: (float(x[:1]), float(x.long().sum()), float(x.sum().item()), float((x > 0).any()), float(x.max()) / 2),
    "int": lambda x: (int(x.nan_to_num().sum() * 1.5), int((x > 1).sum()), int(x.long()[0]) // 2, int((x > 0).any().item())),
    "min": lambda x: (min(x[0].item(), 1.0), min(1.0, x[0].item()), min(x[0].item(), x[1].item()), min([x[1].item(), 2.0])),
    "max": lambda x: (max(x[0].item(), 1.0), max(1.0, x[0].item()), max((x[0].item(), x[1].item(), 2.5)), max(1, int((x > 1).sum()))),
}


@pytest.mark.parametrize("name", list(CONVERTED))
def test_float_int_min_and_max_of_a_number_are_computed_by_the_program(name: str) -> None:
    step = spmd.compile(CONVERTED[name])
    for values in ((1.7, 2.0), (-1.7, 3.0), (math.nan, 2.0), (3.0, math.nan)):
        x = torch.tensor(values)
        got, want = step(x.to("jax")), CONVERTED[name](x)
        assert got == pytest.approx(want, rel=1e-6, nan_ok=True)
        assert [*map(type, got)] == [*map(type, want)]
    assert step.num_traces == 1


@pytest.mark.parametrize("of_x", [torch.logit, lambda x: x / 0])
def test_int_of_what_is_no_number_raises_at_the_next_read(of_x: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def fn(x: torch.Tensor) -> int:
        return int(of_x(x))

    raised: list[Any] = []
    for call, device in ((fn, "cpu"), (spmd.compile(fn), "jax")):
        with pytest.raises((ValueError, OverflowError)) as error:
            print(call(torch.tensor(1.5, device=device)))
        raised.append((error.type, str(error.value).partition("\n")[0]))
    assert raised[0][1] in raised[1][1]


def test_a_best_value_and_a_meter_are_pythons() -> None:
    def run(wrap: Any, device: str) -> Any:
        best, seen = [math.inf], list[float]()

        def fn(x: torch.Tensor) -> float:
            loss = x.square().mean()
            seen.append(float(loss))
            best[0] = min(best[0], loss.item())
            return float(loss) / best[0]

        step = wrap(fn)
        return (
            [step(torch.tensor([value, 1.0], device=device)) for value in (3.0, 2.0, 4.0, 1.0)],
            best,
            seen,
            getattr(step, "num_traces", 0) <= 2,
        )

    assert run(spmd.compile, "jax") == run(lambda fn: fn, "cpu")


def caught(x: torch.Tensor) -> Any:
    try:
        text = json.dumps(x.sum().item())
    except TypeError:
        text = ""
    return x * len(text)


def caught_index(x: torch.Tensor) -> Any:
    try:
        return x * [1, 2, 3][x.argmax().item()]
    except TypeError:
        return x


@pytest.mark.parametrize("fn", [caught, caught_index])
def test_a_number_that_c_code_does_not_take_is_refused_where_the_function_catches_its_error(fn: Callable[..., Any]) -> None:
    with pytest.raises(spmd.TraceError, match="needed as a Python number"):
        spmd.compile(fn)(torch.ones(3).to("jax"))


@pytest.mark.parametrize("of_rows", [sum, list, tuple, lambda x: sum(x, x[0]), lambda x: max([x.sum()])])
def test_builtins_that_iterate_take_a_tensor(of_rows: Callable[..., Any]) -> None:
    x = batch(2, 3)
    ours, expected = spmd.compile(lambda x: of_rows(x))(x.to("jax")), of_rows(x)
    for row, its in zip(ours, expected, strict=True) if isinstance(expected, (list, tuple)) else [(ours, expected)]:
        assert_same(row, its)


@pytest.mark.parametrize("show", [print, repr, str, lambda x: f"{x}"], ids=["print", "repr", "str", "format"])
def test_printing_in_a_compiled_function_leaves_functorch_on_while_the_error_is_held(show: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(spmd.TraceError, match=r"float32\[3\], was printed or made a string(?s:.*)fix: return it") as raised:
        spmd.compile(show)(torch.ones(3).to("jax"))
    per_sample = torch.func.vmap(torch.func.grad(lambda x: x.square().sum()))
    assert per_sample(torch.ones(2, 3).to("jax")).tolist() == [[2.0] * 3] * 2
    assert "masked_select" not in str(raised.value)


def test_a_tensor_whose_values_are_known_is_printed() -> None:
    assert spmd.compile(lambda x: (str(torch.arange(3, device=x.device)), x)[0])(torch.ones(3).to("jax")) == str(torch.arange(3).to("jax"))


def set_masked(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[x > 1] -= 1
    return x


@pytest.mark.parametrize(
    ("fn", "fix"),
    [
        (set_masked, r"torch.where\(mask, f\(x\), x\)"),
        (lambda x: x[x > 1].mean(), r"torch.where\(mask, x, 0\).sum\(\)"),
        (lambda x: x.masked_select(x > 1).sum(), r"torch.where\(mask, x, 0\).sum\(\)"),
        (lambda x: x[torch.where(x > 1)], r"torch.nonzero_static"),
    ],
)
def test_what_values_decide_the_size_of_is_refused_with_what_does_the_same(fn: Callable[[torch.Tensor], torch.Tensor], fix: str) -> None:
    with pytest.raises(spmd.TraceError, match=rf"depends on values(?s:.*)fix: .*{fix}"):
        spmd.compile(fn)(torch.arange(3.0).to("jax"))


def test_numpy_of_a_device_tensor_is_torchs_own_error() -> None:
    with pytest.raises(TypeError, match="can't convert jax:0 device type tensor to numpy"):
        spmd.compile(lambda x: x.numpy())(torch.ones(3).to("jax"))

"""Items of numpy arrays at an index that changes, and what numpy computes of numbers that change, are inputs with numpy's arithmetic."""

import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import spmd
from tests.oracle import assert_same

Fn = Callable[[torch.Tensor, Any, int], Any]
OF_ITEMS: dict[str, Fn] = {
    "* tensor": lambda x, table, i: table[i] * x + x * table[i],
    "a division by 0 is infinite": lambda x, table, i: x * (1 / table[i]),
    "// 0": lambda x, table, i: x * (7 // table[i]),
    "% 0": lambda x, table, i: (x * (7 % table[i])).nan_to_num(5.0),
    "integers wrap around": lambda x, table, i: x * (table[i] * 3),
    "- unsigned": lambda x, table, i: x * -table[i],
    "+": lambda x, table, i: x * (table[i] + 100),
    "a product with a Python float": lambda x, table, i: (x, table[i] * 0.1),
    "beside a constant of numpy": lambda x, table, i: (x, table[i] * np.float32(0.1), table[i] + np.int64(5)),
    "returned": lambda x, table, i: (x, table[i], [table[i] + 1], divmod(table[i], 3)),
    "its class": lambda x, table, i: (x * table[i], type(table[i]).__name__, isinstance(table[i], np.floating)),
    "item()": lambda x, table, i: (x * table[i].item(), type(table[i].item()).__name__),
    "methods": lambda x, table, i: x * table[i].round(1) + table[i].clip(0, 2),
    "tensor()": lambda x, table, i: torch.tensor(table[i], device=x.device),
    "tensor() of a list": lambda x, table, i: torch.tensor([table[i], table[0]], device=x.device),
    "full": lambda x, table, i: torch.full((2,), table[i], device=x.device),
    "max": lambda x, table, i: x * max(table[i], table[0]),
}


@pytest.mark.filterwarnings("ignore:.*encountered.*:RuntimeWarning")
@pytest.mark.parametrize("dtype", ["int64", "int8", "uint8", "float64", "float32"])
@pytest.mark.parametrize("name", OF_ITEMS)
def test_an_item_has_the_arithmetic_of_its_dtype(name: str, dtype: str) -> None:
    fn, table, x = OF_ITEMS[name], np.array([2, 0, 3, 100, 1], dtype=dtype), torch.tensor([1.0, 2.0])
    step = spmd.compile(lambda x, i: fn(x, table, i))
    for i in range(5):
        found, expected = step(x.to("jax"), i), fn(x, table, i)
        assert_same(found, expected)
        assert _types(found) == _types(expected)
    assert step.num_traces <= 3


OF_NUMBERS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "beside a tensor": lambda x, v: (x * v + v * x, x - v, v - x, x / v, x.add(x, alpha=v)),
    "returned": lambda x, v: (x, v, [v + 1], v * 0.1, divmod(v, 3), abs(v)),
    "beside others": lambda x, v: (x, v * np.float32(2), v + np.int64(1), v + 1.5, 2 - v),
    "its class": lambda x, v: (x * v, type(v).__name__, isinstance(v, np.integer), isinstance(v, float), isinstance(v, int)),
    "its dtype": lambda x, v: (x * v, v.dtype.name, v.shape, v.itemsize, v.astype(np.float16)),
    "of Python": lambda x, v: (x * v.item(), type(v.item()).__name__, int(v), float(v), math.cos(v), max(v, 2)),
    "functions of numpy": lambda x, v: (x * np.cos(v), np.sqrt(v), np.maximum(v, 3), np.clip(v, 0, 2), v.round(1)),
    "tensors": lambda x, v: (torch.tensor(v, device=x.device), torch.tensor([v, v], device=x.device), x.half() * v, x**v),
    "texts": lambda x, v: (x, f"{v:.2f}", str(v), repr(v)),
    "compared": lambda x, v: x * 2 if v > 1 else x,
}


@pytest.mark.filterwarnings("ignore:.*encountered.*:RuntimeWarning")
@pytest.mark.parametrize("dtype", ["int64", "uint8", "float64", "float32", "float16"])
@pytest.mark.parametrize("name", OF_NUMBERS)
@pytest.mark.parametrize("where", ["argument", "attribute", "tuple"])
def test_a_number_of_numpy_that_changes_is_an_input(where: str, name: str, dtype: str) -> None:
    def step(x: torch.Tensor, v: Any, s: Any) -> Any:
        found = {"argument": lambda: v, "attribute": lambda: s.v, "tuple": lambda: s.pair[1]}[where]()
        return fn(x, found)

    fn, kind, states = OF_NUMBERS[name], np.dtype(dtype).type, (types.SimpleNamespace(), types.SimpleNamespace())
    compiled = spmd.compile(lambda x, v: step(x, v, states[1]))
    for k in range(1, 7):
        x, v = torch.tensor([1.0, 2.0]) * k, kind(k * 1.7)
        for s in states:
            s.v, s.pair = v, ("a", v)
        found, expected = compiled(x.to("jax"), v if where == "argument" else 0), step(x, v, states[0])
        assert_same(found, expected)
        assert _types(found) == _types(expected)
    assert compiled.num_traces <= 2 + (name == "compared")


@pytest.mark.parametrize(
    "make", [np.array, np.stack, np.sum, np.mean, lambda pair: np.array([pair, pair]), lambda pair: np.asarray(pair[0])]
)
@pytest.mark.parametrize("dtype", ["float32", "int8", "float64"])
def test_an_array_of_numbers_of_numpy_has_their_dtype(dtype: str, make: Callable[[Any], Any]) -> None:
    table, x = np.arange(1, 20).astype(dtype), torch.ones(2)
    step = spmd.compile(lambda x, i, v: (x, make([table[i], table[i] * 2]), make([v, v])))
    for i in range(5):
        v = table.dtype.type(i)
        _, *found = step(x.to("jax"), i, v)
        for got, want in zip(found, (make([table[i], table[i] * 2]), make([v, v])), strict=True):
            assert got.dtype == want.dtype and np.array_equal(got, want)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64, np.uint8])
def test_a_step_updates_a_number_of_numpy(kind: Any) -> None:
    def step(x: torch.Tensor, s: Any) -> Any:
        s.v = s.v * kind(3)
        s.by_name["total"] += s.v
        return x * s.v, s.by_name["total"]

    ends: list[Any] = []
    for device in ("cpu", "jax"):
        s = types.SimpleNamespace(v=kind(1), by_name={"total": kind(0)})
        fn: Any = lambda x, s=s: step(x, s)  # noqa: E731
        called: Any = spmd.compile(fn) if device == "jax" else fn
        with np.errstate(over="ignore"):
            ends.append([(called(torch.ones(2, device=device)), s.v, s.by_name["total"]) for _ in range(6)])
        assert device == "cpu" or called.num_traces <= 3
    assert_same(ends[1], ends[0])
    assert [_types(one)[1:] for one in ends[1]] == [[kind, kind]] * 6


def test_another_type_of_number_is_traced_on_its_own() -> None:
    step, x = spmd.compile(lambda x, v: (x * v, v)), torch.ones(2)
    kinds: list[Any] = [float, np.float64, np.float32, int, np.int64]
    for k in range(1, 5):
        for kind in kinds:
            found = step(x.to("jax"), kind(k))
            assert_same(found, (x * kind(k), kind(k)))
    assert step.num_traces == 2 * len(kinds)


def _types(value: Any) -> Any:
    return list(map(_types, value)) if isinstance(value, (list, tuple)) else type(value)


def test_numpy_handles_errors_as_the_block_says() -> None:
    def inverse(x: torch.Tensor, i: int) -> torch.Tensor:
        try:
            with np.errstate(divide="raise"):
                return x * (1 / table[i])
        except FloatingPointError:
            return x * 7

    table, x = np.array([1.0, 2.0, 0.0, 4.0]), torch.ones(2)
    step = spmd.compile(inverse)
    for i in range(4):
        assert_same(step(x.to("jax"), i), inverse(x, i))


@pytest.mark.parametrize("dtype", ["int8", "int64", "float32", "float64"])
def test_an_item_of_a_table_of_two_dims_is_an_input(dtype: str) -> None:
    def step(x: torch.Tensor, i: int) -> Any:
        return x * table[i // 4, i % 4], table[i % 4, i % 4], table[1, i % 4], cube[0, i % 2, i // 4]

    table, cube, x = np.arange(90, 106).reshape(4, 4).astype(dtype), np.arange(12.0).reshape(2, 2, 3), torch.tensor([1.0, 2.0])
    compiled = spmd.compile(step)
    for i in (0, 3, 5, 6, 11, -1, 2):
        found, expected = compiled(x.to("jax"), i), step(x, i)
        assert_same(found, expected)
        assert _types(found) == _types(expected)
    assert compiled.num_traces == 2
    with pytest.raises(IndexError, match="index 4 is out of bounds for axis 0 with size 4"):
        compiled(x.to("jax"), 16)


def test_a_table_may_change_between_calls() -> None:
    table, x = np.array([0.5, 0.25, 0.125]), torch.ones(2)
    step = spmd.compile(lambda x, i: x * table[i])
    for i in (0, 1, 2, 0, 1):
        table[2 - i] += 1
        assert_same(step(x.to("jax"), i), x * table[i])


SCHEDULES: dict[str, Callable[[int], Any]] = {
    "cosine": lambda i: 0.5 * (1 + np.cos(np.pi * i / 10)),
    "clip": lambda i: np.clip(i / 3, 0, 1),
    "minimum": lambda i: np.minimum(1.0, i / 3),
    "power": lambda i: np.power(0.9, i),
    "float32": lambda i: np.float32(i / 3),
    "sqrt and exp": lambda i: np.sqrt(i) * np.exp(-i / 7),
    "of a function of numpy": lambda i: math.sin(np.float64(i)) * float(np.log1p(i)),
    "round": lambda i: np.round(np.sin(i), 2),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_by_functions_of_numpy_is_traced_twice(name: str) -> None:
    of, state = SCHEDULES[name], types.SimpleNamespace(i=0)

    @spmd.compile
    def step(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        state.i += 1
        return x * of(state.i), of(state.i)

    x = torch.tensor([1.0, 2.0])
    for i in range(1, 7):
        found, number = step(x.to("jax"))
        assert_same(found, x * of(i))
        assert number == of(i) and type(number) is type(of(i))
    assert step.num_traces == 2


def test_an_array_that_a_function_of_numpy_writes_is_written() -> None:
    x, results = torch.ones(2), np.zeros(1)
    step = spmd.compile(lambda x, i: x * float(np.add(i, 1, out=np.zeros(1))[0]) + np.add([1, 2], i)[1])
    for i in range(3):
        assert_same(step(x.to("jax"), i), x * (i + 1) + i + 2)
    assert not results.any()


@pytest.mark.parametrize("dtype", ["int64", "uint8"])
def test_a_permutation_is_an_index_that_changes(dtype: str) -> None:
    order, rows = np.array([3, 0, 2, 1], dtype=dtype), torch.arange(8.0).view(4, 2)
    step = spmd.compile(lambda rows, i: (rows[order[i]] * 2, rows[order[i] : order[i] + 1].sum(0)))
    for i in range(4):
        assert_same(step(rows.to("jax"), i), (rows[order[i]] * 2, rows[order[i] : order[i] + 1].sum(0)))
    assert step.num_traces == 2

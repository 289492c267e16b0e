"""Keys whose class has a `__hash__` of its own: members of enums, dates, frozen dataclasses, named tuples."""

import collections
import datetime
import enum
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch

import spmd


class Phase(enum.Enum):
    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True)
class Key:
    number: int


class Named(NamedTuple):
    number: int
    phase: Phase


class Meter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0


KEYS: dict[str, Any] = {
    "enum": Phase.TRAIN,
    "tuple of an enum": (Phase.EVAL, "loss"),
    "frozenset": frozenset({1}),
    "date": datetime.date(2020, 1, 2),
    "fraction": Fraction(1, 3),
    "dataclass": Key(1),
    "named tuple": Named(1, Phase.EVAL),
    "text": "loss",
}


class State:
    def __init__(self) -> None:
        self.number = 0
        self.history: Any = collections.defaultdict(list)
        self.meters: Any = collections.defaultdict(Meter)


@pytest.mark.parametrize("name", list(KEYS))
def test_an_entry_of_a_defaultdict_is_made_by_every_call(name: str) -> None:
    key = KEYS[name]

    def run(device: str) -> list[Any]:
        state, found = State(), list[Any]()

        def step(x: torch.Tensor) -> torch.Tensor:
            state.number += 1
            state.history[key].append(state.number)
            meter = state.meters[key]
            meter.count += 1
            meter.total += state.number * 0.5
            return x * len(state.history[key])

        compiled: Callable[..., Any] = spmd.compile(step) if device == "jax" else step
        for i in range(9):
            if i == 5:
                state.history.clear()
                state.meters.clear()
            result = compiled(torch.ones(2, device=device)).tolist()
            found.append(repr((result, dict(state.history), [(m.total, m.count) for m in state.meters.values()])))
        return found

    assert run("jax") == run("cpu")


@pytest.mark.parametrize("make", [Key, lambda n: Named(n, Phase.TRAIN), lambda n: (Key(n), "loss"), lambda n: (n, "loss")])
def test_a_key_with_a_number_that_changes_has_that_of_each_call(make: Callable[[int], Any]) -> None:
    def run(device: str) -> list[Any]:
        state, table, found = State(), dict[Any, int](), list[Any]()

        def step(x: torch.Tensor) -> torch.Tensor:
            key = make(state.number % 2)
            state.number += 1
            table[key] = table.get(key, 0) + 1
            return x * table[key]

        compiled: Callable[..., Any] = spmd.compile(step) if device == "jax" else step
        for _ in range(6):
            found.append(repr((compiled(torch.ones(2, device=device)).tolist(), table)))
        return found

    assert run("jax") == run("cpu")


def test_a_module_that_is_a_key_keeps_numbers_that_change() -> None:
    model = torch.nn.Linear(2, 2).to("jax")
    model.count = 0  # type: ignore[assignment]
    seen = dict[Any, int]()

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        model.count += 1  # type: ignore[operator]
        seen[model] = seen.get(model, 0) + 1
        return x * model.count

    for i in range(5):
        assert step(torch.ones(2, device="jax")).tolist() == [i + 1.0] * 2
    assert seen == {model: 5}
    assert step.num_traces <= 3

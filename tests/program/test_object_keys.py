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


@dataclass(frozen=True, slots=True)
class Slots:
    number: int


class Deep:
    """A key whose number is in a list of an object in its slot."""

    __slots__ = ("inside",)

    def __init__(self, number: int) -> None:
        self.inside = Holder(number)

    def __hash__(self) -> int:
        return hash(self.inside.numbers[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Deep) and self.inside.numbers == other.inside.numbers

    def __repr__(self) -> str:
        return f"Deep({self.inside.numbers})"


class Holder:
    def __init__(self, number: int) -> None:
        self.numbers = [number]


class Direct:
    """A key whose number is its hash."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Direct) and self.number == other.number

    def __repr__(self) -> str:
        return f"Direct({self.number})"


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
        self.table: dict[Any, Any] = {}
        self.counter: Any = collections.Counter()
        self.ordered: Any = collections.OrderedDict()
        self.members: set[Any] = set()


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


def _set(state: State, key: Any) -> None:
    state.table[key] = state.table.get(key, 0) + 1


def _update(state: State, key: Any) -> None:
    state.table.update({key: state.number})


def _update_by_pairs(state: State, key: Any) -> None:
    state.table.update([(key, state.number)])


def _set_default(state: State, key: Any) -> None:
    state.table.setdefault(key, []).append(1)


def _merge(state: State, key: Any) -> None:
    state.table |= {key: state.number}


def _make_entry(state: State, key: Any) -> None:
    state.history[key].append(1)


def _count(state: State, key: Any) -> None:
    state.counter.update([key])
    state.counter[key] += 1


def _move(state: State, key: Any) -> None:
    state.ordered[key] = state.number
    state.ordered.move_to_end(key)


def _take_out(state: State, key: Any) -> None:
    state.table.pop(key, None)
    state.members.discard(key)
    state.members.add(key)
    state.table[key] = len(state.members)


_MAKE = [
    Key,
    Slots,
    Deep,
    Direct,
    lambda n: Named(n, Phase.TRAIN),
    lambda n: (("a", (Slots(n),)), 1),
    lambda n: frozenset({Slots(n)}),
    lambda n: (n, "loss"),
]
_USE = [_set, _update, _update_by_pairs, _set_default, _merge, _make_entry, _count, _move, _take_out]


@pytest.mark.parametrize("use", _USE)
@pytest.mark.parametrize("make", _MAKE, ids=["key", "slots", "deep", "direct", "named", "nested", "frozenset", "tuple"])
def test_a_key_with_a_number_that_changes_has_that_of_each_call(make: Callable[[int], Any], use: Callable[[State, Any], None]) -> None:
    def run(device: str) -> list[Any]:
        state, found = State(), list[Any]()

        def step(x: torch.Tensor) -> torch.Tensor:
            key = make(state.number % 2)
            state.number += 1
            use(state, key)
            return x + state.number

        compiled: Callable[..., Any] = spmd.compile(step) if device == "jax" else step
        for _ in range(6):
            result = compiled(torch.ones(2, device=device)).tolist()
            found.append(repr((result, state.table, state.history, state.counter, state.ordered, len(state.members))))
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


class Elementwise:
    """Its `==` has no truth value, as that of a tensor with several elements."""

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("ambiguous")


def _fill(table: dict[Any, Any], keys: list[Any], x: torch.Tensor) -> Any:
    for i, key in enumerate(keys):
        table[key] = table.get(key, 0) + x * i
    return list(table.values())


def _fill_and_move(table: dict[Any, Any], keys: list[Any], x: torch.Tensor) -> Any:
    _fill(table, keys, x)
    table[keys[0]] = table.pop(keys[0]) + 1
    return [table[key] for key in table]


def _fill_an_argument(table: dict[Any, Any], keys: list[Any], x: torch.Tensor) -> Any:
    _fill_and_move(table, keys, x)
    return x


def _parameters(values: Any) -> Callable[[str], list[Any]]:
    return lambda device: [torch.nn.Parameter(torch.tensor(values, device=device)) for _ in range(3)]


@pytest.mark.parametrize("use", [_fill, _fill_and_move, _fill_an_argument])
@pytest.mark.parametrize(
    "make",
    [
        _parameters([1.0, 2.0]),
        _parameters([1.0]),
        lambda _: [Elementwise() for _ in range(3)],
        lambda d: [(p,) for p in _parameters([1.0, 2.0])(d)],
    ],
    ids=["parameters", "of one element", "objects", "in tuples"],
)
def test_keys_are_told_apart_as_a_dict_does(make: Callable[[str], list[Any]], use: Callable[..., Any]) -> None:
    def run(device: str) -> list[Any]:
        keys, found, table = make(device), list[Any](), dict[Any, Any]()

        def step(x: torch.Tensor, *given: dict[Any, Any]) -> Any:
            return use(*(given or (table,)), keys, x)

        compiled: Callable[..., Any] = spmd.compile(step) if device == "jax" else step
        for _ in range(4):
            given = [{key: torch.ones(2, device=device) for key in keys}] if use is _fill_an_argument else []
            result = compiled(torch.ones(2, device=device), *given)
            filled = given[0] if given else table
            found.append(
                [[next(i for i, key in enumerate(keys) if key is k) for k in filled], [v.tolist() for v in (*filled.values(), *result)]]
            )
        return found

    assert run("jax") == run("cpu")

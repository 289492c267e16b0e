"""What a trace leaves in Python is made anew by every call: containers, objects and functions, who is who included."""

import array
import collections
import contextlib
import contextvars
import copy
import dataclasses
import functools
import itertools
import queue
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import spmd
from benchmarks.fuzz_trials import difference, snapshot

ROWS: dict[str, Callable[[Any, torch.Tensor, dict[str, Any]], Any]] = {}


def row(fn: Callable[[Any, torch.Tensor, dict[str, Any]], Any]) -> None:
    ROWS[fn.__name__] = fn


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Key(Box):
    """Equal by value: a dict looks at it while it is filled."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return f"Key({self.value})"


class State:
    def __init__(self) -> None:
        self.n, self.log, self.items = 0, list[Any](), [1]
        self.x: Any = None
        self.y: Any = None
        self.table = {"a": 1, "b": 2, "c": 3}
        self.order = collections.OrderedDict(a=1, b=2)
        self.module = types.ModuleType("of_a_test")
        self.user: Any = collections.UserDict()
        self.pair = ({"n": 0}, 1)
        self.point = Point(1)


@row
def an_argument_kept(s: State, x: torch.Tensor, batch: dict[str, Any]) -> Any:
    s.x = batch
    s.log.append([batch["of"], 1])
    return x * 2


@row
def an_argument_returned(s: State, x: torch.Tensor, batch: dict[str, Any]) -> Any:
    batch["n"] = s.n
    batch["of"] = batch["of"] + [x]
    batch["pair"][0].append(x * 2)
    return batch, batch["pair"]


@row
def state_returned(s: State, x: torch.Tensor, batch: dict[str, Any]) -> Any:
    s.items.append(2)
    s.x, s.y = [s.items, 1], (s.items, 2)
    return s.items


@row
def one_list_under_two_names(s: State, x: torch.Tensor, batch: dict[str, Any]) -> Any:
    s.x = s.y = [x * 2]
    s.log.append(s.x)
    return s.x, s.y


@row
def a_list_in_itself(s: State, x: torch.Tensor, batch: dict[str, Any]) -> Any:
    s.x = [x]
    s.x.append(s.x)
    return x


@row
def objects(s: State, x: torch.Tensor, batch: dict[str, Any]) -> Any:
    s.n += 1
    s.log += [Box(s.n), Slots(s.n), Point(s.n, y=s.n), {s.n, 70}, {s.n: 7}, {i + s.n: 7 for i in range(2)}]
    return Box(s.n), {s.n + i for i in range(2)}, collections.Counter(a=s.n)


@row
def functions(s: State, x: torch.Tensor, batch: dict[str, Any]) -> Any:
    s.n += 1
    number = s.n
    y = x * s.x() if s.x else x
    s.x = lambda: number * 2
    return y


@row
def an_order(s: State, x: torch.Tensor, batch: dict[str, Any]) -> Any:
    s.n += 1
    s.order["c"] = s.n
    key = "abc"[s.n % 3]
    del s.table[key]
    s.table[key] = s.n
    return x


@row
def class_patterns(s: State, x: torch.Tensor, batch: dict[str, Any]) -> Any:
    s.n += 1
    s.point.x += 1
    match s.point:
        case Point(2):
            x = x * 3
        case Point(x=3):
            x = x * 5
        case _:
            pass
    match s.n:
        case int(number):
            return x * number
        case _:
            return x * 100


@row
def a_constant(s: State, x: torch.Tensor, batch: dict[str, Any]) -> Any:
    s.x = torch.ones(2, device=x.device)
    return x


@row
def numbers_in_lists(s: State, x: torch.Tensor, batch: dict[str, Any]) -> Any:
    s.n += 1
    return np.array([s.n, 2]).sum() * 1.0, torch.tensor([s.n, 2], device=x.device), sum([s.n, 3])


@row
def numbers_as_keys(s: State, x: torch.Tensor, batch: dict[str, Any]) -> Any:
    s.n += 1
    s.table.update({s.n % 3: s.n})  # type: ignore[dict-item]
    s.table.setdefault((s.n, "of"), s.n * 2)  # type: ignore[call-overload]
    s.items.insert(s.n % 2, s.n)
    s.log.append(({s.n % 2}, {s.n: s.n * 3}, {i * s.n for i in range(2)}, {s.n + i: i for i in range(2)}, set([s.n]), dict([(s.n, 1)])))
    s.n += 1
    return x * s.n


@row
def objects_as_keys(s: State, x: torch.Tensor, batch: dict[str, Any]) -> Any:
    table: Any = s.table
    table[Key(1)] = table.get(Key(1), 0) + 1
    table.setdefault(Key((2, Key(3))), []).append(1)
    key = Key(4)
    s.log.append((key, {key: x}, {key, Key(5)}, frozenset([key]), Box({frozenset([key, Key(6)]): key}), collections.Counter([key])))
    return collections.defaultdict(list, {(key, 1): [x * table[Key(1)]]}), {Key(7)}


@row
def dicts_of_plain_values(s: State, x: torch.Tensor, batch: dict[str, Any]) -> Any:
    s.n += 1
    s.module.value = s.n  # type: ignore[attr-defined]
    s.user["k"] = s.n
    s.pair[0]["n"] = s.n
    return x


def change(s: State) -> None:
    """What the caller does between two calls to what they left."""
    for held in s.log[-6:]:
        if isinstance(held, (Box, Slots)):
            held.value += 77
        elif isinstance(held, set):
            held.add(50)
    if isinstance(s.x, torch.Tensor):
        s.x.add_(1)


def after(fn: Callable[..., Any], device: str) -> list[Any]:
    s = State()
    step: Any = lambda x, batch: fn(s, x, batch)  # noqa: E731
    step = step if device == "cpu" else spmd.compile(step, max_retraces=50)
    found: list[Any] = []
    for i in range(4):
        x = torch.full((2,), i + 1.0).to(device)
        batch = {"of": [i, torch.ones(2).to(device)], "pair": ([i], 2)}
        found.append(snapshot([step(x, batch), s, x, batch]))
        change(s)
    return found


@pytest.mark.parametrize("name", list(ROWS))
def test_every_call_leaves_what_python_leaves(name: str) -> None:
    for call, (got, want) in enumerate(zip(after(ROWS[name], "jax"), after(ROWS[name], "cpu"), strict=True)):
        assert difference(got, want, f"call {call}") == ""


def test_an_optimizer_that_does_not_step_has_no_state() -> None:
    weight = torch.nn.Parameter(torch.ones(2).to("jax"))
    opt = torch.optim.Adam([weight])

    @spmd.compile
    def step(x: torch.Tensor, steps: bool) -> torch.Tensor:
        if steps:
            opt.zero_grad()
            (weight * x).sum().backward()
            opt.step()
        return x + weight.detach()

    x = torch.ones(2).to("jax")
    step(x, False)
    assert not opt.state
    step(x, True)
    assert opt.state[weight]["step"].item() == 1
    step(x, False)
    assert opt.state[weight]["step"].item() == 1


class Pair(NamedTuple):
    value: torch.Tensor
    count: int


def test_a_tuple_whose_number_is_an_input_leaves_as_the_tuple_that_the_call_found() -> None:
    rows: list[Any] = []
    kept: dict[str, Any] = {}

    @spmd.compile
    def step(x: torch.Tensor) -> Any:
        last = rows[-1]
        kept.update(last=last, twice=(last, last), inner=rows[0][1])
        rows.insert(0, last)
        return last, last.value * last.count

    for i in range(4):
        rows[:] = [(torch.ones(2, device="jax"), (i, 2.5)), Pair(torch.full((2,), 3.0, device="jax"), 10 + i)]
        found, product = step(torch.ones(2, device="jax"))
        assert found is rows[-1] is rows[0] is kept["last"] is kept["twice"][0]
        assert kept["inner"] is rows[1][1] and kept["inner"] == (i, 2.5)
        assert product.tolist() == [3.0 * (10 + i)] * 2


def test_a_tuple_of_hyperparameters_leaves_with_the_numbers_of_the_call() -> None:
    model = torch.nn.Linear(2, 2).to("jax")
    optimizer = torch.optim.Adam(model.parameters())
    log: list[Any] = []

    @spmd.compile
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        log.append(optimizer.param_groups[0]["betas"])

    wanted = [(0.9 - 0.1 * i, 0.99) for i in range(3)]
    for betas in wanted:
        optimizer.param_groups[0]["betas"] = betas
        step(torch.ones(1, 2, device="jax"))
    assert log == wanted and step.num_traces == 1


class Tags(set[int]):
    pass


class Recent(collections.deque[Any]):
    pass


class Groups(collections.defaultdict[str, list[int]]):
    pass


class Row(tuple[Any, ...]):
    pass


class Failed(Exception):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.n = n


class Scaled(torch.nn.Module):
    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(x * 2)


def objects_of(n: int) -> Any:
    made = np.empty(2, dtype=object)
    made[0], made[1] = [n], n
    return made


def queue_of(n: int) -> Any:
    made: queue.Queue[int] = queue.Queue()
    made.put(n)
    return made


def held_lock() -> Any:
    made = threading.Lock()
    made.acquire()
    return made


def clear_doc(made: Any) -> None:
    type(made).__doc__ = None


def referred(n: int) -> Any:
    box = Box(n)
    return box, weakref.ref(box)


# what is made of a counter and a tensor; what is looked at; what the caller writes to it afterwards
KINDS: dict[str, tuple[Callable[[int, torch.Tensor], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "set": (lambda n, x: Tags({n}), sorted, lambda made: made.add(90)),
    "deque": (lambda n, x: Recent([n, x]), lambda made: [float(torch.as_tensor(v).sum()) for v in made], lambda made: made.append(9)),
    "dict": (lambda n, x: Groups(list, a=[n]), dict, lambda made: made["b"].append(1)),
    "tuple": (lambda n, x: Row((n, x)), lambda made: (made[0], made[1].tolist()), lambda made: setattr(made, "tag", 1)),
    "exception": (lambda n, x: Failed(n), lambda made: (made.args, made.n), lambda made: setattr(made, "n", 9)),
    "method in C": (lambda n, x: [n].append, lambda made: list(made.__self__), lambda made: made(9)),
    "read-only dict": (lambda n, x: types.MappingProxyType({"a": n}), dict, lambda made: None),
    "view": (lambda n, x: {"a": n}.values(), list, lambda made: None),
    "array": (lambda n, x: array.array("d", [n]), list, lambda made: made.append(9)),
    "array of objects": (lambda n, x: objects_of(n), lambda made: [list(made[0]), made[1]], lambda made: made[0].append(9)),
    "queue": (lambda n, x: queue_of(n), lambda made: list(made.queue), lambda made: made.put(9)),
    "iterator": (lambda n, x: iter([n, 2]), lambda made: list(copy.copy(made)), next),
    "lock": (lambda n, x: threading.Lock(), lambda made: made.locked(), lambda made: made.acquire(blocking=False)),
    "held lock": (lambda n, x: held_lock(), lambda made: made.locked(), lambda made: made.release()),
    "generator": (
        lambda n, x: np.random.default_rng(3),
        lambda made: made.bit_generator.state["state"]["state"],
        lambda made: made.random(),
    ),
    "slice": (lambda n, x: slice([n], 2), lambda made: list(made.start), lambda made: made.start.append(9)),
    "static method": (lambda n, x: staticmethod([n].append), lambda made: list(made.__func__.__self__), lambda made: made(9)),
    "defaults": (lambda n, x: lambda v, held=[n]: (held.append(v), held)[1], lambda made: list(made.__defaults__[0]), lambda made: made(9)),
    "module": (lambda n, x: Scaled(x), lambda made: made.weight.tolist(), lambda made: made.weight.data.add_(1)),
    "state": (lambda n, x: Scaled(x).state_dict(), lambda made: (made["weight"].tolist(), dict(made._metadata)), lambda made: None),
    "weak reference": (lambda n, x: referred(n), lambda made: made[1]() is made[0], lambda made: None),
}


# the same of what only Python can make
ONCE: dict[str, tuple[Callable[[int, torch.Tensor], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "class": (lambda n, x: type("Kind", (), {"n": 1}), lambda made: made.n, lambda made: setattr(made, "n", 9)),
    "object": (lambda n, x: type("Kind", (), {"held": []})(), lambda made: list(made.held), lambda made: made.held.append(9)),
    "named tuple": (lambda n, x: collections.namedtuple("Kind", "a")(1), lambda made: type(made).__doc__, clear_doc),
    "context variable": (lambda n, x: contextvars.ContextVar("held"), lambda made: made.get(None), lambda made: made.set(9)),
    "thread's own": (lambda n, x: threading.local(), lambda made: dict(vars(made)), lambda made: setattr(made, "n", 9)),
    "cached function": (lambda n, x: functools.lru_cache(lambda v: [v]), lambda made: list(made(1)), lambda made: made(1).append(9)),
    "python's module": (lambda n, x: types.ModuleType("held"), lambda made: getattr(made, "n", 0), lambda made: setattr(made, "n", 9)),
    "stack": (lambda n, x: contextlib.ExitStack(), lambda made: len(made._exit_callbacks), lambda made: made.callback(int)),
    "chain": (lambda n, x: itertools.chain([1, 2]), lambda made: type(made).__name__, next),
    "simple queue": (lambda n, x: queue.SimpleQueue(), lambda made: made.qsize(), lambda made: made.put(9)),
}


def outcomes(kinds: Any, device: str, is_counted: bool = True) -> tuple[list[Any], Any]:
    kept, held = list[list[Any]](), types.SimpleNamespace(n=0)

    def make(x: torch.Tensor) -> torch.Tensor:
        held.n += is_counted
        kept.append([new(held.n, x) for new, _, _ in kinds.values()])
        return x

    step: Any = make if device == "cpu" else spmd.compile(make)
    found: list[Any] = []
    for i in range(4):
        step(torch.full((2,), i + 1.0).to(device))
        found.append([[look(made) for (_, look, _), made in zip(kinds.values(), each, strict=True)] for each in kept])
        for (_, _, write), made in zip(kinds.values(), kept[-1], strict=True):
            write(made)
    return found, step


@pytest.mark.parametrize("is_counted", [True, False])
def test_what_no_list_or_dict_is_every_call_makes_too(is_counted: bool) -> None:
    ours, step = outcomes(KINDS, "jax", is_counted)
    assert ours == outcomes(KINDS, "cpu", is_counted)[0]
    assert is_counted or step.num_traces == 1


def test_what_no_program_can_make_is_made_by_a_trace_of_every_call() -> None:
    ours, step = outcomes(ONCE, "jax")
    assert ours == outcomes(ONCE, "cpu")[0]
    assert step.num_traces == 4
    assert str(step.retraces[-1]) == "every call creates the class Kind anew, which a program cannot do"

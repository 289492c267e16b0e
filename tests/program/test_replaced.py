"""Hidden state that a function reads under a name and replaces there: CPU torch's values, in one program where the build stays."""

import collections
import copy
import dataclasses
import functools
import math
import operator
import types
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mesh
import spmd
from spmd.base._torch import pytree
from tests.oracle import assert_same

Pair = namedtuple("Pair", ["h", "c"])
Step = Callable[["Cell", torch.Tensor], Any]


class Cell:
    """Holds state; `shape` says in what."""

    def __init__(self, device: str, shape: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        self.shape = shape
        self.state = shape(torch.zeros(2, device=device), torch.ones(2, device=device))
        self.other: Any = None


SHAPES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tuple": lambda h, c: (h, c),
    "list": lambda h, c: [h, c],
    "dict": lambda h, c: {0: h, 1: c},
    "named tuple": lambda h, c: Pair(h, c),
    "nested": lambda h, c: ((h,), [{"c": c}, 3]),
    "one tensor twice": lambda h, c: (h, h, c),
}
PARTS: dict[str, Callable[[Any], tuple[torch.Tensor, torch.Tensor]]] = {
    "nested": lambda s: (s[0][0], s[1][0]["c"]),
    "one tensor twice": lambda s: (s[0], s[2]),
}


def parts_of(name: str) -> Callable[[Any], tuple[torch.Tensor, torch.Tensor]]:
    return PARTS.get(name, lambda s: (s[0], s[1]))


def outcomes(
    body: Callable[[Cell, torch.Tensor], Any], name: str, device: str, between: Callable[[Cell, int], Any] | None
) -> tuple[Any, Any]:
    """What five calls return and leave, and the step if it was compiled."""
    cell, found = Cell(device, SHAPES[name]), []
    step = spmd.compile(lambda x: body(cell, x)) if device == "jax" else lambda x: body(cell, x)
    for i in range(5):
        found.append((step(torch.full((2,), float(i), device=device)), cell.state, cell.other))
        if between is not None:
            between(cell, i)
    return found, step


def require_equal(body: Callable[[Cell, torch.Tensor], Any], name: str, between: Callable[[Cell, int], Any] | None = None) -> Any:
    """The step, after it did what CPU torch does."""
    want, _ = outcomes(body, name, "cpu", between)
    got, step = outcomes(body, name, "jax", between)
    assert_same(got, want)
    return step


@pytest.mark.parametrize("name", SHAPES)
def test_state_in_a_container_is_replaced_in_one_program(name: str) -> None:
    def body(cell: Cell, x: torch.Tensor) -> torch.Tensor:
        h, c = parts_of(name)(cell.state)
        c = torch.tanh(c + x)
        h = h * 0.5 + c
        cell.state = cell.shape(h, c)
        return h

    assert require_equal(body, name).num_traces == 1


COUNTED: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "tuple": (lambda h, t: (h, t), lambda s: s),
    "named tuple": (lambda h, t: Pair(h, t), lambda s: (s.h, s.c)),
    "tuple in a tuple": (lambda h, t: ((t, 0.5), h), lambda s: (s[1], s[0][0])),
    "tuple that is never the same": (lambda h, t: (t, 2.0 * t, h), lambda s: (s[2], s[0])),
}


@pytest.mark.parametrize("make", ["object", "module"])
@pytest.mark.parametrize("name", COUNTED)
def test_a_number_that_counts_beside_the_state_is_an_input(name: str, make: str) -> None:
    pack, unpack = COUNTED[name]

    def run(device: str) -> tuple[list[Any], Any]:
        holder: Any = nn.Module() if make == "module" else Cell(device, pack)
        holder.state = pack(torch.zeros(2, device=device), 0)

        def body(x: torch.Tensor) -> torch.Tensor:
            h, t = unpack(holder.state)
            h = h * 0.5 + x * t
            if t >= 3:
                h = h + 1
            holder.state = pack(h, t + 1)
            return h

        step, found = spmd.compile(body) if device == "jax" else body, []
        for i in range(8):
            if i == 6:
                holder.state = pack(torch.ones(2, device=device), 20)
            found.append((step(torch.full((2,), float(i), device=device)), holder.state))
        return found, step

    (want, _), (got, step) = run("cpu"), run("jax")
    assert_same(got, want)
    assert step.num_traces == 3  # the first, one with an input, one for the other branch


def test_a_tuple_with_a_number_that_counts_is_put_back_when_a_trace_fails() -> None:
    cell = Cell("jax", lambda h, c: (h, 0))
    is_failing = False

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        h, t = cell.state
        if is_failing:
            raise KeyError("mine")
        cell.state = (h + x * t, t + 1)
        return h

    for _ in range(3):
        step(torch.ones(2, device="jax"))
    before, is_failing = cell.state, True
    with pytest.raises(KeyError, match="mine"):
        step(torch.ones(2, device="jax"))
    assert cell.state is before and type(before[1]) is int


@pytest.mark.parametrize("name", SHAPES)
def test_a_part_that_moves_on_is_todays(name: str) -> None:
    def body(cell: Cell, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        h, c = parts_of(name)(cell.state)
        before, cell.state = cell.state, cell.shape(c, h + x)
        return c, before

    assert require_equal(body, name).num_traces == 1


def test_what_a_name_held_before_is_returned_and_left_under_another() -> None:
    class Delay:
        def __init__(self, device: str) -> None:
            self.now, self.last = torch.zeros(2, device=device), torch.zeros(2, device=device)

    def run(device: str) -> tuple[list[Any], Any]:
        line, found = Delay(device), []

        def body(x: torch.Tensor) -> torch.Tensor:
            old, line.last = line.last, line.now
            line.now = line.now * 0.5 + x
            return old

        step = spmd.compile(body) if device == "jax" else body
        for i in range(5):
            before = line.last
            found.append((step(torch.full((2,), float(i), device=device)), line.now, line.last))
            assert found[-1][0] is before
        return found, step

    (want, _), (got, step) = run("cpu"), run("jax")
    assert_same(got, want)
    assert step.num_traces <= 2


def test_a_view_of_what_was_replaced_is_todays() -> None:
    def body(cell: Cell, x: torch.Tensor) -> torch.Tensor:
        h, c = cell.state
        cell.state = (h + x, c)
        return h[1:]

    require_equal(body, "tuple")


@pytest.mark.parametrize("name", ["tuple", "list", "dict"])
def test_what_the_caller_puts_there_is_used(name: str) -> None:
    def body(cell: Cell, x: torch.Tensor) -> torch.Tensor:
        h, c = parts_of(name)(cell.state)
        cell.state = cell.shape(h + c * x, c)
        return h

    def between(cell: Cell, i: int) -> None:
        h, c = parts_of(name)(cell.state)
        if i == 1:
            cell.state = cell.shape(h * 2, c + 1)
        if i == 2 and not isinstance(cell.state, tuple):
            cell.state[0] = h + 5
        if i == 3:
            c.mul_(3)

    assert require_equal(body, name, between).num_traces <= 2


def test_two_names_that_come_to_hold_one_tensor_are_another_program() -> None:
    def body(cell: Cell, x: torch.Tensor) -> torch.Tensor:
        h, c = cell.state
        h.add_(x)
        cell.state = (h * 1, c * 2)
        return h + c

    def between(cell: Cell, i: int) -> None:
        if i == 1:
            cell.state = (cell.state[0], cell.state[0])

    assert require_equal(body, "tuple", between).num_traces == 2


def test_an_argument_that_a_name_has_come_to_hold_is_refused_where_one_is_written() -> None:
    cell = Cell("jax", SHAPES["tuple"])

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        h, c = cell.state
        x.add_(1)
        cell.state = (h + x, c + h)
        return h

    step(torch.ones(2, device="jax"))
    x = cell.state[0]
    assert x.tolist() == [2.0, 2.0]
    with pytest.raises(spmd.TraceError, match="a tensor in an attribute or container is also an argument"):
        step(x)
    assert x.tolist() == [2.0, 2.0] and cell.state[0] is x
    step(x.clone())
    assert cell.state[0].tolist() == [5.0, 5.0]


@pytest.mark.parametrize("make", [lambda x: [0, x], lambda x: State(0, x)], ids=["list", "object"])
def test_an_object_that_is_an_argument_too_is_refused_where_one_is_written(make: Callable[[Any], Any]) -> None:
    held = types.SimpleNamespace(a=State(3))

    @spmd.compile
    def step(given: Any) -> torch.Tensor:
        if type(given) is list:
            given[0] = given[0] + 1
        else:
            given.n = given.n + 1
        n = held.a[0] if type(held.a) is list else held.a.n
        held.a = make(n + 1)
        return n * torch.ones(2, device="jax")

    for _ in range(3):
        held.a = make(torch.ones(2, device="jax"))
        step(make(torch.ones(2, device="jax")))
    given = held.a = make(torch.ones(2, device="jax"))
    with pytest.raises(spmd.TraceError, match="in an attribute or container is also an argument"):
        step(given)
    assert held.a is given and (given[0] if type(given) is list else given.n) == 0


def test_another_build_is_another_program() -> None:
    def body(cell: Cell, x: torch.Tensor) -> torch.Tensor:
        h = cell.state[0]
        cell.state = (h + x, *cell.state[1:])
        return h.sum() + len(cell.state)

    def between(cell: Cell, i: int) -> None:
        if i == 2:
            cell.state = (cell.state[0],)
        if i == 3:
            cell.state = (cell.state[0].double(),)

    assert require_equal(body, "tuple", between).num_traces == 3


def test_a_container_that_another_name_holds_too_is_right() -> None:
    def body(cell: Cell, x: torch.Tensor) -> torch.Tensor:
        h = cell.state[0] + cell.other[0] if cell.other is not None else cell.state[0]
        cell.other = cell.state
        cell.state = [h + x, cell.state[1]]
        return h

    require_equal(body, "list")


def test_a_container_that_is_written_before_it_is_replaced_is_right() -> None:
    def body(cell: Cell, x: torch.Tensor) -> torch.Tensor:
        cell.state[0] = cell.state[0] + x
        cell.other = cell.state
        cell.state = [cell.state[1], cell.state[0] * 2]
        return cell.state[0]

    require_equal(body, "list")


class Slotted:
    __slots__ = ("h", "state")

    def __init__(self, device: str) -> None:
        self.h: torch.Tensor = torch.zeros(2, device=device)
        self.state = (torch.ones(2, device=device), 1)


def test_state_in_slots_is_replaced_in_one_program() -> None:
    ours, torchs = Slotted("jax"), Slotted("cpu")

    def step(held: Slotted, x: torch.Tensor) -> torch.Tensor:
        held.h = held.h * 0.5 + x
        held.state = (held.state[0] + held.h, held.state[1] + 1)
        return held.h * held.state[1]

    compiled = spmd.compile(lambda x: step(ours, x))
    for i in range(5):
        x = torch.full((2,), float(i))
        assert_same((compiled(x.to("jax")), ours.h, ours.state), (step(torchs, x), torchs.h, torchs.state))
    assert compiled.num_traces == 2


def test_the_hidden_state_of_an_lstm_goes_on_between_calls() -> None:
    def run(device: str) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        lstm = nn.LSTM(3, 4).to(device)
        optimizer = torch.optim.SGD(lstm.parameters(), lr=0.1)
        kept = {"hidden": (torch.zeros(1, 2, 4, device=device), torch.zeros(1, 2, 4, device=device))}

        def body(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            out, hidden = lstm(x, kept["hidden"])
            kept["hidden"] = tuple(t.detach() for t in hidden)
            loss = out.square().mean()
            loss.backward()
            optimizer.step()
            return loss

        step = spmd.compile(body) if device == "jax" else body
        return [(step(torch.full((5, 2, 3), 0.1 * i, device=device)), kept["hidden"]) for i in range(5)], step

    (want, _), (got, step) = run("cpu"), run("jax")
    assert_same(got, want)
    assert step.num_traces == 1


def test_a_sharded_cache_is_replaced_in_one_program(mesh_4x2: mesh.Mesh) -> None:
    cache = {"kv": [spmd.mark_sharding(torch.zeros(8, 4, device="jax"), mesh_4x2, ("data", "model")), torch.ones(8, device="jax")]}

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        keys, scale = cache["kv"]
        cache["kv"] = [keys * 0.5 + x, scale + 1]
        return (keys * scale[:, None]).sum()

    x = torch.ones(8, 4).to("jax")
    assert [step(x).item() for _ in range(4)] == [0.0, 64.0, 144.0, 224.0]
    assert step.num_traces <= 2


def test_check_takes_state_that_every_call_replaces_for_the_same() -> None:
    state = {"hidden": torch.zeros(2, device="jax"), "pair": (torch.zeros(2, device="jax"), torch.ones(2, device="jax"))}

    @spmd.compile(check=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        first, second = state["pair"]
        state["pair"] = (second + x, first + state["hidden"])
        state["hidden"] = state["hidden"] * 0.5 + x
        return state["hidden"].sum()

    assert [step(torch.ones(2, device="jax")).item() for _ in range(3)] == [2.0, 3.0, 3.5]
    assert step.num_traces == 1


class Count:
    """A plain object."""

    def __init__(self, n: int, inner: Any = None) -> None:
        self.n = n
        self.inner = inner

    def next(self) -> "Count":
        return type(self)(self.n + 1, self.inner)


class OtherCount(Count):
    pass


class SlottedCount:
    __slots__ = ("n",)

    def __init__(self, n: int) -> None:
        self.n = n


@dataclasses.dataclass
class State:
    n: int
    inner: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    n: int
    inner: Any = 0.5


@dataclasses.dataclass(slots=True)
class SlottedState:
    n: int


class OwnList(list[Any]):
    pass


class OwnDict(dict[str, Any]):
    pass


def copied(s: Any, copier: Callable[[Any], Any]) -> None:
    made = copier(s.a)
    made.n += 1
    s.a = made


LEFT: Any = None


def replaced_global(s: Any, x: torch.Tensor) -> torch.Tensor:
    global LEFT
    s.a, LEFT = LEFT, LEFT.next()
    return x * s.a.n


# what a holder has in `a` at first; what a call returns and leaves
OBJECTS: dict[str, tuple[Callable[[str], Any], Callable[[Any, torch.Tensor], Any]]] = {
    "object": (lambda d: Count(0), lambda s, x: (x * s.a.n, setattr(s, "a", Count(s.a.n + 1)))),
    "object by its method": (lambda d: Count(0), lambda s, x: (x * s.a.n, setattr(s, "a", s.a.next()), s.a)),
    "slots": (lambda d: SlottedCount(0), lambda s, x: (x * s.a.n, setattr(s, "a", SlottedCount(s.a.n + 1)))),
    "dataclass": (lambda d: State(0), lambda s, x: (x * s.a.n, setattr(s, "a", dataclasses.replace(s.a, n=s.a.n + 1)))),
    "frozen": (lambda d: Frozen(0), lambda s, x: (x * s.a.n + s.a.inner, setattr(s, "a", Frozen(s.a.n + 1)), s.a)),
    "dataclass with slots": (lambda d: SlottedState(0), lambda s, x: (x * s.a.n, setattr(s, "a", dataclasses.replace(s.a, n=s.a.n + 1)))),
    "namespace": (
        lambda d: types.SimpleNamespace(n=0, m=2),
        lambda s, x: (x * s.a.n + s.a.m, setattr(s, "a", types.SimpleNamespace(**{**vars(s.a), "n": s.a.n + 1}))),
    ),
    "dict": (lambda d: {"i": 0, "j": 3}, lambda s, x: (x * s.a["i"], setattr(s, "a", {**s.a, "i": s.a["i"] + 1}))),
    "list": (lambda d: [0, 1, 2], lambda s, x: (x * sum(s.a), setattr(s, "a", [*s.a, s.a[-1] + 1][-3:]))),
    "list by a function": (lambda d: [1, 2], lambda s, x: (x * math.prod(s.a) + max(s.a), setattr(s, "a", [n + 1 for n in s.a]))),
    "deque of tuples": (
        lambda d: collections.deque([(0, 1), (2, 3)]),
        lambda s, x: (x * s.a[0][0] + s.a[1][1], setattr(s, "a", collections.deque([(i + 1, j) for i, j in s.a]))),
    ),
    "objects in a list": (lambda d: [State(0), State(4)], lambda s, x: (x * s.a[0].n, setattr(s, "a", [State(o.n + 1) for o in s.a]))),
    "item of a list": (lambda d: [State(0), State(4)], lambda s, x: (x * s.a[0].n, s.a.__setitem__(0, State(s.a[0].n + 1)))),
    "objects that move": (lambda d: [State(0), State(4)], lambda s, x: (x * s.a[0].n, setattr(s, "a", [s.a[1], State(s.a[0].n + 1)]))),
    "nested": (
        lambda d: {"x": [0, {"y": (Frozen(0, Count(2)), 1)}]},
        lambda s, x: (
            x * s.a["x"][0] + s.a["x"][1]["y"][0].inner.n,
            setattr(s, "a", {"x": [s.a["x"][0] + 1, {"y": (Frozen(1, Count(s.a["x"][1]["y"][0].inner.n + 1)), 1)}]}),
        ),
    ),
    "inner object": (lambda d: Count(3, Count(1)), lambda s, x: (x * s.a.n + s.a.inner.n, setattr(s.a, "inner", s.a.inner.next()))),
    "the one before too": (lambda d: Count(0), lambda s, x: (x * s.a.n + s.b.n, setattr(s, "b", s.a), setattr(s, "a", s.a.next()), s.b)),
    "appended": (lambda d: Count(0), lambda s, x: (x * s.a.n, s.log.append(s.a), setattr(s, "a", s.a.next()))),
    "method of it": (lambda d: Count(0), lambda s, x: (x * s.a.n, setattr(s, "log", s.a.next), setattr(s, "a", s.a.next()))),
    "tensor": (
        lambda d: State(0, torch.zeros(2, device=d)),
        lambda s, x: (s.a.inner, setattr(s, "a", State(s.a.n + 1, s.a.inner + x * s.a.n))),
    ),
    "tensor in place": (
        lambda d: State(0, torch.zeros(2, device=d)),
        lambda s, x: (s.a.inner.add_(x * s.a.n), setattr(s, "a", State(s.a.n + 1, s.a.inner)), s.a),
    ),
    "variable": (lambda d: Count(0), replaced_global),
    "own list": (lambda d: OwnList([0, 1]), lambda s, x: (x * s.a[0], setattr(s, "a", OwnList([s.a[0] + 1, 1])))),
    "own dict": (lambda d: OwnDict(n=0), lambda s, x: (x * s.a["n"], setattr(s, "a", OwnDict(n=s.a["n"] + 1)))),
    "ordered dict": (
        lambda d: collections.OrderedDict(n=0, m=1),
        lambda s, x: (x * s.a["n"] + s.a["m"], setattr(s, "a", collections.OrderedDict(s.a, n=s.a["n"] + 1))),
    ),
    "dict with a list": (
        lambda d: {"i": 0, "l": [1, 2]},
        lambda s, x: (x * s.a["i"] + s.a["l"][0], setattr(s, "a", dict(s.a, i=s.a["i"] + 1))),
    ),
    "named tuple": (lambda d: Pair(Frozen(0), 1), lambda s, x: (x * s.a.h.n, setattr(s, "a", s.a._replace(h=Frozen(s.a.h.n + 1))))),
    "copy": (lambda d: State(0), lambda s, x: (copied(s, copy.copy), x * s.a.n)),
    "deep copy": (lambda d: State(0, [3]), lambda s, x: (copied(s, copy.deepcopy), x * s.a.n + s.a.inner[0])),
    "by asdict": (lambda d: State(0), lambda s, x: (copied(s, lambda o: State(**dataclasses.asdict(o))), x * s.a.n)),
    "by astuple": (lambda d: State(0), lambda s, x: (copied(s, lambda o: State(*dataclasses.astuple(o))), x * s.a.n)),
}


def described(value: Any, seen: dict[int, int]) -> Any:
    """A value with all that is in it, and which of its objects are the same."""
    if isinstance(value, torch.Tensor):
        return seen.setdefault(id(value), len(seen)), value.tolist()
    if value is None or type(value) in (int, float, bool, str):
        return type(value), value
    if id(value) in seen:
        return seen[id(value)]
    number, kind = seen.setdefault(id(value), len(seen)), type(value).__name__
    if isinstance(value, types.MethodType):
        return kind, described(value.__self__, seen)
    if isinstance(value, (list, tuple, collections.deque)):
        return kind, number, [described(part, seen) for part in value]
    attributes = value if isinstance(value, dict) else {**getattr(value, "__dict__", {}), **{n: getattr(value, n) for n in names_of(value)}}
    return kind, number, [(name, described(part, seen)) for name, part in attributes.items()]


def names_of(value: Any) -> Any:
    return [name for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]


def calls_of(body: Any, make: Any, device: str, between: Any, num: int) -> tuple[list[Any], Any]:
    """What `num` calls return and leave, each with all objects that the caller has seen, and the step if it was compiled."""
    global LEFT
    s = types.SimpleNamespace(a=make(device), b=Count(7), log=[])
    LEFT, kept, found = Count(0), list[Any](), list[Any]()
    step = spmd.compile(lambda x: body(s, x), max_retraces=50) if device == "jax" else lambda x: body(s, x)
    for i in range(num):
        kept += [s.a, step(torch.full((2,), i + 1.0, device=device))]
        found.append(described([kept, s, LEFT], {}))
        if between is not None:
            between(s, i)
    return found, step


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_every_call_replaces_is_one_program_from_the_second_on(name: str) -> None:
    make, body = OBJECTS[name]
    want, _ = calls_of(body, make, "cpu", None, 6)
    got, step = calls_of(body, make, "jax", None, 6)
    assert got == want
    assert step.num_traces == 2


def ring(s: Any, x: torch.Tensor) -> torch.Tensor:
    s.a[s.b.n % 3] = x * 2
    s.b.n += 1
    return sum(s.a) if isinstance(s.a, list) else sum(s.a.values())


# what a holder has in `a` at first; what a call does; what the caller does between calls; the number of traces of 12 calls
TENSORS: dict[str, tuple[Any, Any, Any, int]] = {
    "a ring in a list": (lambda d: [torch.zeros(2, device=d) for _ in range(3)], ring, None, 6),
    "a ring in a dict": (lambda d: {i: torch.zeros(2, device=d) for i in range(3)}, ring, None, 6),
    "replaced by the caller": (
        lambda d: torch.zeros(2, device=d),
        lambda s, x: x + s.a,
        lambda s, i: setattr(s, "a", torch.full((2,), 3.0 * i, device=s.a.device)),
        2,
    ),
    "an item replaced by the caller": (
        lambda d: {"mask": torch.zeros(2, device=d)},
        lambda s, x: x + s.a["mask"],
        lambda s, i: s.a.update(mask=torch.full((2,), 3.0 * i, device=s.a["mask"].device)),
        2,
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_is_another_one_in_later_calls_is_an_input(name: str) -> None:
    make, body, between, num_traces = TENSORS[name]
    want, _ = calls_of(body, make, "cpu", between, 12)
    got, step = calls_of(body, make, "jax", between, 12)
    assert got == want
    assert step.num_traces == num_traces


def in_turn(*others: Callable[[Any], torch.Tensor]) -> Callable[[Any, int], None]:
    """Between two calls: the caller puts in `a` a new tensor, and what each of `others` gives, in turn."""

    def between(s: Any, i: int) -> None:
        choices = (lambda s: torch.arange(2.0, device=s.c.device) + i, *others)
        s.a = choices[i % len(choices)](s)

    return between


ALONE: dict[str, tuple[Any, Any]] = {
    "compared": (lambda s, x: x * (2.0 if s.a is s.c else s.a.sum()), in_turn(lambda s: s.c)),
    "compared by a function": (lambda s, x: x * (2.0 if operator.is_(s.a, s.c) else s.a.sum()), in_turn(lambda s: s.c)),
    "its id": (lambda s, x: x * (2.0 if id(s.a) == id(s.c) else s.a.sum()), in_turn(lambda s: s.c)),
    "its hash": (lambda s, x: x * (2.0 if hash(s.a) == hash(s.c) else s.a.sum()), in_turn(lambda s: s.c)),
    "a key": (lambda s, x: x * {s.c: 2.0}.get(s.a, 3.0) + s.a, in_turn(lambda s: s.c)),
    "in a set": (lambda s, x: x * len({s.a, s.c}) + s.a, in_turn(lambda s: s.c)),
    "in a set by its class": (lambda s, x: x * len(set([s.a, s.c])) + s.a, in_turn(lambda s: s.c)),
    "a view": (lambda s, x: x * s.a, in_turn(lambda s: torch.arange(8.0, device=s.c.device)[2:4])),
    "what the step writes": (lambda s, x: (s.c.add_(x), s.a * 2)[1], in_turn(lambda s: s.c)),
    "its memory under another name": (lambda s, x: (s.c.add_(x), s.a * 2)[1], in_turn(lambda s: s.c.detach())),
    "written, and read elsewhere": (lambda s, x: (s.a.add_(x), s.c * 2)[1], in_turn(lambda s: s.c, lambda s: s.c.detach())),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_tensor_that_the_function_also_knows_otherwise_is_todays(name: str) -> None:
    def run(device: str) -> list[Any]:
        body, between = ALONE[name]
        s = types.SimpleNamespace(a=torch.zeros(2, device=device), c=torch.ones(2, device=device))
        step = spmd.compile(lambda x: body(s, x), max_retraces=50) if device == "jax" else lambda x: body(s, x)
        found: list[Any] = []
        for i in range(9):
            found += [step(torch.full((2,), i + 1.0, device=device)).tolist(), s.a.tolist(), s.c.tolist(), s.a is s.c]
            between(s, i)
        return found

    assert run("jax") == run("cpu")


def put(i: int, name: str, value: Callable[[Any], Any]) -> Callable[[Any, int], None]:
    """Between two calls: after call `i`, the caller sets an attribute."""
    return lambda s, now: setattr(s, name, value(s)) if now == i else None


def replacing(result: Callable[[Any, torch.Tensor], Any]) -> Callable[[Any, torch.Tensor], Any]:
    """A step that returns `result`, and replaces the object in `a`."""

    def body(s: Any, x: torch.Tensor) -> Any:
        found = result(s, x)
        s.a = type(s.a)(s.a.n + 1)
        return found

    return body


def every_second(s: Any, x: torch.Tensor) -> Any:
    n = s.a.n
    if n % 4 < 2:
        s.a = State(n + 1)
    else:
        s.a.n = n + 1
    return x * n


def alternating(s: Any, x: torch.Tensor) -> Any:
    n = s.a.n
    s.a = (Count if type(s.a) is OtherCount else OtherCount)(n + 1)
    return x * n


def written_and_replaced(s: Any, x: torch.Tensor) -> Any:
    s.a.n += 1
    s.a = State(s.a.n + 1)
    return x * s.a.n


def refers_to(make: Callable[[Any], Any]) -> Callable[[Any, int], None]:
    """Between two calls: `log` refers to `b`, and from the third call on `b` is also in `a`."""

    def between(s: Any, i: int) -> None:
        if i == 2:
            s.b = s.a
        s.log = make(s.b)

    return between


def cut(s: Any, x: torch.Tensor) -> Any:
    s.log.append(len(s.log) if not s.log else s.log[-1] + 1)
    s.log = s.log[-2:]
    return x * sum(s.log)


# the step; what the caller does between two calls; the largest number of traces of eight calls
FOUND: dict[str, tuple[Any, Any, int]] = {
    "is it the other": (replacing(lambda s, x: x * (2 if s.a is s.b else 1) + s.a.n), put(3, "b", lambda s: s.a), 8),
    "one object under two names": (replacing(lambda s, x: x * s.a.n + s.b.n), put(3, "b", lambda s: s.a), 5),
    "written under another name": (
        replacing(lambda s, x: (setattr(s.b, "n", s.b.n + 9), x * s.a.n + s.b.n)[1]),
        lambda s, i: setattr(s, "a", s.b) if i in (3, 5) else setattr(s, "b", State(i)) if i == 4 else None,
        7,
    ),
    "equal objects": (replacing(lambda s, x: x * (2 if s.a == s.b else 1) + s.a.n), put(3, "b", lambda s: State(s.a.n)), 6),
    "its id": (replacing(lambda s, x: x * (id(s.a) == id(s.b)) + s.a.n), put(3, "b", lambda s: s.a), 8),
    "a member of a list": (replacing(lambda s, x: x * (s.a in s.log) + s.a.n), lambda s, i: s.log.append(s.a) if i == 3 else None, 8),
    "inside a set": (replacing(lambda s, x: x * s.a.n + sum(o.n for o in s.log)), put(1, "log", lambda s: {s.a}), 8),
    "behind a weak reference": (replacing(lambda s, x: x * s.a.n + (s.log().n if s.log else 0)), refers_to(weakref.ref), 8),
    "inside a partial": (
        replacing(lambda s, x: x * s.a.n + (s.log() if s.log else 0)),
        refers_to(lambda o: functools.partial(lambda o: o.n, o)),
        8,
    ),
    "another class once": (replacing(lambda s, x: x * s.a.n), put(3, "a", lambda s: Count(20)), 4),
    "replaced by the caller": (lambda s, x: x * s.a.n, lambda s, i: setattr(s, "a", State(i + 1)), 2),
    "changed by the caller": (replacing(lambda s, x: x * s.a.n), lambda s, i: setattr(s.a, "n", 40 + i), 2),
    "another class in every call": (alternating, None, 5),
    "replaced in some calls": (every_second, None, 5),
    "written and replaced": (written_and_replaced, None, 2),
    "written under two names": (
        replacing(lambda s, x: (setattr(s.a, "n", s.a.n + 9), x * s.a.n + s.b.n)[1]),
        lambda s, i: setattr(s, "a", s.b) if i in (3, 5) else setattr(s, "b", s.a) if i == 4 else None,
        7,
    ),
    "its inner object too": (
        replacing(lambda s, x: (setattr(s.a, "inner", State(s.a.n if s.a.inner is None else s.a.inner.n + 1)), x * s.a.inner.n)),
        lambda s, i: setattr(s.a, "inner", s.b),
        4,
    ),
    "appended and cut": (cut, None, 4),
}


@pytest.mark.parametrize("name", FOUND)
def test_which_object_a_call_finds_is_torchs(name: str) -> None:
    body, between, most = FOUND[name]

    def make(device: str) -> Any:
        return Count(0) if name in ("another class in every call", "inside a set") else State(0)

    want, _ = calls_of(body, make, "cpu", between, 8)
    got, step = calls_of(body, make, "jax", between, 8)
    assert got == want
    assert step.num_traces <= most


def filled(s: Any, x: torch.Tensor) -> None:
    """As torchmetrics gathers batches: the list is emptied and filled, and a new one with the same items takes its place."""
    before = [t.clone() for t in s.items]
    s.items.clear()
    s.items.append(x * 2)
    s.items = before + s.items


def filled_dict(s: Any, x: torch.Tensor) -> None:
    s.table["x"] = x * 2
    s.table = dict(s.table)


def handed_on(s: Any, x: torch.Tensor) -> None:
    s.past.append(s.items)
    s.items = [*s.items]
    if len(s.past) > 1:
        s.items.append(x)


@pytest.mark.parametrize("body", [filled, filled_dict, handed_on], ids=lambda body: body.__name__)
def test_a_list_or_dict_that_takes_the_place_of_an_equal_one_is_another_object(body: Any) -> None:
    found: list[Any] = []
    for device, wrap in (("cpu", lambda fn: fn), ("jax", spmd.compile)):
        s = types.SimpleNamespace(items=[], table={}, past=[])
        step = wrap(lambda x, s=s: body(s, x))
        for i in range(4):
            before = s.items, s.table
            step(torch.full((2,), i + 1.0).to(device))
            parts = (s.items, s.table, *before, s.past)
            values = pytree.tree_map(lambda t: t.tolist(), parts)
            found.append((values, s.items is before[0], s.table is before[1]))
    assert found[4:] == found[:4]

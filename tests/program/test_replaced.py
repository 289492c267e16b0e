"""Hidden state that a function reads under a name and replaces there: CPU torch's values, in one program where the build stays."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mesh
import spmd
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

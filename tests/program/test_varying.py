"""Python numbers that change from call to call are inputs of a program; branches on them choose among programs."""

import bisect
import collections
import contextlib
import datetime
import functools
import heapq
import itertools
import math
import operator
import pickle
import random
import secrets
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import spmd


def warm_up(state: Any, x: torch.Tensor) -> torch.Tensor:
    state.step += 1
    beta = min(1.0, state.step / 10) * 0.5 * (1 + math.cos(state.step / 3))
    y = x * beta + state.step
    if state.step % 3 == 0:
        y = y + 1
    return torch.lerp(x, y, beta)


def test_a_warm_up_has_one_program_for_each_branch() -> None:
    ours, torchs = types.SimpleNamespace(step=0), types.SimpleNamespace(step=0)
    step = spmd.compile(lambda x: warm_up(ours, x))
    for _ in range(20):
        torch.testing.assert_close(step(torch.ones(2).to("jax")).cpu(), warm_up(torchs, torch.ones(2)))
        assert ours.step == torchs.step
    assert step.num_traces == 3


def test_numbers_among_the_arguments_are_inputs() -> None:
    def scaled(x: torch.Tensor, lr: float, i: int = 0) -> tuple[torch.Tensor, float]:
        return (x * lr + i if i % 4 else x * lr), lr * 2

    step = spmd.compile(scaled)
    for i in range(9):
        (ours, number), (torchs, expected) = step(torch.ones(2).to("jax"), 0.1 * i, i=i), scaled(torch.ones(2), 0.1 * i, i)
        torch.testing.assert_close(ours.cpu(), torchs)
        assert number == expected and type(number) is float
    assert step.num_traces <= 3


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor, by: float) -> torch.Tensor:
        return x * by


class Schedule:
    def __init__(self) -> None:
        self.best: float | None = None

    def __call__(self, step: int, *, base: float = 0.5) -> float:
        if self.best is None or step > self.best:
            self.best = step
        return base * math.cos(step)


def test_modules_and_objects_that_are_called_take_numbers() -> None:
    module, schedule = Scaled(), Schedule()

    @spmd.compile
    def step(x: torch.Tensor, i: int) -> torch.Tensor:
        by = schedule(i) + functools.partial(schedule, base=2.0)(i)
        return module(x, by) + module(x, by=i) + torch.func.functional_call(module, {}, (x, by))

    for i in range(1, 6):
        by = 2.5 * math.cos(i)
        torch.testing.assert_close(step(torch.ones(2).to("jax"), i).cpu(), torch.full((2,), 2 * by + i))
        assert schedule.best == i
    assert step.num_traces <= 3


Point = collections.namedtuple("Point", ["x", "y"])
TUPLES: dict[str, tuple[Callable[[float], Any], Callable[[Any], float]]] = {
    "tuple": (lambda v: ("name", v), lambda held: held[1]),
    "named tuple": (lambda v: Point(1, v), lambda held: held.y),
    "tuple in a tuple": (lambda v: (1, (v, 2.0)), lambda held: held[1][0]),
    "two numbers": (lambda v: (v, v + 0.5), lambda held: held[0] * held[1]),
}


@pytest.mark.parametrize("where", ["attribute", "item", "list item", "slot", "argument"])
@pytest.mark.parametrize("name", TUPLES)
def test_numbers_in_tuples_are_inputs(name: str, where: str) -> None:
    pack, unpack = TUPLES[name]
    state, slotted = types.SimpleNamespace(held=None, table={}, items=[None]), Slotted()

    def read(held: Any) -> Any:
        places = {"attribute": lambda: state.held, "item": lambda: state.table["held"], "list item": lambda: state.items[0]}
        return {**places, "slot": lambda: slotted.held, "argument": lambda: held}[where]()

    def scaled(x: torch.Tensor, held: Any) -> torch.Tensor:
        value = unpack(read(held))
        return x * value + (1 if value > 20 else 0)

    step = spmd.compile(scaled)
    for value in (1, 2, 3, 5, 30, 4, 40):
        state.held = state.table["held"] = state.items[0] = slotted.held = held = pack(value)
        given = held if where == "argument" else None
        torch.testing.assert_close(step(torch.ones(2).to("jax"), given).cpu(), scaled(torch.ones(2), given))
        assert state.held is held and state.table["held"] is held and state.items[0] is held and slotted.held is held
    assert step.num_traces == 3


def test_a_named_tuple_whose_numbers_are_replaced_has_one_program() -> None:
    ours, torchs = types.SimpleNamespace(held=Point(0, 1.0)), types.SimpleNamespace(held=Point(0, 1.0))

    def counted(state: Any, x: torch.Tensor) -> torch.Tensor:
        state.held = state.held._replace(x=state.held.x + 1)
        state.held = Point._make([state.held.x, state.held.y * 0.5])
        return x * state.held.y + state.held.x

    step = spmd.compile(lambda x: counted(ours, x))
    for _ in range(4):
        torch.testing.assert_close(step(torch.ones(2).to("jax")).cpu(), counted(torchs, torch.ones(2)))
        assert ours.held == torchs.held and type(ours.held) is Point
    assert step.num_traces == 2


class Slotted:
    __slots__ = ("held",)


def queue(device: str) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    keys, state = torch.zeros(8, 2, device=device), types.SimpleNamespace(pointer=0)

    def push(k: torch.Tensor) -> torch.Tensor:
        first = keys[state.pointer].sum()
        keys[state.pointer : state.pointer + len(k)] = k
        state.pointer = (state.pointer + len(k)) % len(keys)
        return keys.sum() + first

    return keys, push


def test_a_queue_pointer_is_an_input() -> None:
    (host, push), (device, compiled) = queue("cpu"), queue("jax")
    step = spmd.compile(compiled)
    for i in range(10):
        k = torch.full((2, 2), float(i + 1))
        assert step(k.to("jax")).item() == push(k).item()
    assert torch.equal(device.cpu(), host)
    assert step.num_traces == 2


@pytest.mark.parametrize("make", [np.array, tuple])
def test_a_schedule_of_numbers_read_at_a_counter_has_one_program(make: Callable[[list[float]], Any]) -> None:
    rates, count = make([0.1 * 0.9**i for i in range(8)]), [0]

    def average(mean: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        at = count[0]
        count[0] += 1
        return mean.mul_(rates[at]).add_((1 - rates[at]) * x) * rates[-1 - at]

    step, mean, expected = spmd.compile(average), torch.ones(3, device="jax"), torch.ones(3)
    for i in range(8):
        x = torch.full((3,), i + 1.0)
        found = step(mean, x.to("jax"))
        count[0] -= 1
        torch.testing.assert_close(found.cpu(), average(expected, x))
        if i == 5 and isinstance(rates, np.ndarray):
            rates[6] = 0.5
    assert step.num_traces == (3 if isinstance(rates, np.ndarray) else 2)
    with pytest.raises(IndexError, match="out of (bounds|range)"):
        step(mean, torch.ones(3, device="jax"))


HOST_ITEMS: dict[str, tuple[Callable[[torch.Tensor, int], Any], int]] = {  # what is read of a CPU tensor, and for how many traces
    "item": (lambda t, i: t[i].item() + float(t[-1 - i]) + int(t[i] * 0 + 1) + t.view(2, 3)[i % 2, 0].item(), 5),
    "items alone": (lambda t, i: t[i].item() + float(t[-1 - i]) + t.view(2, 3)[1, i // 2].item() + t.double().numpy()[i].item(), 2),
    "in a branch": (lambda t, i: 2 if t[i] > 0.3 else 3, 5),
    "as a tensor": (lambda t, i: t[i] * 2 + t[i].tolist() + torch.stack([t[i], t[0]]).sum().item(), 5),
    "of an array": (lambda t, i: (2 if isinstance(t.numpy()[i], np.floating) else 3) + t.numpy()[i].round(1), 2),
}


@pytest.mark.parametrize("name", HOST_ITEMS)
def test_an_item_of_a_cpu_tensor_at_a_counter_is_a_number_that_varies(name: str) -> None:
    (read, num_traces), table, x = HOST_ITEMS[name], torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]), torch.arange(3.0)
    step = spmd.compile(lambda x, i: x * read(table, i))
    for i in range(5):
        torch.testing.assert_close(step(x.to("jax"), i).cpu(), x * read(table, i))
    assert step.num_traces <= num_traces


def smoothed(rate: float) -> Any:
    mean = 0.0
    while True:
        mean += rate * ((yield mean) - mean)


def sent(state: Any, x: torch.Tensor) -> torch.Tensor:
    state.n += 1
    means = smoothed(0.5)
    next(means)
    return x * means.send(state.n) + means.send(2 * state.n)


def test_a_number_that_is_sent_to_a_generator_stays_an_input() -> None:
    ours, torchs = types.SimpleNamespace(n=0), types.SimpleNamespace(n=0)
    step = spmd.compile(lambda x: sent(ours, x))
    for _ in range(5):
        torch.testing.assert_close(step(torch.ones(2).to("jax")).cpu(), sent(torchs, torch.ones(2)))
    assert step.num_traces == 2


def first_is_empty(log: Any, x: torch.Tensor) -> Any:
    if not log:
        x = x + 1
    log.append(len(log))
    return x * len(log)


def of_the_last(log: Any, x: torch.Tensor) -> Any:
    log.append((log[-1] if len(log) > 0 else 0) + 1)
    return x * log[-1]


def until_it_is_full(log: Any, x: torch.Tensor) -> Any:
    log += [x.shape[0], 2]
    size = len(log)
    if size > 8:
        log.clear()
    return x / size


GROWING: dict[str, tuple[Callable[[Any, torch.Tensor], Any], int]] = {  # what a call does with a list, and for how many traces
    "length": (lambda log, x: (x * len(log), log.append(len(log) * 2), x + len(log)), 2),
    "if it is empty": (first_is_empty, 2),
    "last item": (of_the_last, 3),
    "until it is full": (until_it_is_full, 3),
    "all items": (lambda log, x: (log.append(2), x * sum(log)), 6),
}


@pytest.mark.parametrize("kind", [list, collections.deque])
@pytest.mark.parametrize("name", GROWING)
def test_the_length_of_a_list_that_grows_is_a_number_that_varies(name: str, kind: Any) -> None:
    body, num_traces = GROWING[name]
    ours, torchs = kind(), kind()
    step = spmd.compile(lambda x: body(ours, x))
    for i in range(6):
        x = torch.full((2,), i + 1.0)
        got, want = step(x.to("jax")), body(torchs, x)
        for a, b in zip(got if type(got) is tuple else [got], want if type(want) is tuple else [want], strict=True):
            torch.testing.assert_close(a.cpu() if isinstance(a, torch.Tensor) else a, b)
        assert ours == torchs and all(type(a) is int for a in ours)
    if kind is list or name != "until it is full":  # `+=` reads a deque
        assert step.num_traces == num_traces


def kept_short(log: Any, x: torch.Tensor) -> Any:
    log.append(x.sum().item())
    if len(log) > 4:
        log.pop(0)
    return x + sum(log[-3:])


WINDOWS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], int]] = {  # of a list that grows, and for how many traces
    "after": (lambda log, x: (log.append(x.sum().item()), x + sum(log[-3:]) / 3)[1], 4),
    "before": (lambda log, x: (x + sum(log[-3:]), log.append(x.sum().item()))[0], 5),
    "without the last": (lambda log, x: (log.append(x.sum().item()), x + log[-1] - sum(log[-3:-1]))[1], 4),
    "tensors": (lambda log, x: (log.append(x.sum()), torch.stack(log[-2:]).mean())[1], 3),
    "first items": (lambda log, x: (log.append(x.sum().item()), x + sum(log[:2]))[1], 3),
    "of a list that is kept short": (kept_short, 6),
    "from both ends": (lambda log, x: (log.append(x.sum().item()), x + sum(log[:1]) + sum(log[-1:]))[1], 2),
    "all but some": (lambda log, x: (log.append(x.sum().item()), x + sum(log[1:]) + sum(log[:-1]))[1], 10),
}


@pytest.mark.filterwarnings("ignore:step was traced again")
@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_of_a_list_that_grows_reads_its_items_alone(name: str) -> None:
    body, num_traces = WINDOWS[name]
    ours, torchs = [], []

    def step(x: torch.Tensor) -> Any:
        return body(ours, x)

    compiled = spmd.compile(step)
    for i in range(10):
        x = torch.full((2,), i + 1.0)
        torch.testing.assert_close(compiled(x.to("jax")).cpu(), body(torchs, x))
        assert [float(a) for a in ours] == [float(a) for a in torchs]
    assert compiled.num_traces == num_traces


def test_an_item_that_varied_as_the_last_is_another_one_when_the_list_has_grown() -> None:
    held, x = [1.0], torch.zeros(1, device="jax")
    step = spmd.compile(lambda x, is_first: x + (held[0] if is_first else held[-1]))
    found = [step(x, False).item()]
    held[0] = 2.0
    found += [step(x, False).item(), step(x, True).item()]
    held.append(5.0)
    found += [step(x, True).item(), step(x, False).item()]
    assert found == [1.0, 2.0, 2.0, 2.0, 5.0]


def by_milestones(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6])


def one_after_the_other(optimizer: Any) -> Any:
    first = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 3)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)], [4])


MILESTONES, TABLE, SET = [3, 6], {3: 0.5, 6: 0.25}, {3, 6}
ASKED = {  # of few answers, not of the number
    "list": lambda x, i: x * 2 if i in MILESTONES else x * i,
    "set": lambda x, i: x * 2 if i not in SET else x * i,
    "dict": lambda x, i: x * TABLE[i] if i in TABLE else x * i,
    "keys": lambda x, i: x * 2 if i in TABLE else x * i,
    "get": lambda x, i: x * TABLE.get(i, 1.0) + i,
    "range": lambda x, i: x * 2 if i in range(3, 100, 3) else x * i,
    "floats and texts": lambda x, i: x * 2 if i / 2 in (1.5, "a", None) else x * i,
    "by its method": lambda x, i: x * 2 if SET.__contains__(i) and MILESTONES.__contains__(i) else x * i,
    "count, index": lambda x, i: x * (MILESTONES.count(i) + range(9).index(i)) if i not in SET else x * (3, 6).index(i),
    "bisect": lambda x, i: x * 0.5 ** bisect.bisect(MILESTONES, i),
    "bisect, an item": lambda x, i: x * ("a", "bb", "ccc")[bisect.bisect_left(MILESTONES, i, lo=1)].count("c") + i,
}


@pytest.mark.parametrize("name", list(ASKED))
def test_a_number_asked_for_in_a_container_has_a_program_for_each_answer(name: str) -> None:
    fn = ASKED[name]
    step, x = spmd.compile(fn, max_retraces=20), torch.ones(2)
    assert [step(x.to("jax"), i).tolist() for i in range(9)] == [fn(x, i).tolist() for i in range(9)]
    assert step.num_traces <= 5


def test_a_container_that_changes_is_asked_anew() -> None:
    asked = {3}
    step = spmd.compile(lambda x, i: x * 2 if i in asked else x * i)
    x = torch.ones(1, device="jax")
    found = [step(x, i).item() for i in (1, 2, 3, 4)]
    asked.add(4)
    assert [*found, step(x, 4).item()] == [1, 2, 2, 4, 2]


@pytest.mark.parametrize("make", [by_milestones, one_after_the_other])
def test_a_scheduler_with_milestones_that_steps_inside_has_a_program_for_each_stretch(make: Callable[[Any], Any]) -> None:
    rates = []
    for device in ("cpu", "jax"):
        weight = torch.ones(2, device=device, requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.1)
        schedule = make(optimizer)

        def step(optimizer: Any = optimizer, schedule: Any = schedule, weight: torch.Tensor = weight) -> None:
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
            schedule.step()

        run = spmd.compile(step, max_retraces=20) if device == "jax" else step
        rates.append([(run(), optimizer.param_groups[0]["lr"], weight.tolist()) for _ in range(10)])
    assert [rate for _, rate, _ in rates[0]] == pytest.approx([rate for _, rate, _ in rates[1]], rel=1e-12)
    assert [w for _, _, w in rates[0]] == [pytest.approx(w) for _, _, w in rates[1]]
    assert run.num_traces <= 7


def test_a_write_to_what_was_read_at_a_varying_index_reaches_the_tensor() -> None:
    keys, state = torch.zeros(4).to("jax"), types.SimpleNamespace(pointer=0)

    @spmd.compile
    def step() -> None:
        keys[state.pointer : state.pointer + 1].add_(1)
        row = keys[-1 - state.pointer]
        row.mul_(2)
        state.pointer = (state.pointer + 1) % 4

    for _ in range(9):
        step()
    assert keys.tolist() == [7.0, 6.0, 3.0, 6.0]
    assert step.num_traces <= 5  # one for each index


def test_what_is_read_at_a_varying_index_is_a_view() -> None:
    def run(held: types.SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        held.i = (held.i + 1) % 3
        row = held.rows[held.i]
        held.rows.mul_(2)
        return row, row + held.rows[held.i]

    ours, torchs = (types.SimpleNamespace(rows=torch.arange(6.0).reshape(3, 2).to(d), i=0) for d in ("jax", "cpu"))
    step = spmd.compile(lambda: run(ours))
    for _ in range(7):
        (row, total), (expected, sums) = step(), run(torchs)
        assert (row.tolist(), total.tolist()) == (expected.tolist(), sums.tolist())
        ours.rows[0].fill_(1), torchs.rows[0].fill_(1)
        assert row.tolist() == expected.tolist()


def test_code_that_needs_the_number_itself_gets_it() -> None:
    state = types.SimpleNamespace(size=2)
    step = spmd.compile(lambda x: torch.zeros(state.size, device="jax") + float(f"{state.size:.1f}") + x, max_retraces=50)
    for size in (2, 3, 4):
        state.size = size
        assert step(torch.ones(1).to("jax")).tolist() == [size + 1.0] * size


def test_a_number_that_torchs_code_does_not_take_is_a_constant() -> None:
    """`calculate_gain` wants an int or a float, and raises ValueError for anything else."""
    step = spmd.compile(lambda x, slope: x * torch.nn.init.calculate_gain("leaky_relu", slope), max_retraces=50)
    x = torch.ones(1)
    for slope in (1, 2, 3, 0.5, 0.25):
        expected = x * torch.nn.init.calculate_gain("leaky_relu", slope)
        assert step(x.to("jax"), slope).tolist() == expected.tolist()


def test_a_loss_may_be_added_to_a_number_and_to_a_list() -> None:
    meter, log = {"total": 0.0}, []

    @spmd.compile
    def step(x: torch.Tensor) -> None:
        loss = (x * 2).mean()
        meter["total"] += loss.item()
        log.append(loss.item())

    for i in range(5):
        step(torch.full((2,), float(i)).to("jax"))
    assert (meter["total"], log, step.num_traces) == (20.0, [0.0, 2.0, 4.0, 6.0, 8.0], 2)


COMPUTED: list[Callable[[int, dict[str, Any]], float]] = [  # what Python computes of a counter and of an optimizer's setting
    lambda n, group: math.pow(group["beta"], n),
    lambda n, group: math.sqrt(1 - group["beta"] ** n) / (1 - group["lr"] ** n),
    lambda n, group: math.exp(-group["lr"] * n) + math.atan2(n, 2) + math.ldexp(group["lr"], n),
    lambda n, group: math.modf(n * 0.9)[0] + math.frexp(n)[0] + divmod(n * group["lr"], 0.04)[0] + divmod(n, 3)[1],
    lambda n, group: math.fsum([n, group["lr"]]) + math.prod((n, 0.5)) + math.dist([n], [0]) + sum([n, group["lr"]]),
    lambda n, group: round(n / 3, 1) + round(n / 7, ndigits=2) + round(group["lr"] * n),
    lambda n, group: min(group["lr"], n * 0.03) + max([n * 0.5, 1.5]) + min(n, 3) + pow(n, 2, 7) + pow(group["beta"], n),
    lambda n, group: operator.pow(0.9, n) + operator.mul(group["lr"], n) + operator.truediv(n, 3),
    lambda n, group: (0.9).__pow__(n) + n.bit_length() + (n * 0.5).as_integer_ratio()[0] + float(math.isfinite(n)),
]


def test_what_is_computed_of_numbers_that_vary_is_computed_by_every_call() -> None:
    def made(device: str) -> Callable[[], list[torch.Tensor]]:
        weight, count = torch.ones(2, device=device, requires_grad=True), [0]
        optimizer = torch.optim.SGD([{"params": [weight], "beta": 0.9}], 0.1)

        def step() -> list[torch.Tensor]:
            count[0] += 1
            group = optimizer.param_groups[0]
            found = [weight.detach() * fn(count[0], group) for fn in COMPUTED]
            group["lr"] *= 0.9
            return found

        return step

    step, expected = spmd.compile(made("jax")), made("cpu")
    for _ in range(6):
        torch.testing.assert_close([t.cpu() for t in step()], expected())
    assert step.num_traces == 2


TYPED: dict[str, Callable[[int], Any]] = {  # a bool, or an int at one time and a float at another
    "isclose": lambda n: math.isclose(n, 3),
    "bool": lambda n: bool(n % 2) + 1,
    "truth": lambda n: operator.truth(n % 3),
    "min": lambda n: min(n, 2.5),
    "max of a list": lambda n: max([n * 0.5, 2]),
    "pow": lambda n: pow(2, 3 - n),
    "is_integer": lambda n: (n * 0.5).is_integer(),
}


@pytest.mark.parametrize("name", TYPED)
def test_another_bool_or_type_of_what_is_computed_is_another_program(name: str) -> None:
    fn, x = TYPED[name], torch.arange(3)
    step = spmd.compile(lambda x, n: x * fn(n))
    for n in range(1, 7):
        torch.testing.assert_close(step(x.to("jax"), n).cpu(), x * fn(n))
    assert step.num_traces <= 3


def test_an_item_of_a_list_has_one_place_also_from_its_end() -> None:
    def averaged(held: list[float], x: torch.Tensor) -> torch.Tensor:
        held.append(x.sum().item() + held[-1])
        held.pop(0)
        return x * (sum(held) / len(held))

    ours, torchs = [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]
    step, x = spmd.compile(lambda x: averaged(ours, x)), torch.arange(3.0)
    for _ in range(5):
        torch.testing.assert_close(step(x.to("jax")).cpu(), averaged(torchs, x))
        assert ours == torchs
    assert step.num_traces == 2


SEEN: list[Any] = []


class Finalised:
    def __del__(self) -> None:
        SEEN.append(self)


REFUSED: dict[str, Callable[[], Callable[[], Any]]] = {
    "iterator": lambda: iter([1.0, 2.0]).__next__,
    "generator": lambda: (v for v in (1.0, 2.0)).__next__,
    "a repeat that ends": lambda: itertools.repeat(1.0, 2).__next__,
    "random.Random": lambda: random.Random(0).random,
    "numpy.random.Generator": lambda: np.random.default_rng(0).random,
    "secrets": lambda: lambda: float(secrets.randbelow(10)),
    "time": lambda: time.time,
    "perf_counter": lambda: time.perf_counter,
    "datetime": lambda: lambda: float(datetime.datetime.now().second),
    "an object with __del__": lambda: lambda: (Finalised(), 1.0)[1],
    "finalize": lambda: lambda: (weakref.finalize(Finalised, print), 1.0)[1],
    "a weak reference with a function": lambda: lambda: (weakref.ref(Finalised, print), 1.0)[1],
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_no_call_can_see_again_is_refused(name: str) -> None:
    draw = REFUSED[name]()
    with pytest.raises(spmd.TraceError, match="depends on a value that later calls cannot check"):
        spmd.compile(lambda x: x * draw())(torch.ones(1).to("jax"))


@pytest.mark.parametrize("kind", ["cond", "scan", "accumulate"])
def test_a_number_that_changes_is_an_input_in_branches_and_rounds_too(kind: str) -> None:
    held = {"k": 0.5}
    weight = torch.nn.Parameter(torch.ones(2, device="jax"))

    def part(x: torch.Tensor) -> torch.Tensor:
        return x * weight * held["k"]

    @spmd.compile
    def step(xs: torch.Tensor) -> torch.Tensor:
        if kind == "cond":
            return torch.cond(xs.sum() > 0, part, lambda x: x - held["k"], (xs,)).sum() + held["k"]
        if kind == "scan":
            total, parts = spmd.scan(lambda c, x: (c + part(x), c * held["k"]), torch.zeros(2, device="jax"), xs)
            return (total + parts.sum(0)).sum() + held["k"]
        return spmd.accumulate(3)(lambda x: part(x).sum())(xs).sum() + held["k"]

    found: list[float] = []
    for i in range(4):
        held["k"] = 0.5 + i
        loss = step(torch.ones(3, 2, device="jax"))
        found.append(loss.item())
    rounds = 6.0  # elements; a scan adds k times what was carried: 0, k and 2k, twice
    want = [rounds * k + (6.0 * k * k if kind == "scan" else 0.0) + k for k in (0.5, 1.5, 2.5, 3.5)]
    assert found == pytest.approx(want)
    assert step.num_traces == 2


class Stack(list[float]):
    """A list of a class of its own."""


MADE: dict[str, Callable[[torch.Tensor, int, float], Any]] = {
    "a tensor": lambda x, n, h: torch.tensor(n, device=x.device),
    "of floats": lambda x, n, h: torch.tensor([h, n], device=x.device),
    "of a deque": lambda x, n, h: torch.tensor(collections.deque([n, n]), device=x.device),
    "of a list's subclass": lambda x, n, h: torch.tensor(Stack([n, h]), device=x.device),
    "of a named tuple": lambda x, n, h: torch.tensor([Point(n, h)], device=x.device),
    "on the CPU": lambda x, n, h: x + torch.tensor([n]).to(x.device),
    "where": lambda x, n, h: torch.where(x > n, x.long(), n),
    "a range": lambda x, n, h: torch.arange(n, device=x.device),
    "expanded": lambda x, n, h: x.view(1, 8).expand(n, 8),
    "a norm": lambda x, n, h: x.norm(n),
    "an array of a deque": lambda x, n, h: torch.tensor(np.array(collections.deque([n])), device=x.device),
    "an array's sum": lambda x, n, h: x * (np.arange(8) + n).sum().item(),
    "an array's product": lambda x, n, h: x + torch.from_numpy(h * np.arange(8)).to(x),
    "rows of a list": lambda x, n, h: x[[0, n]],
    "pickled": lambda x, n, h: x * pickle.loads(pickle.dumps([n]))[0],
    "a class": lambda x, n, h: x * len(n.__class__.__name__),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_of_numbers_is_pythons(name: str) -> None:
    step = spmd.compile(MADE[name])
    for n in (1, 2, 3, 5):
        x = torch.arange(8.0)
        torch.testing.assert_close(step(x.to("jax"), n, n * 0.5).cpu(), MADE[name](x, n, n * 0.5))


def test_a_tensor_of_numbers_that_vary_is_one_program() -> None:
    step = spmd.compile(lambda x, n, h: x + torch.tensor([n, h, 1], device=x.device).sum() + torch.tensor(n, device=x.device))
    for n in range(6):
        assert step(torch.zeros(1).to("jax"), n, n * 0.5).item() == 2.5 * n + 1
    assert step.num_traces == 2


HEAPS: dict[str, Callable[[list[int], int], Any]] = {
    "heappush": lambda held, i: heapq.heappush(held, -i),
    "heappushpop": lambda held, i: heapq.heappushpop(held, 2 * i),
    "heapreplace": lambda held, i: heapq.heapreplace(held, i),
    "insort": lambda held, i: bisect.insort(held, 5 - i),
}


@pytest.mark.parametrize("name", HEAPS)
def test_c_code_that_puts_numbers_in_a_list_puts_those_of_the_call(name: str) -> None:
    ours, expected = [3, 9], [3, 9]
    step = spmd.compile(lambda x, i: (HEAPS[name](ours, i), x * i)[1])
    for i in (1, 2, 3, 5, 4):
        HEAPS[name](expected, i)
        assert step(torch.ones(1).to("jax"), i).item() == i
        assert ours == expected and all(type(v) is int for v in ours)


def add_to_a_row(b: torch.Tensor, x: torch.Tensor, i: int) -> None:
    b[i % 4] += x


def swap_rows(b: torch.Tensor, x: torch.Tensor, i: int) -> None:
    b[i % 4], b[0] = b[0], b[i % 4]


def assign_another_dtype(b: torch.Tensor, x: torch.Tensor, i: int) -> None:
    b[i % 4] = x.double() * i


def add_to_a_row_of_a_view(b: torch.Tensor, x: torch.Tensor, i: int) -> None:
    v = b.view(2, 4)
    v[i % 2] += 1


def add_to_listed_rows(b: torch.Tensor, x: torch.Tensor, i: int) -> None:
    b[[0, i % 4]] += x


@pytest.mark.parametrize("write", [add_to_a_row, swap_rows, assign_another_dtype, add_to_a_row_of_a_view, add_to_listed_rows])
def test_rows_at_an_index_that_varies_are_written_as_slices_are(write: Callable[[torch.Tensor, torch.Tensor, int], None]) -> None:
    ours, expected = torch.arange(8.0).view(4, 2).to("jax"), torch.arange(8.0).view(4, 2)
    step = spmd.compile(lambda x, i: write(ours, x, i))
    for i in (1, 2, 3, 6, 4):
        x = torch.full((2,), float(i))
        step(x.to("jax"), i)
        write(expected, x, i)
        torch.testing.assert_close(ours.cpu(), expected)


def suppressed(x: torch.Tensor, k: int) -> torch.Tensor:
    with contextlib.suppress(ZeroDivisionError):
        x = x * 2
        1 / k
        x = x * 3
    return x


def caught(x: torch.Tensor, k: int) -> torch.Tensor:
    try:
        return x * math.sqrt(k) * (7 % k)
    except (ValueError, ZeroDivisionError) as error:
        return x - len(type(error).__name__)


@pytest.mark.parametrize("fn", [suppressed, caught])
def test_an_error_of_a_number_that_is_caught_chooses_among_programs(fn: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    step, x = spmd.compile(fn), torch.ones(2)
    for k in (1, 2, 0, 4, 0, 9, 3):
        torch.testing.assert_close(step(x.to("jax"), k).cpu(), fn(x, k))
    assert step.num_traces <= 3


def test_an_object_is_converted_to_a_number_by_its_own_code() -> None:
    class Temperature:
        def __init__(self) -> None:
            self.value, self.seen = 1.0, list[float]()

        def __float__(self) -> float:
            return self.value

        def step(self) -> None:
            self.value *= 0.5
            self.seen.append(self.value)

    def run(wrap: Any, device: str) -> Any:
        temperature, errors = Temperature(), list[str]()

        def fn(x: torch.Tensor) -> torch.Tensor:
            temperature.step()
            try:
                temperature.value @ 2  # type: ignore[operator]
            except TypeError as error:
                errors.append(str(error))
            return x * float(temperature)

        step = wrap(fn)
        assert [step(torch.ones(1, device=device)).item() for _ in range(5)] == [0.5**n for n in range(1, 6)]
        return temperature.seen, errors, getattr(step, "num_traces", 0) <= 2

    assert run(spmd.compile, "jax") == run(lambda fn: fn, "cpu")


def test_a_list_that_contains_itself_has_places_like_any_other() -> None:
    cyclic: list[Any] = [1]
    cyclic.append(cyclic)

    @spmd.compile
    def scaled(x: Any) -> Any:
        return x * len(cyclic) * cyclic[1][0]

    x, found = torch.ones(1, device="jax"), []
    for i in range(5):
        cyclic[0] = i
        found.append(scaled(x).item())
    assert found == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert scaled.num_traces == 2


class Ring:
    """A replay buffer that counts itself."""

    def __init__(self) -> None:
        self.at, self.is_full = 0, False

    def __len__(self) -> int:
        return 10 if self.is_full else self.at

    def __index__(self) -> int:
        return self.at

    def __hash__(self) -> int:
        return self.at

    def add(self) -> None:
        self.at += 3
        if self.at >= 10:
            self.is_full, self.at = True, self.at % 10


@pytest.mark.parametrize(
    ("read", "num_traces"),
    [
        (lambda ring: len(ring) >= 4, 5),
        (lambda ring: hash(ring), 7),
        (lambda ring: range(12)[ring], 7),
        (lambda ring: 2 if ring else 1, 5),
    ],
    ids=["len", "hash", "index", "bool"],
)
def test_a_special_method_that_must_return_an_int_returns_the_value_and_other_numbers_vary(
    read: Callable[[Ring], Any], num_traces: int
) -> None:
    def fn(ring: Ring, x: torch.Tensor, by: float) -> torch.Tensor:
        ring.add()
        return x * read(ring) + by

    ring, other = Ring(), Ring()
    step = spmd.compile(lambda x, by: fn(ring, x, by))
    for i in range(7):
        assert torch.equal(step(torch.ones(3, device="jax"), i * 0.5).cpu(), fn(other, torch.ones(3), i * 0.5))
        assert ring.at == other.at
    assert step.num_traces <= num_traces


def _bytes_of(i: int) -> bytes:
    data = bytearray(4)
    memoryview(data)[i % 2] = i
    memoryview(data)[2] += i
    return bytes(data)


@pytest.mark.parametrize(
    "made",
    [
        _bytes_of,
        lambda i: collections.deque(range(5), maxlen=i),
        lambda i: collections.deque(maxlen=i),
        lambda i: collections.deque([i, i + 1, i + 2], i),
    ],
    ids=["memoryview", "deque by name", "empty deque", "deque"],
)
def test_code_in_c_whose_error_does_not_name_a_number_gets_that_of_the_call(made: Callable[[int], Any]) -> None:
    step = spmd.compile(lambda x, i: (x * i, made(i)))
    for i in (1, 2, 3, 2):
        scaled, found = step(torch.ones(1, device="jax"), i)
        assert (scaled.item(), found, type(found)) == (i, made(i), type(made(i)))


def test_a_deque_limited_by_a_number_that_changes_reads_its_items() -> None:
    items = [1, 2, 3]

    def fn(x: torch.Tensor, i: int) -> torch.Tensor:
        return x * sum(collections.deque(items, maxlen=i))

    step = spmd.compile(fn)
    for num in (1, 2, 3, 3):
        items[2] += num
        assert step(torch.ones(1, device="jax"), num).item() == sum(items[-num:])

"""A handler that raises, as that of Ctrl-C does, loses no state: it waits until a compiled call or a trace has left everything whole."""

import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import spmd
from spmd.base._signals import handler_of, handlers_run, handlers_wait
from spmd.program.reads._heap import HEAP
from tests.observing import replaced
from tests.oracle import batch, train, twins
from tests.program.test_exceptions import nothing_changes, surroundings


class InterruptError(BaseException):
    """What the handler raises."""


@pytest.fixture(autouse=True)
def _raising_handler() -> Iterator[None]:
    def handler(number: int, frame: FrameType | None) -> None:
        raise InterruptError

    before = signal.signal(signal.SIGUSR1, handler)
    yield
    signal.signal(signal.SIGUSR1, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGUSR1)


class Interrupted:
    """Sends a signal at the n-th call or return of Python code, and raises the handler's error there, or later if it waits."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        self.count += 1
        if self.count == self.at:
            interrupt()

    def run(self, fn: Callable[[], Any]) -> Any:
        with replaced(sys.getprofile, sys.setprofile, self):
            return fn()


def test_a_handler_waits_for_the_end_of_the_context() -> None:
    order: list[str] = []
    with pytest.raises(InterruptError), handlers_wait():
        interrupt()
        order.append("after the signal")
        with handlers_wait():
            order.append("in an inner context")
        order.append("after an inner context")
    assert order == ["after the signal", "in an inner context", "after an inner context"]
    with pytest.raises(InterruptError):  # the handler is back
        interrupt()


def test_a_handler_runs_at_once_where_code_may_take_long() -> None:
    order: list[str] = []
    with handlers_wait():
        with pytest.raises(InterruptError), handlers_run():
            interrupt()
            order.append("never")
        with pytest.raises(InterruptError):
            interrupt()
            with handlers_run():  # the signal that arrived before
                order.append("never")
    assert order == []


def test_every_handler_runs_and_the_first_error_is_raised() -> None:
    seen: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise InterruptError(number)

    before = [signal.signal(number, handler) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    try:
        with pytest.raises(InterruptError) as raised, handlers_wait():
            interrupt()
            signal.raise_signal(signal.SIGUSR2)
        assert seen == [signal.SIGUSR1, signal.SIGUSR2]
        assert isinstance(raised.value.__context__, InterruptError)
        assert signal.getsignal(signal.SIGUSR2) is handler
    finally:
        for number, its in zip((signal.SIGUSR1, signal.SIGUSR2), before, strict=True):
            signal.signal(number, its)


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    def other(number: int, frame: FrameType | None) -> None:
        pass

    with handlers_wait():
        signal.signal(signal.SIGUSR1, other)
    assert signal.getsignal(signal.SIGUSR1) is other


def test_other_threads_have_no_handlers_to_wait() -> None:
    found: list[Any] = []

    def run() -> None:
        with handlers_wait():
            found.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGUSR1)]


class Job:
    """A training step, its state, and how often it ran."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.count = model, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return train(self.model, self.optimizer, x, y)


def expected_losses(host: nn.Module, num_steps: int) -> list[float]:
    job = Job(host)
    return [job.step(batch(4, 8), batch(4, 8, seed=2)).item() for _ in range(num_steps)]


def test_a_call_that_is_interrupted_anywhere_has_run_or_has_not() -> None:
    host, device = twins()
    job = Job(device)
    step = spmd.compile(job.step)
    x, y = batch(4, 8).to("jax"), batch(4, 8, seed=2).to("jax")
    losses: dict[int, float] = {}  # by the number of steps so far

    def uninterrupted() -> None:
        loss = step(x, y).item()
        losses[job.count] = loss

    for _ in range(3):
        uninterrupted()
    counter = Interrupted(0)
    counter.run(lambda: step(x, y))
    interrupted = 0
    for at in range(1, counter.count + 1, 5):
        try:
            Interrupted(at).run(lambda: step(x, y))
        except InterruptError:
            interrupted += 1
        uninterrupted()
    assert interrupted > 10
    want = expected_losses(host, job.count)
    assert losses == pytest.approx({number: want[number - 1] for number in losses}, rel=1e-4)


@pytest.mark.parametrize("part", range(4))
def test_a_trace_that_is_interrupted_anywhere_leaves_everything_as_it_was(part: int) -> None:
    host, device = twins()
    x, y = batch(4, 8).to("jax"), batch(4, 8, seed=2).to("jax")
    warm = Job(twins()[1])
    spmd.compile(warm.step)(x, y)
    counter = Interrupted(0)
    counter.run(lambda: spmd.compile(Job(twins()[1]).step)(x, y))
    want = expected_losses(host, 3)
    functions: list[types.FunctionType] = HEAP.functions()
    codes = [fn.__code__ for fn in functions]
    state = {name: value.clone() for name, value in device.state_dict().items()}
    for at in range(1 + part * counter.count // 4, (part + 1) * counter.count // 4, counter.count // 16):
        device.load_state_dict(state)
        job = Job(device)
        step = spmd.compile(job.step)
        with nothing_changes(surroundings):
            try:
                Interrupted(at).run(lambda s=step: s(x, y))
            except InterruptError:
                pass
            finally:
                assert all(fn.__code__ is code for fn, code in zip(functions, codes, strict=True))
        number = job.count
        assert [step(x, y).item() for _ in range(3 - number)] == pytest.approx(want[number:], rel=1e-4)


def test_the_handler_that_waits_is_the_users() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with handlers_wait():
        assert signal.getsignal(signal.SIGUSR1) is not before
        assert handler_of(signal.SIGUSR1) is before

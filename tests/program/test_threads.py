"""Compiled functions and eager operations of several threads at once: every result is right, and nothing stays behind."""

import copy
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # replaces torch.manual_seed when it is first imported, as a trace does
from torch import nn

import spmd
from tests.oracle import MLP, assert_same, batch, train, twins
from tests.program.test_exceptions import nothing_changes, surroundings


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    """Let Python change threads a thousand times as often as it does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """The results of functions that run at the same time, each in a thread; the first error is raised."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def run(i: int) -> None:
        try:
            start.wait(60)
            results[i] = jobs[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
    return results


def test_first_calls_of_one_function_are_one_trace() -> None:
    host, device = twins()
    step = spmd.compile(lambda x: device(x))
    xs = [batch(4, 8, seed=i) for i in range(6)]
    with nothing_changes(surroundings):
        got = together(*(lambda x=x: step(x.to("jax")) for x in xs))
    assert_same(got, [host(x) for x in xs])
    assert step.num_traces == 1


def test_first_calls_of_different_functions_and_shapes() -> None:
    pairs = [twins(seed=i) for i in range(4)]
    steps = [spmd.compile(lambda x, m=device: m(x).square()) for _, device in pairs]
    xs = [batch(2 + i, 8, seed=i) for i in range(4)]
    got = together(*(lambda s=s, x=x: s(x.to("jax")) for s, x in zip(steps, xs, strict=True)))
    assert_same(got, [host(x).square() for (host, _), x in zip(pairs, xs, strict=True)])


def test_eager_operations_on_a_model_while_it_is_traced() -> None:
    host, device = twins()
    x = batch(4, 8)
    on_device, want = x.to("jax"), host(x)

    def eager() -> list[torch.Tensor]:
        with torch.no_grad():
            return [device(on_device) for _ in range(30)]

    def compiled() -> torch.Tensor:
        with torch.no_grad():
            for p in device.parameters():
                p.mul_(1.0)  # written, so that the trace has tracers in the parameters
            return device(on_device)

    for _ in range(3):
        *rounds, got = together(eager, eager, spmd.compile(compiled))
        assert_same(got, want)
        for results in rounds:
            assert_same(results, [want] * 30)


def test_training_in_threads_each_its_own_model() -> None:
    def losses(model: nn.Module, wrap: Callable[..., Any], move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = wrap(lambda x, y: train(model, optimizer, x, y))
        return [step(move(batch(4, 8)), move(batch(4, 8, seed=2))).item() for _ in range(5)]

    pairs = [twins(seed=i) for i in range(4)]
    torch.optim.SGD(pairs[0][0].parameters())  # the first one of a class replaces the class's `step`
    wraps: list[Any] = [spmd.compile, lambda f: f, spmd.compile, lambda f: f]
    with nothing_changes(surroundings):
        got = together(*(lambda m=d, w=w: losses(m, w, lambda t: t.to("jax")) for (_, d), w in zip(pairs, wraps, strict=True)))
    for values, (host, _) in zip(got, pairs, strict=True):
        assert values == pytest.approx(losses(host, lambda f: f, lambda t: t), rel=1e-5)


def test_calls_that_update_the_same_state_take_turns() -> None:
    count = torch.zeros((), device="jax")
    weight = nn.Parameter(torch.zeros(64, device="jax"))

    @spmd.compile
    def add() -> None:
        with torch.no_grad():
            count.add_(1)
            weight.add_(1)

    together(*(lambda: [add() for _ in range(50)] for _ in range(4)))
    assert count.item() == 200
    assert weight.tolist() == [200.0] * 64
    assert add.num_traces == 1


def test_an_error_in_one_threads_trace_leaves_the_others_right() -> None:
    host, device = twins(MLP)
    x = batch(4, 8)

    def fails(x: torch.Tensor) -> torch.Tensor:
        device(x)
        raise ValueError("mine")

    def failing() -> str:
        with pytest.raises(ValueError, match="mine"):
            spmd.compile(fails)(x.to("jax"))
        return "failed"

    with nothing_changes(surroundings):
        got = together(failing, lambda: spmd.compile(lambda x: device(x))(x.to("jax")), failing, lambda: device(x.to("jax")))
    assert got[0] == got[2] == "failed"
    assert_same([got[1], got[3]], [host(x)] * 2)


def in_a_thread(x: torch.Tensor) -> torch.Tensor:
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(x * 2), daemon=True)
    thread.start()
    thread.join(20)
    return results[0]


def in_a_pool(x: torch.Tensor) -> torch.Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: x * 2).result(20)


def of_a_process(x: torch.Tensor) -> torch.Tensor:
    return x * float(subprocess.check_output([sys.executable, "-c", "print(2)"]))


@pytest.mark.parametrize("fn", [in_a_thread, in_a_pool, of_a_process])
def test_what_runs_in_another_thread_or_process_is_refused(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(spmd.TraceError, match="code that runs in another thread, event loop or process"):
        spmd.compile(fn)(torch.ones(2).to("jax"))


def test_an_event_is_read_and_set_by_every_call() -> None:
    event = threading.Event()

    def doubled(x: torch.Tensor) -> torch.Tensor:
        y = x * (2 if event.is_set() else 3)
        event.clear() if event.is_set() else event.set()
        return y

    step = spmd.compile(doubled)
    x = torch.ones(1).to("jax")
    assert [(step(x).item(), event.is_set()) for _ in range(4)] == [(3.0, True), (2.0, False)] * 2


def test_another_threads_random_numbers_do_not_end_a_trace_and_are_not_drawn_again() -> None:
    start, done = threading.Event(), threading.Event()
    drawn: list[float] = []

    def numbers() -> list[float]:
        return [random.random(), float(np.random.rand()), torch.rand(()).item()]

    def load() -> None:  # as a loader that augments the next batch, and then waits until it is taken
        start.wait(60)
        drawn.extend(numbers())
        done.set()

    def while_traced(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_name == "doubled":
            start.set()
            done.wait(60)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    thread = threading.Thread(target=load)
    thread.start()
    before = sys.getprofile()
    sys.setprofile(while_traced)
    try:
        assert spmd.compile(doubled)(torch.ones(2).to("jax")).tolist() == [2.0, 2.0]
    finally:
        sys.setprofile(before)
    thread.join()
    after = numbers()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    assert [*drawn, *after] == [*numbers(), *numbers()]


def test_a_function_that_draws_is_refused_while_another_thread_runs() -> None:
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait, args=(300,), name="waits")
    thread.start()
    states = random.getstate()
    try:
        with pytest.raises(
            spmd.TraceError, match=r"(?s)draws random numbers on the host, from Python's random.*another thread does.*waits"
        ):
            spmd.compile(lambda x: x * random.random())(torch.ones(2).to("jax"))
    finally:
        is_over.set()
        thread.join()
    assert random.getstate() == states


def test_what_another_thread_reads_is_not_lost_to_a_step_that_donates_it(tmp_path: Path) -> None:
    _, device = twins()
    optimizer = torch.optim.SGD(device.parameters(), lr=0.0)
    x, y = batch(4, 8).to("jax"), batch(4, 8, seed=2).to("jax")
    step = spmd.compile(lambda: train(device, optimizer, x, y))
    step()
    want = {name: value.cpu() for name, value in device.state_dict().items()}
    is_over = threading.Event()

    def stepping() -> None:
        while not is_over.is_set():
            step()

    def reading() -> None:
        try:
            for i in range(30):
                assert_same({name: value.cpu() for name, value in device.state_dict().items()}, want)
                assert_same({name: value.clone() for name, value in device.state_dict().items()}, want)
                assert_same(dict(copy.deepcopy(device).state_dict()), want)
                torch.save(device.state_dict(), tmp_path / str(i))
                assert_same(dict(torch.load(tmp_path / str(i))), want)
                assert device.state_dict()[next(iter(want))].flatten()[0].item() == want[next(iter(want))].flatten()[0]
        finally:
            is_over.set()

    together(stepping, reading)

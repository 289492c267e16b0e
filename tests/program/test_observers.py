"""Functions that Python calls on its own during a trace run once, are recorded nowhere, and do not break the trace."""

import bdb
import gc
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

import spmd
from tests.observing import replaced
from tests.oracle import assert_same, batch, twins

SEEN: Counter[str] = Counter()
SCALE = [2.0]


def note(name: str) -> None:
    SEEN[name] += 1


def on_profile(frame: FrameType, event: str, arg: Any) -> None:
    note(event)


def on_frame(frame: FrameType, event: str, arg: Any) -> Any:
    def on_line(frame: FrameType, event: str, arg: Any) -> Any:
        note(event)
        return on_line

    note(event)
    return on_line


def on_collection(phase: str, info: dict[str, int]) -> None:
    note(phase)


def on_signal(number: int, frame: FrameType | None) -> None:
    note("signal")


class Debugger(bdb.Bdb):
    """A debugger that stops at every line of this file."""

    def user_line(self, frame: FrameType) -> None:
        if frame.f_code.co_filename == __file__:
            note("line")
        self.set_step()


def with_profile(run: Callable[[], Any]) -> Any:
    with replaced(sys.getprofile, sys.setprofile, on_profile):
        return run()


def with_trace(run: Callable[[], Any]) -> Any:
    with replaced(sys.gettrace, sys.settrace, on_frame):
        return run()


def with_debugger(run: Callable[[], Any]) -> Any:
    with replaced(sys.gettrace, sys.settrace, sys.gettrace()):
        return Debugger(skip=["torch.*", "jax.*", "spmd.*", "numpy.*"]).runcall(run)


def with_collections(run: Callable[[], Any]) -> Any:
    gc.callbacks.append(on_collection)
    try:
        return run()
    finally:
        gc.callbacks.remove(on_collection)


def with_signals(run: Callable[[], Any]) -> Any:
    before = signal.signal(signal.SIGUSR1, on_signal)

    def send(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_name == "doubled":
            signal.raise_signal(signal.SIGUSR1)

    try:
        with replaced(sys.getprofile, sys.setprofile, send):
            return run()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.fixture(autouse=True)
def _nothing_seen() -> Iterator[None]:
    SEEN.clear()
    SCALE[0] = 2.0
    yield
    SEEN.clear()


def doubled(x: torch.Tensor) -> torch.Tensor:
    gc.collect()
    return x * SCALE[0]


OBSERVERS = {
    "profile function": with_profile,
    "trace function": with_trace,
    "debugger": with_debugger,
    "gc callback": with_collections,
    "signal handler": with_signals,
}


@pytest.mark.parametrize("observed", OBSERVERS.values(), ids=OBSERVERS)
def test_an_observer_of_a_trace_sees_it_and_is_no_part_of_it(observed: Callable[[Callable[[], Any]], Any]) -> None:
    host, device = twins()
    x = batch(4, 8)
    spmd.compile(lambda x: device(x).square())(x.to("jax"))  # imports what a first trace imports
    step = spmd.compile(lambda x: doubled(device(x)))
    assert_same(observed(lambda: step(x.to("jax"))), host(x) * 2)
    assert SEEN
    before = SEEN.copy()
    assert_same([step(x.to("jax")) for _ in range(3)], [host(x) * 2] * 3)
    assert before == SEEN  # no call repeats what an observer wrote, nor depends on it
    assert step.num_traces == 1
    SCALE[0] = 3.0
    assert_same(step(x.to("jax")), host(x) * 3)


def test_a_function_that_was_traced_before_may_become_an_observer() -> None:

    def direct(x: torch.Tensor) -> torch.Tensor:
        on_signal(0, None)
        return x * 2

    step = spmd.compile(direct)
    x = torch.ones(2).to("jax")
    assert (step(x).tolist(), SEEN) == ([2.0, 2.0], {"signal": 1})
    other = spmd.compile(doubled)
    with_signals(lambda: other(x))
    assert SEEN == {"signal": 2}
    other(x)
    assert SEEN == {"signal": 2}
    step(x)
    assert SEEN == {"signal": 3}


@pytest.mark.parametrize("send", ["signal.raise_signal(10)", "os.kill(os.getpid(), 10)"])
def test_a_function_that_sends_a_signal_is_refused(send: str) -> None:
    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        scope: dict[str, Any] = {}
        exec(f"import os, signal\ndef sends(x):\n    {send}\n    return x * 2", scope)
        sends: Callable[[torch.Tensor], torch.Tensor] = scope["sends"]
        with pytest.raises(spmd.TraceError, match="a change of the process, which no call can undo"):
            spmd.compile(sends)(torch.ones(2).to("jax"))
    finally:
        signal.signal(signal.SIGUSR1, before)


AUDITED = """
import sys
from collections import Counter
import torch, spmd

SEEN = Counter()
active = [False]

def note(event):
    SEEN[event] += 1

class Hook:
    def __call__(self, event, args):
        if active[0]:
            note(event)

def hook(event, args):
    assert event != "spmd.recorded"
    if active[0]:
        note(event)

sys.addaudithook(hook)
sys.addaudithook(Hook())
active[0] = True
scale = [2.0]
step = spmd.compile(lambda x: x * scale[id(x) * 0])
x = torch.ones(2).to("jax")
assert step(x).tolist() == [2.0, 2.0]
assert SEEN["builtins.id"] > 1
before = SEEN["object.__setattr__"]
assert [step(x).tolist() for _ in range(3)] == [[2.0, 2.0]] * 3
assert (step.num_traces, SEEN["object.__setattr__"]) == (1, before)
scale[0] = 3.0
assert step(x).tolist() == [3.0, 3.0]
"""


def test_audit_hooks_see_a_trace_and_are_no_part_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", AUDITED], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

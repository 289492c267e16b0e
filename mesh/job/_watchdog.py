"""Watchdog: notices that the job stands still, and names the process that stopped first.

Every process publishes now and then where it is (a *beat*): how many steps it entered, whether it is in one, and a count
that shows that the process lives. A process that makes no progress for `max(least_s, 20 x the median step)` reads the
beats of all: the culprit is one whose beats have stopped, else one that entered the fewest steps, else one that is not
inside a step. First steps and what is announced as long (compiling, saving) get a long allowance; but a process whose beats
stop for `least_s` has stopped as a whole, whatever it was doing: process 0 watches the others for that, and they process 0.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from mesh.job._service import Service, ServiceLost
from mesh.job._timeouts import FIRST_STEP_S, SILENT_S, WATCHDOG_S

FOLDER = "spmd/beat"
_FACTOR = 20
_SLOW_FACTOR, _SLOW_S, _SLOW_STEPS = 3, 1.0, 5  # when to say that a step is slow: so many medians, seconds, and steps before
_ANSWER_S, _STOP_S = 0.3, 5.0
_LEFT = "left"  # the phase of a process that has ended in order


@dataclass(frozen=True)
class Limits:
    """Seconds without progress after which a process counts as stuck.

    Attributes:
        least_s: never less than this, however short the steps.
        first_s: for the first step and for what is announced as long.
        silent_s: without a beat, never less than this: a busy machine keeps living threads waiting.
    """

    least_s: float = WATCHDOG_S
    first_s: float = FIRST_STEP_S
    silent_s: float = SILENT_S


@dataclass(frozen=True)
class Beat:
    """Where a process is: steps entered, what it does, and a count of its beats."""

    steps: int
    phase: str
    count: int

    def to_text(self) -> str:
        return json.dumps([self.steps, self.phase, self.count])

    @classmethod
    def from_text(cls, text: str) -> Beat:
        steps, phase, count = json.loads(text)
        return cls(steps, phase, count)


class Watchdog:
    """Watches this process's progress from a thread of its own.

    Args:
        service: where the beats are.
        index, count: this process, and how many there are.
        limits: after how long it calls `on_stall`.
        on_stall: called once, with who stopped first (or None) and a line that says why.
        warn: called with a line for each step that takes three medians and more.
    """

    def __init__(
        self,
        service: Service,
        index: int,
        count: int,
        limits: Limits,
        on_stall: Callable[[int | None, str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._service, self._index, self._count, self._limits, self._on_stall, self._warn = service, index, count, limits, on_stall, warn
        self._steps, self._phase = 0, "before the first step"
        self._since = self._entered = time.monotonic()
        self._durations: deque[float] = deque(maxlen=101)
        self._is_long = self._was_long = True  # was: the step that was entered last, whose duration says nothing
        self._over = threading.Event()
        self._interval_s = min(2.0, max(0.05, limits.least_s / 40)) * max(1.0, count / 128)
        # A process whose beats do not advance in this time is silent: many intervals, because a busy machine is late.
        self._window_s = 0.6 * limits.least_s
        self._answered = time.monotonic()
        self._heard: dict[int, tuple[Beat, float]] = {}
        self._before: tuple[float, dict[int, Beat] | None] = (0.0, {})
        named = (self._publish, "beats"), (self._watch, "watchdog")
        self._threads = [threading.Thread(target=target, name=name, daemon=True) for target, name in named]
        for thread in self._threads:
            thread.start()

    def enter(self) -> None:
        """A step begins."""
        now = time.monotonic()
        if not self._was_long:
            self._durations.append(now - self._entered)
        self._was_long = self._is_long
        self._steps, self._phase, self._since, self._entered = self._steps + 1, "in a step", now, now

    def leave(self) -> None:
        """The step's program was dispatched, or has ended."""
        self._phase, self._is_long = "between steps", False

    @contextmanager
    def extended(self, phase: str) -> Generator[None]:
        """While active, the long limit holds: compiling, saving, evaluating."""
        kept = self._phase, self._is_long
        self._phase, self._is_long, self._was_long, self._since = phase, True, True, time.monotonic()
        try:
            yield
        finally:
            self._phase, self._is_long = kept
            self._since = time.monotonic()

    @property
    def steps(self) -> int:
        """How many steps this process has entered."""
        return self._steps

    @property
    def first_s(self) -> float:
        """Seconds allowed for a first step, for compiling and saving."""
        return self._limits.first_s

    @property
    def limit_s(self) -> float:
        """Seconds without progress that are allowed now."""
        if self._is_long or not self._steps:
            return self._limits.first_s
        return max(self._limits.least_s, _FACTOR * statistics.median(self._durations)) if self._durations else self._limits.least_s

    def stop(self) -> None:
        """The process ends: no more beats, `on_stall` is not called, and no thread is left in jax's client, which would abort."""
        self._over.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_STOP_S)

    def _publish(self) -> None:
        count, key = 0, f"{FOLDER}/{self._index}"
        try:
            while not self._over.wait(self._interval_s):
                count += 1
                self._service.set(key, Beat(self._steps, self._phase, count).to_text(), overwrite=True)
                self._answered = time.monotonic()
                if self._index == 0 and count % 4 == 0:
                    self._hear_others()
            self._service.set(key, Beat(self._steps, _LEFT, count).to_text(), overwrite=True)
        except ServiceLost:  # the listener of notices deals with it
            return

    def _hear_others(self) -> None:
        now = time.monotonic()
        for index, text in self._service.below(FOLDER).items():
            beat = Beat.from_text(text)
            known = self._heard.get(int(index))
            if known is None or known[0] != beat:
                self._heard[int(index)] = beat, now

    def _silent(self) -> tuple[int, str] | None:
        """A process that has shown no sign of life for `least_s` (and no less than a busy machine needs), and a line about it."""
        now, least_s = time.monotonic(), max(self._limits.least_s, self._limits.silent_s)
        if self._index and now - self._answered > least_s:
            return 0, f"process 0 stopped first: it has not answered for {now - self._answered:.1f} s"
        for index, (beat, since) in list(self._heard.items()):
            if index and beat.phase != _LEFT and now - since > least_s:
                return index, f"process {index} stopped first: no sign of life for {now - since:.1f} s, {beat.phase}"
        return None

    def _slow(self, stood_s: float) -> str | None:
        """A line about the step that runs now, if it takes much longer than the others did."""
        if self._is_long or len(self._durations) < _SLOW_STEPS:
            return None
        median_s = statistics.median(self._durations)
        if stood_s < max(_SLOW_S, _SLOW_FACTOR * median_s):
            return None
        return f"step {self._steps} has taken {stood_s:.1f} s so far, the median is {median_s:.2f} s ({self._phase})"

    def _watch(self) -> None:
        told_of = 0
        while not self._over.wait(min(0.1, self._interval_s)):
            since = self._since
            limit_s, stood_s = self.limit_s, time.monotonic() - since
            if stood_s > limit_s - self._window_s and self._before[0] != since:  # once for this standstill
                self._before = since, self._beats()
            if told_of != self._steps and (slow := self._slow(stood_s)) is not None:
                told_of = self._steps
                self._warn(slow)
            silent = self._silent()
            if silent is None and stood_s < limit_s:
                continue
            if not self._over.is_set():
                self._on_stall(*(silent or self._culprit(stood_s)))
            return

    def _beats(self) -> dict[int, Beat] | None:
        """All beats, or None if process 0 does not answer at once (a stopped process keeps its connections open)."""
        found: list[dict[int, Beat]] = []

        def ask() -> None:
            try:
                found.append({int(index): Beat.from_text(text) for index, text in self._service.below(FOLDER).items()})
            except ServiceLost:
                return

        asking = threading.Thread(target=ask, name="beats read", daemon=True)
        asking.start()
        asking.join(_ANSWER_S)
        return found[0] if found else None

    def _culprit(self, stood_s: float) -> tuple[int | None, str]:
        here = f"no progress for {stood_s:.1f} s: process {self._index} entered step {self._steps}, {self._phase}"
        before, now = self._before[1], None
        if before is not None:  # else process 0 did not answer a while ago either: not a second wait
            now = self._beats()
        if before is None or now is None:
            return 0, f"process 0 stopped first: it does not answer any more; {here}"
        return blame(before, now, self._index, self._count, here)


def blame(before: dict[int, Beat], now: dict[int, Beat], index: int, count: int, here: str) -> tuple[int | None, str]:
    """Which process stopped first, and a line that says so.

    Args:
        before, now: two samples of the beats, many intervals apart.
        index: the process that asks, which is alive.
        count: number of processes.
        here: what the process that asks knows of itself.
    """
    silent = [i for i in range(count) if i != index and _is_silent(before.get(i), now.get(i))]
    if silent:
        silent.sort(key=lambda i: now[i].steps if i in now else -1)
        last = f"after entering step {now[silent[0]].steps}" if silent[0] in now else "before its first sign of life"
        return silent[0], f"process {silent[0]} stopped first: no sign of life, {last}; {here}"
    fewest = min(beat.steps for beat in now.values())
    behind = [i for i in range(count) if now[i].steps == fewest]
    outside = [i for i in behind if now[i].phase != "in a step"]
    if len(behind) == count and not outside:
        return None, f"all processes are in step {fewest} and none has stopped in Python; {here}"
    first = (outside or behind)[0]
    return first, f"process {first} stopped first: it entered step {now[first].steps} as the last, {now[first].phase}; {here}"


def _is_silent(before: Beat | None, now: Beat | None) -> bool:
    return now is None or (before is not None and before.count == now.count and now.phase != _LEFT)

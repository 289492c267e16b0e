"""Watchdog: detects that the job hangs, and names the process that stopped first.

Every process publishes a *heartbeat* at intervals: the number of steps that it entered, its phase, and a counter that shows that
it is alive. A process that makes no progress for `max(least_s, 20 x the median step)` reads all heartbeats. The culprit is a process
whose heartbeat has stopped, else one that entered the fewest steps, else one that is not in a step. The first step and
extended phases (compiling, saving) have a longer timeout. But a process without a heartbeat for `max(least_s, silent_s)` is stopped as a
whole, whatever it was doing: process 0 checks the others for this, and they check process 0.
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

FOLDER = "spmd/heartbeat"
_FACTOR = 20
_SLOW_FACTOR, _SLOW_S, _SLOW_STEPS = 3, 1.0, 5  # a step is slow after so many medians and seconds, if so many steps came before
_ANSWER_S, _STOP_S = 0.3, 5.0
_LEFT = "left"  # the phase of a process that has ended normally


@dataclass(frozen=True)
class Limits:
    """Seconds without progress after which a process counts as stuck.

    Attributes:
        least_s: minimum for ordinary steps, however short they are.
        first_s: for the first step and for extended phases.
        silent_s: minimum without a heartbeat, because threads of a busy machine may be delayed.
    """

    least_s: float = WATCHDOG_S
    first_s: float = FIRST_STEP_S
    silent_s: float = SILENT_S


@dataclass(frozen=True)
class Heartbeat:
    """State of a process: steps entered, current phase, and number of its heartbeats."""

    steps: int
    phase: str
    count: int

    def to_text(self) -> str:
        return json.dumps([self.steps, self.phase, self.count])

    @classmethod
    def from_text(cls, text: str) -> Heartbeat:
        steps, phase, count = json.loads(text)
        return cls(steps, phase, count)


class Watchdog:
    """Monitors the progress of this process, and the heartbeats of the others, on its own threads.

    Args:
        service: the coordination service that stores the heartbeats.
        index, count: index of this process, and number of processes.
        limits: seconds without progress before `on_stall` is called.
        on_stall: called once, with the index of the process that stopped first (or None) and a line with the reason.
        warn: called with a line for each step that takes three medians or more.
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
        self._is_long = self._was_long = True  # was: applies to the last step entered, whose duration is not typical
        self._over = threading.Event()
        self._interval_s = min(2.0, max(0.05, limits.least_s / 40)) * max(1.0, count / 128)
        # A process whose heartbeat counter does not advance in this time is silent. Many intervals, since a busy machine delays threads.
        self._window_s = 0.6 * limits.least_s
        self._answered = time.monotonic()
        self._last_changes: dict[int, tuple[Heartbeat, float]] = {}  # per process, with the time when it changed
        # The heartbeats read early in a stall, with the time when the stall began.
        self._before: tuple[float, dict[int, Heartbeat] | None] = (0.0, {})
        loops = (self._publish, "heartbeats"), (self._watch, "watchdog")
        self._threads = [threading.Thread(target=target, name=name, daemon=True) for target, name in loops]
        for thread in self._threads:
            thread.start()

    def enter(self) -> None:
        """Record that a step begins."""
        now = time.monotonic()
        if not self._was_long:
            self._durations.append(now - self._entered)
        self._was_long = self._is_long
        self._steps, self._phase, self._since, self._entered = self._steps + 1, "in a step", now, now

    def leave(self) -> None:
        """Record that the step's program was dispatched, or has ended."""
        self._phase, self._is_long = "between steps", False

    @contextmanager
    def extended(self, phase: str) -> Generator[None]:
        """Context manager under which the timeout of a first step applies: for compiling, saving, evaluating."""
        outer = self._phase, self._is_long
        self._phase, self._is_long, self._was_long, self._since = phase, True, True, time.monotonic()
        try:
            yield
        finally:
            self._phase, self._is_long = outer
            self._since = time.monotonic()

    @property
    def steps(self) -> int:
        """Number of steps that this process has entered."""
        return self._steps

    @property
    def first_s(self) -> float:
        """Seconds allowed for the first step, and for compiling or saving."""
        return self._limits.first_s

    @property
    def limit_s(self) -> float:
        """Seconds without progress that are allowed in the current phase."""
        if self._is_long or not self._steps:
            return self._limits.first_s
        return max(self._limits.least_s, _FACTOR * statistics.median(self._durations)) if self._durations else self._limits.least_s

    def stop(self) -> None:
        """Stop both threads at the normal end of the process. A thread left in jax's client would abort the process."""
        self._over.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_STOP_S)

    def _publish(self) -> None:
        count, key = 0, f"{FOLDER}/{self._index}"
        try:
            while not self._over.wait(self._interval_s):
                count += 1
                self._service.set(key, Heartbeat(self._steps, self._phase, count).to_text(), overwrite=True)
                self._answered = time.monotonic()
                if self._index == 0 and count % 4 == 0:
                    self._read_others()
            self._service.set(key, Heartbeat(self._steps, _LEFT, count).to_text(), overwrite=True)
        except ServiceLost:  # the thread that receives notices handles this
            return

    def _read_others(self) -> None:
        now = time.monotonic()
        for index, text in self._service.get_folder(FOLDER).items():
            heartbeat = Heartbeat.from_text(text)
            last = self._last_changes.get(int(index))
            if last is None or last[0] != heartbeat:
                self._last_changes[int(index)] = heartbeat, now

    def _silent(self) -> tuple[int, str] | None:
        """A process without a heartbeat for `max(least_s, silent_s)`, with a line that names it; or None."""
        now, least_s = time.monotonic(), max(self._limits.least_s, self._limits.silent_s)
        if self._index and now - self._answered > least_s:
            return 0, f"process 0 stopped first: it has not answered for {now - self._answered:.1f} s"
        for index, (heartbeat, since) in list(self._last_changes.items()):
            if index and heartbeat.phase != _LEFT and now - since > least_s:
                return index, f"process {index} stopped first: no heartbeat for {now - since:.1f} s, {heartbeat.phase}"
        return None

    def _slow(self, stalled_s: float) -> str | None:
        """A warning about the current step, if it takes much longer than the previous ones; or None."""
        if self._is_long or len(self._durations) < _SLOW_STEPS:
            return None
        median_s = statistics.median(self._durations)
        if stalled_s < max(_SLOW_S, _SLOW_FACTOR * median_s):
            return None
        return f"step {self._steps} has taken {stalled_s:.1f} s so far, the median is {median_s:.2f} s ({self._phase})"

    def _watch(self) -> None:
        warned_step = 0
        while not self._over.wait(min(0.1, self._interval_s)):
            since = self._since
            limit_s, stalled_s = self.limit_s, time.monotonic() - since
            if stalled_s > limit_s - self._window_s and self._before[0] != since:  # once per stall
                self._before = since, self._read_all()
            if warned_step != self._steps and (slow := self._slow(stalled_s)) is not None:
                warned_step = self._steps
                self._warn(slow)
            silent = self._silent()
            if silent is None and stalled_s < limit_s:
                continue
            if not self._over.is_set():
                self._on_stall(*(silent or self._culprit(stalled_s)))
            return

    def _read_all(self) -> dict[int, Heartbeat] | None:
        """All heartbeats, or None if process 0 does not answer at once (a stopped process keeps its connections open)."""
        found: list[dict[int, Heartbeat]] = []

        def read() -> None:
            try:
                found.append({int(index): Heartbeat.from_text(text) for index, text in self._service.get_folder(FOLDER).items()})
            except ServiceLost:
                return

        thread = threading.Thread(target=read, name="heartbeats read", daemon=True)
        thread.start()
        thread.join(_ANSWER_S)
        return found[0] if found else None

    def _culprit(self, stalled_s: float) -> tuple[int | None, str]:
        """The process that stopped first (or None), and a line with the reason."""
        here = f"no progress for {stalled_s:.1f} s: process {self._index} entered step {self._steps}, {self._phase}"
        before, now = self._before[1], None
        if before is not None:  # if process 0 did not answer then, do not wait for it a second time
            now = self._read_all()
        if before is None or now is None:
            return 0, f"process 0 stopped first: it no longer answers; {here}"
        return blame(before, now, self._index, self._count, here)


def blame(before: dict[int, Heartbeat], now: dict[int, Heartbeat], index: int, count: int, here: str) -> tuple[int | None, str]:
    """Determine which process stopped first.

    Args:
        before, now: two samples of all heartbeats by process, many intervals apart.
        index: index of the calling process, which is alive.
        count: number of processes.
        here: state of the calling process, appended to the line.

    Returns:
        The index of the process, or None if all are in the same step; and a line with the reason.
    """
    silent = [i for i in range(count) if i != index and _is_silent(before.get(i), now.get(i))]
    if silent:
        silent.sort(key=lambda i: now[i].steps if i in now else -1)
        last = f"after entering step {now[silent[0]].steps}" if silent[0] in now else "since it joined the job"
        return silent[0], f"process {silent[0]} stopped first: no heartbeat {last}; {here}"
    fewest = min(heartbeat.steps for heartbeat in now.values())
    behind = [i for i in range(count) if now[i].steps == fewest]
    outside = [i for i in behind if now[i].phase != "in a step"]
    if len(behind) == count and not outside:
        return None, f"all processes are in step {fewest}, and none of them has stopped in Python; {here}"
    first = (outside or behind)[0]
    return first, f"process {first} stopped first: it did not get past step {now[first].steps}, {now[first].phase}; {here}"


def _is_silent(before: Heartbeat | None, now: Heartbeat | None) -> bool:
    return now is None or (before is not None and before.count == now.count and now.phase != _LEFT)

"""Where a run's time goes: every second of it belongs to one kind of work."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from spmd import Step

R = TypeVar("R")
KINDS = ("start", "compile", "data", "step", "evaluation", "checkpoint", "profile", "restart")


class Clock:
    """Seconds by kind, over all restarts of a run; state for its checkpoints.

    Attributes:
        seconds: by kind of `KINDS`: "start" until the first step, "restart" what was lost and waited for when a run went on.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {kind: 0.0 for kind in KINDS}
        self._kind, self._since = "start", time.perf_counter()

    def to(self, kind: str) -> str:
        """From here on it is this kind; the kind before."""
        now = time.perf_counter()
        self.seconds[self._kind] += now - self._since
        before, self._kind, self._since = self._kind, kind, now
        return before

    def count(self) -> dict[str, float]:
        """Seconds by kind, up to now."""
        self.to(self._kind)
        return dict(self.seconds)

    def move(self, kind: str, to: str, seconds: float) -> None:
        """Some of what was counted as one kind was another."""
        self.seconds[kind] -= seconds
        self.seconds[to] += seconds

    def calling(self, step: Step[..., R], *args: Any) -> tuple[R, bool]:
        """Call a compiled function; its result, and whether it was traced now, whose seconds are of the kind "compile"."""
        num_traces, start = step.num_traces, time.perf_counter()
        result = step(*args)
        was_compiled = step.num_traces != num_traces
        if was_compiled:
            self.move(self._kind, "compile", time.perf_counter() - start)
        return result, was_compiled

    @contextmanager
    def during(self, kind: str) -> Generator[None]:
        """A block of this kind; what comes after is of the kind before."""
        before = self.to(kind)
        try:
            yield
        finally:
            self.to(before)

    @property
    def goodput(self) -> float:
        """The part of all seconds that were spent in steps."""
        seconds = self.count()
        return seconds["step"] / max(sum(seconds.values()), 1e-9)

    def state_dict(self) -> dict[str, Any]:
        """Seconds so far and the time of day."""
        return {"seconds": self.count(), "time": time.time()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting; from the checkpoint until now, but for this process's own seconds, is a restart."""
        here = sum(self.count().values())
        for kind, seconds in state["seconds"].items():
            self.seconds[kind] += seconds
        self.seconds["restart"] += max(0.0, time.time() - state["time"] - here)


__all__ = ["KINDS", "Clock"]

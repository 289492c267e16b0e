"""Accounts for the wall time of a run: every second belongs to one kind of work."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from spmd import Step

R = TypeVar("R")
KINDS = ("start", "compile", "data", "step", "evaluation", "checkpoint", "profile", "restart")


class Clock:
    """Seconds by kind of work, summed over all restarts of a run. It is part of the run's checkpoints.

    Attributes:
        seconds: seconds of each kind in `KINDS`. "start" ends at the first step; "restart" is the time between a checkpoint and
            the moment a new process resumed from it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {kind: 0.0 for kind in KINDS}
        self._kind, self._since = "start", time.perf_counter()

    def to(self, kind: str) -> str:
        """Count the time from now on as `kind`; returns the previous kind."""
        now = time.perf_counter()
        self.seconds[self._kind] += now - self._since
        before, self._kind, self._since = self._kind, kind, now
        return before

    def count(self) -> dict[str, float]:
        """Seconds by kind until now."""
        self.to(self._kind)
        return dict(self.seconds)

    def move(self, kind: str, to: str, seconds: float) -> None:
        """Reassign `seconds` that were counted as `kind` to the kind `to`."""
        self.seconds[kind] -= seconds
        self.seconds[to] += seconds

    def calling(self, step: Step[..., R], *args: Any) -> tuple[R, bool]:
        """Call a compiled function. If the call traced it, its seconds count as "compile".

        Returns:
            The function's result, and whether the call traced it.
        """
        num_traces, start = step.num_traces, time.perf_counter()
        result = step(*args)
        was_compiled = step.num_traces != num_traces
        if was_compiled:
            self.move(self._kind, "compile", time.perf_counter() - start)
        return result, was_compiled

    @contextmanager
    def during(self, kind: str) -> Generator[None]:
        """Count the block as `kind`, then return to the previous kind."""
        before = self.to(kind)
        try:
            yield
        finally:
            self.to(before)

    @property
    def goodput(self) -> float:
        """The fraction of all seconds that was spent in steps."""
        seconds = self.count()
        return seconds["step"] / max(sum(seconds.values()), 1e-9)

    def state_dict(self) -> dict[str, Any]:
        """Seconds by kind so far, and the current Unix time."""
        return {"seconds": self.count(), "time": time.time()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a saved clock. The time since the checkpoint counts as "restart", except for the seconds of this process."""
        here = sum(self.count().values())
        for kind, seconds in state["seconds"].items():
            self.seconds[kind] += seconds
        self.seconds["restart"] += max(0.0, time.time() - state["time"] - here)


__all__ = ["KINDS", "Clock"]

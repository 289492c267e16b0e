"""What a new program says to the other processes of a job before it runs."""

from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.job import _agreement
from mesh.job._watchdog import Heartbeat, blame
from spmd.program._job_checks import JobChecks


class Job:
    """Of a job what `JobChecks` uses."""

    def __init__(self) -> None:
        self.phase = "compiling"
        self.host, self.service = SimpleNamespace(index=1), None
        self.watchdog = SimpleNamespace(first_s=7.0, extended=self._extended)

    def next_program(self) -> int:
        return 3

    @contextmanager
    def _extended(self, phase: str) -> Generator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


def test_a_process_that_waits_for_the_others_says_so_and_not_that_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    job: Any = Job()
    phases: list[str] = []

    def compare(service: Any, index: int, name: str, items: dict[str, str], limit_s: float) -> None:
        assert (index, name, limit_s) == (1, "program 3 (step)", 7.0) and items["function"] == "step"
        phases.append(job.phase)

    monkeypatch.setattr(_agreement, "compare", compare)
    JobChecks(job).require_same("step", None, [], [], SimpleNamespace(as_text=lambda: "module"))
    assert phases == ["waiting for all processes to run program 3 (step), which this process has traced"]
    assert job.phase == "compiling"
    beats = [{0: Heartbeat(6, "in a step", n), 1: Heartbeat(5, phases[0], n)} for n in (1, 2)]
    who, why = blame(beats[0], beats[1], 0, 2, "no progress for 60.0 s")
    assert who == 1
    assert "it did not get past step 5, waiting for all processes to run program 3 (step), which this process has traced" in why

"""A process that finds the trace of an earlier one on disk runs it if all that the trace read is the same, and traces otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.program.stored_cases import CASES

SCRIPT = Path(__file__).with_name("stored_cases.py")
NOT_STORED = {
    "an_array_of_numpy": "it becomes a CPU tensor, which is guarded by its version",
    "a_log_record": "the cache of a function of the user's cannot be found by a path",
    "the_order_of_a_set": "another process has another order",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@cache
def _found(folder: Path, variant: str) -> dict[str, tuple[str | None, int]]:
    if variant != "first":
        _found(folder, "first")
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}  # one case reads the environment
    given = [sys.executable, str(SCRIPT), str(folder), variant]
    done = subprocess.run(given, capture_output=True, text=True, check=False, env={**env, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("variant", ["first", "same", "changed"])
@pytest.mark.parametrize("name", CASES)
def test_computes_what_the_cpu_does(folder: Path, name: str, variant: str) -> None:
    assert _found(folder, variant)[name][0] is None


@pytest.mark.parametrize("name", CASES)
def test_the_second_process_does_not_trace(folder: Path, name: str) -> None:
    assert _found(folder, "first")[name][1] > 0
    assert (_found(folder, "same")[name][1] == 0) is (name not in NOT_STORED)

"""A process that finds the trace of an earlier one on disk runs it if all that the trace read is the same, and traces otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.program.stored_harness import load

ROOT = Path(__file__).parents[2]
CASES = load()
NOT_STORED = {  # cases by the reason why a second process traces again
    "objects are compared by their addresses, and an order may depend on the seed of hashes": """
        the_order_of_a_set a_set_of_functions a_set_of_objects objects_as_arguments""",
    "state in C that cannot be read: the list of a bounded cache, a file in memory": """
        a_cached_result a_cached_function printed_text text_written_to_stderr an_array_of_jax_in_a_jitted_function""",
    "a tensor of the CPU is guarded by its version": "a_tensor_of_the_cpu a_reference_to_a_tensor",
    "no path leads to an object: a log record, the cache of a function, what a compiled function holds": """
        a_log_record a_record_with_more a_step_in_a_step several_steps_in_a_call optimizer_radam an_enumeration_in_a_function""",
    "state that the first call creates": "a_scaler",
    "hooks have numbers as keys, and the trace of an earlier case took some, which this process does not repeat": """
        a_hook_of_an_optimizer weight_norm""",
    "the trace wrote to a file, or the file was written again": "a_file_that_is_written a_file_that_is_read",
    "a gradient from before": "a_gradient_from_before",
}
TRACED_AGAIN = {name for names in NOT_STORED.values() for name in names.split()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@cache
def _found(folder: Path, variant: str) -> dict[str, tuple[str | None, int]]:
    if variant != "first":
        _found(folder, "first")
    env = {name: value for name, value in os.environ.items() if name not in ("PYTEST_CURRENT_TEST", "PYTHONHASHSEED")}
    env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": str(ROOT)}
    given = [sys.executable, "tests/program/stored_harness.py", str(folder), variant]
    done = subprocess.run(given, capture_output=True, text=True, check=False, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("variant", ["first", "same", "changed"])
@pytest.mark.parametrize("name", CASES)
def test_computes_what_the_cpu_does(folder: Path, name: str, variant: str) -> None:
    assert _found(folder, variant)[name][0] is None


@pytest.mark.parametrize("name", CASES)
def test_the_second_process_does_not_trace(folder: Path, name: str) -> None:
    assert (_found(folder, "same")[name][1] == 0) is (name not in TRACED_AGAIN)

"""Tests whose meshes take all devices, whatever their number (tests/grids.py), pass on other numbers than pytest's default of 8.

The number is fixed when jax starts, so each other number is a pytest of its own.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FEW = ("tests/sharding/test_shard.py", "tests/device/test_call_jax.py")
ANY_NUMBER = (*FEW, "tests/xla_names", "tests/compat", "tests/program/test_scan.py")


@pytest.mark.parametrize(
    ("count", "tests"),
    [(1, FEW), *(pytest.param(count, ANY_NUMBER, marks=pytest.mark.slow) for count in (1, 4))],
    ids=["1", "1-all", "4-all"],
)
def test_tests_of_any_number_of_devices_pass(count: int, tests: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--devices") == count:
        pytest.skip("this pytest has that number of devices")
    optimize = ["--optimize"] if request.config.getoption("--optimize") else []
    command = [sys.executable, "-m", "pytest", "--quiet", "--devices", str(count), *optimize, *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_are_there() -> None:
    assert [name for name in ANY_NUMBER if not (ROOT / name).exists()] == []

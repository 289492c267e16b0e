"""A short slice of `make endurance`: loops that read nothing end, with the right result and no more memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "unread.py"


@pytest.mark.parametrize(("row", "threads"), [("eager", 3), ("compiled", 3)])
def test_a_loop_that_reads_nothing_ends_and_memory_stays(row: str, threads: int) -> None:
    command = [sys.executable, str(SCRIPT), "--row", row, "--devices", "8", "--threads", str(threads), "--calls", "150"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["right"], done.stderr[-2000:]
    assert said["growth_mb"] < 30

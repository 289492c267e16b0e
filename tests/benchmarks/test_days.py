"""A short slice of `make endurance`: a job with evaluation, checkpoints, retraces and new batches holds no more after it is warm.

Resident memory is the long run's to judge: so early the allocator still grows.
"""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "days.py"


def test_a_job_that_runs_on_holds_no_more() -> None:
    command = [sys.executable, str(SCRIPT), "--steps", "800", "--warm", "400", "--json", "None"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    growth = json.loads(done.stdout.splitlines()[-1])["growth"]
    assert growth["threads"] <= 0
    assert growth["files"] <= 0
    assert growth["buffers"] <= 2  # which batch is alive at the moment
    assert growth["arrays"] <= 10

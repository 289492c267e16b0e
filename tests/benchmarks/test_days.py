"""A short slice of `make endurance`: a job with evaluation, checkpoints, retraces and new batches holds no more after it is warm.

Resident memory is the long run's to judge: so early the allocator still grows.
"""

import json

from tests import launched

SCRIPT = launched.ROOT / "benchmarks" / "days.py"


def test_a_job_that_runs_on_holds_no_more() -> None:
    done = launched.run(SCRIPT, "--steps", 800, "--warm", 400, "--json", None, timeout=600)
    assert done.code == 0, done.err[-2000:]
    growth = json.loads(done.out.splitlines()[-1])["growth"]
    assert growth["threads"] <= 0
    assert growth["files"] <= 0
    assert growth["buffers"] <= 2  # which batch is alive at the moment
    assert growth["arrays"] <= 10

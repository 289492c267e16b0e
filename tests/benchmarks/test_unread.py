"""A short slice of `make endurance`: loops that read nothing end, with the right result and no more memory."""

import json

import pytest

from tests import launched

SCRIPT = launched.ROOT / "benchmarks" / "unread.py"


@pytest.mark.parametrize(("row", "threads"), [("eager", 3), ("compiled", 3)])
def test_a_loop_that_reads_nothing_ends_and_memory_stays(row: str, threads: int) -> None:
    done = launched.run(SCRIPT, "--row", row, "--devices", 8, "--threads", threads, "--calls", 150)
    assert done.code == 0, done.err[-2000:]
    said = json.loads(done.out.splitlines()[-1])
    assert said["right"], done.err[-2000:]
    assert said["growth_mb"] < 30

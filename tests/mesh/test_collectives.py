"""Collectives between CPU processes compute what numpy does, at every size; psum_scatter over gloo by itself does not."""

from pathlib import Path

import pytest

from tests.launched import launch

PROGRAM = Path(__file__).with_name("collectives_program.py")
CASES = 8


@pytest.mark.parametrize("sizes", [(2**10, 2**20, 2**23), pytest.param((2**26,), marks=pytest.mark.slow)], ids=["to 8 MiB", "64 MiB"])
def test_collectives_between_processes_agree_with_numpy(sizes: tuple[int, ...]) -> None:
    """The sum that gloo scatters is wrong from 4 to 8 MiB on."""
    done = launch("-n", 2, "--devices-per-process", 1, program=PROGRAM, arguments=sizes)
    lines = [line.partition("] ")[2] for line in done.out.splitlines()]
    assert done.code == 0, done.err
    assert [line for line in lines if line.endswith("WRONG")] == []
    assert len(lines) == 2 * CASES * len(sizes)


def test_collectives_over_several_devices_of_each_process_agree_with_numpy() -> None:
    done = launch("-n", 2, "--devices-per-process", 2, program=PROGRAM, arguments=(2**12, 2**16))
    assert done.code == 0, done.err
    assert "WRONG" not in done.out and done.out.count("right") == 2 * CASES * 2

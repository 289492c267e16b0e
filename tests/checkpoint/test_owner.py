"""Two jobs do not save into one folder: the second is told so before it changed anything."""

import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import spmd
from spmd.checkpoint._owner import NAME

HOLDER = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("taken", flush=True)
    sys.exit()
os.write(file, b"4711 on elsewhere")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_job(root: Path) -> Generator[str]:
    """Another process that holds the folder if it gets it: "held" or "taken"."""
    command = [sys.executable, "-S", "-c", HOLDER, str(root / NAME)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate()


def state(value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((3,), value)}


@pytest.mark.parametrize("wait", [True, False])
def test_a_folder_that_another_process_saves_into_is_refused(tmp_path: Path, wait: bool) -> None:
    writing = tmp_path / ".writing_step_00000007"
    writing.mkdir()
    with another_job(tmp_path) as answer:
        assert answer == "held"
        with pytest.raises(
            spmd.CheckpointError, match=r"(?s)step 1 was not saved: another job saves into .*4711 on elsewhere.*fix: give each job"
        ):
            spmd.checkpoint.save(tmp_path, 1, state(1.0), wait=wait).join()
        assert writing.is_dir()  # the other's save in progress
    spmd.checkpoint.save(tmp_path, 1, state(1.0), wait=True)
    assert [step.step for step in spmd.checkpoint.steps(tmp_path)] == [1]
    assert not writing.exists()


def test_a_job_holds_its_folder_until_it_joins(tmp_path: Path) -> None:
    spmd.checkpoint.save(tmp_path, 1, state(1.0))
    spmd.checkpoint.save(tmp_path, 2, state(2.0)).wait()
    with another_job(tmp_path) as answer:
        assert answer == "taken"
    spmd.checkpoint.join(tmp_path)
    assert not (tmp_path / NAME).exists()
    with another_job(tmp_path) as answer:
        assert answer == "held"
    spmd.checkpoint.save(tmp_path, 3, state(3.0)).join()
    with another_job(tmp_path) as answer:
        assert answer == "held"


def test_a_save_that_waits_leaves_the_folder_free(tmp_path: Path) -> None:
    spmd.checkpoint.save(tmp_path, 1, state(1.0), wait=True)
    with another_job(tmp_path) as answer:
        assert answer == "held"


def test_a_step_that_another_job_saved_meanwhile_is_noticed_until_the_state_is_restored(tmp_path: Path) -> None:
    spmd.checkpoint.save(tmp_path / "a", 1, state(1.0), wait=True)
    spmd.checkpoint.save(tmp_path / "b", 5, state(5.0), wait=True)
    shutil.copytree(tmp_path / "b" / "step_00000005", tmp_path / "a" / "step_00000005")
    with pytest.raises(spmd.CheckpointError, match=r"another job saves into .*\n.*another wrote step_00000005"):
        spmd.checkpoint.save(tmp_path / "a", 2, state(2.0), wait=True)
    found = state(0.0)
    assert spmd.checkpoint.restore(tmp_path / "a", found).step == 5
    assert found["x"].tolist() == [5.0] * 3
    spmd.checkpoint.save(tmp_path / "a", 6, found, wait=True)
    assert [step.step for step in spmd.checkpoint.steps(tmp_path / "a")] == [6, 5, 1]

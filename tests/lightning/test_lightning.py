"""Lightning's Trainer and Fabric train as on the CPU, in processes of their own: the package lies in a folder beside the environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-lightning"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER.exists(), reason="`make lightning` installs it in .venv-lightning")]


def run(script: Path, *arguments: str, cwd: Path) -> str:
    path = os.pathsep.join((str(ROOT), str(FOLDER), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("what", ["trainer", "fabric"])
def test_losses_and_checkpoints_are_those_of_the_cpu(what: str, tmp_path: Path) -> None:
    assert "equal" in run(ROOT / "tests/lightning/compare.py", what, cwd=tmp_path)


def test_the_example_runs(tmp_path: Path) -> None:
    assert "loss" in run(ROOT / "examples/lightning_trainer.py", cwd=tmp_path)

"""Lightning's Trainer and Fabric train as on the CPU; the package lies in a folder beside the environment."""

from pathlib import Path

import pytest

from tests.beside import ROOT, run_with

FOLDER = ".venv-lightning"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (ROOT / FOLDER).exists(), reason="`make lightning` installs it in .venv-lightning")]


@pytest.mark.parametrize("what", ["trainer", "fabric"])
def test_losses_and_checkpoints_are_those_of_the_cpu(what: str, tmp_path: Path) -> None:
    assert "equal" in run_with(FOLDER, "tests/lightning/compare.py", what, cwd=tmp_path)


@pytest.mark.parametrize("example", ["lightning_trainer", "lightning_fabric"])
def test_the_example_runs(example: str, tmp_path: Path) -> None:
    assert "loss" in run_with(FOLDER, f"examples/{example}.py", cwd=tmp_path)

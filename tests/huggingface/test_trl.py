"""TRL's trainers log what they log on CPU torch; the packages lie in a folder beside the environment."""

from pathlib import Path

import pytest

from tests.beside import ROOT, run_with

FOLDER = ".venv-trl/site-packages"  # by this name dill knows that what lies there can be imported

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (ROOT / FOLDER).exists(), reason="`make trl` installs it in .venv-trl")]


@pytest.mark.parametrize("layout", ["fsdp", "megatron"])
@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_what_is_logged_is_what_cpu_torch_logs(trainer: str, layout: str, tmp_path: Path) -> None:
    assert run_with(FOLDER, "tests/huggingface/compare_trl.py", trainer, layout, cwd=tmp_path).startswith("equal")


def test_the_example_runs(tmp_path: Path) -> None:
    assert "programs, loss" in run_with(FOLDER, "examples/trl_sft.py", cwd=tmp_path)

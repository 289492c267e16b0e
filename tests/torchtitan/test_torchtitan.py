"""torchtitan's Llama, sharded by its own function, trains ten steps as CPU torch; the package lies in a folder beside the environment."""

from pathlib import Path

import pytest

from tests.beside import ROOT, run_with

FOLDER = ".venv-torchtitan"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / FOLDER).exists(), reason="`make torchtitan` installs it in .venv-torchtitan"),
]


@pytest.mark.parametrize(("tp", "dp_replicate"), [(4, 1), (2, 2), (1, 1), (8, 1)], ids=["tp4-fsdp2", "tp2-hsdp", "fsdp8", "tp8"])
def test_ten_losses_are_those_of_the_cpu(tp: int, dp_replicate: int, tmp_path: Path) -> None:
    lines = run_with(FOLDER, "examples/torchtitan_llama.py", str(tp), str(dp_replicate), cwd=tmp_path).splitlines()
    assert len([line for line in lines if line.replace(".", "").isdigit()]) == 10

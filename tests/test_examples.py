"""Every script under examples/ runs in a process of its own, as a reader would run it, and warns of nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# tests/lightning, tests/torchtitan and tests/huggingface/test_trl.py run theirs: those packages are in folders beside the environment.
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if not path.stem.startswith(("lightning", "torchtitan", "trl")))


SHOWN_ELSEWHERE = {
    "train_gpt2": "tests/test_train_gpt2.py runs it seven times",
    "huggingface_trainer": "tests/huggingface/test_trainer.py trains the same beside CPU torch",
    "peft_lora": "and tests/huggingface/test_peft.py",
    "accelerate_loop": "and tests/huggingface/test_accelerate.py",
    "distributed_data_parallel": "tests/torch_distributed/test_data_parallel.py has its parts",
    "torch_distributed": "tests/torch_distributed has its parts",
}
CASES = [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SHOWN_ELSEWHERE else []) for path in EXAMPLES]


@pytest.mark.parametrize("example", CASES)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    code = "import runpy, sys; root, *sys.argv = sys.argv[1:]; sys.path.insert(0, root); runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-W", "error::UserWarning", "-W", "ignore:virtual_devices", "-c", code, str(ROOT), str(example)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout

"""Every script under examples/ runs in a process of its own, as a reader would run it, and warns of nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fork_server
from tests.launched import environ, launch
from tests.ports import reserve_port

ROOT = Path(__file__).resolve().parents[1]
# tests/lightning, tests/torchtitan and tests/huggingface/test_trl.py run theirs: those packages are in folders beside the environment.
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if not path.stem.startswith(("lightning", "torchtitan", "trl")))


SHOWN_ELSEWHERE = {
    "megatron_mlp": "tests/test_readme.py runs the same model and step, which the README shows",
    "jax_both_ways": "tests/interop has its parts",
    "train_gpt2": "tests/test_train_gpt2.py runs it seven times",
    "huggingface_trainer": "tests/huggingface/test_trainer.py trains the same beside CPU torch",
    "peft_lora": "and tests/huggingface/test_peft.py",
    "finetune_safetensors": "tests/checkpoint/test_safetensors.py and tests/rules/test_presets.py have its parts",
    "generate_with_cache": "tests/test_models.py fills a static cache beside CPU torch",
    "llama_pod": "a minute of libtpu's compiler; tests/program/test_ahead_of_time.py compiles a smaller one",
    "streamed_text": "tests/train/test_text_files.py reads a recipe's text, tests/test_data.py keeps a loader's place",
    "two_hosts": "below, on two hosts, with a crash",
    "vision_amp_ema": "tests/patches/test_running_averages.py and tests/device/test_autocast.py have its parts",
    "accelerate_loop": "and tests/huggingface/test_accelerate.py",
    "distributed_data_parallel": "tests/torch_distributed/test_data_parallel.py has its parts",
    "torch_distributed": "tests/torch_distributed has its parts",
}
CASES = [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SHOWN_ELSEWHERE else []) for path in EXAMPLES]


@pytest.mark.parametrize("example", CASES)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    code = "import runpy, sys; root, *sys.argv = sys.argv[1:]; sys.path.insert(0, root); runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-W", "error::UserWarning", "-W", "ignore:virtual_devices", "-c", code, str(ROOT), str(example)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def losses(out: str) -> dict[int, str]:
    found = re.findall(r"step (\d+): loss (\S+)$", out, re.MULTILINE)
    return {int(step): loss for step, loss in found}


@pytest.mark.slow
def test_two_hosts_survive_a_crash_bit_for_bit(tmp_path: Path) -> None:
    """With a stand-in for ssh that runs the command here."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift\nexec sh -c "$1"\n', encoding="utf-8")
    ssh.chmod(0o755)
    options = ("-n", 2, "--hosts", "one,two", "--ssh", ssh, "--restarts", 1, "--coordinator", f"127.0.0.1:{reserve_port()}")
    program = ROOT / "examples" / "two_hosts.py"
    broken = launch(*options, program=program, arguments=("--out", tmp_path / "broken", "--steps", 9, "--crash", 7))
    assert broken.code == 0, broken.err
    assert "host two failed first" in broken.err and "restarting all 2 processes" in broken.err
    unbroken = launch("-n", 2, program=program, arguments=("--out", tmp_path / "unbroken", "--steps", 9))
    assert unbroken.code == 0, unbroken.err
    assert losses(broken.out) == losses(unbroken.out)
    assert len(losses(broken.out)) == 9


@pytest.mark.slow
def test_the_quick_starts_command_line_survives_its_crash(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^spmd (launch -n 2 --restarts 3 examples/two_hosts.py[^#\n]*)", page, re.MULTILINE)
    words = line.replace("examples/", f"{ROOT}/examples/").split()
    code, out, err = fork_server.run(["spmd.cli", *words], environ(), tmp_path)
    assert code == 0, err
    assert "restarting all 2 processes from the checkpoint of step 10" in err
    assert sorted(losses(out)) == [*range(1, 21)]


def test_the_quick_start_names_every_example() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    scripts = [path.name for path in (ROOT / "examples").iterdir() if not path.name.startswith("__")]
    assert [name for name in scripts if f"](../examples/{name})" not in page] == []

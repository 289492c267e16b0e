"""What a library or a user's own part raises: a line at the terminal, the traceback in a file or behind --debug."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd.train import _train_command
from spmd.train._train_command import main
from tests.launched import ROOT, launch

RECIPE = """
out = "{out}"
steps = 2
[model]
own = "tests.train.failing_parts:model"
[data]
kind = "dataset"
own = "tests.train.failing_parts:Pairs"
batch = 16
shuffle = false
[checkpoint]
every = 0
export = false
"""

# overrides -> how the line begins, after "spmd train: "
FAILURES = {
    "--data.arguments.path no/pairs.jsonl": "[data]: FileNotFoundError: [Errno 2] No such file or directory: 'no/pairs.jsonl' (at",
    "--data.arguments.fails_at 9": "loading a batch: ValueError: sample 9 is damaged (at failing_parts.py:",
    "--model.arguments.features 6": "step 1: RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x8 and 6x4)",
    "--model.arguments.name tests": "[model]: ValueError: Unrecognized model in tests.",
}


def recipe(folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text(RECIPE.replace("{out}", str(folder / "run")), encoding="utf-8")
    return path


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("overrides", FAILURES)
def test_what_ends_a_run_is_one_line_and_the_traceback_a_file(
    overrides: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main([str(recipe(tmp_path)), *overrides.split()]) == 1
    said = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("spmd: ")]
    (line,) = said
    assert line.startswith(f"spmd train: {FAILURES[overrides]}")
    log = tmp_path / "run" / "error.txt"
    assert line.endswith(f"; the traceback is in {log}; --debug shows it here")
    whole = log.read_text(encoding="utf-8")
    assert whole.startswith("Traceback") and whole.count("\n") > 5


@pytest.mark.multidevice(num=8)
def test_debug_shows_the_whole_of_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no/pairs.jsonl"):
        main([str(recipe(tmp_path)), "--data.arguments.path", "no/pairs.jsonl", "--debug"])
    assert not (tmp_path / "run" / "error.txt").exists()


def test_an_error_without_words_and_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").touch()  # a file where the folder should be

    def failing(recipe: object) -> None:
        raise MemoryError

    monkeypatch.setattr(_train_command, "Run", failing)
    assert main([str(recipe(tmp_path))]) == 1
    assert capsys.readouterr().err.startswith("spmd train: MemoryError (at test_failed_run.py:")


def test_ctrl_c_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(recipe: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_train_command, "Run", stopped)
    assert main([str(recipe(tmp_path))]) == 130
    assert capsys.readouterr().err == "spmd train: stopped by Ctrl-C; the same command resumes from the last checkpoint\n"


@pytest.mark.slow
def test_in_a_job_each_process_says_its_line_and_the_first_is_the_reason(tmp_path: Path) -> None:
    words = ("-m", "spmd.train", recipe(tmp_path), "--data.arguments.fails_at", 9)
    done = launch("-n", 2, "--devices-per-process", 1, program=Path("--"), arguments=words)
    assert done.code == 1
    assert "ValueError: sample 9 is damaged" in done.err and "Traceback" not in done.err
    assert list((tmp_path / "run").glob("error*.txt"))

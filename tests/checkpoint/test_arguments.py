"""The functions of `spmd.checkpoint` refuse arguments of wrong types before anything changes on the disk."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spmd
from spmd import checkpoint

LINEAR = torch.nn.Linear(2, 2)
CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "save wait": (lambda path: checkpoint.save(path, 1, {}, wait="x"), "wait of save must be True or False, got 'x'"),  # type: ignore[arg-type]
    "save step": (lambda path: checkpoint.save(path, np.ones(3), {}), "step of save must be an integer, got a ndarray"),  # type: ignore[arg-type]
    "reshard to no mesh": (lambda path: checkpoint.reshard(path, path, None), "mesh of reshard must be a text .*, got None"),  # type: ignore[arg-type]
    "reshard to a number": (lambda path: checkpoint.reshard(path, path, 8), "mesh of reshard must be a text .*, got 8"),  # type: ignore[arg-type]
    "reshard of nothing": (lambda path: checkpoint.reshard("", path, "data=1"), "reshard takes the path of a folder first, got ''"),
}
OF_A_PATH: dict[str, Callable[[Any], Any]] = {
    "save": lambda path: checkpoint.save(path, 1, {"n": 3}, wait=True),
    "restore": checkpoint.restore,
    "has_step": checkpoint.has_step,
    "steps": checkpoint.steps,
    "verify": checkpoint.verify,
    "save_safetensors": lambda path: checkpoint.save_safetensors(path, LINEAR),
    "reshard": lambda path: checkpoint.reshard(path, path, "data=1"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    call, text = CASES[name]
    with pytest.raises(spmd.CheckpointError, match=text) as refused:
        call(tmp_path / "new")
    assert "\n  fix: " in str(refused.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["", 3, None])
@pytest.mark.parametrize("name", OF_A_PATH)
def test_what_is_no_path_is_refused(name: str, path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(spmd.CheckpointError, match=f"{name} takes the path of a folder first, got {path!r}\n") as refused:
        OF_A_PATH[name](path)
    assert "\n  fix: " in str(refused.value) and not os.listdir()


def test_join_takes_a_path_or_none() -> None:
    checkpoint.join()
    with pytest.raises(spmd.CheckpointError, match="join takes the path of a folder first, got 3"):
        checkpoint.join(3)  # type: ignore[arg-type]

"""Records on their way out: what each writer makes of one, and what a missing package is told."""

from __future__ import annotations

import importlib.machinery
import json
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from spmd.train._recipe import Metrics
from spmd.train._writers import Record, Terminal, flat, writers_of

RECORD = Record(3, 12.5, {"loss": 0.5, "step_s": {"median": 0.25, "max": 0.5}, "memory_bytes": 1536, "tokens_per_s": 2000.0, "mfu": 0.5})
FLAT = {"loss": 0.5, "step_s/median": 0.25, "step_s/max": 0.5, "memory_bytes": 1536, "tokens_per_s": 2000.0, "mfu": 0.5}


class Heard:
    """Stands for a package: keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, *args, kwargs)) or self


def installed(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def test_json_lines_are_appended_whole(tmp_path: Path) -> None:
    for _ in range(2):
        writers_of(Metrics(writers=("json",)), tmp_path, 9).write(RECORD)
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 3, "time": 12.5, **RECORD.values}] * 2


def test_the_terminal_gets_a_line_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal(9).write(RECORD)
    assert capsys.readouterr().out == "step 3/9  loss 0.5  memory 1.5 KiB  tokens/s 2,000  mfu 50.0%\n"


def test_names_of_nested_numbers_are_joined() -> None:
    assert flat(RECORD.values) == FLAT
    assert flat({"samples": ["a", "b"]}) == {"samples/0": "a", "samples/1": "b"}


def test_tensorboard_gets_scalars_and_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    heard = Heard()
    installed(monkeypatch, "tensorboard")
    installed(monkeypatch, "torch.utils.tensorboard", SummaryWriter=heard.SummaryWriter)
    writers = writers_of(Metrics(writers=("tensorboard",)), tmp_path, 9)
    writers.write(RECORD)
    writers.write(Record(4, 13.0, {"samples": ["a"]}))
    writers.flush()
    scalars = [("add_scalar", name, value, 3, 12.5, {}) for name, value in FLAT.items()]
    assert heard.calls == [
        ("SummaryWriter", tmp_path / "tensorboard", {}),
        *scalars,
        ("add_text", "samples/0", "a", 4, 13.0, {}),
        ("flush", {}),
    ]


def test_weights_and_biases_goes_on_under_the_name_of_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    heard = Heard()
    installed(monkeypatch, "wandb", init=heard.init)
    writers_of(Metrics(writers=("wandb",), project="p"), tmp_path / "run", 9).write(RECORD)
    assert heard.calls == [("init", {"project": "p", "name": "run", "id": "run", "resume": "allow"}), ("log", FLAT, {"step": 3})]


def test_a_package_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with caplog.at_level(logging.WARNING, "spmd.train"):
        writers_of(Metrics(writers=("tensorboard", "json")), tmp_path, 9).write(RECORD)
    assert [record.getMessage() for record in caplog.records] == [
        "[metrics] writers: tensorboard is not installed, so its records are not written; fix: pip install tensorboard"
    ]
    assert (tmp_path / "metrics.jsonl").exists()

"""Writes the records of a run: to the terminal, a JSON lines file, TensorBoard, Weights & Biases. Only process 0 of a job writes."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from mesh import size_text
from spmd.train._recipe import Metrics

_log = logging.getLogger("spmd.train")


@dataclass(frozen=True)
class Record:
    """Metrics or texts of one step.

    Attributes:
        step: number of steps so far.
        time: Unix time, in seconds.
        values: metrics by name. Each entry of a nested dict or list is one metric.
    """

    step: int
    time: float
    values: dict[str, Any]


class Writer(Protocol):
    """Receives records in the order of the steps."""

    def write(self, record: Record) -> None: ...

    def flush(self) -> None: ...


class JsonLines:
    """One JSON object per line. A resumed run appends to its file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, record: Record) -> None:
        line = json.dumps({"step": record.step, "time": record.time, **record.values})
        with self._path.open("a", encoding="utf-8") as file:  # closed after each line, so a killed run leaves complete lines
            file.write(line + "\n")

    def flush(self) -> None: ...


class Terminal:
    """One line per record, for people."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, markup=False, soft_wrap=True)
        self._steps = steps

    def write(self, record: Record) -> None:
        shown = [_shown(name, value) for name, value in record.values.items() if name not in ("seconds", "step_s")]
        self._console.print(f"step {record.step}/{self._steps}", *shown, sep="  ")

    def flush(self) -> None: ...


class TensorBoard:
    """TensorBoard event files: numbers as scalars, texts as texts."""

    def __init__(self, folder: Path) -> None:
        self._board = importlib.import_module("torch.utils.tensorboard").SummaryWriter(folder)

    def write(self, record: Record) -> None:
        for name, value in flat(record.values).items():
            add = self._board.add_text if isinstance(value, str) else self._board.add_scalar
            add(name, value, record.step, record.time)

    def flush(self) -> None:
        self._board.flush()


class WeightsAndBiases:
    """A Weights & Biases run. It is resumed when the recipe's run is resumed."""

    def __init__(self, project: str, name: str) -> None:
        self._run = importlib.import_module("wandb").init(project=project, name=name, id=name, resume="allow")

    def write(self, record: Record) -> None:
        self._run.log(flat(record.values), step=record.step)

    def flush(self) -> None:
        """Do nothing: wandb sends records in the background, and the rest when the process ends."""


class Writers:
    """All writers of a recipe. Empty in every process except process 0."""

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = writers

    def write(self, record: Record) -> None:
        for writer in self._writers:
            writer.write(record)

    def flush(self) -> None:
        for writer in self._writers:
            writer.flush()


_OPTIONAL = ("tensorboard", "wandb")  # writers that need a package of the same name


def writers_of(table: Metrics, out: Path, steps: int) -> Writers:
    """The writers that a recipe names, for a run of `steps` steps in `out`. A writer whose package is missing is skipped with a warning."""
    make: dict[str, Callable[[], Writer]] = {
        "terminal": lambda: Terminal(steps),
        "json": lambda: JsonLines(out / "metrics.jsonl"),
        "tensorboard": lambda: TensorBoard(out / "tensorboard"),
        "wandb": lambda: WeightsAndBiases(table.project, out.name),
    }
    made: list[Writer] = []
    for name in table.writers:
        if name in _OPTIONAL and importlib.util.find_spec(name) is None:
            _log.warning("[metrics] writers: %s is not installed, so its records are not written; fix: pip install %s", name, name)
        else:
            made.append(make[name]())
    return Writers(made)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts and lists into one dict whose names are joined with a slash: "seconds/step"."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, list | tuple):
            found |= flat({str(number): item for number, item in enumerate(value)}, f"{prefix}{name}/")
        else:
            found[prefix + name] = value
    return found


def _shown(name: str, value: Any) -> str:
    if name == "memory_bytes":
        return f"memory {size_text(value)}"
    if name in ("goodput", "mfu", "evaluation_accuracy"):
        return f"{name} {value:.1%}"
    if name.endswith("_per_s"):
        return f"{name.removesuffix('_per_s')}/s {value:,.0f}"
    if isinstance(value, list):
        return "".join(f"\n    {text!r}" for text in value)
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


__all__ = ["JsonLines", "Record", "TensorBoard", "Terminal", "WeightsAndBiases", "Writer", "Writers", "flat", "writers_of"]

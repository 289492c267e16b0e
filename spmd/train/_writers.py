"""Where records of a run go: the terminal, and a file of JSON lines. Only process 0 of a job writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from mesh import size_text


@dataclass(frozen=True)
class Record:
    """Numbers, or texts, of a step.

    Attributes:
        step: steps made so far.
        time: seconds since 1970.
        values: by name; tables of numbers inside it are one metric each.
    """

    step: int
    time: float
    values: dict[str, Any]


class Writer(Protocol):
    """Takes records, in order."""

    def write(self, record: Record) -> None: ...

    def flush(self) -> None: ...


class JsonLines:
    """One JSON object a line, appended: a run that goes on goes on in its file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, record: Record) -> None:
        line = json.dumps({"step": record.step, "time": record.time, **record.values})
        with self._path.open("a", encoding="utf-8") as file:  # closed after each line: a run that is killed leaves whole ones
            file.write(line + "\n")

    def flush(self) -> None: ...


class Terminal:
    """A line for a person."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, markup=False, soft_wrap=True)
        self._steps = steps

    def write(self, record: Record) -> None:
        shown = [_shown(name, value) for name, value in record.values.items() if name not in ("seconds", "step_s")]
        self._console.print(f"step {record.step}/{self._steps}", *shown, sep="  ")

    def flush(self) -> None: ...


class Writers:
    """All that a recipe asks for; none but in process 0."""

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = writers

    def write(self, record: Record) -> None:
        for writer in self._writers:
            writer.write(record)

    def flush(self) -> None:
        for writer in self._writers:
            writer.flush()


def writers_of(names: Sequence[str], out: Path, steps: int) -> Writers:
    """The writers that a recipe names, for a run in the folder `out` of `steps` steps."""
    made: dict[str, Any] = {"terminal": lambda: Terminal(steps), "json": lambda: JsonLines(out / "metrics.jsonl")}
    return Writers([made[name]() for name in names])


def _shown(name: str, value: Any) -> str:
    if name == "memory_bytes":
        return f"memory {size_text(value)}"
    if name in ("goodput", "mfu"):
        return f"{name} {value:.1%}"
    if name.endswith("_per_s"):
        return f"{name.removesuffix('_per_s')}/s {value:,.0f}"
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


__all__ = ["JsonLines", "Record", "Terminal", "Writer", "Writers", "writers_of"]

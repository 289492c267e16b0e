"""Reports the exception that ended a run in one line: the part of the recipe or the step, the exception, and the traceback's file."""

from __future__ import annotations

import traceback
from pathlib import Path

from spmd.base._errors import line_of

# Function of spmd.train -> its activity in the report. The innermost such function in the traceback is reported.
_ACTIVITIES = {
    "dataset_of": "[data]",
    "held_out_of": "[evaluation]",
    "built_model": "[model]",
    "built_optimizer": "[optimizer]",
    "training_batches": "[data]",
    "tokenizer_of": "the tokenizer",
    "writers_of": "[metrics] writers",
    "_resume": "resuming from the checkpoint",
    "_timed_batches": "loading a batch",
    "evaluate": "evaluating",
    "sample": "[samples]",
    "_save": "saving a checkpoint",
    "export": "exporting the model",
}
_MAX_CHARACTERS = 300


def line_of_failure(error: BaseException, log: Path | None) -> str:
    """One line: "[model]: OSError: ... (at parts.py:12 in model); the traceback is in runs/a/error.txt".

    Args:
        error: the exception that nothing caught.
        log: the file with the traceback, or None if it could not be written.
    """
    activity = _activity(error)
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    summary = f"{type(error).__name__}{f': {first_line}' if first_line else ''}"
    summary = summary if len(summary) <= _MAX_CHARACTERS else f"{summary[: _MAX_CHARACTERS - 3]}..."
    place = line_of(error)
    where = "" if log is None else f"the traceback is in {log}; "
    return f"{f'{activity}: ' if activity else ''}{summary}{f' (at {place})' if place else ''}; {where}--debug shows it here"


def write_traceback(error: BaseException, path: Path) -> Path | None:
    """Write the whole traceback to `path`. Returns None if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        return None
    return path


def _activity(error: BaseException) -> str:
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("spmd.train."):
            name, run = frame.f_code.co_name, frame.f_locals.get("self")
            found = f"step {run.step + 1}" if name == "_one_step" and run is not None else _ACTIVITIES.get(name, found)
    return found


__all__ = ["line_of_failure", "write_traceback"]

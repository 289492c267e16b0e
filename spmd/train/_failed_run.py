"""What ended a run, in a line: which part of the recipe or which step, whose words, and the file that has the traceback."""

from __future__ import annotations

import traceback
from pathlib import Path

from spmd.base._errors import line_of

# function of spmd.train that an exception passed through -> what it was doing; the innermost one counts
_DOING = {
    "dataset_of": "[data]",
    "held_out_of": "[evaluation]",
    "built_model": "[model]",
    "built_optimizer": "[optimizer]",
    "training_batches": "[data]",
    "tokenizer_of": "the tokenizer",
    "writers_of": "[metrics] writers",
    "_resume": "going on from the checkpoint",
    "_timed_batches": "taking a batch",
    "evaluate": "evaluating",
    "sample": "[samples]",
    "_save": "a checkpoint",
    "export": "writing the model",
}
_LONGEST = 300


def line_of_failure(error: BaseException, log: Path | None) -> str:
    """One line: "[model]: OSError: ... (at parts.py:12 in model); the traceback is in runs/a/error.txt".

    Args:
        error: what nobody caught.
        log: the file that has the traceback; None: no such file could be written.
    """
    doing = _doing(error)
    words = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    said = f"{type(error).__name__}{f': {words}' if words else ''}"
    said = said if len(said) <= _LONGEST else f"{said[: _LONGEST - 3]}..."
    place = line_of(error)
    where = "" if log is None else f"the traceback is in {log}; "
    return f"{f'{doing}: ' if doing else ''}{said}{f' (at {place})' if place else ''}; {where}--debug shows it here"


def write_traceback(error: BaseException, path: Path) -> Path | None:
    """The whole traceback as a file; None where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        return None
    return path


def _doing(error: BaseException) -> str:
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("spmd.train."):
            name, run = frame.f_code.co_name, frame.f_locals.get("self")
            found = f"step {run.step + 1}" if name == "_one_step" and run is not None else _DOING.get(name, found)
    return found


__all__ = ["line_of_failure", "write_traceback"]

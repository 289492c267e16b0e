"""Records: small files that the processes of a job and its launcher exchange."""

from __future__ import annotations

import os
from pathlib import Path


def write_record(path: Path, text: str) -> None:
    """Write the file atomically: a concurrent reader sees either all of the new text or the previous file.

    Raises:
        OSError: the file cannot be written; the previous one is unchanged.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)

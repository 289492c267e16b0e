"""Records: small files that the processes of a job and its launcher exchange."""

from __future__ import annotations

import os
from pathlib import Path


def write_record(path: Path, text: str) -> None:
    """Write the file so that who reads it meanwhile finds all of it, or what was there before.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)

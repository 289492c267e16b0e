"""Files that a trace opens to read, by whatever function: Python tells its audit hooks of each one. Every call expects the same content.

open(path, encoding="latin-1"); codecs.open(path); gzip.open(path); shutil.copy(path, other)
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

from spmd.program.reads._hooks import now, without_hooks
from spmd.program.reads._outside import question_of_file

_CODE = (".py", ".pyc", ".so")  # read by imports and tracebacks
_OF_THE_SYSTEM = ("/proc/", "/sys/", "/dev/")


@cache
def watch() -> None:
    """Install the audit hook; once, since a process cannot remove one."""
    sys.addaudithook(_audited)


def _audited(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and (recording := now()) is not None:
        path, _, flags = args
        if isinstance(path, (str, bytes, os.PathLike)) and not flags & (os.O_WRONLY | os.O_RDWR):  # files are written while tracing only
            name = os.fsdecode(path)
            if not name.endswith(_CODE) and not name.startswith(_OF_THE_SYSTEM):
                without_hooks(recording, recording.ask_all, [question_of_file(name)])


__all__ = ["watch"]

"""Checks the path of a file before the work of writing it is done."""

from __future__ import annotations

import os
from pathlib import Path

from spmd.base._errors import SpmdError, called_at, message, shown


def file_path(path: object, taker: str, call: str) -> Path:
    """`path`, a path of a file.

    Args:
        path: what the user passed.
        taker: name of the function, for the error.
        call: a call of it as code, with `{path}` for the path.

    Raises:
        SpmdError: it is no path.
    """
    if not isinstance(path, str | os.PathLike) or not str(path):
        what = f"{taker} takes the path of a file, got {shown(path)}"
        raise SpmdError(message(what, *called_at(), fix=call.format(path=repr("programs.spmd"))))
    return Path(path)


def file_to_write(path: object, taker: str, call: str) -> Path:
    """`path`, a path at which a file can be made; see `file_path`.

    Raises:
        SpmdError: it is no path, is a folder, or its folder does not exist.
    """
    found = file_path(path, taker, call)
    if found.is_dir():
        fix = call.format(path=repr(str(found / "programs.spmd")))
        raise SpmdError(message(f"{taker} takes the path of a file, and {str(found)!r} is a folder", *called_at(), fix=fix))
    if not found.parent.is_dir():
        what = f"{taker} cannot write {str(found)!r}: there is no folder {str(found.parent)!r}"
        raise SpmdError(message(what, *called_at(), fix=f"os.makedirs({str(found.parent)!r}, exist_ok=True) before the call"))
    return found


__all__ = ["file_path", "file_to_write"]

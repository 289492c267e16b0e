"""Checks that commands make of their input before any work.

Raises:
    UsageError: from every check that fails, with a message of one line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mesh._mesh_errors import nearest
from spmd.base._errors import UsageError


def require_least(given: Mapping[str, float], least: Mapping[str, float]) -> None:
    """Check that every option named in `least` is finite and at least that large."""
    for option, smallest in least.items():
        value = given[option.removeprefix("--").replace("-", "_")]
        if not smallest <= value < math.inf:
            raise UsageError(f"{option} must be at least {smallest:g}, got {value:g}")


def require_writable(option: str, path: Path | None) -> None:
    """Check that a file can be written at `path`. Missing parent folders are created."""
    if path is None:
        return
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except FileExistsError as error:  # from `mkdir`
        raise UsageError(f"{option} {path} cannot be written: {path.parent} is not a folder") from error
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {error.strerror or error}") from error


def require_exists(option: str, path: Path | None, *, is_folder: bool | None = None) -> None:
    """Check that a file or folder exists at `path`."""
    if path is None:
        return
    with suppress(OSError):
        if path.is_dir() if is_folder else path.is_file() if is_folder is False else path.exists():
            return
    kind = "folder" if is_folder else "file" if is_folder is False else "file or folder"
    raise UsageError(f"{option} {path}: no such {kind}")


def mesh_axes(option: str, text: str, known: Sequence[str] = ()) -> dict[str, int]:
    """Parse "data=4,model=2" to axes and sizes. `known`: the only valid axis names; empty: any name is valid."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not name or not equals or not size.isdecimal() or not int(size):
            raise UsageError(f"{option} {text!r} is not a mesh: write axes and their sizes, like data=4,model=2")
        if known and name not in known:
            raise UsageError(f"{option} {text!r}: no axis {name!r}{nearest(name, known) or ', only ' + ' and '.join(known)}")
        if name in axes:
            raise UsageError(f"{option} {text!r} names axis {name!r} twice")
        axes[name] = int(size)
    return axes


__all__ = ["mesh_axes", "require_exists", "require_least", "require_writable"]

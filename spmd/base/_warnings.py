"""Sees the warnings that Python shows, those that a filter ignores excluded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

_python: Any = warnings


@contextmanager
def warnings_shown(note: Callable[[warnings.WarningMessage], None]) -> Generator[None]:
    """While active, call `note` with each warning before it is shown."""
    show = _python._showwarnmsg_impl  # a function of Python 3.6 and later, which `catch_warnings(record=True)` replaces too

    def noting(message: warnings.WarningMessage) -> None:
        note(message)
        show(message)

    noting.__wrapped__ = show  # type: ignore[attr-defined]
    _python._showwarnmsg_impl = noting
    try:
        yield
    finally:
        if _python._showwarnmsg_impl is noting:
            _python._showwarnmsg_impl = show


__all__ = ["warnings_shown"]

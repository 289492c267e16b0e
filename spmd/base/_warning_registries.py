"""Keeps what Python has noted of the warnings that it shows once for each place.

A `catch_warnings` block, as torch and jax have many, makes Python forget them all: it shows the warnings of a step again.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

_start: ContextVar[tuple[list[Any], int] | None] = ContextVar("filters of warnings, and their version", default=None)


@contextmanager
def shown_warnings_kept() -> Generator[None]:
    """A context after which the warnings that were shown before it, and in it, still count as shown, unless the filters differ."""
    token = _start.set((list(warnings.filters), _version()))
    try:
        yield
    finally:
        keep_shown_warnings()
        _start.reset(token)


@contextmanager
def ignored(text: str) -> Generator[None]:
    """A context that ignores warnings whose text matches the regular expression `text`. Others that were shown still count as shown."""
    start = _start.get()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", text)
        token = _start.set(start and (list(warnings.filters), start[1]))
        try:
            yield
        finally:
            _start.reset(token)


def keep_shown_warnings() -> None:
    """In such a context: the warnings that were shown before it, and in it, still count as shown now."""
    filters, version = _start.get() or ([], -1)
    if warnings.filters == filters and (now := _version()) != version:
        for module in list(sys.modules.values()):
            registry = getattr(module, "__dict__", {}).get("__warningregistry__")
            if type(registry) is dict and version <= registry.get("version", -1) < now:
                registry["version"] = now


def _version() -> int:
    """The number that Python writes to a registry of shown warnings: of the last change of the filters.

    Nothing else gives it. The category is a function, which the filters refuse after the number was written.
    """
    registry: dict[Any, Any] = {}
    if warnings.filters:
        with suppress(TypeError):
            warnings.warn_explicit("", str.strip, "", 0, registry=registry)  # type: ignore[arg-type]
    return registry.get("version", -1)


__all__ = ["ignored", "keep_shown_warnings", "shown_warnings_kept"]

"""Removes the note that jax adds to an exception which passes through it: "For simplicity, JAX has removed its internal frames".

An exception of the user's function that leaves a trace is the user's own, with the notes that the user gave it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

_WORDS = "JAX has removed its internal frames"


@contextmanager
def without_jax_note() -> Generator[None]:
    """Context whose exceptions have no note of jax. It goes around the outermost call of jax, which adds one."""
    try:
        yield
    except BaseException as error:
        notes = getattr(error, "__notes__", None)
        if isinstance(notes, list) and notes and isinstance(notes[-1], str) and _WORDS in notes[-1]:
            notes.pop()
            if not notes:
                del error.__notes__
        raise


__all__ = ["without_jax_note"]

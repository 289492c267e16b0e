"""Exceptions of `mesh`, its one warning, and `message`, which formats every error text of the project.

The tree of all exceptions, of `mesh` and of `spmd`, is drawn in `spmd/base/_errors.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from difflib import get_close_matches
from typing import ClassVar

# Code that must learn of every exception raised, caught or not, sets a list here; `Noted` appends to it.
noted: ContextVar[list[Exception] | None] = ContextVar("noted", default=None)


class Noted(Exception):
    """An exception that is recorded in `noted` when created, so that a traced function cannot swallow it."""

    is_noted: ClassVar[bool] = True

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        listening = noted.get()
        if self.is_noted and listening is not None:
            listening.append(self)


class SpmdError(Noted):
    """Base of every exception that `mesh` and `spmd` raise."""


class MeshError(SpmdError, ValueError):
    """A mesh, a spec or a device request is invalid; base of the errors about meshes."""

    is_noted = False  # raised alike inside and outside a trace, so a function that catches it behaves the same in both


class SpecError(MeshError):
    """A PartitionSpec is malformed, or does not fit its mesh or its tensor."""


class RulesError(SpecError):
    """Strict rules for a model make suspicious placements."""


class DeviceError(MeshError, RuntimeError):
    """The requested devices do not exist, or were requested too late."""


class JobError(SpmdError, RuntimeError):
    """The processes of a job could not start together, disagree, or have lost one of them."""

    is_noted = False


class AcceleratorIdle(UserWarning):
    """Virtual CPU devices were requested on a machine that seems to have an accelerator."""


def message(what: str, *details: str, fix: str) -> str:
    """Text of an error in the project's form: what is wrong, the values on both sides, the shortest fix.

        >>> print(message("the mesh has no axis 'modle'", "axes: data, model", fix="write 'model'"))
        the mesh has no axis 'modle'
          axes: data, model
          fix: write 'model'

    Args:
        what: what is wrong, in the user's words, with the thing's own name.
        details: the values on both sides, one line each.
        fix: the shortest change that helps, as code where possible.
    """
    return "\n".join([what, *(f"  {line}" for line in details), f"  fix: {fix}"])


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggestion to append to an error about a misspelt word: "; did you mean 'data'?", or "" if no word of `known` is close."""
    found = get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""

"""Parts of a restore plan: references to saved arrays, final actions, the sharding of a target, and the error for a mismatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from spmd.base._errors import CheckpointError, message
from spmd.device._storage import Buffer

Finish = Callable[[], Any]
"""The last part of a plan: changes the program's object after everything was read, and returns the restored value."""
_MAX_NAMES = 3  # names shown in an error


class Ref(NamedTuple):
    """A saved array that has not been read yet: its number in the manifest, and its kind (see `_tree.kind_of`)."""

    number: int
    kind: str


def layout_of(buffer: Buffer) -> jax.sharding.Sharding | None:
    """The sharding to restore a tensor with: its annotation, else the one that a program gave it; None if it is not on a mesh."""
    if buffer.annotation is not None:
        return buffer.annotation.to_jax()
    sharding = getattr(buffer.value, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def first_names(names: list[Any]) -> str:
    """The first few names and the number of the others, for an error."""
    shown = ", ".join(repr(name)[:80] for name in names[:_MAX_NAMES])
    return shown + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "") if names else "nothing"


def mismatch(path: str, *details: str, fix: str = "restore into the program that saved it, or restore another step") -> CheckpointError:
    """The error for a saved value that does not match the program's at `path`."""
    return CheckpointError(message(f"the checkpoint does not match {path or 'the state'!r}", *details, fix=fix))


__all__ = ["Finish", "Ref", "layout_of", "first_names", "mismatch"]

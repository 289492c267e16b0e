"""The entries of a restore plan: an array not read yet, an action for the end, the target of values, and the error for a mismatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from spmd.base._errors import CheckpointError, message
from spmd.device._storage import Buffer

Finish = Callable[[], Any]
_SHOWN = 3  # names in an error


class Ref(NamedTuple):
    """An array of the saved state that is not read yet: its number, and what it was."""

    number: int
    kind: str


def layout_of(buffer: Buffer) -> jax.sharding.Sharding | None:
    """Where a tensor's values go: its annotation, else the mesh that a program laid it out on, else nowhere yet."""
    if buffer.annotation is not None:
        return buffer.annotation.to_jax()
    sharding = getattr(buffer.value, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def some(names: list[Any]) -> str:
    """A few of the names, for an error."""
    shown = ", ".join(repr(name)[:80] for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "") if names else "nothing"


def unfit(path: str, *details: str, fix: str = "restore into the program that saved, or another step") -> CheckpointError:
    """The error for a saved state of another program."""
    return CheckpointError(message(f"the checkpoint does not match {path or 'the state'!r}", *details, fix=fix))


__all__ = ["Finish", "Ref", "layout_of", "some", "unfit"]

"""Arrays that the user may also hold, because `to_jax` returned them or `from_jax` received them. Programs never donate them.

Note [Shared arrays]
A compiled call donates the arrays of the state that it updates, which would delete arrays that the user still holds. For a buffer
with a shared array, the call donates a copy instead. This happens once, because the new value is not shared. An array counts as
shared as long as it is alive, because it cannot be determined whether only the buffer still refers to it.
"""

from __future__ import annotations

import weakref
from typing import Any

from spmd.device._arrays import copied

_shared: dict[int, weakref.ref[Any]] = {}  # by id of the array


def note_shared(array: Any) -> None:
    """Record that the user may hold the array too."""
    key = id(array)
    _shared[key] = weakref.ref(array, lambda _: _shared.pop(key, None))


def is_shared(array: Any) -> bool:
    """Whether the user may hold the array too."""
    found = _shared.get(id(array))
    return found is not None and found() is array


def donatable(values: list[Any]) -> list[Any]:
    """The values with shared arrays replaced by copies, so that a program may donate all of them."""
    return [copied(value) if is_shared(value) else value for value in values] if _shared else values


def copy_shared(state: list[Any]) -> None:
    """Copy arrays that occur more than once in `state`, in place: an array can be donated only once."""
    if len(set(map(id, state))) == len(state):
        return
    seen: set[int] = set()
    for i, value in enumerate(state):
        if id(value) in seen:
            state[i] = copied(value)
        seen.add(id(value))


__all__ = ["copy_shared", "donatable", "is_shared", "note_shared"]

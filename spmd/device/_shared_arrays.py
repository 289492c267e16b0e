"""Arrays that somebody else holds too: `to_jax` handed them out, or `from_jax` took them in. No program takes their memory.

Note [Shared arrays]
A compiled call donates the arrays of the state that it updates, and so would take the memory from under whoever holds one of them.
A buffer whose array was lent gives the program a copy of it instead, once: the new value is the program's own. An array counts as
lent for as long as it lives; no one can tell whether only the buffer still holds it.
"""

from __future__ import annotations

import weakref
from typing import Any

from spmd.device._arrays import copied

_shared: dict[int, weakref.ref[Any]] = {}  # by id of the array


def note_shared(array: Any) -> None:
    """The array is held outside too."""
    key = id(array)
    _shared[key] = weakref.ref(array, lambda _: _shared.pop(key, None))


def is_shared(array: Any) -> bool:
    """Whether it was lent."""
    found = _shared.get(id(array))
    return found is not None and found() is array


def donatable(values: list[Any]) -> list[Any]:
    """Arrays that a program may take: those that are lent are replaced by copies."""
    return [copied(value) if is_shared(value) else value for value in values] if _shared else values


__all__ = ["is_shared", "note_shared", "donatable"]

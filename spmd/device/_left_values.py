"""The values that a program's last call left in buffers. The next call compares identities to find buffers written in between.

Note [Values that are left]. The list must not keep replaced values alive. Otherwise a restored checkpoint or `load_state_dict` would
be in memory next to the state that it replaces, until the next step. Giving a buffer another value therefore clears its entries.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmd.device._storage import Buffer

NOTHING: Any = object()  # sentinel, not identical to any value


class LeftValues:
    """The values that a program left in its buffers.

    Attributes:
        values: one value per buffer; `NOTHING` if another value was written since. See Note [Values that are left].
    """

    __slots__ = ("__weakref__", "values")

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self.values: list[Any] = []
        own: weakref.ref[LeftValues] = weakref.ref(self)
        for position, buffer in enumerate(buffers):
            self.values.append(NOTHING)
            buffer.left_by = [entry for entry in buffer.left_by if entry[0]() is not None] + [(own, position)]


def forget(left_by: Iterable[tuple[weakref.ref[LeftValues], int]]) -> None:
    """Clear the entries of a buffer, given as (values, position)."""
    for ref, position in left_by:
        left = ref()
        if left is not None:
            left.values[position] = NOTHING


__all__ = ["NOTHING", "LeftValues", "forget"]

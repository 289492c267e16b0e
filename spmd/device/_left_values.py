"""What a program's last call left in buffers: the next call compares identities, and looks at what somebody else has written since.

Note [Values that are left]. The list must not keep what nobody else has: a restored checkpoint or `load_state_dict` would lie in memory
beside the state that it replaces, until the next step. So a buffer that is given another value has its entries emptied.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmd.device._storage import Buffer

NOTHING: Any = object()  # which no value is


class LeftValues:
    """The values that a program left in its buffers, by position.

    Attributes:
        values: `NOTHING` where another value was written since. See Note [Values that are left].
    """

    __slots__ = ("__weakref__", "values")

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self.values: list[Any] = []
        own: weakref.ref[LeftValues] = weakref.ref(self)
        for position, buffer in enumerate(buffers):
            self.values.append(NOTHING)
            buffer.left_by = [entry for entry in buffer.left_by if entry[0]() is not None] + [(own, position)]


def forget(left_by: Iterable[tuple[weakref.ref[LeftValues], int]]) -> None:
    """Empty the entries of a buffer."""
    for ref, position in left_by:
        left = ref()
        if left is not None:
            left.values[position] = NOTHING


__all__ = ["NOTHING", "LeftValues", "forget"]

"""The arrays of a call's tensor arguments: those that the program updates, which are donated, and the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from spmd.device._storage import Buffer

_value = attrgetter("value")


class ArgumentArrays:
    """Prepares the arrays of the arguments, and stores their new values.

    Args:
        number: number of tensor arguments.
        written: positions of the arguments that the program updates.
        is_on_mesh: whether the program runs on a mesh.

    Attributes:
        written, kept: positions of the arguments that the program updates, and of the others.
        shardings: the sharding that the program expects of each argument; empty until the program is compiled.
    """

    def __init__(self, number: int, written: Iterable[int], is_on_mesh: bool) -> None:
        self.written = list(written)
        is_written = set(self.written)
        self.kept = [i for i in range(number) if i not in is_written]
        self.shardings: list[Any] = []
        self._is_on_mesh = is_on_mesh

    def current(self, buffers: Sequence[Buffer]) -> tuple[list[Any], list[Any]]:
        """(arrays of the updated arguments, arrays of the others), with the shardings that the program expects."""
        for buffer, sharding in zip(buffers, self.shardings, strict=True):
            value = buffer.value
            if value is None:
                buffer.place(sharding if self._is_on_mesh else None)
            elif value.sharding is not sharding and value.sharding != sharding:
                buffer.place(sharding)
        values = list(map(_value, buffers))
        return ([values[i] for i in self.written], [values[i] for i in self.kept]) if self.written else ([], values)

    def store(self, buffers: Sequence[Buffer], values: Sequence[Any]) -> None:
        """Store the new values of the updated arguments."""
        for i, value in zip(self.written, values, strict=True):
            buffers[i].value = value


__all__ = ["ArgumentArrays"]

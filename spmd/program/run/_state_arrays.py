"""Buffers of a program's state, and their arrays as a call takes and leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

from spmd.device._left_values import NOTHING, LeftValues
from spmd.device._storage import Buffer
from spmd.program.run._program_devices import ProgramDevices

_EMPTY = Buffer(None, ())
_value = attrgetter("value")


class StateArrays:
    """State that a program updates, or that it only reads.

    Attributes:
        buffers: those of the next call: gradients, and what a place holds, may lie in others each time.
        shardings: how the program takes each; known when it is compiled.
    """

    def __init__(self, buffers: Sequence[Buffer], devices: ProgramDevices, *, is_written: bool) -> None:
        self.buffers = list(buffers)
        self.shardings: list[Any] = []
        self._is_written = is_written
        self._devices = devices
        self._left = LeftValues(self.buffers)

    def today(self, changed: list[Any]) -> list[Any]:
        """The arrays; those that are not what the last call left are laid out anew, and added to `changed`."""
        values, left = list(map(_value, self.buffers)), self._left.values
        if not all(map(is_, values, left)):
            for i, value in enumerate(values):
                if value is not left[i]:
                    values[i] = self._fitted(self.buffers[i], self.shardings[i])
                    changed.append(values[i])
            if not self._is_written:  # what the next call expects is what this one takes
                self._left.values = values
        return values

    def _fitted(self, buffer: Buffer, sharding: Any) -> Any:
        """A value that somebody else wrote since the last call, laid out as the program expects."""
        self._devices.settle(buffer)
        if buffer.raw().sharding != sharding:
            buffer.place(sharding)
        return buffer.value

    def first_is_new(self) -> bool:
        """Whether the first of them is not what the last call left."""
        return bool(self.buffers) and self.buffers[0].value is not self._left.values[0]

    def leave(self, values: list[Any]) -> None:
        """Write back what a call left."""
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer.value = value  # its host value is gone: `settle` has uploaded it
        self._left.values = values

    def let_go(self, position: int) -> None:
        """Hold nothing there until the next call, which may have another buffer."""
        self.buffers[position], self._left.values[position] = _EMPTY, NOTHING


__all__ = ["StateArrays"]

"""Buffers of a program's state, and their arrays before and after a call."""

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
    """The state that a program updates, or the state that it only reads.

    Attributes:
        buffers: the buffers of the next call. Gradients and tensors in assigned places may have other buffers in each call.
        shardings: the sharding that the program expects of each buffer; empty until the program is compiled.
    """

    def __init__(self, buffers: Sequence[Buffer], devices: ProgramDevices, *, is_written: bool) -> None:
        self.buffers = list(buffers)
        self.shardings: list[Any] = []
        self._is_written = is_written
        self._devices = devices
        self._left = LeftValues(self.buffers)

    def current(self, changed: list[Any]) -> list[Any]:
        """The arrays for a call. Arrays that were replaced since the last call are placed as expected, and added to `changed`."""
        values, left = list(map(_value, self.buffers)), self._left.values
        if not all(map(is_, values, left)):
            for i, value in enumerate(values):
                if value is not left[i]:
                    values[i] = self._fitted(self.buffers[i], self.shardings[i])
                    changed.append(values[i])
            if not self._is_written:  # the program does not replace these arrays, so the next call expects them again
                self._left.values = values
        return values

    def _fitted(self, buffer: Buffer, sharding: Any) -> Any:
        """A value that was written since the last call, with the sharding that the program expects."""
        self._devices.place(buffer)
        if buffer.raw().sharding != sharding:
            buffer.place(sharding)
        return buffer.value

    def first_has_changed(self) -> bool:
        """Whether the array of the first buffer was replaced since the last call."""
        return bool(self.buffers) and self.buffers[0].value is not self._left.values[0]

    def store(self, values: list[Any]) -> None:
        """Store the new values after a call."""
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer.value = value  # the buffer has no host value: `place` has uploaded it
        self._left.values = values

    def release(self, position: int) -> None:
        """Drop the references to a buffer and its array until the next call, which may have another buffer."""
        self.buffers[position], self._left.values[position] = _EMPTY, NOTHING


__all__ = ["StateArrays"]

"""Inputs of a call that the host computes: Python numbers, and the state of the random stream."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.device._random_stream import default_stream
from spmd.program.optim._lifted_numbers import LiftedNumbers
from spmd.program.run._program_devices import ProgramDevices


class HostInputs:
    """Uploads the vector of Python numbers and the random words. Values that did not change are not uploaded again.

    Args:
        numbers: the Python numbers that are inputs of the program.
        draws: number of random keys that a call draws.
        devices: the devices of the program.
    """

    def __init__(self, numbers: LiftedNumbers, draws: int, devices: ProgramDevices) -> None:
        self._lifted, self._draws, self._devices = numbers, draws, devices
        self._numbers: Any = None
        self._digest: bytes | None = None
        self._vector: Any = None
        self._words: Any = None

    def current(self) -> tuple[Any, Any]:
        """(numbers as float64[count], random words as uint32[4]) for the next call."""
        if self._lifted.today is not self._numbers:
            self._upload(self._lifted.today)
        if self._draws or self._words is None:
            self._words = self._devices.array_of(default_stream.words())
        return self._vector, self._words

    def _upload(self, values: list[float]) -> None:
        numbers = np.array(values, np.float64)
        digest = numbers.tobytes()  # comparing bytes distinguishes -0.0 from 0.0, and NaN equals NaN
        if digest != self._digest:
            self._vector = self._devices.array_of(numbers)
        self._numbers, self._digest = values, digest


__all__ = ["HostInputs"]

"""What the host itself puts into a call: the numbers that are inputs, and the state of the random stream."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.device._random_stream import default_stream
from spmd.program.optim._lifted_numbers import LiftedNumbers
from spmd.program.run._program_devices import ProgramDevices


class HostInputs:
    """The vector of the numbers and the random words as arrays; what did not change stays on the devices."""

    def __init__(self, numbers: LiftedNumbers, draws: int, devices: ProgramDevices) -> None:
        self._lifted, self._draws, self._devices = numbers, draws, devices
        self._numbers: Any = None
        self._digest: bytes | None = None
        self._vector: Any = None
        self._words: Any = None

    def today(self) -> tuple[Any, Any]:
        """(numbers, random words) of the call to come."""
        if self._lifted.today is not self._numbers:
            self._take_numbers(self._lifted.today)
        if self._draws or self._words is None:
            self._words = self._devices.array_of(default_stream.words())
        return self._vector, self._words

    def _take_numbers(self, today: list[float]) -> None:
        numbers = np.array(today, np.float64)
        digest = numbers.tobytes()  # -0.0 is not 0.0, and NaN is NaN
        if digest != self._digest:
            self._vector = self._devices.array_of(numbers)
        self._numbers, self._digest = today, digest


__all__ = ["HostInputs"]

"""Numbers of the steps, read when they are there: nothing here makes the host wait for a device that is at work.

A step's numbers are 0-dim tensors of a program that may still run. They are kept until their arrays are ready, and read then. Only
a host that is `AHEAD` steps before its devices waits, for the oldest: the devices have work meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import torch

import mesh
from spmd.base._chips import peak_flops
from spmd.device._memory_statistics import counted
from spmd.device._storage import buffer_of
from spmd.train._clock import Clock
from spmd.train._recipe import Metrics
from spmd.train._writers import Record, Writers

AHEAD = 8  # steps


@dataclass(frozen=True)
class Cost:
    """What one call of the compiled step takes, from its program; on one device.

    Attributes:
        flops: of the matrix products and convolutions.
        memory_bytes: all allocations at the peak.
    """

    flops: int
    memory_bytes: int


class Meter:
    """Takes each step's numbers and hands records to the writers. What waits: step, tensors, what the host knew (None: no record).

    Args:
        table: how often, and the peak of a chip.
        clock: which has the seconds.
        writers: get records, in the order of the steps.
        units: what a step takes of the data, as {"tokens": 65536}.
    """

    def __init__(self, table: Metrics, clock: Clock, writers: Writers, units: Mapping[str, int]) -> None:
        self._every, self._clock, self._writers, self._units = table.every, clock, writers, units
        self._peak = table.peak_flops or peak_flops(mesh.devices()[0].device_kind)
        self._waiting: deque[tuple[int, dict[str, torch.Tensor], dict[str, Any] | None]] = deque()
        self._step_s: list[float] = []  # of the steps since the last record
        self._counted = 0.0
        self.cost: Cost | None = None

    @property
    def wants_flops(self) -> bool:
        """Whether MFU is known once a step's FLOPs are."""
        return self._peak is not None

    def after_step(self, step: int, numbers: Mapping[str, torch.Tensor], rate: float, *, is_last: bool, was_compiled: bool) -> None:
        """Note a step that was dispatched, and write what is there by now.

        Args:
            step: steps made.
            numbers: 0-dim tensors that the step returned.
            rate: learning rate of the step.
            is_last: there is a record of the last step, whatever its number.
            was_compiled: its time is none of a step.
        """
        busy = self._busy()
        if not was_compiled:
            self._step_s.append(busy - self._counted)
        self._counted = busy
        if step % self._every == 0 or is_last:
            self._waiting.append((step, dict(numbers), {"learning_rate": rate, **self._measured()}))
            self._step_s = []
        else:
            self._waiting.append((step, {"loss": numbers["loss"]}, None))
        self._write(AHEAD)

    def note(self, step: int, **values: Any) -> None:
        """A record of other numbers and texts of a step; tensors are read when they are there."""
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        self._waiting.append((step, tensors, {name: value for name, value in values.items() if name not in tensors}))
        self._write(AHEAD)

    def finish(self) -> None:
        """Wait for all numbers, and write them."""
        self._write(0)
        self._writers.flush()

    def _write(self, ahead: int) -> None:
        """Records whose numbers are there, and as many more as leave `ahead` waiting."""
        while self._waiting:
            step, tensors, known = self._waiting[0]
            is_forced = len(self._waiting) > ahead
            if not is_forced and not all(map(_is_ready, tensors.values())):
                return
            self._waiting.popleft()
            if known is not None:
                values = {name: tensor.item() for name, tensor in tensors.items()}
                self._writers.write(Record(step, time.time(), {**values, **known}))
            elif is_forced:
                jax.block_until_ready([buffer_of(tensor).value for tensor in tensors.values()])

    def _busy(self) -> float:
        seconds = self._clock.count()
        return seconds["step"] + seconds["data"]

    def _measured(self) -> dict[str, Any]:
        """What the host knows of the steps since the last record."""
        known: dict[str, Any] = {}
        if self._step_s:
            ordered = sorted(self._step_s)
            mean = sum(ordered) / len(ordered)
            known["step_s"] = {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1], "mean": mean}
            known |= {f"{name}_per_s": count / mean for name, count in self._units.items()}
            if self.cost is not None and self._peak:
                known["mfu"] = self.cost.flops / (mean * self._peak)
        memory = max((chip.get("peak_bytes_in_use", 0) for chip in counted()), default=0)
        if memory or self.cost is not None:
            known["memory_bytes"] = memory or (self.cost.memory_bytes if self.cost else 0)
        return known | {"goodput": self._clock.goodput, "seconds": self._clock.count()}


def _is_ready(tensor: torch.Tensor) -> bool:
    is_ready = getattr(buffer_of(tensor).value, "is_ready", None)
    return is_ready is None or bool(is_ready())


__all__ = ["AHEAD", "Cost", "Meter"]

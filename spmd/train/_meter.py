"""Reads the metrics of the steps without making the host wait for a busy device.

The metrics of a step are 0-dim tensors whose program may still be running. They wait in a queue until their arrays are ready. Only
when the host is more than `AHEAD` entries ahead of its devices does it wait, for the oldest entry; the devices still have work then.
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

AHEAD = 8  # entries of the queue: one per step, evaluation and set of samples


@dataclass(frozen=True)
class Cost:
    """Cost of one call of the compiled step on one device, computed from its program.

    Attributes:
        flops: FLOPs of the matrix products and convolutions.
        memory_bytes: all allocations at the peak.
    """

    flops: int
    memory_bytes: int


class Meter:
    """Collects the metrics of each step and passes records to the writers.

    Args:
        table: gives the number of steps between records, and a chip's peak FLOPs per second.
        clock: the clock of the run.
        writers: receive the records in the order of the steps.
        units: amount of data in one step, as {"tokens": 65536}.
    """

    def __init__(self, table: Metrics, clock: Clock, writers: Writers, units: Mapping[str, int]) -> None:
        self._every, self._clock, self._writers, self._units = table.every, clock, writers, units
        self._peak = table.peak_flops or peak_flops(mesh.devices()[0].device_kind)
        # step, its tensors, its values on the host (None: the step has no record)
        self._waiting: deque[tuple[int, dict[str, torch.Tensor], dict[str, Any] | None]] = deque()
        self._step_s: list[float] = []  # seconds of each step since the last record
        self._counted = 0.0
        self.cost: Cost | None = None

    @property
    def wants_flops(self) -> bool:
        """Whether MFU can be computed, given the FLOPs of a step: the peak of the chip is known."""
        return self._peak is not None

    def after_step(self, step: int, numbers: Mapping[str, torch.Tensor], rate: float, *, is_last: bool, was_compiled: bool) -> None:
        """Queue the metrics of a step that was dispatched, and write the records that are ready.

        Args:
            step: number of steps so far, including this one.
            numbers: 0-dim tensors that the step returned.
            rate: learning rate of the step.
            is_last: this is the last step of the run, which always gets a record.
            was_compiled: the call compiled the step, so its time is not counted as a step's.
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
        """Queue a record of other numbers and texts of a step. Tensors are read when they are ready."""
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        self._waiting.append((step, tensors, {name: value for name, value in values.items() if name not in tensors}))
        self._write(AHEAD)

    def finish(self) -> None:
        """Wait for all queued metrics and write their records."""
        self._write(0)
        self._writers.flush()

    def _write(self, ahead: int) -> None:
        """Write the records that are ready, and wait for older ones until at most `ahead` entries are queued."""
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
        """Metrics that the host measures: times, rates and memory of the steps since the last record."""
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

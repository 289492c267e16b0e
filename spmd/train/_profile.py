"""A trace of some steps, for TensorBoard's profile plugin or xprof: device operations under the names of the modules they come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import torch

import mesh
from spmd.base._errors import message
from spmd.device._storage import buffer_of
from spmd.train._recipe import Profile, RecipeError


class StepTrace:
    """Starts before the table's first step and ends after its last, for which it waits.

    Args:
        table: which steps.
        folder: each process writes into one of its own in it.

    Raises:
        RecipeError: no trace can be taken in this process.
    """

    def __init__(self, table: Profile, folder: Path) -> None:
        if table.first and mesh.has_topology():
            what = "[profile]: this process has compiled for a TPU topology, so it cannot take a profile"
            raise RecipeError(message(what, fix="train in a process of its own"))
        self._first, self._last, self._folder = table.first, table.first + table.steps - 1, folder
        self.is_running = False

    def before(self, step: int) -> None:
        """Step number `step`, from 1 on, comes now. A run that goes on inside the range traces the rest of it."""
        if self._first and self._first <= step <= self._last and not self.is_running:
            jax.profiler.start_trace(self._folder / f"process-{mesh.init().index}")
            self.is_running = True

    def after(self, step: int, numbers: Mapping[str, torch.Tensor]) -> None:
        """It was dispatched, and returned `numbers`."""
        if self.is_running and step == self._last:
            jax.block_until_ready([buffer_of(number).value for number in numbers.values()])
            self.stop()

    def stop(self) -> None:
        """Write the trace, if one is being taken."""
        if self.is_running:
            self.is_running = False
            jax.profiler.stop_trace()


__all__ = ["StepTrace"]

"""Profiles some steps with jax's profiler, for TensorBoard's profile plugin or xprof. Device operations have the names of their modules."""

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
    """A profile from the table's first step to its last. After the last step it waits for the devices.

    Args:
        table: the recipe's table [profile].
        folder: each process writes into its own subfolder.

    Raises:
        RecipeError: this process cannot take a profile, because it has compiled for a TPU topology.
    """

    def __init__(self, table: Profile, folder: Path) -> None:
        if table.first and mesh.has_topology():
            what = "[profile]: this process has compiled for a TPU topology, so it cannot take a profile"
            raise RecipeError(message(what, fix="train in a new process"))
        self._first, self._last, self._folder = table.first, table.first + table.steps - 1, folder
        self.is_running = False

    def before(self, step: int) -> None:
        """Start the profile if `step`, counted from 1, is in range. A run that resumes inside the range profiles the rest of it."""
        if self._first and self._first <= step <= self._last and not self.is_running:
            jax.profiler.start_trace(self._folder / f"process-{mesh.init().index}")
            self.is_running = True

    def after(self, step: int, numbers: Mapping[str, torch.Tensor]) -> None:
        """Stop the profile if `step` is the last of the range, once the device tensors `numbers` that it returned are computed."""
        if self.is_running and step == self._last:
            jax.block_until_ready([buffer_of(number).value for number in numbers.values()])
            self.stop()

    def stop(self) -> None:
        """Write the profile, if one is running."""
        if self.is_running:
            self.is_running = False
            jax.profiler.stop_trace()


__all__ = ["StepTrace"]

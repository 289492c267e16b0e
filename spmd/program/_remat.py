"""`torch.utils.checkpoint` in a compiled program: the recomputation really happens again, so its memory is really saved.

Traced as it stands, a recomputed forward is the same operations on the same values, and XLA's common-subexpression
elimination merges it with the first one: nothing would be saved. So during a trace the inputs of every recomputation pass
through an optimization barrier, which XLA does not look through (as `jax.checkpoint` does).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax
import torch
import torch.utils.checkpoint as checkpoint_module

from spmd._convert import exact_dtypes
from spmd.device._storage import load, wrap


@contextmanager
def recomputing_for_real() -> Generator[None]:
    """While active, checkpointed functions recompute from inputs behind a barrier."""
    frame: Any = checkpoint_module._CheckpointFrame
    get_inputs: Callable[[Any], Any] = frame.get_inputs
    detach_variable = checkpoint_module.detach_variable

    def inputs_behind_barrier(self: Any) -> Any:
        return _behind_barrier(get_inputs(self))

    def detached_behind_barrier(inputs: Any) -> Any:
        return tuple(_behind_barrier(detach_variable(inputs)))

    frame.get_inputs = inputs_behind_barrier
    checkpoint_module.detach_variable = detached_behind_barrier
    try:
        yield
    finally:
        frame.get_inputs = get_inputs
        checkpoint_module.detach_variable = detach_variable


def _behind_barrier(values: Any) -> list[Any]:
    """The same values; tensors on the device as new leaves that XLA cannot trace back to the old ones."""
    held = list(values)
    places = [i for i, v in enumerate(held) if isinstance(v, torch.Tensor) and v.device.type == "jax"]
    with exact_dtypes():
        fenced = jax.lax.optimization_barrier([load(held[i]) for i in places])
    for i, array in zip(places, fenced, strict=True):
        held[i] = wrap(array).as_subclass(type(held[i])).requires_grad_(held[i].requires_grad)
    return held

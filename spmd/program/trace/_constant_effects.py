"""Tensors that a trace gives to names and that depend on no input: a cache of positions, a mask.

They get their value once, when the trace is over, and the program may run again with them in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._jax import eval_jaxpr
from spmd.device._storage import buffer_of
from spmd.program.xla._jaxpr import constant_outputs, pruned


def computed_once(closed: Any, outputs: Sequence[tuple[int, torch.Tensor]], is_state: Sequence[bool]) -> tuple[Any, list[torch.Tensor]]:
    """The jaxpr without those of `outputs` (position, tensor) that are constant, and their tensors, which have values now.

    Args:
        is_state: for each constant of the jaxpr, whether it is the value of a buffer of before.
    """
    jaxpr = closed.jaxpr
    constant = constant_outputs(jaxpr, [not state for state in is_state])
    ready = [(i, tensor) for i, tensor in outputs if constant[i]]
    if not ready:
        return closed, []
    with exact_dtypes():
        made = pruned(jaxpr, [i for i, _ in ready])
        values = jax.jit(lambda: eval_jaxpr(made, closed.consts))()
    for (_, tensor), value in zip(ready, values, strict=True):
        buffer_of(tensor).value, buffer_of(tensor).dropped = value, None
    gone = {i for i, _ in ready}
    return closed.replace(jaxpr=jaxpr.replace(outvars=[v for i, v in enumerate(jaxpr.outvars) if i not in gone])), [t for _, t in ready]

"""Optimization barriers: XLA neither simplifies across a barrier nor uses a value behind it before all values before it are computed.

A barrier has an effect only in a program. While operations are deferred it is deferred too; in eager code it does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._jax import is_tracing
from spmd.device._deferred import Deferrable, deferring
from spmd.device._storage import load, recording, wrap


def is_fencing() -> bool:
    """Whether operations called now become part of a program, because they are traced or deferred."""
    return recording.get() is not None or is_tracing() or deferring.get() is not None


def fenced(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """New tensors, without gradients, with the values of the device tensors behind one barrier; in eager code the same tensors."""
    return _fenced(list(tensors)) if tensors and is_fencing() else list(tensors)


def _behind_one_barrier(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    with exact_dtypes():
        return [wrap(value) for value in jax.lax.optimization_barrier([load(t) for t in tensors])]


_fenced = Deferrable("optimization_barrier", _behind_one_barrier)

__all__ = ["fenced", "is_fencing"]

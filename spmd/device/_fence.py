"""Values behind an optimization barrier: XLA does not trace them back to what they were, nor compute them before all of it is there.

In a program, that is: where operations wait for one, a barrier waits with them; run one by one, there is nothing to fence.
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
    """Whether what runs here becomes a program: of a trace, or of operations that wait."""
    return recording.get() is not None or is_tracing() or deferring.get() is not None


def fenced(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """New tensors, without gradients, with the values of device tensors behind one barrier; the same ones where nothing is compiled."""
    return _fenced(list(tensors)) if tensors and is_fencing() else list(tensors)


def _behind_one_barrier(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    with exact_dtypes():
        return [wrap(value) for value in jax.lax.optimization_barrier([load(t) for t in tensors])]


_fenced = Deferrable("optimization_barrier", _behind_one_barrier)

__all__ = ["fenced", "is_fencing"]

"""Optimization barriers: values behind one are not computed before all of it is there, and XLA fuses nothing across it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
from torch import nn

from spmd._jax import is_tracer
from spmd.device._storage import buffer_of, load, store


def optimization_barrier_(tensors: Sequence[torch.Tensor]) -> None:
    """Put a barrier behind `tensors`, in place, inside a compiled function; outside, where each operation is a program, nothing."""
    traced = [t for t in tensors if t.device.type == "jax" and is_tracer(buffer_of(t).value)]
    if traced:
        for tensor, value in zip(traced, jax.lax.optimization_barrier([load(t) for t in traced]), strict=True):
            store(tensor, value)


def apply_backward_optimization_barrier(m: nn.Module) -> None:
    """Put a barrier behind the backward pass of `m`, each time it runs in a compiled function.

    Gradients of its parameters and of its inputs are then ready together before the backward pass goes on, so that the
    compiler cannot delay a layer's gradient reduction and keep its buffers alive.
    """

    def barrier(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        optimization_barrier_([*gradients, *(g for g in grad_input if g is not None)])

    m.register_full_backward_hook(barrier)

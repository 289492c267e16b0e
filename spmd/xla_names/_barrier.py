"""Optimization barriers: values behind one are not computed before all of it is there, and XLA fuses nothing across it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
from torch import nn

from spmd.base._jax import is_tracer
from spmd.base._torch import pytree
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

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        flat, tree = pytree.tree_flatten((args, kwargs))
        chosen = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not chosen or not torch.is_grad_enabled():  # the backward pass ends in this module: nothing comes after it
            return None
        for i, passed in zip(chosen, _Entrance.apply(module, *(flat[i] for i in chosen)), strict=True):
            flat[i] = passed
        return pytree.tree_unflatten(flat, tree)

    m.register_forward_pre_hook(before, with_kwargs=True)


class _Entrance(torch.autograd.Function):
    """A module's inputs as they are; backward, which runs after the module's own, a barrier behind its gradients and theirs."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, *tensors: torch.Tensor) -> Any:
        ctx.module = module
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gradients = [p.grad for p in ctx.module.parameters() if p.grad is not None]
        optimization_barrier_([*gradients, *grads])
        return None, *grads

"""Optimization barriers: XLA computes nothing behind a barrier before all its values are ready, and does not fuse across it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
from torch import nn

from spmd.base._jax import is_tracer
from spmd.base._torch import pytree
from spmd.base._wrong_arguments import require_module
from spmd.device._storage import buffer_of, load, store


def optimization_barrier_(tensors: Sequence[torch.Tensor]) -> None:
    """Put a barrier behind `tensors`, in place, inside a compiled function. Outside, each operation is its own program: no effect."""
    traced = [t for t in tensors if t.device.type == "jax" and is_tracer(buffer_of(t).value)]
    if traced:
        for tensor, value in zip(traced, jax.lax.optimization_barrier([load(t) for t in traced]), strict=True):
            store(tensor, value)


def apply_backward_optimization_barrier(m: nn.Module) -> None:
    """Put a barrier behind the backward pass of `m` whenever it runs in a compiled function.

    The gradients of its parameters and of its inputs are then complete before the backward pass continues. So the compiler cannot
    delay a layer's gradient reduction and keep its buffers alive.
    """
    require_module(m, "apply_backward_optimization_barrier", "spmd.apply_backward_optimization_barrier(model.layers[0])")

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        flat, tree = pytree.tree_flatten((args, kwargs))
        chosen = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not chosen or not torch.is_grad_enabled():  # the backward pass ends in this module
            return None
        for i, passed in zip(chosen, _Entrance.apply(module, *(flat[i] for i in chosen)), strict=True):
            flat[i] = passed
        return pytree.tree_unflatten(flat, tree)

    m.register_forward_pre_hook(before, with_kwargs=True)


class _Entrance(torch.autograd.Function):
    """Identity on a module's inputs. Its backward runs after the module's own and puts a barrier behind all their gradients."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, *tensors: torch.Tensor) -> Any:
        ctx.module = module
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gradients = [p.grad for p in ctx.module.parameters() if p.grad is not None]
        optimization_barrier_([*gradients, *grads])
        return None, *grads

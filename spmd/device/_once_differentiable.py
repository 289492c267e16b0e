"""Autograd functions without a second derivative. Differentiating one twice is an error.

    @once_differentiable("spmd.scan", fix="for x in xs: carry, y = fn(carry, x)")
    class _Passes(torch.autograd.Function): ...

torch's decorator of this name returns gradients whose only ancestors are new leaves. `autograd.grad` finds no path from these to the
inputs, never reaches the error, and leaves the second-order term out of its result. Here gradients computed with `create_graph=True` depend
on the inputs of the function and on the incoming gradients, through a node that raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from spmd.base._errors import SpmdError, called_at, message
from spmd.device._storage import wrap_unset

F = TypeVar("F", bound=type[torch.autograd.Function])


def _nothing(*args: Any) -> Sequence[torch.Tensor]:
    return ()


def once_differentiable(name: str, *, fix: str, others: Callable[..., Sequence[torch.Tensor]] = _nothing) -> Callable[[F], F]:
    """A class decorator for an autograd function whose `backward` is not differentiable.

    Args:
        name: what the user called, for the error.
        fix: code that has a second derivative.
        others: given the function's arguments, tensors that its gradients depend on besides the arguments that are tensors.
    """

    def decorate(function: F) -> F:
        forward, backward = function.forward, function.backward

        @functools.wraps(forward)
        def with_edges(ctx: Any, *args: Any) -> Any:
            result = forward(ctx, *args)
            more = others(*args)
            computed = [a for a in (*args, *more) if isinstance(a, torch.Tensor) and not a.is_leaf]
            ctx.edges = [*(t for t in more if t.is_leaf and t.requires_grad), *_edges(computed)]
            return result

        @functools.wraps(backward)
        def once(ctx: Any, *grads: Any) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            with torch.no_grad():
                found = list(backward(ctx, *grads))
            places = [i for i, value in enumerate(found) if value is not None]
            leaves = [node.variable for node, _ in ctx.next_functions if hasattr(node, "variable")]
            sources = [*leaves, *ctx.edges, *(g for g in grads if g is not None)]
            passed: Any = _Refused.apply((name, fix), [found[i].detach() for i in places], *sources)
            for i, gradient in zip(places, passed, strict=True):
                found[i] = gradient
            return tuple(found)

        function.forward, function.backward = staticmethod(with_edges), staticmethod(once)
        return function

    return decorate


def _edges(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A tensor without elements whose gradient would reach `tensors`. Unlike these it keeps no memory alive. Leaves need none."""
    if not tensors:
        return []
    with torch.enable_grad():
        return [_Edges.apply(*tensors)]  # pyright: ignore[reportReturnType]


class _Edges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return wrap_unset((0,), np.dtype(np.float32))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise AssertionError("_Refused raises first")


class _Refused(torch.autograd.Function):
    """`apply((name, fix), gradients, *tensors that they depend on)`: the gradients, which cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, named: tuple[str, str], gradients: list[torch.Tensor], *sources: torch.Tensor) -> Any:
        ctx.named = named
        return tuple(gradients)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        name, fix = ctx.named
        why = "its gradient was computed with create_graph=True and differentiated again, but it has no second derivative"
        raise SpmdError(message(f"{name} was differentiated twice", *called_at(), why, fix=fix))


__all__ = ["once_differentiable"]

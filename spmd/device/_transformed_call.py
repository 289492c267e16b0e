"""`call_jax` under the transforms of `torch.func`: `grad`, `vjp`, `jvp`, `vmap` and any nesting of them.

Each torch transform becomes the same JAX transform of the function. The result is called through this module again, so transforms can
be nested. Without transforms `_call_jax` saves residuals in the forward pass; this module recomputes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from spmd.base._convert import exact_dtypes
from spmd.device._partitioner import PartitionedJit
from spmd.device._storage import load, wrap

ArrayFunction = Callable[..., tuple[Any, ...]]  # arrays -> arrays


class TransformedCall(torch.autograd.Function):
    """Applies a function of arrays to tensors: `TransformedCall.apply(fn, *tensors)` returns a tuple of tensors."""

    @staticmethod
    def forward(fn: ArrayFunction, *tensors: torch.Tensor) -> Any:
        with exact_dtypes():
            return tuple(map(wrap, _jitted(fn)(*map(load, tensors))))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.fn, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.is_inexact = [_is_inexact(t) for t in output]
        ctx.mark_non_differentiable(*(t for t in output if not _is_inexact(t)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        tensors = ctx.saved_tensors
        wanted = tuple(i for i, t in enumerate(tensors) if ctx.needs_input_grad[i + 1] and _is_inexact(t))
        found = iter(TransformedCall.apply(_pullback(ctx.fn, wanted, len(tensors)), *tensors, *(g for g in grads if _is_inexact(g))))
        return None, *(next(found) if i in wanted else None for i in range(len(tensors)))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        tensors = ctx.saved_tensors
        given = tuple(i for i, t in enumerate(tangents) if t is not None)
        found = iter(TransformedCall.apply(_pushforward(ctx.fn, given, len(tensors)), *tensors, *(tangents[i] for i in given)))
        return tuple(next(found) if is_inexact else None for is_inexact in ctx.is_inexact)

    @staticmethod
    def vmap(info: Any, in_dims: Any, fn: ArrayFunction, *tensors: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        results = TransformedCall.apply(_batched(fn, tuple(in_dims[1:]), info.batch_size), *tensors)
        return results, (0,) * len(results)


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@functools.lru_cache(maxsize=256)
def _jitted(fn: ArrayFunction) -> Any:
    return PartitionedJit(fn)


def _conjugated(values: Any) -> Any:
    """The conjugates of complex values: torch's gradient of a complex value is the conjugate of jax's."""
    return jax.tree.map(lambda v: jnp.conj(v) if jnp.iscomplexobj(v) else v, values)


def _inexact(results: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(r for r in results if jnp.issubdtype(r.dtype, jnp.inexact))


def _of(fn: ArrayFunction, inputs: tuple[Any, ...], positions: tuple[int, ...]) -> ArrayFunction:
    """`fn` as a function of the inputs at `positions` only, which returns the inexact results."""

    def of_chosen(*chosen: Any) -> tuple[Any, ...]:
        filled = list(inputs)
        for position, value in zip(positions, chosen, strict=True):
            filled[position] = value
        return _inexact(fn(*filled))

    return of_chosen


@functools.lru_cache(maxsize=256)
def _pullback(fn: ArrayFunction, wanted: tuple[int, ...], count: int) -> ArrayFunction:
    """Function of `count` inputs and one cotangent per inexact result, which returns the gradients of the wanted inputs."""

    def run(*values: Any) -> tuple[Any, ...]:
        inputs, cotangents = values[:count], values[count:]
        _, pull = jax.vjp(_of(fn, inputs, wanted), *(inputs[i] for i in wanted))
        return tuple(_conjugated(pull(_conjugated(cotangents))))

    return run


@functools.lru_cache(maxsize=256)
def _pushforward(fn: ArrayFunction, given: tuple[int, ...], count: int) -> ArrayFunction:
    """Function of `count` inputs and one tangent per given input, which returns the tangents of the inexact results."""

    def run(*values: Any) -> tuple[Any, ...]:
        inputs, tangents = values[:count], values[count:]
        return jax.jvp(_of(fn, inputs, given), tuple(inputs[i] for i in given), tangents)[1]

    return run


@functools.lru_cache(maxsize=256)
def _batched(fn: ArrayFunction, dims: tuple[int | None, ...], size: int) -> ArrayFunction:
    return jax.vmap(fn, in_axes=dims, axis_size=size)


__all__ = ["TransformedCall"]

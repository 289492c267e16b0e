"""Ops that draw from the device's random stream; each gets its own key, so results do not depend on the mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from spmd.lowering._registry import lower


@lower("dropout", whole=True, random=True)
def dropout(key: Any, input: Any, p: float, train: bool) -> Any:
    if not train or p == 0.0:
        return input
    if p == 1.0:
        return jnp.zeros_like(input)
    keep = jax.random.bernoulli(key, 1.0 - p, input.shape)
    return jnp.where(keep, input * (1.0 / (1.0 - p)), jnp.zeros((), input.dtype))


@lower("native_dropout", random=True)
def native_dropout(key: Any, input: Any, p: float, train: bool | None) -> Any:
    if train is False or p == 0.0:
        return input, jnp.ones(input.shape, bool)
    keep = jax.random.bernoulli(key, 1.0 - p, input.shape)
    return jnp.where(keep, input * (1.0 / (1.0 - p)) if p < 1.0 else input, jnp.zeros((), input.dtype)), keep


@lower("native_dropout_backward")
def native_dropout_backward(grad_output: Any, mask: Any, scale: float) -> Any:
    return grad_output * mask.astype(grad_output.dtype) * scale

"""torch.optim's AdamW and SGD on pytrees, for the hand-written JAX peers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


class AdamW:
    """AdamW with torch.optim.AdamW's arithmetic. The state is (first moments, second moments, step)."""

    def __init__(self, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay

    def init(self, params: Tree) -> Tree:
        return jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.float32)

    def specs(self, params: Tree, scalar: Any) -> Tree:
        """Shardings of the state: those of the parameters, and `scalar` for the step."""
        return params, params, scalar

    def update(self, params: Tree, grads: Tree, state: Tree) -> tuple[Tree, Tree]:
        first, second, count = state
        (beta1, beta2), count = self.betas, count + 1
        correction1, correction2 = 1 - beta1**count, jnp.sqrt(1 - beta2**count)
        first = jax.tree.map(lambda m, g: m + (1 - beta1) * (g - m), first, grads)
        second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, second, grads)

        def updated(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            step = (self.lr / correction1) * m.astype(jnp.float32) / (jnp.sqrt(v) / correction2 + self.eps)
            return (p * (1 - self.lr * self.weight_decay) - step).astype(p.dtype)

        return jax.tree.map(updated, params, first, second), (first, second, count)


class SGD:
    """SGD with momentum. The momentum buffers start at zero; torch's start at the first gradient, with the same result."""

    def __init__(self, lr: float, momentum: float, weight_decay: float) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay

    def init(self, params: Tree) -> Tree:
        return jax.tree.map(jnp.zeros_like, params)

    def specs(self, params: Tree, scalar: Any) -> Tree:
        return params

    def update(self, params: Tree, grads: Tree, state: Tree) -> tuple[Tree, Tree]:
        state = jax.tree.map(lambda m, g, p: self.momentum * m + (g + self.weight_decay * p), state, grads, params)
        return jax.tree.map(lambda p, m: p - self.lr * m, params, state), state

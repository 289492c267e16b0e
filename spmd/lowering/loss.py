"""Losses. Those over classes are masked sums, not gathers, so that a vocabulary sharded over an axis stays sharded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from spmd.lowering._registry import lower

_NONE, _MEAN, _SUM = 0, 1, 2


def _reduced(loss: Any, reduction: int) -> Any:
    if reduction == _NONE:
        return loss
    return jnp.mean(loss) if reduction == _MEAN else jnp.sum(loss)


@lower("mse_loss")
def mse_loss(self: Any, target: Any, reduction: int = _MEAN) -> Any:
    difference = self - target
    return _reduced(difference * difference, reduction)


@lower("mse_loss_backward")
def mse_loss_backward(grad_output: Any, self: Any, target: Any, reduction: int) -> Any:
    factor = 2.0 / max(self.size, 1) if reduction == _MEAN else 2.0
    return grad_output * (factor * (self - target))


@lower("cross_entropy_loss", whole=True)
def cross_entropy_loss(
    self: Any, target: Any, weight: Any = None, reduction: int = _MEAN, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Any:
    """Classes are dim 1 of `self` (dim 0 if one-dimensional); `target` holds class indices or, if floating, probabilities."""
    classes = 1 if self.ndim > 1 else 0
    count = self.shape[classes]
    log_p = jax.nn.log_softmax(self, axis=classes)
    shape = [1] * self.ndim
    shape[classes] = count
    class_weight = None if weight is None else weight.reshape(shape)
    if jnp.issubdtype(target.dtype, jnp.floating):
        target = target * (1 - label_smoothing) + label_smoothing / count if label_smoothing else target
        weighted = log_p * target if class_weight is None else log_p * target * class_weight
        loss = -jnp.sum(weighted, axis=classes)
        if reduction == _MEAN:
            return jnp.sum(loss) / max(self.size // count, 1)
        return _reduced(loss, reduction)
    kept = target != ignore_index
    is_target = jnp.expand_dims(target, classes) == jnp.arange(count, dtype=target.dtype).reshape(shape)
    zero = jnp.zeros((), log_p.dtype)
    picked = jnp.where(is_target, log_p, zero)
    loss = -jnp.sum(picked if class_weight is None else picked * class_weight, axis=classes)
    share = jnp.ones((), log_p.dtype)
    if class_weight is not None:
        share = jnp.sum(jnp.where(is_target, class_weight, zero), axis=classes)
    if label_smoothing:
        smooth = -jnp.sum(log_p if class_weight is None else log_p * class_weight, axis=classes)
        loss = (1 - label_smoothing) * loss + label_smoothing / count * smooth
    loss = jnp.where(kept, loss, zero)
    if reduction == _MEAN:
        return jnp.sum(loss) / jnp.sum(jnp.where(kept, share, zero))
    return _reduced(loss, reduction)

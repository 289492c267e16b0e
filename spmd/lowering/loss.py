"""Loss functions. Those over classes are masked sums instead of gathers, so that a vocabulary sharded over an axis stays sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.lowering._registry import is_static, lower
from spmd.lowering.norm import wide

_NONE, _MEAN, _SUM = 0, 1, 2


def _reduced(loss: Any, reduction: int) -> Any:
    if reduction == _NONE:
        return loss
    return jnp.mean(loss) if reduction == _MEAN else jnp.sum(loss)


def _gradient_per_element(grad_output: Any, like: Any, reduction: int) -> Any:
    """Gradient of each element's loss before the reduction."""
    g = wide(grad_output)
    return g / max(like.size, 1) if reduction == _MEAN else g


def _elementwise(name: str, loss: Callable[..., Any], check: Callable[..., None] | None = None) -> None:
    """Register `name`(self, target, reduction, *numbers) and its backward, whose first argument is the gradient."""

    def forward(self: Any, target: Any, reduction: int = _MEAN, *numbers: Any) -> Any:
        return _reduced(loss(wide(self), wide(target), *numbers), reduction)

    def backward(grad_output: Any, self: Any, target: Any, reduction: int, *numbers: Any) -> Any:
        x, y = jnp.broadcast_arrays(wide(self), wide(target))
        slope = jax.vjp(lambda x: loss(x, y, *numbers), x)[1](jnp.ones_like(x))[0]
        return slope * _gradient_per_element(grad_output, x, reduction)

    lower(name, check=check)(forward)
    lower(f"{name}_backward")(backward)


def _squared(x: Any, y: Any) -> Any:
    return (x - y) * (x - y)


def _distance(x: Any, y: Any) -> Any:
    """|x - y|, whose gradient is the sign of x - y, and NaN for NaN."""
    return (x - y) * jax.lax.stop_gradient(jnp.sign(x - y))


def _smooth_l1(x: Any, y: Any, beta: Any = 1.0) -> Any:
    distance = _distance(x, y)
    if beta == 0:
        return distance
    near = jnp.where(distance < beta, x - y, 0)  # for infinity the gradient of the square is NaN, also behind `where`
    return jnp.where(distance < beta, 0.5 * near * near / beta, distance - 0.5 * beta)


def _huber(x: Any, y: Any, delta: Any = 1.0) -> Any:
    distance = _distance(x, y)
    near = jnp.where(distance <= delta, x - y, 0)
    return jnp.where(distance <= delta, 0.5 * near * near, delta * (distance - 0.5 * delta))


def _soft_margin(x: Any, y: Any) -> Any:
    return jnp.log1p(jnp.exp(-y * x))  # infinite from 89 on, like torch's


def _require_beta(self: Any, target: Any, reduction: int = _MEAN, beta: Any = 1.0) -> None:
    if is_static(beta) and not beta >= 0:
        raise RuntimeError("smooth_l1_loss does not support negative values for beta.")


_elementwise("smooth_l1_loss", _smooth_l1, _require_beta)
for _name, _loss in (("mse_loss", _squared), ("huber_loss", _huber), ("soft_margin_loss", _soft_margin)):
    _elementwise(_name, _loss)


@lower("binary_cross_entropy")
def binary_cross_entropy(self: Any, target: Any, weight: Any = None, reduction: int = _MEAN) -> Any:
    """Logarithms are clamped at -100, like torch's, so that the loss of a wrong prediction with probability 1 is finite."""
    p, y = wide(self), wide(target)
    loss = (y - 1) * jnp.maximum(jnp.log1p(-p), -100.0) - y * jnp.maximum(jnp.log(p), -100.0)
    return _reduced(loss if weight is None else loss * weight, reduction)


@lower("binary_cross_entropy_backward")
def binary_cross_entropy_backward(grad_output: Any, self: Any, target: Any, weight: Any = None, reduction: int = _MEAN) -> Any:
    p, y = wide(self), wide(target)
    grad = _gradient_per_element(grad_output, self, reduction) * (p - y) / jnp.maximum((1 - p) * p, 1e-12)
    return grad if weight is None else grad * weight


@lower("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(self: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = _MEAN) -> Any:
    x, y = wide(self), wide(target)
    if pos_weight is None:
        loss = (1 - y) * x - jax.nn.log_sigmoid(x)
    else:
        loss = (1 - y) * x - ((pos_weight - 1) * y + 1) * jax.nn.log_sigmoid(x)
    return _reduced(loss if weight is None else loss * weight, reduction)


def _classes_of(x: Any) -> int:
    """The class dim: 1, or 0 for a single sample."""
    return 1 if x.ndim > 1 else 0


def _along_classes(vector: Any, x: Any) -> Any:
    """A [C] array to broadcast against `x`."""
    shape = [1] * x.ndim
    shape[_classes_of(x)] = x.shape[_classes_of(x)]
    return vector.reshape(shape)


def _is_target(x: Any, target: Any) -> Any:
    """Where the class of an element of `x` is the target. It is a comparison, so the result is sharded like `x`."""
    classes = jnp.arange(x.shape[_classes_of(x)], dtype=target.dtype)
    return jnp.expand_dims(target, _classes_of(x)) == _along_classes(classes, x)


@lower("cross_entropy_loss", whole=True)
def cross_entropy_loss(
    self: Any, target: Any, weight: Any = None, reduction: int = _MEAN, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Any:
    """Classes are dim 1 of `self` (dim 0 if it is 1-d). `target` contains class indices or, if floating, probabilities."""
    has_indices = not jnp.issubdtype(target.dtype, jnp.floating)
    if has_indices and weight is None and not label_smoothing > 0:
        losses, count = _nll_of_logits(wide(self), target, ignore_index)
        return (jnp.sum(losses) / count if reduction == _MEAN else _reduced(losses, reduction)).astype(self.dtype)
    log_p = jax.nn.log_softmax(wide(self), axis=_classes_of(self))
    if not has_indices:
        dtype = jnp.promote_types(self.dtype, target.dtype)
        return _soft_target_loss(log_p, wide(target), weight, reduction, label_smoothing).astype(dtype)
    loss, total = _nll(log_p, target, weight, ignore_index)
    if label_smoothing > 0:
        count = self.shape[_classes_of(self)]
        weighted = log_p if weight is None else log_p * _along_classes(weight, log_p)
        smooth = jnp.where(target != ignore_index, -jnp.sum(weighted, axis=_classes_of(self)), 0.0)
        loss = (1 - label_smoothing) * loss + label_smoothing / max(count, 1) * smooth
    if reduction == _MEAN:
        return (jnp.sum(loss) / total).astype(self.dtype)
    return _reduced(loss, reduction).astype(self.dtype)


def _soft_target_loss(log_p: Any, target: Any, weight: Any, reduction: int, label_smoothing: float) -> Any:
    classes = _classes_of(log_p)
    count = log_p.shape[classes]
    if label_smoothing > 0:
        target = target * (1 - label_smoothing) + label_smoothing / max(count, 1)
    weighted = log_p * target if weight is None else log_p * target * _along_classes(weight, log_p)
    loss = -jnp.sum(weighted, axis=classes)
    if reduction == _MEAN:
        return jnp.sum(loss) / (log_p.size // max(count, 1))  # nan without samples
    return _reduced(loss, reduction)


def _nll_of_logits(x: Any, target: Any, ignore_index: int) -> tuple[Any, Any]:
    """`_nll` of the log-softmax of `x`, without computing the log-softmax: it would be as large as `x`, and saved for the backward."""
    classes = _classes_of(x)
    shifted = x - lax.stop_gradient(jnp.max(x, axis=classes, keepdims=True)) if x.size else x
    zero, kept = jnp.zeros((), x.dtype), target != ignore_index
    own = jnp.sum(jnp.where(_is_target(x, target), shifted, zero), axis=classes)
    losses = jnp.log(jnp.sum(jnp.exp(shifted), axis=classes)) - own
    return jnp.where(kept, losses, zero), jnp.sum(kept, dtype=x.dtype)


def _nll(log_p: Any, target: Any, weight: Any, ignore_index: int) -> tuple[Any, Any]:
    """(loss of each sample, zero if ignored; sum of the weights of the others)."""
    picked = _is_target(log_p, target)
    weights = jnp.ones((), log_p.dtype) if weight is None else _along_classes(wide(weight), log_p)
    zero = jnp.zeros((), log_p.dtype)
    kept = target != ignore_index
    loss = jnp.where(kept, -jnp.sum(jnp.where(picked, log_p * weights, zero), axis=_classes_of(log_p)), zero)
    if weight is None:
        return loss, jnp.sum(kept, dtype=log_p.dtype)
    share = jnp.sum(jnp.where(picked, weights, zero), axis=_classes_of(log_p))
    return loss, jnp.sum(jnp.where(kept, share, zero))


@lower("nll_loss_nd", "nll_loss", "nll_loss2d", whole=True)
def nll_loss_nd(self: Any, target: Any, weight: Any = None, reduction: int = _MEAN, ignore_index: int = -100) -> Any:
    return nll_loss_forward(self, target, weight, reduction, ignore_index)[0].astype(self.dtype)


@lower("nll_loss_forward", "nll_loss2d_forward")
def nll_loss_forward(self: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    """(loss, total weight). The mean is over the total weight, and NaN if that is zero."""
    loss, total = _nll(wide(self), target, weight, ignore_index)
    if reduction == _NONE:
        return loss, jnp.zeros((), loss.dtype)
    return jnp.sum(loss) / total if reduction == _MEAN else jnp.sum(loss), total


@lower("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(grad_output: Any, self: Any, target: Any, weight: Any, reduction: int, ignore_index: int, total_weight: Any) -> Any:
    g = wide(grad_output)
    if reduction == _MEAN:
        g = g / total_weight
    if g.ndim:
        g = jnp.expand_dims(g, _classes_of(self))
    if weight is not None:
        g = g * _along_classes(wide(weight), self)
    kept = jnp.expand_dims(target != ignore_index, _classes_of(self))
    return jnp.where(_is_target(self, target) & kept, -g, jnp.zeros((), g.dtype))


@lower("multi_margin_loss", static=("p",))
def multi_margin_loss(self: Any, target: Any, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = _MEAN) -> Any:
    return _reduced(_multi_margin(wide(self), target, p, margin, weight), reduction)


def _positive_part(x: Any) -> Any:
    """max(x, 0), and 0 for NaN, because torch compares x with 0."""
    return jnp.where(x > 0, x, jnp.zeros((), x.dtype))


def _multi_margin(x: Any, target: Any, p: Any, margin: Any, weight: Any) -> Any:
    """Per sample: mean over the classes j != y of max(0, margin - x_y + x_j)^p, times the weight of y."""
    single = x.ndim < 2
    x = x.reshape(1, -1) if single else x
    picked = _is_target(x, target.reshape(-1))
    zero = jnp.zeros((), x.dtype)
    of_target = jnp.sum(jnp.where(picked, x, zero), 1, keepdims=True)
    short = _positive_part(jnp.asarray(margin, x.dtype) - of_target + x)
    cost = jnp.where(picked, zero, short if p == 1 else short * short)
    if weight is not None:
        cost = cost * jnp.sum(jnp.where(picked, wide(weight)[None], zero), 1, keepdims=True)
    loss = jnp.sum(cost, 1) / x.shape[1]
    return loss.reshape(target.shape)


@lower("multi_margin_loss_backward", static=("p",))
def multi_margin_loss_backward(
    grad_output: Any, self: Any, target: Any, p: Any, margin: Any, weight: Any = None, reduction: int = _MEAN
) -> Any:
    loss, vjp = jax.vjp(lambda x: _multi_margin(x, target, p, margin, weight), wide(self))
    return vjp(jnp.broadcast_to(_gradient_per_element(grad_output, loss, reduction), loss.shape))[0]


def _label_mask(x: Any, target: Any) -> Any:
    """(classes [N, C] that are labels of a sample, entries [N, C] of its label list before the first -1), as masks."""
    before_end = jnp.cumprod(target >= 0, 1, dtype=jnp.int32).astype(bool)
    classes = jnp.arange(x.shape[1], dtype=target.dtype)
    return jnp.any((target[:, :, None] == classes) & before_end[:, :, None], 1), before_end


def _multilabel_margin(x: Any, target: Any) -> Any:
    """Per sample [N, C]: sum over labels y and other classes j of max(0, 1 - (x_y - x_j)), divided by C."""
    is_label, before_end = _label_mask(x, target)
    classes = jnp.arange(x.shape[1], dtype=target.dtype)
    of_label = jnp.sum(jnp.where(target[:, :, None] == classes, x[:, None], jnp.zeros((), x.dtype)), 2)
    short = _positive_part(1 - of_label[:, :, None] + x[:, None])
    counted = before_end[:, :, None] & ~is_label[:, None]
    return jnp.sum(jnp.where(counted, short, jnp.zeros((), x.dtype)), (1, 2)) / x.shape[1]


def _rows(x: Any) -> Any:
    """`x` with a batch dim; a single sample becomes a batch of one."""
    return x if x.ndim == 2 else x.reshape(1, -1)


@lower("multilabel_margin_loss_forward")
def multilabel_margin_loss_forward(self: Any, target: Any, reduction: int) -> Any:
    """(loss, 1 for each class that is a label)."""
    x = _rows(wide(self))
    loss = _multilabel_margin(x, _rows(target))
    loss = loss if self.ndim == 2 else loss[0]
    return _reduced(loss, reduction), _label_mask(x, _rows(target))[0].astype(self.dtype).reshape(target.shape)


@lower("multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(grad_output: Any, self: Any, target: Any, reduction: int, is_target: Any) -> Any:
    loss, vjp = jax.vjp(lambda x: _multilabel_margin(x, _rows(target)), _rows(wide(self)))
    return vjp(jnp.broadcast_to(_gradient_per_element(grad_output, loss, reduction), loss.shape))[0].reshape(self.shape)

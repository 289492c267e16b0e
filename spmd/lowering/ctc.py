"""Connectionist temporal classification: the alpha recursion as one scan over time, with torch's gradient.

torch's gradient of the log probabilities is softmax minus posterior. This equals the true gradient only if they are the output of
a log_softmax, so the gradient is implemented explicitly and is not `jax.vjp` of the loss.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.lowering._registry import lower
from spmd.lowering.norm import wide

_NONE, _MEAN = 0, 1


def _padded_targets(targets: Any, lengths: Any, batch: int) -> Any:
    """Targets as [batch, longest]. torch also accepts them concatenated into one dim."""
    if targets.ndim == 2:
        return targets
    if batch == 1:
        return targets[None]
    ends = jnp.cumsum(lengths)
    longest = int(max(lengths)) if isinstance(lengths, np.ndarray) else targets.shape[0]
    at = (ends - lengths)[:, None] + jnp.arange(longest, dtype=ends.dtype)
    return jnp.take(targets, at, mode="clip")


def _lengths(lengths: Any) -> Any:
    """Lengths as an array, of numpy if they are Python numbers."""
    return np.asarray(lengths, np.int64) if isinstance(lengths, tuple | list) else lengths.astype(jnp.int64)


def _log_sum(terms: Any) -> Any:
    """log(sum(exp)) over the first dim. If all terms are -inf, so is the result, and the derivative is 0 instead of NaN."""
    x = jnp.stack(terms) if isinstance(terms, tuple) else terms
    largest = lax.stop_gradient(jnp.max(x, 0))
    shift = jnp.where(jnp.isneginf(largest), jnp.zeros((), x.dtype), largest)
    total = jnp.sum(jnp.exp(x - shift), 0)
    possible = total > 0
    return jnp.where(possible, jnp.log(jnp.where(possible, total, jnp.ones((), x.dtype))) + shift, -jnp.inf)


def _alphas(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int) -> tuple[Any, Any]:
    """(negative log likelihood [B], log alpha [B, T, 2 S + 1]) for log_probs [T, B, C] and targets [B, S]."""
    num_steps, batch, _ = log_probs.shape
    width = 2 * targets.shape[1] + 1
    labels = jnp.full((batch, width), blank, targets.dtype).at[:, 1::2].set(targets)
    never = jnp.asarray(-jnp.inf, log_probs.dtype)
    before = jnp.pad(labels, ((0, 0), (2, 0)), constant_values=blank)[:, :width]
    may_skip = (labels != blank) & (labels != before)
    of_labels = jnp.take_along_axis(log_probs, jnp.broadcast_to(labels[None], (num_steps, batch, width)), 2, mode="clip")
    states = jnp.arange(width, dtype=jnp.int32)
    reachable = states <= 2 * jnp.asarray(target_lengths)[:, None]
    first = jnp.where((states < 2) & reachable, of_labels[0], never) if num_steps else jnp.full((batch, width), never)

    def step(alpha: Any, now: Any) -> tuple[Any, Any]:
        t, lp = now
        one = jnp.pad(alpha, ((0, 0), (1, 0)), constant_values=-jnp.inf)[:, :width]
        two = jnp.where(may_skip, jnp.pad(alpha, ((0, 0), (2, 0)), constant_values=-jnp.inf)[:, :width], never)
        moved = jnp.where(reachable, _log_sum((alpha, one, two)) + lp, never)
        alpha = jnp.where((t < jnp.asarray(input_lengths))[:, None], moved, alpha)
        return alpha, alpha

    times = jnp.arange(1, max(num_steps, 1), dtype=jnp.int64)
    last, rest = lax.scan(step, first, (times, of_labels[1:]))
    ends = (states == 2 * jnp.asarray(target_lengths)[:, None]) | (states == 2 * jnp.asarray(target_lengths)[:, None] - 1)
    likelihood = _log_sum(jnp.moveaxis(jnp.where(ends, last, never), 1, 0))
    nothing = jnp.where(jnp.asarray(target_lengths) == 0, jnp.zeros((), log_probs.dtype), never)
    likelihood = jnp.where(jnp.asarray(input_lengths) == 0, nothing, likelihood)
    return -likelihood, jnp.swapaxes(jnp.concatenate([first[None], rest]), 0, 1)


def _gradient(grad: Any, log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int, zero_infinity: bool) -> Any:
    """(softmax - posterior) times `grad` [B], and zero after the end of each input.

    For an infinite loss it is NaN, as torch's is, or with `zero_infinity` zero.
    """

    def loss(x: Any) -> Any:
        return _alphas(x, targets, input_lengths, target_lengths, blank)[0]

    nll, vjp = jax.vjp(loss, log_probs)
    posterior = -vjp(jnp.ones_like(nll))[0]
    posterior = jnp.where(jnp.isinf(nll)[None, :, None], jnp.asarray(jnp.nan, posterior.dtype), posterior)
    times = jnp.arange(log_probs.shape[0], dtype=jnp.int64)
    inside = times[:, None, None] < jnp.asarray(input_lengths)[None, :, None]
    if zero_infinity:
        inside = inside & ~jnp.isinf(nll)[None, :, None]
    return jnp.where(inside, (jnp.exp(log_probs) - posterior) * grad[None, :, None], jnp.zeros((), log_probs.dtype))


def _check_lengths(batch: int, inputs: Any, targets: Any) -> None:
    for name, lengths in (("input", inputs), ("target", targets)):
        if lengths.size != batch:
            raise RuntimeError(f"{name}_lengths must be of size batch_size")


@lower("_ctc_loss", "_ctc_loss.Tensor")
def _ctc_loss(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0, zero_infinity: bool = False) -> Any:
    x = wide(log_probs) if log_probs.ndim == 3 else wide(log_probs)[:, None]
    inputs, lengths = _lengths(input_lengths), _lengths(target_lengths)
    _check_lengths(x.shape[1], inputs, lengths)
    nll, alpha = _alphas(x, _padded_targets(targets, lengths, x.shape[1]), inputs, lengths, blank)
    return (nll, alpha) if log_probs.ndim == 3 else (nll[0], alpha)


@lower("_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def _ctc_loss_backward(
    grad: Any,
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    neg_log_likelihood: Any,
    log_alpha: Any,
    blank: int,
    zero_infinity: bool = False,
) -> Any:
    x = wide(log_probs) if log_probs.ndim == 3 else wide(log_probs)[:, None]
    inputs, lengths = _lengths(input_lengths), _lengths(target_lengths)
    out = _gradient(grad.reshape(-1), x, _padded_targets(targets, lengths, x.shape[1]), inputs, lengths, blank, zero_infinity)
    return out.reshape(log_probs.shape)


def _plain_loss(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int, zero_infinity: bool) -> Any:
    """Negative log likelihoods. `_loss` is the same function with torch's gradient."""
    return _alphas(log_probs, targets, input_lengths, target_lengths, blank)[0]


def _loss_forward(log_probs: Any, targets: Any, inputs: Any, lengths: Any, blank: int, zero_infinity: bool) -> Any:
    loss = _plain_loss(log_probs, targets, inputs, lengths, blank, zero_infinity)
    return loss, (log_probs, targets, inputs, lengths)


def _loss_backward(blank: int, zero_infinity: bool, saved: Any, grad: Any) -> Any:
    log_probs, targets, inputs, lengths = saved
    return _gradient(grad, log_probs, targets, inputs, lengths, blank, zero_infinity), None, None, None


_loss: Any = jax.custom_vjp(_plain_loss, nondiff_argnums=(4, 5))
_loss.defvjp(_loss_forward, _loss_backward)


@lower("ctc_loss.IntList", "ctc_loss.Tensor", whole=True)
def ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Any:
    """Kept whole because torch's C++ composite reads the lengths on the host."""
    x = wide(log_probs) if log_probs.ndim == 3 else wide(log_probs)[:, None]
    inputs, lengths = _lengths(input_lengths).reshape(-1), _lengths(target_lengths).reshape(-1)
    _check_lengths(x.shape[1], inputs, lengths)
    padded = _padded_targets(targets, lengths, x.shape[1])

    nll = _loss(x, padded, jnp.asarray(inputs), jnp.asarray(lengths), blank, zero_infinity)
    if zero_infinity:
        nll = jnp.where(jnp.isinf(nll), jnp.zeros((), nll.dtype), nll)
    if reduction == _MEAN:
        nll = jnp.mean(nll / jnp.maximum(jnp.asarray(lengths), 1).astype(nll.dtype))
    elif reduction != _NONE:
        nll = jnp.sum(nll)
    elif log_probs.ndim == 2:
        nll = nll[0]
    return nll.astype(log_probs.dtype)

"""Kernels for `torch.amp.GradScaler` and optimizers with `fused=True`: each ATen op updates lists of tensors in place.

They follow torch's CPU kernels: float32 for 16-bit parameters, float64 for the numbers of a step. If `found_inf` is set, nothing
is written.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.autograd.graph import increment_version

from spmd.base._convert import exact_dtypes
from spmd.device._copy import like_placement
from spmd.device._numbers import carried
from spmd.device._powers import power
from spmd.device._storage import load, once, store
from spmd.patches._table import current, replaced


def unscale(self: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """`_amp_foreach_non_finite_check_and_unscale_`: multiply gradients by `inv_scale`; set `found_inf` to 1 if one is not finite."""
    with exact_dtypes():
        factor, found = load(inv_scale), load(found_inf)
        for grad in self:
            value = load(grad)
            found = jnp.maximum(found, (~jnp.all(jnp.isfinite(value))).astype(found.dtype).reshape(found.shape))
            _write(grad, value.astype(jnp.promote_types(value.dtype, jnp.float32)) * factor.reshape(()))
        store(found_inf, found)


def update_scale(
    self: torch.Tensor, growth_tracker: torch.Tensor, found_inf: torch.Tensor, growth: float, backoff: float, interval: int
) -> torch.Tensor:
    """`_amp_update_scale_`: decrease the scale after an overflow, increase it after `interval` steps without one."""
    with exact_dtypes():
        scale, tracker, overflowed = load(self), load(growth_tracker), load(found_inf).reshape(()) > 0
        steps = tracker + 1
        is_due = steps == interval
        grown = jnp.where(is_due.reshape(()) & jnp.isfinite(scale * growth), scale * growth, scale)
        store(self, jnp.where(overflowed, scale * backoff, grown).astype(scale.dtype))
        store(growth_tracker, jnp.where(overflowed | is_due, jnp.zeros_like(tracker), steps).astype(tracker.dtype))
    return self


def adam(decoupled: bool) -> Callable[..., None]:
    """The kernel of `_fused_adam_`, or of `_fused_adamw_` if weight decay is `decoupled`."""

    def kernel(
        self: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any, max_exp_avg_sqs: Any, state_steps: Any, *, lr: Any, beta1: Any, beta2: Any,
        weight_decay: Any, eps: Any, amsgrad: bool, maximize: bool, grad_scale: Any = None, found_inf: Any = None,
    ) -> None:  # fmt: skip
        lr, beta1, beta2, weight_decay, eps = map(_number, (lr, beta1, beta2, weight_decay, eps))
        maxima = max_exp_avg_sqs if amsgrad else [None] * len(self)
        with exact_dtypes():
            for tensors in zip(self, grads, exp_avgs, exp_avg_sqs, maxima, state_steps, strict=True):
                values: Any = [None if t is None else _wide(t) for t in tensors]
                p, g, m, v, largest, step = values
                new_grad = g = g if grad_scale is None else g / load(grad_scale).reshape(())
                g = -g if maximize else g
                p, g = (p - _as(p, lr * weight_decay) * p, g) if decoupled else (p, g + _as(p, weight_decay) * p)
                m, v = m + _as(p, 1 - beta1) * (g - m), _as(p, beta2) * v + _as(p, 1 - beta2) * g * g
                largest = None if largest is None else jnp.maximum(largest, v)
                root = jnp.sqrt(v if largest is None else largest) / _as(p, jnp.sqrt(_correction(beta2, step)))
                p = p - _as(p, lr / _correction(beta1, step)) * m / (root + _as(p, eps))
                _update(found_inf, tensors[:5], (p, None if grad_scale is None else new_grad, m, v, largest))

    return kernel


def sgd(
    self: Any, grads: Any, momentum_buffer_list: Any, *, weight_decay: Any, momentum: Any, lr: Any, dampening: Any, nesterov: bool,
    maximize: bool, is_first_step: bool, grad_scale: Any = None, found_inf: Any = None,
) -> None:  # fmt: skip
    """The kernel of `_fused_sgd_`."""
    lr, weight_decay, dampening, rate = map(_number, (lr, weight_decay, dampening, momentum))
    buffers = momentum_buffer_list or [None] * len(self)
    with exact_dtypes():
        for tensors in zip(self, grads, buffers, strict=True):
            values: Any = [None if t is None else _wide(t) for t in tensors]
            p, g, b = values
            new_grad = g = g if grad_scale is None else g / load(grad_scale).reshape(())
            g = (-g if maximize else g) + _as(p, weight_decay) * p
            if b is not None:
                b = g if is_first_step else _as(p, rate) * b + _as(p, 1 - dampening) * g
                g = g + _as(p, rate) * b if nesterov else b
            _update(found_inf, tensors, (p - _as(p, lr) * g, None if grad_scale is None else new_grad, b))


def adagrad(
    self: Any, grads: Any, state_sums: Any, state_steps: Any, *, lr: Any, lr_decay: Any, weight_decay: Any, eps: Any, maximize: bool,
    grad_scale: Any = None, found_inf: Any = None,
) -> None:  # fmt: skip
    """The kernel of `_fused_adagrad_`."""
    lr, lr_decay, weight_decay, eps = map(_number, (lr, lr_decay, weight_decay, eps))
    with exact_dtypes():
        for tensors in zip(self, grads, state_sums, state_steps, strict=True):
            p, g, total, step = (_wide(t) for t in tensors)
            new_grad = g = g if grad_scale is None else g / load(grad_scale).reshape(())
            g = (-g if maximize else g) + _as(p, weight_decay) * p
            total = total + g * g
            rate = lr / (1 + (step.astype(jnp.float64) - 1) * lr_decay)
            p = p - _as(p, rate) * g / (jnp.sqrt(total) + _as(p, eps))
            _update(found_inf, tensors[:3], (p, None if grad_scale is None else new_grad, total))


NUMBERS = frozenset({"lr", "beta1", "beta2", "weight_decay", "eps", "momentum", "dampening", "lr_decay"})
"""Hyperparameters that the optimizer kernels take as numbers or as 0-dim arrays."""


def kernels() -> dict[str, Callable[..., Any]]:
    """Kernels of this module by overload name."""
    made: dict[str, Callable[..., Any]] = {
        "_amp_foreach_non_finite_check_and_unscale_": unscale,
        "_amp_update_scale_": update_scale,
    }
    for name, kernel in (("sgd", sgd), ("adam", adam(False)), ("adamw", adam(True)), ("adagrad", adagrad)):
        made[f"_fused_{name}_"] = made[f"_fused_{name}_.tensor_lr"] = kernel
    return made


@contextmanager
def called_directly() -> Generator[None]:
    """While active, torch's optimizers call these kernels directly, so that hyperparameters may be values only the device knows.

    The C++ bindings accept only numbers that are known on the host.
    """
    with ExitStack() as stack:
        for name, kernel in (("sgd", sgd), ("adam", adam(False)), ("adamw", adam(True)), ("adagrad", adagrad)):
            torchs = current(f"torch._fused_{name}_")
            stack.enter_context(replaced(f"torch._fused_{name}_", _for_tensors_here(kernel, torchs)))
        yield


def _for_tensors_here(kernel: Callable[..., None], torchs: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: list[torch.Tensor], *rest: Any, **kwargs: Any) -> Any:
        if not self or self[0].device.type != "jax":
            return torchs(self, *rest, **kwargs)
        kernel(self, *rest, **kwargs)
        increment_version([t for tensors in (self, *rest) for t in tensors])
        return None

    return step


def _number(value: Any) -> Any:
    if isinstance(value, torch.SymFloat):
        return carried(value)
    if not isinstance(value, torch.Tensor):
        return value
    return load(value).reshape(()) if value.device.type == "jax" else value.item()


def _correction(beta: Any, step: Any) -> Any:
    """`1 - beta ** step`, float64[] because float32 loses digits here; computed once for parameters that share a step counter."""
    return once("bias correction", (beta, step), lambda: 1 - power(jnp.asarray(beta, jnp.float64), step.astype(jnp.float64)))


def _as(like: Any, number: Any) -> Any:
    """The number in the dtype of `like`. A number on the device is float64, like Python's, and would promote the whole update."""
    return number.astype(like.dtype) if isinstance(number, jax.Array) else number


def _wide(tensor: torch.Tensor) -> Any:
    value = load(tensor)
    return value.astype(jnp.float32) if value.dtype.itemsize == 2 else value


def _update(found_inf: torch.Tensor | None, tensors: Any, values: Any) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        if tensor is None or value is None:
            continue
        _write(tensor, value if found_inf is None else jnp.where(load(found_inf).reshape(()) > 0, load(tensor), value))


def _write(tensor: torch.Tensor, value: Any) -> None:
    store(tensor, like_placement(value.astype(load(tensor).dtype), tensor))

"""Activations and their `*_backward` ops. Where an activation has no derivative, the gradient is that of torch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from spmd.lowering._registry import lower

lower("sigmoid", pointwise=True)(jax.nn.sigmoid)
lower("silu", pointwise=True)(jax.nn.silu)


@lower("relu", pointwise=True)
def relu(self: Any) -> Any:
    return jnp.maximum(self, jnp.zeros((), self.dtype))  # +0.0 for -0.0, as XLA's; with a select compilers fuse convolutions less


@lower("threshold", pointwise=True)
def threshold(self: Any, threshold: Any, value: Any) -> Any:
    return jnp.where(self <= threshold, jnp.asarray(value).astype(self.dtype), self)


@lower("threshold_backward", pointwise=True, promoted=("grad_output", "self"))
def threshold_backward(grad_output: Any, self: Any, threshold: Any) -> Any:
    return jnp.where(self <= threshold, jnp.zeros((), grad_output.dtype), grad_output)


@lower("sigmoid_backward", pointwise=True)
def sigmoid_backward(grad_output: Any, output: Any) -> Any:
    return grad_output * jnp.conj((1 - output) * output)


@lower("tanh_backward", pointwise=True)
def tanh_backward(grad_output: Any, output: Any) -> Any:
    return grad_output * jnp.conj(1 - output * output)


@lower("silu_backward", pointwise=True, whole=True)
def silu_backward(grad_output: Any, self: Any) -> Any:
    gate = jax.nn.sigmoid(self)
    return grad_output * jnp.conj(gate * (1 + self * (1 - gate)))


@lower("gelu", pointwise=True)
def gelu(self: Any, *, approximate: str = "none") -> Any:
    return jax.nn.gelu(self, approximate=approximate == "tanh")


@lower("gelu_backward", pointwise=True)
def gelu_backward(grad_output: Any, self: Any, *, approximate: str = "none") -> Any:
    return jax.vjp(lambda x: gelu(x, approximate=approximate), self)[1](grad_output)[0]


@lower("elu", pointwise=True)
def elu(self: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    return jnp.where(self < 0, jnp.expm1(self * input_scale) * alpha * scale, self * scale)


@lower("elu_backward", pointwise=True, promoted=("grad_output", "self_or_result"))
def elu_backward(grad_output: Any, alpha: Any, scale: Any, input_scale: Any, is_result: bool, self_or_result: Any) -> Any:
    if is_result:
        slope = input_scale * (self_or_result + alpha * scale)
    else:
        slope = input_scale * alpha * scale * jnp.exp(self_or_result * input_scale)
    return jnp.where(self_or_result <= 0, grad_output * slope, grad_output * scale)


@lower("celu", pointwise=True)
def celu(self: Any, alpha: Any = 1.0) -> Any:
    return elu(self, alpha, 1, 1.0 / alpha)


@lower("leaky_relu", pointwise=True)
def leaky_relu(self: Any, negative_slope: Any = 0.01) -> Any:
    return jnp.where(self > 0, self, self * negative_slope)


@lower("leaky_relu_backward", pointwise=True, promoted=("grad_output", "self"))
def leaky_relu_backward(grad_output: Any, self: Any, negative_slope: Any, self_is_result: bool) -> Any:
    return jnp.where(self > 0, grad_output, grad_output * negative_slope)


@lower("hardtanh", pointwise=True)
def hardtanh(self: Any, min_val: Any = -1, max_val: Any = 1) -> Any:
    return jnp.minimum(jnp.maximum(self, min_val), max_val)


@lower("hardtanh_backward", pointwise=True, promoted=("grad_output", "self"))
def hardtanh_backward(grad_output: Any, self: Any, min_val: Any, max_val: Any) -> Any:
    return jnp.where((self > min_val) & (self < max_val), grad_output, jnp.zeros((), grad_output.dtype))


@lower("hardswish", pointwise=True)
def hardswish(self: Any) -> Any:
    return self * jnp.clip(self + 3, 0, 6) / 6


@lower("hardswish_backward", pointwise=True)
def hardswish_backward(grad_output: Any, self: Any) -> Any:
    inner = jnp.where(self < 3, grad_output * (self / 3 + 0.5), grad_output)
    return jnp.where(self <= -3, jnp.zeros((), grad_output.dtype), inner)


@lower("hardsigmoid", pointwise=True)
def hardsigmoid(self: Any) -> Any:
    return jnp.clip(self + 3, 0, 6) / 6


@lower("hardsigmoid_backward", pointwise=True)
def hardsigmoid_backward(grad_output: Any, self: Any) -> Any:
    return jnp.where((self > -3) & (self < 3), grad_output / 6, 0)


@lower("hardshrink", pointwise=True)
def hardshrink(self: Any, lambd: Any = 0.5) -> Any:
    return jnp.where((self >= -lambd) & (self <= lambd), jnp.zeros((), self.dtype), self)


@lower("hardshrink_backward", pointwise=True, promoted=("grad_out", "self"))
def hardshrink_backward(grad_out: Any, self: Any, lambd: Any) -> Any:
    return jnp.where((self > lambd) | (self < -lambd), grad_out, jnp.zeros((), grad_out.dtype))


@lower("softshrink", pointwise=True, static=("lambd",))
def softshrink(self: Any, lambd: Any = 0.5) -> Any:
    return jnp.where(self > lambd, self - lambd, jnp.where(self < -lambd, self + lambd, self * 0))


@lower("softshrink_backward", pointwise=True, promoted=("grad_output", "self"))
def softshrink_backward(grad_output: Any, self: Any, lambd: Any) -> Any:
    return hardshrink_backward(grad_output, self, lambd)


@lower("softplus", pointwise=True)
def softplus(self: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    return jnp.where(self * beta > threshold, self, jnp.log1p(jnp.exp(self * beta)) / beta)


@lower("softplus_backward", pointwise=True, promoted=("grad_output", "self"))
def softplus_backward(grad_output: Any, self: Any, beta: Any, threshold: Any) -> Any:
    return jnp.where(self * beta > threshold, grad_output, grad_output * jax.nn.sigmoid(self * beta))


@lower("mish", pointwise=True)
def mish(self: Any) -> Any:
    return self * jnp.tanh(jax.nn.softplus(self))


@lower("mish_backward", pointwise=True, whole=True)
def mish_backward(grad_output: Any, self: Any) -> Any:
    tanh = jnp.tanh(jax.nn.softplus(self))
    return grad_output * (tanh + self * jax.nn.sigmoid(self) * (1 - tanh * tanh))


@lower("log_sigmoid_forward", pointwise=True)
def log_sigmoid_forward(self: Any) -> Any:
    decay = jnp.exp(-jnp.abs(self))
    return jnp.minimum(self, 0) - jnp.log1p(decay), decay


@lower("log_sigmoid_backward", pointwise=True, promoted=("grad_output", "self"))
def log_sigmoid_backward(grad_output: Any, self: Any, buffer: Any) -> Any:
    return grad_output * jax.nn.sigmoid(-self)


@lower("glu")
def glu(self: Any, dim: int = -1) -> Any:
    wide = jnp.promote_types(self.dtype, jnp.float32)
    value, gate = jnp.split(self.astype(wide), 2, dim)
    return value * jax.nn.sigmoid(gate)


@lower("glu_backward")
def glu_backward(grad_output: Any, self: Any, dim: int) -> Any:
    wide = jnp.promote_types(self.dtype, jnp.float32)
    return jax.vjp(lambda x: glu(x, dim), self)[1](grad_output.astype(wide))[0]


@lower("_prelu_kernel", pointwise=True)
def _prelu_kernel(self: Any, weight: Any) -> Any:
    return jnp.where(self > 0, self, self * weight)


@lower("_prelu_kernel_backward", pointwise=True)
def _prelu_kernel_backward(grad_output: Any, self: Any, weight: Any) -> Any:
    zero = jnp.zeros((), grad_output.dtype)
    return jnp.where(self > 0, grad_output, weight * grad_output), jnp.where(self > 0, zero, self * grad_output)


@lower("logit", pointwise=True)
def logit(self: Any, eps: float | None = None) -> Any:
    x = self
    if eps is not None and not eps < 0:  # the lower bound first: they are in another order if eps > 0.5
        x = jnp.where(x < eps, jnp.asarray(eps, x.dtype), jnp.where(x > 1 - eps, jnp.asarray(1 - eps, x.dtype), x))
    return jnp.log(x / (1 - x))


@lower("logit_backward", pointwise=True, promoted=("grad_output", "self"))
def logit_backward(grad_output: Any, self: Any, eps: float | None = None) -> Any:
    is_free = eps is None or eps < 0
    outside = (self < 0) | (self > 1) if eps is None or is_free else (self < eps) | (self > 1 - eps)
    x = jnp.where(self == 0, jnp.zeros((), self.dtype), self)  # -0.0 is 0.0 here
    return jnp.where(~outside, grad_output / (x * (1 - x)), jnp.nan if is_free else 0)

"""Matrix products, kept whole: `linear` and n-d `matmul` are one `dot_general`, so shardings of batch and heads survive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.lowering._registry import is_static, lower, scaled


@lower("linear", whole=True, told=("reduce_dtype",))
def linear(input: Any, weight: Any, bias: Any = None, reduce_dtype: Any = None) -> Any:
    """y = x W^T + b; input [..., in], weight [out, in] or [in], bias [out]."""
    contract = (((input.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    if is_narrower(weight, reduce_dtype) and weight.ndim == 2:
        out = weighted(lambda x, w: lax.dot_general(x, w, contract), "...o,...i->oi", reduce_dtype)(input, weight)
    else:
        out = lax.dot_general(input, weight, contract)
    return out if bias is None else out + bias


@lower("matmul", whole=True, told=("reduce_dtype",))
def matmul(self: Any, other: Any, reduce_dtype: Any = None) -> Any:
    if is_narrower(other, reduce_dtype) and other.ndim == 2 and self.ndim > 1:
        return weighted(jnp.matmul, "...o,...i->io", reduce_dtype)(self, other)
    return jnp.matmul(self, other)


def is_narrower(weight: Any, reduce_dtype: Any) -> bool:
    """Whether the gradient of `weight` is to be summed in a wider dtype than its own."""
    return reduce_dtype is not None and jnp.issubdtype(weight.dtype, jnp.floating) and weight.dtype.itemsize < reduce_dtype.itemsize


def weighted(product: Callable[..., Any], equation: str, reduce_dtype: Any) -> Callable[..., Any]:
    """`product(x, weight)` whose weight gradient is a product of narrow factors with a wide result.

    Its sum over devices is of that result. Left to jax, the gradient has the dtype of the product, and so has the sum.

    Args:
        equation: the gradient as an einsum of (cotangent, x).
    """

    @jax.custom_vjp
    def apply(x: Any, weight: Any) -> Any:
        return product(x, weight)

    def backward(kept: Any, cotangent: Any) -> Any:
        x, weight = kept
        (to_x,) = jax.linear_transpose(lambda x: product(x, weight), x)(cotangent)
        wide = jnp.einsum(equation, cotangent, x, preferred_element_type=reduce_dtype)
        return to_x, wide.astype(weight.dtype)

    apply.defvjp(lambda x, weight: (product(x, weight), (x, weight)), backward)
    return apply


@lower("einsum", whole=True)
def einsum(equation: str, tensors: Any, *, path: Any = None) -> Any:
    return jnp.einsum(equation, *tensors)


@lower("mm", told=("reduce_dtype",))
def mm(self: Any, mat2: Any, reduce_dtype: Any = None) -> Any:
    """torch's own backward of `addmm` and `mm` makes both gradients of this op, so both are summed in `reduce_dtype`."""
    if is_narrower(mat2, reduce_dtype):
        return jnp.matmul(self, mat2, preferred_element_type=reduce_dtype).astype(mat2.dtype)
    return jnp.matmul(self, mat2)


@lower("bmm", "dot", "mv")
def bmm(self: Any, mat2: Any) -> Any:
    return jnp.matmul(self, mat2)


@lower("addmm", "addmv", static=("beta", "alpha"))
def addmm(self: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return combined(self, unless_zero(alpha, jnp.matmul, mat1, mat2), beta, alpha)


@lower("baddbmm", static=("beta", "alpha"))
def baddbmm(self: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return combined(self, jnp.matmul(batch1, batch2), beta, alpha)


def unless_zero(alpha: Any, product: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """The product; zeros where an `alpha` of zero makes BLAS ignore what the factors hold."""
    if not (is_static(alpha) and alpha == 0):
        return product(left, right)
    shape = jax.eval_shape(product, left, right)
    return jnp.zeros(shape.shape, shape.dtype)


def combined(self: Any, product: Any, beta: Any, alpha: Any) -> Any:
    """`beta * self + alpha * product`; a beta of zero ignores what `self` holds, integers take whole factors, as in torch."""
    if jnp.issubdtype(product.dtype, jnp.integer):
        beta, alpha = (int(factor) if is_static(factor) else jnp.trunc(factor) for factor in (beta, alpha))
    product = scaled(product, alpha)
    if is_static(beta) and beta == 0:
        return jnp.broadcast_to(product, jnp.broadcast_shapes(product.shape, self.shape))
    return scaled(self, beta) + product

"""Matrix products, kept whole: `linear` and n-d `matmul` are one `dot_general`, so that batch and heads stay sharded.

Note [Folded rows]
Code written for matrices folds batch and positions into rows, `addmm(bias, x.view(-1, x.shape[-1]), weight)` (the linears of GPT-2),
and so do torch's gradients. The partitioner cannot shard such rows by batch and by positions at once, so it gathers positions and
communicates parts of a gradient more often. In a trace, the product is therefore computed on the array before folding: [B, T, K] x [K, N],
folded afterwards. The gradient of a weight is the sum over B and T of [B, T, K] x [B, T, N], that of a bias the sum of [B, T, N].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.base._jax import rows_folded_from, transposed_from
from spmd.base._open_sizes import are_sizes_open
from spmd.lowering._registry import is_static, lower, rounded_factor, scaled


@lower("linear", whole=True, told=("reduce_dtype",))
def linear(input: Any, weight: Any, bias: Any = None, reduce_dtype: Any = None) -> Any:
    """y = x W^T + b; input [..., in], weight [out, in] or [in], bias [out]."""
    contract = (((input.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    if is_narrower(weight, reduce_dtype) and weight.ndim == 2:
        out = with_wide_weight_gradient(lambda x, w: lax.dot_general(x, w, contract), "...o,...i->oi", reduce_dtype)(input, weight)
    else:
        out = lax.dot_general(input, weight, contract)
    return out if bias is None else out + bias


@lower("matmul", whole=True, told=("reduce_dtype",))
def matmul(self: Any, other: Any, reduce_dtype: Any = None) -> Any:
    if is_narrower(other, reduce_dtype) and other.ndim == 2 and self.ndim > 1:
        return with_wide_weight_gradient(jnp.matmul, "...o,...i->io", reduce_dtype)(self, other)
    return jnp.matmul(self, other)


def is_narrower(weight: Any, reduce_dtype: Any) -> bool:
    """Whether the gradient of `weight` is to be summed in a dtype wider than that of `weight`."""
    return reduce_dtype is not None and jnp.issubdtype(weight.dtype, jnp.floating) and weight.dtype.itemsize < reduce_dtype.itemsize


def with_wide_weight_gradient(product: Callable[..., Any], equation: str, reduce_dtype: Any) -> Callable[..., Any]:
    """`product(x, weight)` whose weight gradient is a product of narrow operands with a wide result.

    The sum over devices is then in the wide dtype. With jax's own derivative, it would be in the dtype of the product.

    Args:
        equation: the gradient as an einsum of (cotangent, x).
    """

    @jax.custom_vjp
    def apply(x: Any, weight: Any) -> Any:
        return product(x, weight)

    def backward(residuals: Any, cotangent: Any) -> Any:
        x, weight = residuals
        (grad_x,) = jax.linear_transpose(lambda x: product(x, weight), x)(cotangent)
        wide = jnp.einsum(equation, cotangent, x, preferred_element_type=reduce_dtype)
        return grad_x, wide.astype(weight.dtype)

    apply.defvjp(lambda x, weight: (product(x, weight), (x, weight)), backward)
    return apply


@lower("einsum", whole=True)
def einsum(equation: str, tensors: Any, *, path: Any = None) -> Any:
    return jnp.einsum(equation, *tensors)


@lower("mm", told=("reduce_dtype",), by_origin=True)
def mm(self: Any, mat2: Any, reduce_dtype: Any = None) -> Any:
    """torch's backward of `addmm` and `mm` computes both gradients with this op, so both are summed in `reduce_dtype`."""
    if is_narrower(mat2, reduce_dtype):
        return _folded(_product(self, mat2, reduce_dtype)).astype(mat2.dtype)
    return _folded(_product(self, mat2))


def _product(left: Any, right: Any, dtype: Any = None) -> Any:
    """The product of two matrices: [M, N], or [..., N] if the rows of `left` were folded. See Note [Folded rows]."""
    if left.ndim != 2 or right.ndim != 2 or are_sizes_open():
        return jnp.matmul(left, right, preferred_element_type=dtype)
    rows, columns, others = rows_folded_from(left), rows_folded_from(transposed_from(left)), rows_folded_from(right)
    if columns is not None and others is not None and columns.shape[:-1] == others.shape[:-1]:
        summed = tuple(range(columns.ndim - 1))
        return lax.dot_general(columns, others, ((summed, summed), ((), ())), preferred_element_type=dtype)
    left = left if rows is None else rows
    return lax.dot_general(left, right, (((left.ndim - 1,), (0,)), ((), ())), preferred_element_type=dtype)


def _folded(product: Any) -> Any:
    return product if product.ndim == 2 else product.reshape(-1, product.shape[-1])


@lower("bmm", "dot", "mv")
def bmm(self: Any, mat2: Any) -> Any:
    return jnp.matmul(self, mat2)


@lower("addmm", static=("beta", "alpha"), by_origin=True)
def addmm(self: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = unless_zero(alpha, _product, mat1, mat2)
    return _folded(combined(self, product if self.ndim < 2 else _folded(product), beta, alpha))


@lower("addmv", static=("beta", "alpha"))
def addmv(self: Any, mat: Any, vec: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    beta, alpha = (rounded_factor(factor, self.dtype) for factor in (beta, alpha))
    return combined(self, unless_zero(alpha, jnp.matmul, mat, vec), beta, alpha)


@lower("baddbmm", static=("beta", "alpha"))
def baddbmm(self: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return combined(self, jnp.matmul(batch1, batch2), beta, alpha)


def unless_zero(alpha: Any, product: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """`product(left, right)`, but zeros if `alpha` is 0: BLAS then ignores the operands, also NaN in them."""
    if not (is_static(alpha) and alpha == 0):
        return product(left, right)
    shape = jax.eval_shape(product, left, right)
    return jnp.zeros(shape.shape, shape.dtype)


def combined(self: Any, product: Any, beta: Any, alpha: Any) -> Any:
    """`beta * self + alpha * product`. As in torch, a `beta` of 0 ignores the values of `self`, and integers truncate the factors."""
    product = scaled(product, alpha)
    if is_static(beta) and beta == 0:
        return jnp.broadcast_to(product, jnp.broadcast_shapes(product.shape, self.shape))
    return scaled(self, beta) + product

"""Matrix products, kept whole: `linear` and n-d `matmul` are one `dot_general`, so shardings of batch and heads survive."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from spmd.lowering._registry import is_static, lower, scaled


@lower("linear", whole=True)
def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """y = x W^T + b; input [..., in], weight [out, in] or [in], bias [out]."""
    contract = (((input.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    out = lax.dot_general(input, weight, contract)
    return out if bias is None else out + bias


@lower("matmul", whole=True)
def matmul(self: Any, other: Any) -> Any:
    return jnp.matmul(self, other)


@lower("einsum", whole=True)
def einsum(equation: str, tensors: Any, *, path: Any = None) -> Any:
    return jnp.einsum(equation, *tensors)


@lower("mm", "bmm", "dot", "mv")
def mm(self: Any, mat2: Any) -> Any:
    return jnp.matmul(self, mat2)


@lower("addmm", "addmv", "baddbmm", static=("beta", "alpha"))
def addmm(self: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return combined(self, jnp.matmul(mat1, mat2), beta, alpha)


def combined(self: Any, product: Any, beta: Any, alpha: Any) -> Any:
    """`beta * self + alpha * product`; a beta of zero ignores what `self` holds, integers take whole factors, as in torch."""
    if jnp.issubdtype(product.dtype, jnp.integer):
        beta, alpha = (int(factor) if is_static(factor) else jnp.trunc(factor) for factor in (beta, alpha))
    product = scaled(product, alpha)
    if is_static(beta) and beta == 0:
        return jnp.broadcast_to(product, jnp.broadcast_shapes(product.shape, self.shape))
    return scaled(self, beta) + product

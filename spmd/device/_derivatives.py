"""Gradients of ops whose formula in torch reads values on the host: `max()`, `median()`, `prod`, `cumprod`, filling with a tensor.

torch's formulas branch on whether a value is NaN, where the zeros are, or which elements a mask selects. A traced program has no values,
and eager code would wait for them. The formulas here use `where` instead of these branches. They consist of torch's operators, so they
have gradients themselves. functorch, forward mode and tracers other than jax's get torch's kernel, whose formulas read no values for
their tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from spmd.base._torch import (
    AutoDispatchBelowAutograd,
    DispatchKey,
    OpOverload,
    after_autograd_keyset,
    are_functorch_transforms_active,
    dispatch_keys,
    excluded_dispatch_keys,
    included_dispatch_keys,
    pytree,
)
from spmd.lowering._registry import resolve

Formula = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (gradient of the result, self, result) -> gradient of self


def evenly(grad: torch.Tensor, self: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Gradient of an op that selects one element: split evenly over all elements equal to it, or over the NaNs if it is NaN."""
    mask = (self == result) | (self.isnan() & result.isnan())
    return torch.where(mask, grad / mask.sum(), torch.zeros_like(grad))


def of_product(grad: torch.Tensor, self: torch.Tensor, result: torch.Tensor, dim: int, *, is_of_all: bool = False) -> torch.Tensor:
    """Gradient of a product along `dim`: `grad * result / self`, or with the product of the other elements if there is any zero.

    Args:
        is_of_all: the product is over all elements of a tensor. With two or more zeros torch's gradient is then zero everywhere,
            even next to infinities.
    """
    zeros = self == 0
    has_zeros = zeros.any()
    one = torch.ones_like(self)
    quotient = torch.where(has_zeros, one, result) / torch.where(has_zeros, one, self)
    padded = torch.cat([one.narrow(dim, 0, 1), torch.where(has_zeros, self, one), one.narrow(dim, 0, 1)], dim)
    before = padded.narrow(dim, 0, self.shape[dim]).cumprod(dim)
    after = padded.narrow(dim, 2, self.shape[dim]).flip(dim).cumprod(dim).flip(dim)
    others = before * after
    if is_of_all and not torch.is_grad_enabled():
        others = torch.where(zeros.sum() > 1, torch.zeros_like(one), others)
    return grad * torch.where(has_zeros, others, quotient).conj()


def of_running_product(grad: torch.Tensor, self: torch.Tensor, result: torch.Tensor, dim: int) -> torch.Tensor:
    """Gradient of a running product along `dim`, in linear time like torch's.

    Elements before the first zero and the first zero itself have separate formulas; elements after it get zero.
    """
    zeros = self == 0
    count = zeros.cumsum(dim)
    is_before, is_first, nothing = count == 0, zeros & (count == 1), torch.zeros_like(grad)
    weighted = torch.where(is_before, grad * result.conj(), nothing)
    before = weighted.flip(dim).cumsum(dim).flip(dim) / torch.where(is_before, self, torch.ones_like(self)).conj()
    if torch.is_grad_enabled():  # the second derivative is nonzero behind a zero
        return torch.where(zeros.any(), _of_running_product_again(grad, self, dim), before)
    without = torch.where(is_first, torch.ones_like(self), self).cumprod(dim).conj()
    first = torch.where(count == 1, grad * without, nothing).sum(dim, keepdim=True)
    return torch.where(is_before, before, torch.where(is_first, first, nothing))


def _of_running_product_again(grad: torch.Tensor, self: torch.Tensor, dim: int) -> torch.Tensor:
    """The same gradient without division.

    It is the product of the elements before position i, times the sum over j >= i of `grad[j]` times the product between i and j.
    """
    size = self.shape[dim]
    one = torch.ones_like(self.narrow(dim, 0, 1))
    factor, total = torch.cat([self.narrow(dim, 1, size - 1), torch.zeros_like(one)], dim).conj(), grad
    step = 1
    while step < size:
        far = torch.cat([total.narrow(dim, step, size - step), torch.zeros_like(total.narrow(dim, 0, step))], dim)
        total = total + factor * far
        factor = factor * torch.cat([factor.narrow(dim, step, size - step), torch.zeros_like(factor.narrow(dim, 0, step))], dim)
        step *= 2
    return torch.cat([one, self.narrow(dim, 0, size - 1)], dim).cumprod(dim).conj() * total


class _Derived(torch.autograd.Function):
    """A call of an op on autograd's tape, with a gradient formula from this file."""

    @staticmethod
    def forward(ctx: Any, self: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor], formula: Formula) -> torch.Tensor:
        with AutoDispatchBelowAutograd():
            result = run(self)
        ctx.formula = formula
        ctx.save_for_backward(self, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        self, result = ctx.saved_tensors
        return ctx.formula(grads[0], self.to(result.dtype), result), None, None


def _kernel(op: OpOverload, formula: Callable[..., Formula]) -> Callable[..., Any]:
    """The autograd kernel of `op`; `formula(self, *args)` returns the gradient formula of one call."""

    def kernel(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if are_functorch_transforms_active() or _is_foreign(self):
            return _torchs_own(op, self, *args, **kwargs)
        if not (torch.is_grad_enabled() and self.requires_grad):
            with AutoDispatchBelowAutograd():
                return op(self, *args, **kwargs)
        return _Derived.apply(self, lambda x: op(x, *args, **kwargs), formula(self, *args))

    return kernel


def _is_foreign(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ in ("FakeTensor", "FunctionalTensor") or forward_ad.unpack_dual(tensor).tangent is not None


def _torchs_own(op: OpOverload, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call torch's kernel for devices that register none (key AutogradOther)."""
    keys = included_dispatch_keys()
    for tensor in pytree.tree_leaves((self, args)):
        if isinstance(tensor, torch.Tensor):
            keys = keys | dispatch_keys(tensor)
    keys = (keys - excluded_dispatch_keys()) & after_autograd_keyset
    for key in (DispatchKey.BackendSelect, *(() if op._schema.is_mutable else (DispatchKey.ADInplaceOrView,))):
        keys = keys.remove(key)  # no kernel is registered for these; the dispatcher skips such keys, but `redispatch` does not
    return op.redispatch(keys.add(DispatchKey.AutogradOther), self, *args, **kwargs)


def _product_of_all(self: torch.Tensor) -> Formula:
    if self.numel() < 2:
        return lambda grad, x, result: grad.expand_as(x)
    return lambda grad, x, result: of_product(grad, x.reshape(-1), result, 0, is_of_all=True).view_as(x)


def _product(self: torch.Tensor, dim: int, keepdim: bool = False) -> Formula:
    def formula(grad: torch.Tensor, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        if not x.dim():
            return grad
        grad, result = (grad, result) if keepdim else (grad.unsqueeze(dim), result.unsqueeze(dim))
        return grad.expand_as(x) if x.shape[dim] == 1 or not x.numel() else of_product(grad, x, result, dim)

    return formula


def _running_product(self: torch.Tensor, dim: int) -> Formula:
    if self.numel() < 2 or self.shape[dim] == 1:
        return lambda grad, x, result: grad
    return lambda grad, x, result: of_running_product(grad, x, result, dim)


def _cumprod_(self: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`tensor.cumprod_(dim)`, computed by the out-of-place form, which also provides the gradient."""
    if are_functorch_transforms_active() or _is_foreign(self) or dtype not in (None, self.dtype):
        return _torchs_own(torch.ops.aten.cumprod_.default, self, dim, dtype=dtype)
    return self.copy_((self.clone() if self.requires_grad else self).cumprod(dim))  # the gradient needs the old values


def _filling(op: OpOverload, mask_of: Callable[..., torch.Tensor | None]) -> Callable[..., Any]:
    """The autograd kernel of an op that fills elements with the value of a tensor, differentiated like `where`.

    `mask_of(self, *args)` returns a mask of the filled elements, or None to use torch's own kernel.
    """
    is_in_place = op._schema.is_mutable
    position = [a.name for a in op._schema.arguments].index("value" if "fill" in op.name() else "values")

    def kernel(self: torch.Tensor, *args: Any) -> Any:
        value = args[position - 1]
        is_plain = torch.is_grad_enabled() and value.requires_grad and self.dim() and not are_functorch_transforms_active()
        mask = None if not is_plain or any(map(_is_foreign, (self, value))) else mask_of(self, *args)
        if mask is None:
            return _torchs_own(op, self, *args)
        filled = torch.where(mask, value.reshape(()).to(self.dtype), self)
        return self.copy_(filled) if is_in_place else filled

    return kernel


def _put(self: torch.Tensor, indices: list[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False) -> torch.Tensor | None:
    """Mask of the elements that `x[mask] = value` fills; None if the index is not one mask or there are several values."""
    mask = indices[0] if len(indices) == 1 else None
    if mask is None or mask.dtype != torch.bool or values.numel() != 1 or accumulate:
        return None
    return mask.to(self.device).reshape(*mask.shape, *(1,) * (self.dim() - mask.dim()))


def _mask_along(self: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Mask, broadcastable to `self`, of the elements at `index` along `dim`."""
    mask = torch.zeros(self.shape[dim], dtype=torch.bool, device=self.device).index_fill(0, index, True)
    return mask.reshape([-1 if i == dim % self.dim() else 1 for i in range(self.dim())])


def kernels() -> dict[str, Callable[..., Any]]:
    """Autograd kernels by overload name."""
    made = {name: _kernel(resolve(name), lambda self: evenly) for name in ("max", "min", "median", "nanmedian")}
    made["prod"] = _kernel(resolve("prod"), _product_of_all)
    made["prod.dim_int"] = _kernel(resolve("prod.dim_int"), _product)
    made["cumprod"] = _kernel(resolve("cumprod"), _running_product)
    made["cumprod_"] = _cumprod_
    for name in ("masked_fill.Tensor", "masked_fill_.Tensor"):
        made[name] = _filling(resolve(name), lambda self, mask, value: mask)
    for name in ("index_fill.int_Tensor", "index_fill_.int_Tensor"):
        made[name] = _filling(resolve(name), _mask_along)
    for name in ("index_put", "index_put_"):
        made[name] = _filling(resolve(name), _put)
    return made


__all__ = ["evenly", "kernels", "of_product", "of_running_product"]

"""Operators on a program number and a 0-dim tensor under `torch.func.vmap`, as in `loss_of_one_sample * weight`.

torch wraps the number in a 0-dim CPU tensor that keeps the number. If the other operand is 0-dim inside the mapped function, vmap casts
this tensor to the dtype of the result, and the number is lost. So a 0-dim device tensor takes the place of the number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from spmd.base._torch import is_functorch_wrapped_tensor
from spmd.device._numbers import NumberNode, sample

_TAKE_TENSORS = frozenset(  # functions whose operands may be tensors or numbers
    f"{form}{name}{suffix}"
    for name in ("add", "sub", "mul", "div", "subtract", "multiply", "divide", "true_divide", "truediv", "floor_divide", "floordiv")
    for form, suffix in (("", ""), ("__", "__"), ("__r", "__"))
)


def is_mapped_scalar(value: Any) -> bool:
    """Whether it is a tensor under a `torch.func` transform that is 0-dim inside the transformed function."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and is_functorch_wrapped_tensor(value)


def takes_tensors(fn: Any) -> bool:
    """Whether a torch function takes a number or a tensor as operand."""
    return getattr(fn, "__name__", "") in _TAKE_TENSORS


def with_scalars(fn: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """`fn(*given, **options)`, with its program numbers as tensors if another operand is a mapped scalar."""
    operands = (getattr(fn, "__self__", None), *given, *options.values())
    mapped = next(filter(is_mapped_scalar, operands), None)
    return fn(*given, **options) if mapped is None else fn(*(as_scalar(value, mapped) for value in given), **options)


def as_scalar(value: Any, mapped: torch.Tensor) -> Any:
    """A program number as a 0-dim tensor whose dtype is that of the result with `mapped`; other values as they are."""
    if not isinstance(value, torch.SymFloat) or not isinstance(value.node, NumberNode):
        return value
    number: Any = value
    return torch.full((), number, dtype=torch.result_type(mapped, sample(value)), device=mapped.device)


class MappedScalar:
    """Takes the place of a mapped scalar as the left operand, when the right operand is a program number."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _binary(name: str) -> None:
    fn = getattr(operator, name)
    setattr(MappedScalar, f"__{name.rstrip('_')}__", lambda self, number: fn(self.tensor, as_scalar(number, self.tensor)))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "eq", "ne"):
    _binary(_name)

__all__ = ["MappedScalar", "as_scalar", "is_mapped_scalar", "takes_tensors", "with_scalars"]

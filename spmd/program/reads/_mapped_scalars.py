"""A number of a program beside a 0-dim tensor under `torch.func.vmap`, as in `loss_of_one_sample * weight`.

torch makes a 0-dim tensor of the number, which remembers it. vmap casts that tensor to the dtype of the result where the other operand
is 0-dim for the mapped function, and the cast forgets the number. So such an operand gets a tensor of the device instead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from spmd.base._torch import is_functorch_wrapped_tensor
from spmd.device._numbers import NumberNode, sample

_TAKE_TENSORS = frozenset(  # whose operands may be tensors or numbers
    f"{form}{name}{suffix}"
    for name in ("add", "sub", "mul", "div", "subtract", "multiply", "divide", "true_divide", "truediv", "floor_divide", "floordiv")
    for form, suffix in (("", ""), ("__", "__"), ("__r", "__"))
)


def is_mapped_scalar(value: Any) -> bool:
    """Whether it is a tensor of a transform that is 0-dim for the function that is transformed."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and is_functorch_wrapped_tensor(value)


def takes_tensors(fn: Any) -> bool:
    """Whether a function of torch takes numbers where it takes tensors."""
    return getattr(fn, "__name__", "") in _TAKE_TENSORS


def with_scalars(fn: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """`fn(*given, **options)`, its numbers tensors beside such an operand."""
    operands = (getattr(fn, "__self__", None), *given, *options.values())
    mapped = next(filter(is_mapped_scalar, operands), None)
    return fn(*given, **options) if mapped is None else fn(*(as_scalar(value, mapped) for value in given), **options)


def as_scalar(value: Any, mapped: torch.Tensor) -> Any:
    """A number of the program as a 0-dim tensor that promotes as it does beside `mapped`; other values as they are."""
    if not isinstance(value, torch.SymFloat) or not isinstance(value.node, NumberNode):
        return value
    number: Any = value
    return torch.full((), number, dtype=torch.result_type(mapped, sample(value)), device=mapped.device)


class MappedScalar:
    """Stands for such a tensor as the first operand beside a number."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _binary(name: str) -> None:
    fn = getattr(operator, name)
    setattr(MappedScalar, f"__{name.rstrip('_')}__", lambda self, number: fn(self.tensor, as_scalar(number, self.tensor)))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "eq", "ne"):
    _binary(_name)

__all__ = ["MappedScalar", "as_scalar", "is_mapped_scalar", "takes_tensors", "with_scalars"]

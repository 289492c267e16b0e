"""Operators on a program number and a tensor beside which torch loses the number.

torch wraps the number in a 0-dim CPU tensor that keeps the number. If the other operand is 0-dim inside a function that is mapped by
`torch.func.vmap`, vmap casts this tensor to the dtype of the result, and the number is lost. So a 0-dim device tensor takes the place of
the number. If the other operand is on the CPU, the CPU computes with the value of the 0-dim tensor, which is NaN. So the Python number
takes the place of the number, and the program is valid for it only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from spmd.base._torch import is_functorch_wrapped_tensor
from spmd.device._host_copies import held_of
from spmd.device._numbers import NumberNode, sample
from spmd.device._storage import is_device_tensor

_TAKE_TENSORS = frozenset(  # functions whose operands may be tensors or numbers
    f"{form}{name}{suffix}"
    for name in ("add", "sub", "mul", "div", "subtract", "multiply", "divide", "true_divide", "truediv", "floor_divide", "floordiv")
    for form, suffix in (("", ""), ("", "_"), ("i", ""), ("__", "__"), ("__r", "__"), ("__i", "__"))
)


def is_mapped_scalar(value: Any) -> bool:
    """Whether it is a tensor beside which torch loses a program number."""
    if not isinstance(value, torch.Tensor):
        return False
    return _is_of_host(value) or (value.dim() == 0 and is_functorch_wrapped_tensor(value))


def _is_of_host(tensor: torch.Tensor) -> bool:
    """Whether it is on the CPU, and no copy of a tensor on the device."""
    return tensor.device.type == "cpu" and not is_device_tensor(held_of(tensor))


def takes_tensors(fn: Any) -> bool:
    """Whether a torch function takes a number or a tensor as operand."""
    return getattr(fn, "__name__", "") in _TAKE_TENSORS


def with_scalars(fn: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """`fn(*given, **options)`, with its program numbers as tensors if another operand is a mapped scalar."""
    operands = (getattr(fn, "__self__", None), *given, *options.values())
    mapped = next(filter(is_mapped_scalar, operands), None)
    return fn(*given, **options) if mapped is None else fn(*(as_scalar(value, mapped) for value in given), **options)


def as_scalar(value: Any, mapped: torch.Tensor) -> Any:
    """A program number as a 0-dim tensor whose dtype is that of the result with `mapped`; other values as they are.

    Beside a tensor on the CPU it is the Python number.

    Raises:
        TraceError: the tensor is on the CPU, and only the device knows the number.
    """
    if not isinstance(value, torch.SymFloat) or not isinstance(value.node, NumberNode):
        return value
    if _is_of_host(mapped):
        return value.node.known("number, beside a tensor on the CPU")
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

"""Operators on a program number and a tensor beside which torch loses the number.

torch wraps the number in a 0-dim CPU tensor that keeps the number. If the other operand is 0-dim inside a function that is mapped by
`torch.func.vmap`, vmap casts this tensor to the dtype of the result, and the number is lost. So a 0-dim device tensor takes the place of
the number. If the other operand is on the CPU, the CPU computes with the value of the 0-dim tensor, which is NaN. So the Python number
takes the place of the number, and the program is valid for it only.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch

from spmd.base._torch import OpOverload, OpOverloadPacket, is_functorch_wrapped_tensor
from spmd.device._host_copies import held_of
from spmd.device._number_arithmetic import bitwise
from spmd.device._numbers import is_program_number, sample
from spmd.device._storage import is_device_tensor

_IN_TORCH = (types.BuiltinFunctionType, OpOverload, OpOverloadPacket)
_TAKE_TENSORS = frozenset(  # functions whose operands may be tensors or numbers
    f"{form}{name}{suffix}"
    for name in ("add", "sub", "mul", "div", "subtract", "multiply", "divide", "true_divide", "truediv", "floor_divide", "floordiv")
    for form, suffix in (("", ""), ("", "_"), ("i", ""), ("__", "__"), ("__r", "__"), ("__i", "__"))
)


def loses_numbers(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor beside which torch loses a program number."""
    if not isinstance(value, torch.Tensor):
        return False
    return _is_of_host(value) or (value.dim() == 0 and is_functorch_wrapped_tensor(value))


def _is_of_host(tensor: torch.Tensor) -> bool:
    """Whether it is on the CPU, and no copy of a tensor on the device."""
    return tensor.is_cpu and not is_device_tensor(held_of(tensor))


def takes_tensors(fn: Any) -> bool:
    """Whether a torch function takes a number or a tensor as operand."""
    return getattr(fn, "__name__", "") in _TAKE_TENSORS


def with_operands(fn: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """`fn(*given, **options)`; if one of the operands loses numbers, the others are what takes their place."""
    operands = (getattr(fn, "__self__", None), *given, *options.values())
    tensor = next(filter(loses_numbers, operands), None)
    if tensor is None:
        return fn(*given, **options)
    return fn(*(number_beside(v, tensor) for v in given), **{name: number_beside(v, tensor) for name, v in options.items()})


def number_beside(value: Any, tensor: torch.Tensor) -> Any:
    """What takes the place of a program number beside a tensor that loses it; other values as they are.

    Raises:
        TraceError: the tensor is on the CPU, and only the device knows the number.
    """
    if not isinstance(value, torch.SymFloat) or not is_program_number(value):
        return value
    if _is_of_host(tensor):
        return value.node.known("number, beside a tensor on the CPU")
    number: Any = value
    return torch.full((), number, dtype=torch.result_type(tensor, sample(number)), device=tensor.device)


def is_in_torch(fn: Any) -> bool:
    """Whether it is a function or method of torch in C++."""
    if type(fn) is types.BuiltinFunctionType and isinstance(fn.__self__, torch.Tensor):
        return True
    if type(fn) is types.MethodDescriptorType:  # torch.Tensor.clamp(x, n)
        return issubclass(torch.Tensor, fn.__objclass__)
    return type(fn) in _IN_TORCH and str(getattr(fn, "__module__", None)).partition(".")[0] == "torch"


def runs_on_host(fn: Any, given: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether a call of a function of torch computes on the CPU: there an integer of the program would be a float."""
    device, owner = options.get("device"), getattr(fn, "__self__", None)
    if device is not None:
        return torch.device(device).type == "cpu"
    operands: list[Any] = [owner, *given, *options.values()]
    parts = [part for value in operands for part in (value if type(value) in (list, tuple) else (value,))]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    return all(map(_is_of_host, tensors)) if tensors else torch.get_default_device().type == "cpu"


class TensorOperand:
    """Takes the place of a tensor that loses numbers as the left operand, when the right operand is a program number."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _binary(name: str) -> None:
    fn = getattr(operator, name)
    setattr(TensorOperand, f"__{name.rstrip('_')}__", lambda self, number: fn(self.tensor, number_beside(number, self.tensor)))


class IntegerOperand:
    """Takes the place of the left operand where one is an integer of the program: torch's numbers have no bitwise operators."""

    def __init__(self, left: Any) -> None:
        self.left = left

    def __invert__(self) -> Any:
        return -self.left - 1


def integer_operand(left: Any, right: Any) -> Any:
    """The left operand to use where one operand is an integer or a bool of the program, and the other one is an integer or a bool."""
    if not (is_program_number(left) or is_program_number(right)) or not _is_integer(left) or not _is_integer(right):
        return left
    return IntegerOperand(left)


def _is_integer(value: Any) -> bool:
    return type(value) in (int, bool) or (is_program_number(value) and value.node.kind in (int, bool))


def _integers(name: str, is_bitwise: bool) -> None:
    fn = partial(bitwise, name) if is_bitwise else getattr(operator, name)
    setattr(IntegerOperand, f"__{name.rstrip('_')}__", lambda self, right: fn(self.left, right))


for _names, _is_bitwise in (("add sub mul truediv floordiv mod pow", False), ("lshift rshift and_ or_ xor", True)):
    for _name in _names.split():
        _integers(_name, _is_bitwise)
for _names in ("add sub mul truediv floordiv mod pow", "lshift rshift and_ or_ xor", "lt le gt ge eq ne"):
    for _name in _names.split():
        _binary(_name)

__all__ = [
    "TensorOperand",
    "integer_operand",
    "is_in_torch",
    "loses_numbers",
    "number_beside",
    "runs_on_host",
    "takes_tensors",
    "with_operands",
]

"""Numbers of the host that are inputs of a program, as arguments of operators whose dtype may not represent them.

An input has 64 bits. Beside a tensor of int8, PyTorch wraps a Python number that the dtype does not represent, or refuses it. It also
refuses 0 as a divisor of integers, negative powers of integers, and floats that it cannot convert to 16 bits. So the program gets a guard
on whether the number is such a one. If it is, its value is a constant of the program, as that of a Python number is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from spmd.device._numbers import NumberNode, number_of

_DIVISIONS = frozenset({"floor_divide", "remainder", "fmod", "div"})
_POWERS = frozenset({"pow", "float_power"})
_ADD_PRODUCTS = frozenset({"addmm", "addmv", "addr", "addbmm", "baddbmm"})
# operators that refuse a float that 32 bits do not represent; for others, such as an optimizer's, this is not worth a guard
_FILLS = frozenset(
    {
        *("full", "full_like", "new_full", "fill", "masked_fill", "index_fill", "scatter", "constant_pad_nd", "scalar_tensor"),
        *("clamp", "clamp_min", "clamp_max"),
    }
)
_EXACT = 2**53  # integers up to here are exact as 64-bit floats, which the inputs of a program are


def with_representable(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operator, with Python numbers in the place of those that its dtype does not represent.

    Args:
        name: of the operator, without its namespace.
    """
    if all(_node_of(arg) is None for arg in (*args, *kwargs.values())):
        return args, kwargs
    if (factor := _node_of(kwargs.get("beta"))) is not None and name in _ADD_PRODUCTS and not _holds(factor, bool):
        kwargs = {**kwargs, "beta": factor.known("number")}  # the tensor times 0 is 0 then, also if it is not finite
    dtype = _dtype_of(args, kwargs)
    if dtype is None or (dtype in (torch.float32, torch.float64) and name not in _FILLS):
        return args, kwargs
    valid_operand = _valid(name, torch.int64 if dtype is torch.bool else dtype)  # a bool and an int are promoted to int64
    valid = valid_operand if name in _DIVISIONS or name in _POWERS else _valid(name, dtype)

    def taken(arg: Any) -> Any:
        node = _node_of(arg)
        if node is None or node.truth:
            return arg
        is_operand = isinstance(arg, torch.Tensor)
        if is_operand and (dtype.is_floating_point or not node.integral):  # the result is a float
            return arg
        return arg if _holds(node, valid_operand if is_operand else valid) else node.known("number")

    return tuple(map(taken, args)), {key: taken(value) for key, value in kwargs.items()}


def is_exact(number: Any) -> bool:
    """Whether a number can be an input of a program: not an int that a 64-bit float does not represent, nor a float as large."""
    return not abs(number) > _EXACT  # NaN can


def _valid(name: str, dtype: torch.dtype) -> Callable[[Any], bool]:
    if dtype.is_floating_point:
        limit = torch.finfo(dtype).max
        return lambda number: not abs(number) > limit or math.isinf(number)
    if dtype is torch.bool:
        return lambda number: number in (0, 1)
    low, high = 0 if name in _POWERS else torch.iinfo(dtype).min, torch.iinfo(dtype).max
    is_divisor = name in _DIVISIONS
    return lambda number: low <= number <= high and not (is_divisor and number == 0)


def _holds(node: NumberNode, valid: Callable[[Any], bool]) -> bool:
    """Whether the number of this call is valid. The program gets a guard on the answer."""
    evaluate = node.evaluate
    assert evaluate is not None and node.on_branch is not None
    outcome = valid(evaluate())
    node.on_branch(None, lambda: valid(evaluate()), outcome)
    return outcome


def _node_of(arg: Any) -> NumberNode | None:
    """The node of an argument that is a number of the host; None for others."""
    number = number_of(arg)
    node = None if number is None else number.node
    return node if isinstance(node, NumberNode) and node.evaluate is not None and node.on_branch is not None else None


def _dtype_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype to which the numbers are converted, the real one of a complex one; None if there is none."""
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor) and not arg.is_cpu]
    floats = (t.dtype for t in tensors if t.is_floating_point() or t.is_complex())
    dtype = kwargs.get("dtype") or next(floats, tensors[0].dtype if tensors else None)
    return dtype.to_real() if dtype is not None and dtype.is_complex else dtype


__all__ = ["is_exact", "with_representable"]

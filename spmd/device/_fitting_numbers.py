"""Numbers of the host that are inputs of a program, as arguments of operators whose dtype may not represent them.

An input has 64 bits. Beside a tensor of int8, PyTorch wraps a Python number that the dtype does not represent, or refuses it; it refuses
0 as a divisor of integers, and negative powers of them. So there the program has a guard on whether the number is such a one. If it is,
its value is part of the program, as that of a Python number is. The same holds for floats that PyTorch refuses to convert to 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from spmd.device._numbers import NumberNode

_DIVISIONS = frozenset({"floor_divide", "remainder", "fmod", "div", "__rshift__", "__lshift__"})
_POWERS = frozenset({"pow", "float_power"})
# operators that convert a float to the dtype of the tensor; others give a result of floats
_CONVERT = frozenset(
    {
        *("full", "full_like", "new_full", "fill", "masked_fill", "index_fill", "scatter", "constant_pad_nd", "scalar_tensor"),
        *("clamp", "clamp_min", "clamp_max"),
    }
)
_ADD_PRODUCTS = frozenset({"addmm", "addmv", "addr", "addbmm", "baddbmm"})
_EXACT = 2**53  # integers up to here are exact as 64-bit floats, which the inputs of a program are


def fitting(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operator, with numbers that its integers do not represent as Python numbers.

    Args:
        name: of the operator, without its namespace.
    """
    if not any(_node_of(arg) is not None for arg in (*args, *kwargs.values())):
        return args, kwargs
    if (factor := _node_of(kwargs.get("beta"))) is not None and name in _ADD_PRODUCTS and not _holds(factor, bool):
        kwargs = {**kwargs, "beta": factor.known("number")}  # the tensor times 0 is 0 then, also if it is not finite
    dtype = _dtype_of(args, kwargs)
    if dtype is None or (dtype.is_floating_point and name not in _CONVERT):
        return args, kwargs
    valid = _valid(name, dtype)

    def fit(arg: Any) -> Any:
        node = _node_of(arg)
        if node is None or not (node.integral or name in _CONVERT) or node.truth:
            return arg
        return arg if _holds(node, valid) else node.known("number")

    return tuple(map(fit, args)), {key: fit(value) for key, value in kwargs.items()}


def is_exact(number: Any) -> bool:
    """Whether a number can be an input of a program: not an int that a 64-bit float does not represent, nor a float as large."""
    return not abs(number) > _EXACT  # NaN can


def _valid(name: str, dtype: torch.dtype) -> Callable[[Any], bool]:
    if dtype.is_floating_point:
        limit = torch.finfo(dtype).max
        return lambda number: not abs(number) > limit or math.isinf(number)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if name in _POWERS:
        low = 0
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
    number = arg if type(arg) is torch.SymFloat else getattr(arg, "__wrapped_number", None) if _is_wrapped(arg) else None
    node = None if number is None else number.node
    return node if isinstance(node, NumberNode) and node.evaluate is not None and node.on_branch is not None else None


def _is_wrapped(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.is_cpu


def _dtype_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype to which the numbers are converted; None if it is a complex one or bool."""
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor) and not arg.is_cpu]
    floats = (t.dtype for t in tensors if t.is_floating_point() or t.is_complex())
    dtype = kwargs.get("dtype") or next(floats, tensors[0].dtype if tensors else None)
    return None if dtype is None or dtype is torch.bool or dtype.is_complex else dtype


__all__ = ["fitting", "is_exact"]

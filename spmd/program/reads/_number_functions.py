"""Functions of numbers: which may raise for other numbers, and which give numbers that a program computes from settings of optimizers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from spmd.device._numbers import OF_MATH

_NEVER_RAISE = frozenset(
    (operator.add, operator.sub, operator.mul, operator.neg, operator.pos, operator.and_, operator.or_, operator.xor, operator.invert)
) | {abs, min, max, bool, float}
_DIVIDE = frozenset((operator.truediv, operator.floordiv, operator.mod, divmod))
_DIVIDE_EXACTLY = frozenset((operator.truediv, operator.itruediv))
_POWERS = frozenset((operator.pow, operator.ipow))
_OF_INTS = frozenset(getattr(operator, i + name) for name in ("add", "sub", "mul") for i in ("", "i"))
_OF_MATH = frozenset(getattr(math, name) for name in OF_MATH)


def may_raise(fn: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether `fn` may raise an error for other numbers."""
    return fn not in _NEVER_RAISE and not (fn in _DIVIDE and type(args[1]) in (int, float) and args[1] != 0)


def gives_float(fn: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether `fn`, which `keeps_settings`, gives a float for these arguments."""
    return not (fn in _OF_INTS and all(map(_is_int, args)))


def keeps_settings(fn: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a `NumberNode` has the operation `fn`, which gives of settings of optimizers a number that follows from settings alone."""
    return (fn in _OF_MATH and len(args) == 1) or fn in _OF_INTS or fn in _DIVIDE_EXACTLY or (fn in _POWERS and not all(map(_is_int, args)))


def _is_int(number: Any) -> bool:
    return number.node.kind is int if isinstance(number, torch.SymFloat) else type(number) is not float


__all__ = ["gives_float", "keeps_settings", "may_raise"]

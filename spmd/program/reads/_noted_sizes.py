"""Replacements for C functions that are called with a noted size.

A noted size is an int that records each comparison that Python makes of it (`sizes/_size_reads`). C code would read its value without
a record.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch

_OF_NUMBERS = frozenset((range, bytes, bytearray, bin, hex, oct, chr, complex))
_NUMBERS_IN = frozenset(("math", "cmath", "itertools", "numpy", "_operator", "_decimal", "decimal", "_bisect", "_heapq", "_struct"))


# functions without steps and turning points
_SMOOTH = frozenset(map(id, (math.sqrt, math.log, math.log2, math.log10, math.log1p, math.exp, math.pow)))


def _hides_numbers(fn: Any) -> bool:
    """Whether `fn` computes from a number, in C, a value that records nothing; methods of tensors are operations of the program."""
    owner = getattr(fn, "__self__", None)
    return (
        (isinstance(fn, Hashable) and fn in _OF_NUMBERS)
        or str(getattr(fn, "__module__", None) or "").partition(".")[0] in _NUMBERS_IN
        or isinstance(owner, (str, bytes, bytearray, np.ndarray))
        or (isinstance(owner, (list, collections.deque)) and fn.__name__ in ("insert", "pop", "rotate", "index"))
    )


def is_noted(number: Any) -> bool:
    """Whether it is a noted size: an int or float that records each comparison that Python makes of it. See `sizes/_size_reads`."""
    return type(number) not in (int, float) and isinstance(number, (int, float)) and hasattr(number, "plain")


def plain_key(key: Any) -> Any:
    """A key with plain numbers in the place of noted sizes; the sizes record that their values were read."""
    if type(key) is slice:
        return slice(plain_key(key.start), plain_key(key.stop), plain_key(key.step))
    return key.plain() if is_noted(key) else key


def float_operand(left: Any, size: Any) -> Any:
    """The left operand to use where the right one is a noted size: operators of float and numpy would read the size without a record."""
    if isinstance(left, np.generic):
        size.plain()
    return size.beside(left) if type(left) is float else left


def for_noted_sizes(fn: Any, args: tuple[Any, ...]) -> Any:
    """The callable to use instead of `fn`, if it is called with noted sizes and would read one without a record; else None."""
    if id(fn) in _SMOOTH and all(isinstance(a, (int, float)) for a in args) and (first := next(filter(is_noted, args), None)) is not None:
        return lambda *given: first.through(fn, given)
    if any(map(is_noted, args)) and _hides_numbers(fn):
        return lambda *given, **options: fn(*(n.plain() if is_noted(n) else n for n in given), **options)
    if fn in (min, max, sum) and args and type(given := args[0] if len(args) == 1 else args) in (list, tuple):
        noted = next((n for n in given if is_noted(n)), None)
        if noted is not None and any(type(n) is float for n in given):
            rest = args[1:] if len(args) == 1 else ()
            return lambda *_, **options: fn([noted.beside(n) if type(n) is float else n for n in given], *rest, **options)
    if fn is len and args and isinstance(args[0], torch.Tensor) and any(map(is_noted, args[0].shape)):
        return lambda tensor: tensor.shape[0]
    if fn is torch.numel and args and any(map(is_noted, args[0].shape)):
        return torch.Tensor.numel
    shape = getattr(fn, "__self__", None)
    return (lambda: math.prod(shape)) if type(shape) is torch.Size and fn.__name__ == "numel" and any(map(is_noted, shape)) else None


__all__ = ["float_operand", "for_noted_sizes", "is_noted", "plain_key"]

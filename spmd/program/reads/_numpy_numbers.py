"""Numbers of numpy: arguments, variables, items of arrays, and what numpy computes of them and of Python numbers.

They are as exact as numpy has them: an int32 wraps around, a float32 is rounded, and a division by 0 is infinite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

NUMPYS = (np.integer, np.floating)
NUMBER_TYPES: frozenset[type] = frozenset({int, float, *(np.dtype(code).type for code in "bBhHiIlLqQefd")})  # those that may be inputs
OF_DTYPE = frozenset({"dtype", "itemsize", "nbytes", "ndim", "shape", "size", "strides"})  # attributes that are equal for all of a type


def is_number(value: Any) -> bool:
    """Whether it is a number of Python or numpy, and no bool."""
    return type(value) in (int, float) or isinstance(value, NUMPYS)


def plain(value: Any) -> Any:
    """The Python number of a number of numpy; others as they are."""
    return value.item() if isinstance(value, NUMPYS) else value


def is_elementwise(fn: Any) -> bool:
    """Whether it is a function of numpy that computes an element from elements: a ufunc, or the class of a dtype."""
    return isinstance(fn, np.ufunc) or (isinstance(fn, type) and issubclass(fn, np.generic))


def is_of_numbers(fn: Any) -> bool:
    """Whether it is a function of numpy that gives a number for numbers, and an array for lists of some."""
    return is_elementwise(fn) or fn is np.clip or fn is np.round


def with_errors(errors: Any, evaluate: Callable[[], Any]) -> Any:
    """`evaluate()` in a block `np.errstate(**errors)`, in which the function has it."""
    with np.errstate(**errors):
        return evaluate()


__all__ = ["NUMBER_TYPES", "NUMPYS", "OF_DTYPE", "is_elementwise", "is_number", "is_of_numbers", "plain", "with_errors"]

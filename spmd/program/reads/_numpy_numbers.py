"""Numbers of numpy: items of arrays, and what numpy computes of them and of Python numbers.

They are as exact as numpy has them: an int32 wraps around, a float32 is rounded, and a division by 0 is infinite.
"""

from __future__ import annotations

from typing import Any

import numpy as np

CLASSES = (np.integer, np.floating)


def is_number(value: Any) -> bool:
    """Whether it is a number of Python or numpy, and no bool."""
    return type(value) in (int, float) or isinstance(value, CLASSES)


def plain(value: Any) -> Any:
    """The Python number of a number of numpy; others as they are."""
    return value.item() if isinstance(value, CLASSES) else value


def is_of_numbers(fn: Any) -> bool:
    """Whether it is a function of numpy that gives a number for numbers, and an array for lists of some."""
    return isinstance(fn, np.ufunc) or fn is np.clip or fn is np.round or (isinstance(fn, type) and issubclass(fn, CLASSES))


__all__ = ["CLASSES", "is_number", "is_of_numbers", "plain"]

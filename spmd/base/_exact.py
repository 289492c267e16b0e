"""When two Python values are the same to a program: `exactly(a) == exactly(b)`.

Python's `==` says that 0.0 is -0.0, 1 is True and NaN is not NaN; a program made for one of them computes something else for
the other.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any

import numpy as np


class _Sign:
    def __init__(self, shown: str) -> None:
        self._shown = shown

    def __repr__(self) -> str:
        return self._shown


_NEGATIVE_ZERO, _NAN = _Sign("-0.0"), _Sign("nan")


def exactly(value: Any) -> Any:
    """What stands for a hashable value where such values are compared. Most stand for themselves."""
    cls = type(value)
    if cls is float or isinstance(value, np.floating):
        return value if value and value == value else _special(float(value))
    if cls is complex or isinstance(value, np.complexfloating):
        return exactly(float(value.real)), exactly(float(value.imag))
    if cls is tuple:
        return tuple((type(item), exactly(item)) for item in value)
    if cls is frozenset:
        return frozenset((type(item), exactly(item)) for item in value)
    if is_dataclass(cls) and isinstance(cls.__eq__, FunctionType) and cls.__eq__.__code__.co_filename == "<string>":  # its own fields'
        parts = [object.__getattribute__(value, f.name) for f in fields(value) if f.compare]
        return (cls, *((type(part), exactly(part)) for part in parts))
    return value


def _special(number: float) -> Any:
    if number != number:
        return _NAN
    return _NEGATIVE_ZERO if math.copysign(1.0, number) < 0 else number

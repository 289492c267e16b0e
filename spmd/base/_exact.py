"""Comparison of Python values that are constants of a program: `exactly(a) == exactly(b)`.

For Python's `==`, 0.0 equals -0.0, 1 equals True and NaN differs from NaN. But a program with one of them as a constant computes
other results than with the other.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any

import numpy as np


class _Marker:
    def __init__(self, shown: str) -> None:
        self._shown = shown

    def __repr__(self) -> str:
        return self._shown


_NEGATIVE_ZERO, _NAN = _Marker("-0.0"), _Marker("nan")


def exactly(value: Any) -> Any:
    """A key for a hashable value; keys are equal if programs need not distinguish the values. For most values, the value itself."""
    cls = type(value)
    if cls is float or isinstance(value, np.floating):
        return value if value and value == value else _special(float(value))
    if cls is complex or isinstance(value, np.complexfloating):
        return exactly(float(value.real)), exactly(float(value.imag))
    if cls is tuple:
        return tuple((type(item), exactly(item)) for item in value)
    if cls is frozenset:
        return frozenset((type(item), exactly(item)) for item in value)
    # The file name "<string>" shows that `dataclass` generated `__eq__`, which compares the fields.
    if is_dataclass(cls) and isinstance(cls.__eq__, FunctionType) and cls.__eq__.__code__.co_filename == "<string>":
        parts = [object.__getattribute__(value, f.name) for f in fields(value) if f.compare]
        return (cls, *((type(part), exactly(part)) for part in parts))
    return value


def _special(number: float) -> Any:
    if number != number:
        return _NAN
    return _NEGATIVE_ZERO if math.copysign(1.0, number) < 0 else number

"""Functions of Python that take the number in a tensor without dims: `"{:.3f}".format(loss)`, `"%.3f" % loss`, `math.sqrt(loss)`.

The tensor gives its number, as `loss.item()` does, and what is made of that may be pending. A text of the tensor itself (`"%s" % loss`) is
not made.
"""

from __future__ import annotations

import builtins
import re
import string
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from spmd.device._storage import is_device_tensor
from spmd.sharding._tensor import XLAShardedTensor

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

_CONVERSION = re.compile(r"%(?:\((?P<name>[^)]*)\))?[#0\- +]*(?P<width>\*|\d+)?(?:\.(?P<digits>\*|\d+))?[hlL]?(?P<kind>.)", re.DOTALL)
_OF_NUMBERS = frozenset("diouxXeEfFgG")


class TextOperand:
    """Takes the place of a text as the left operand of `%`, when numbers in tensors are formatted.

    Attributes:
        operand: gives the left operand to use beside another right one.
        text: the text.
    """

    def __init__(self, operand: Callable[[Any, Any], Any], text: str) -> None:
        self.operand, self.text = operand, text

    def __mod__(self, right: Any) -> Any:
        numbers = _with_numbers(self.text, right)
        return self.operand(self.text, numbers) % numbers


def formats_tensors(left: Any, right: Any) -> bool:
    """Whether it is `text % right` with conversions of numbers for tensors in `right`."""
    return type(left) is str and type(right) in (torch.Tensor, XLAShardedTensor, tuple, dict) and _with_numbers(left, right) is not right


def for_tensors(recording: Recording, fn: Any, args: tuple[Any, ...], note: Callable[..., Any]) -> Callable[..., Any] | None:
    """The callable for `str.format`, `format` or a function of `math` with tensors without dims; None for other calls.

    Args:
        recording, fn, args: the call.
        note: records a call, and returns the callable to use.
    """
    if not any(map(_has_number, args)) or not _takes_numbers(fn):
        return None
    numbers = {id(arg): _number(arg) for arg in args}
    chosen = note(recording, fn, tuple(numbers[id(arg)] for arg in args))
    return lambda *given, **options: chosen(
        *(numbers[id(value)] for value in given), **{name: numbers[id(value)] for name, value in options.items()}
    )


def _takes_numbers(fn: Any) -> bool:
    """Whether a function takes the number of a tensor, and neither its text nor parts of it."""
    if fn is builtins.format or getattr(fn, "__module__", None) == "math":
        return True
    text = getattr(fn, "__self__", None)
    if type(text) is not str or fn.__name__ != "format":
        return False
    try:
        fields = [(name, conversion) for _, name, _, conversion in string.Formatter().parse(text) if name is not None]
    except ValueError:  # which the call raises
        return True
    return all(conversion is None and not {".", "["} & set(name) for name, conversion in fields)


def _with_numbers(text: str, right: Any) -> Any:
    """The right operand of `text % right` with the numbers in its tensors; itself if there are none."""
    found = [match for match in _CONVERSION.finditer(text) if match["kind"] != "%"]
    if any("*" in (match["width"], match["digits"]) for match in found):
        return right
    if isinstance(right, dict):
        others = {match["name"] for match in found if match["kind"] not in _OF_NUMBERS}
        return _changed(right, {name: value if name in others else _number(value) for name, value in right.items()})
    values = right if isinstance(right, tuple) else (right,)
    kinds = [match["kind"] for match in found] if len(values) == len(found) else ["f"] * len(values)  # which raises
    numbers = tuple(_number(value) if kind in _OF_NUMBERS else value for kind, value in zip(kinds, values, strict=True))
    return _changed(right, numbers if isinstance(right, tuple) else numbers[0])


def _changed(before: Any, now: Any) -> Any:
    """`now`, or `before` if it has the same items."""
    pairs = zip(before.values(), now.values(), strict=True) if isinstance(before, dict) else [(before, now)]
    pairs = zip(before, now, strict=True) if isinstance(before, tuple) else pairs
    return before if all(a is b for a, b in pairs) else now


def _has_number(value: Any) -> bool:
    return type(value) in (torch.Tensor, XLAShardedTensor) and not value.dim() and is_device_tensor(value)


def _number(value: Any) -> Any:
    return value.item() if _has_number(value) else value


__all__ = ["TextOperand", "for_tensors", "formats_tensors"]

"""Numbers that vary as objects: which object `float(x)`, `+x`, `min` and `max` give, and the answer of `is`.

    best = min(best, value)
    if best is value: ...          # as Python's `min`, one of its arguments

Where two numbers were read from places or arguments, each call compares the objects there.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from spmd.program.reads._numpy_numbers import is_number

if TYPE_CHECKING:
    from spmd.program.reads._varying import Varying

_OF_INT = dict.fromkeys((builtins.int, builtins.round, operator.index, math.trunc, math.floor, math.ceil), (int,))
RETURNED: dict[Any, tuple[type, ...]] = {**_OF_INT, builtins.float: (float,), operator.pos: (int, float)}
"""By function, the types of numbers that it returns as they are."""


class Choice:
    """Which of some numbers `min` or `max` has returned.

    Attributes:
        numbers: the arguments.
        position: gives the position of the one that is returned in a call.
    """

    def __init__(self, fn: Any, numbers: Sequence[Any], values: Sequence[Callable[[], Any]], key: Callable[[Any], Any] | None) -> None:
        """`fn` is `min` or `max`; `values` gives each number in a call."""
        self.numbers = tuple(numbers)

        def position() -> int:
            now = [value() for value in values]
            return fn(range(len(now)), key=lambda i: now[i] if key is None else key(now[i]))

        self.position = position


def _object_of(number: Any) -> Any:
    """The number that a number is, if it was chosen among several. The program is then valid for this choice only."""
    while (choice := getattr(number, "choice", None)) is not None:
        position = choice.position()
        number.guard(choice.position, position)
        number = choice.numbers[position]
    return number


def identical_number(varying: type[Varying], left: Any, right: Any) -> Any:
    """The left operand to use for `left is right`, of which at least one is of the class `varying`."""
    one, other = _object_of(left), _object_of(right)
    if one is other or any(type(a) is varying and a.is_held(b) for a, b in ((one, other), (other, one))):
        return right
    numbers = [n for n in (one, other) if type(n) is varying]
    if not numbers or not all(type(n) is varying or is_number(n) for n in (one, other)):
        return left
    first, second = (n.evaluate if type(n) is varying else lambda n=n: n for n in (one, other))
    outcome = first() is second()
    numbers[0].guard(lambda: first() is second(), outcome)
    return right if outcome else left


__all__ = ["RETURNED", "Choice", "identical_number"]

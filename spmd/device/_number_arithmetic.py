"""Python's arithmetic for the `torch.SymFloat`s that stand for numbers of a traced program.

`n = tokens.sum().item()` is an int, and so are `n + 1`, `n % 4` and `n ** 2`; torch's own operators would convert the int to float.
The program checks for cases where Python raises (`1 / n` with n = 0), and for results that it cannot represent (`h ** 0.5` with a
negative h is complex). Arithmetic in torch's own code is not checked: its optimizers divide by numbers that are known to be nonzero.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import TraceError, user_line
from spmd.device._checks import Check
from spmd.device._numbers import CONSTANTS, OF_MATH, NumberNode, needs_value
from spmd.device._storage import recording
from spmd.patches._table import current, replace

_CAN_OVERFLOW = frozenset({"exp", "expm1", "sinh", "cosh"})
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_CHOICES = ("sym_max", "sym_min")


def install() -> None:
    """Replace the operators of `torch.SymFloat`; numbers of other tracers behave as before."""
    reversible = ((form, name) for name in _OPERATORS for form in ("", "r"))
    for form, name in (*reversible, *(("", name) for name in (*_COMPARISONS, *_CHOICES))):
        target = f"torch.SymFloat.__{form}{name}__"
        replace(target, _operator(name, form == "r", current(target)))


def _operator(name: str, is_reversed: bool, of_torch: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, other: Any, *modulo: Any) -> Any:
        node = self.node
        if not isinstance(node, NumberNode):
            return of_torch(self, other, *modulo)
        if any(number is not None for number in modulo):
            raise needs_value("int (a power modulo another number)")
        its = _node_of(other, node)
        if its is None:
            return of_torch(self, other)
        left, right = (its, node) if is_reversed else (node, its)
        # Optimizers divide many times per step by numbers that cannot be 0 (a bias correction). A check would add a flag to the program.
        # Only the frame identifies the caller: an operator receives nothing but its operands. Patching every optimizer would be worse.
        is_of_user = not str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.")
        is_natural = name == "pow" and left.integral and right.integral and not _is_negative(right)
        made = getattr(left, "pow_by_natural" if is_natural else name)(right)
        for flag, check in _CHECKED[name](left, right, made) if is_of_user and name in _CHECKED else ():
            _require_not(flag, check)
        if made.boolean:  # torch's own code expects a `SymBool`, which has no arithmetic
            return torch.SymFloat(made.as_truth()) if is_of_user else torch.SymBool(made)
        return torch.SymFloat(made)

    return method


def bitwise(name: str, left: Any, right: Any) -> Any:
    """`operator.<name>(left, right)` of integers of which the program computes at least one: `and_`, `or_`, `xor`, `lshift` or `rshift`.

    A result that needs more than 64 bits, and a negative count, are checked on the device.
    """
    beside: NumberNode = (left if isinstance(left, torch.SymFloat) else right).node
    its, other = _node_of(left, beside), _node_of(right, beside)
    assert its is not None
    assert other is not None
    made: NumberNode = getattr(its, name)(other)
    if name in ("lshift", "rshift"):
        _require_not(lambda: jnp.asarray(other.value) < 0, Check(ValueError, "negative shift count", user_line()))
    elif all(type(value) is bool or (isinstance(value, torch.SymFloat) and value.node.kind is bool) for value in (left, right)):
        return torch.SymFloat(made.as_truth())
    if name == "lshift":
        _require_not(lambda: abs(_wide(its)) * 2.0 ** _wide(other) >= _LIMIT, _too_large())
    return torch.SymFloat(made)


def of_math(fn: Callable[..., float], number: Any, *more: Any) -> Any:
    """Apply a function of `OF_MATH` to a number, as an operation of the program; C would convert the number to a constant.

    Errors that Python's function raises are raised too, or checked on the device.
    """
    node = number.node if isinstance(number, torch.SymFloat) else None
    if more or not isinstance(node, NumberNode) or (node.key is None and node.evaluate is not None):
        return fn(number, *more)
    made: NumberNode = getattr(node, f"sym_{fn.__name__}")()
    if made.evaluate is not None:
        made.evaluate()  # raises its error at the user's line
        return torch.SymFloat(made)
    given, result = node.value, made.value
    is_infinite, is_nan = (lambda: jnp.isinf(result) & jnp.isfinite(given)), (lambda: jnp.isnan(result) & ~jnp.isnan(given))
    is_outside = is_nan
    if fn.__name__ in _CAN_OVERFLOW:
        _require_not(is_infinite, Check(OverflowError, "math range error", user_line()))
    else:
        is_outside = lambda: is_nan() | is_infinite()  # noqa: E731
    _require_not(is_outside, Check(ValueError, "math domain error", user_line()))
    return torch.SymFloat(made)


def converted(fn: type[float] | type[int], number: Any) -> torch.SymFloat:
    """`float(number)` and `int(number)` of a number that only the device knows, as an operation of the program."""
    node: NumberNode = number.node
    if node.kind is fn:
        return number
    if fn is float:
        return number * 1.0
    given, made = node.value, node.int()  # type: ignore[attr-defined]
    _require_not(lambda: jnp.isnan(given), Check(ValueError, "cannot convert float NaN to integer", user_line()))
    _require_not(lambda: jnp.isinf(given), Check(OverflowError, "cannot convert float infinity to integer", user_line()))
    return torch.SymFloat(made)


def chosen(fn: Callable[..., Any], numbers: Sequence[Any]) -> torch.SymFloat | None:
    """`min(numbers)` or `max(numbers)`, some of which only the device knows, as operations of the program; None if their types differ."""
    beside: NumberNode = next(number.node for number in numbers if isinstance(number, torch.SymFloat))
    nodes = [_node_of(number, beside) for number in numbers]
    if any(node is None or node.kind is not beside.kind for node in nodes):
        return None
    return torch.SymFloat(reduce(lambda left, right: getattr(left, fn.__name__)(right), nodes))


def in_python(number: torch.SymFloat | torch.SymBool) -> tuple[Callable[..., Any], list[Any]] | None:
    """The function of Python that gives a number that only the device knows, and its operands: numbers of the program, or Python's.

    The device rounds some operations otherwise (a quotient by a constant), so a result is computed from the items that were read. None for
    an item, and where there are many operations.
    """
    node = number.node
    if not isinstance(node, NumberNode) or node.operation is None or node.num_operations > _MOST_OPERATIONS:
        return None
    name, operands = node.operation
    fn = _IN_PYTHON.get(name)
    return None if fn is None else (fn, list(map(_operand, operands)))


def _operand(node: NumberNode) -> Any:
    if node.evaluate is not None and node.key is not None and node.key[0] in CONSTANTS:
        return node.evaluate()
    return torch.SymBool(node) if node.boolean else torch.SymFloat(node)


_MOST_OPERATIONS = 32
_IN_PYTHON: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(operator, name) for name in ("and_", "or_", "xor", "lshift", "rshift")},
    **{"pow_by_natural": operator.pow, "float_truediv": operator.truediv, "float_pow": operator.pow},
    **{"floor": math.floor, "ceil": math.ceil, "int": int, "min": min, "max": max},
    **{f"sym_{name}": getattr(math, name) for name in OF_MATH},
}


def _is_of_device(node: NumberNode) -> bool:
    return node.evaluate is None


def _is_negative(node: NumberNode) -> bool:
    """Whether the host knows that the number is negative."""
    return node.evaluate is not None and node.evaluate() < 0


def _require_not(flag: Callable[[], Any], check: Check) -> None:
    """Check on the device that `flag` is False. Bodies of branches and loops are not checked, because no flag can leave them."""
    recorder = recording.get()
    if recorder is not None:
        with exact_dtypes():
            recorder.expect(jnp.asarray(flag()), check)


_Checks = list[tuple[Callable[[], Any], Check]]


def _division(left: NumberNode, right: NumberNode, made: NumberNode) -> _Checks:
    if right.key is not None and right.key[0] in ("int", "float"):  # a constant
        if right.value == 0:
            raise ZeroDivisionError("division by zero")
        return []
    return [(lambda: right.value == 0, Check(ZeroDivisionError, "division by zero", user_line()))]


def _product(left: NumberNode, right: NumberNode, made: NumberNode) -> _Checks:
    if not made.integral or not (_is_of_device(left) or _is_of_device(right)) or left.truth or right.truth:
        return []
    return [(lambda: abs(_wide(left) * _wide(right)) >= _LIMIT, _too_large())]


def _power(left: NumberNode, right: NumberNode, made: NumberNode) -> _Checks:
    if not (_is_of_device(left) or _is_of_device(right)):
        return []
    base, exponent, checks = left.value, right.value, list[tuple[Callable[[], Any], Check]]()
    if made.integral:
        checks.append((lambda: abs(_wide(left) ** _wide(right)) >= _LIMIT, _too_large()))
        if _is_of_device(right):
            checks.append((lambda: jnp.minimum(exponent, 0), Check(TraceError, "an int to the power {} is a float", user_line())))
        return checks
    is_fraction = _is_of_device(right) or (right.evaluate is not None and right.evaluate() % 1 != 0)
    if _is_of_device(left) and is_fraction and not right.integral:
        complex_ = Check(TraceError, "a negative number to a power that is not an integer is complex", user_line())
        checks.append((lambda: (base < 0) & (exponent % 1 != 0) & jnp.isfinite(exponent), complex_))
    if _is_of_device(right) or _is_negative(right):
        checks.append((lambda: (base == 0) & (exponent < 0), Check(ZeroDivisionError, "zero to a negative power", user_line())))
    overflowed = lambda: jnp.isinf(made.value) & jnp.isfinite(base) & jnp.isfinite(exponent) & (base != 0)  # noqa: E731
    checks.append((overflowed, Check(OverflowError, "the power of a number is too large", user_line())))
    return checks


def _wide(node: NumberNode) -> Any:
    return jnp.asarray(node.value).astype(jnp.float64)


def _too_large() -> Check:
    return Check(TraceError, "an int does not fit into 64 bits", user_line())


_LIMIT = np.float64(2**63)
_CHECKED: dict[str, Callable[[NumberNode, NumberNode, NumberNode], _Checks]] = {
    **dict.fromkeys(("truediv", "floordiv", "mod"), _division),
    "mul": _product,
    "pow": _power,
}


def _node_of(number: Any, beside: NumberNode) -> NumberNode | None:
    """The node of an operand; None if it is not a plain number."""
    if isinstance(number, torch.SymFloat):
        return number.node if isinstance(number.node, NumberNode) else None
    if type(number) in (int, bool):
        return beside.wrap_int(number)  # a bool too, with which Python gives a bool
    return beside.wrap_float(number) if type(number) is float else None


__all__ = ["bitwise", "chosen", "converted", "in_python", "install", "of_math"]

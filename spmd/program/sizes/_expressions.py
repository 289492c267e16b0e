"""Expressions of sizes as plain data that can be saved in a file: ["-", "seq", 1] for `seq - 1`.

A formula of sizes (`Points`) or a recorded condition (`SizeReads`) returns an expression if it is called with expressions for numbers.
"""

from __future__ import annotations

from typing import Any

_SIGNS = {
    **{"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "truediv": "/", "mod": "%", "pow": "**"},
    **{"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="},
}


class Expression:
    """A symbolic number. `tree` is a name, a number, or a list of an operator and its operands."""

    __hash__ = None  # type: ignore[assignment]  (`==` returns an expression)

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def astype(self, dtype: Any) -> Expression:
        """Return itself: formulas of floats call this method, and saved numbers are Python numbers."""
        return self

    def __bool__(self) -> bool:
        raise TypeError("the truth value of a symbolic size is not known")


def tree_of(value: Any) -> Any:
    """A number or an expression as plain data."""
    return value.tree if isinstance(value, Expression) else value


def _is(value: Any, number: int) -> bool:
    return isinstance(value, int) and value == number


def _operation(sign: str, is_swapped: bool) -> Any:
    def method(self: Expression, other: Any) -> Any:
        if not isinstance(other, (int, float, Expression)):
            return NotImplemented
        if (sign in "+-" and _is(other, 0) and not (sign == "-" and is_swapped)) or (
            sign in ("*", "//") and _is(other, 1) and not (sign == "//" and is_swapped)
        ):
            return self
        operands = (other, self) if is_swapped else (self, other)
        return Expression([sign, *map(tree_of, operands)])

    return method


for _name, _sign in _SIGNS.items():
    setattr(Expression, f"__{_name}__", _operation(_sign, False))
    if _sign not in ("<", "<=", ">", ">=", "==", "!="):
        setattr(Expression, f"__r{_name}__", _operation(_sign, True))


__all__ = ["Expression", "tree_of"]

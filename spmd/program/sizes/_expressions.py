"""What is computed of sizes, as plain data that a file can hold: ["-", "seq", 1] of `seq - 1`.

A formula of sizes (`Points`), or a question of Python's (`SizeReads`), that is asked with expressions in place of numbers answers with one.
"""

from __future__ import annotations

from typing import Any

_SIGNS = {
    **{"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "truediv": "/", "mod": "%", "pow": "**"},
    **{"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="},
}


class Expression:
    """Attributes: tree: a name, a number, or a sign with its operands."""

    __hash__ = None  # type: ignore[assignment]  (`==` makes an expression)

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def astype(self, dtype: Any) -> Expression:
        """A formula of floats asks for it; in a file numbers are Python's."""
        return self

    def __bool__(self) -> bool:
        raise TypeError("the truth value of a symbolic size is not known")


def tree_of(value: Any) -> Any:
    """A number, or an expression, as plain data."""
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

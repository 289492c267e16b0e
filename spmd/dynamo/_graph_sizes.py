"""The sizes that Dynamo leaves open in a graph: its symbols, the shapes that depend on them, and the guards on them.

sizes = GraphSizes([node.meta.get("example_value") for node in placeholders])
sizes.of(args)                  # (5, 128): values of the symbols in a call
sizes.shape(3, (8, 128))        # (8, 128, 64): shape of the input at position 3 for other sizes
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import sympy
import torch

from spmd.base._torch import pytree

Sizes = Sequence[int]
_LARGEST_UNIT = 64
_TRIED = 8
_QUOTIENTS = {"FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv, "PythonMod": operator.mod, "Mod": operator.mod}  # torch's


class GraphSizes:
    """The symbols of one graph.

    Attributes:
        names: names of the symbols; sizes of a call are in this order.
    """

    def __init__(self, inputs: Sequence[Any], values: Sequence[Any] = ()) -> None:
        """`inputs`: Dynamo's example for each input; `values`: examples for all values in the graph."""
        self._numbers = {i: v.node.expr for i, v in enumerate(inputs) if isinstance(v, torch.SymInt)}
        shapes = {i: tuple(map(_expression, v.shape)) for i, v in enumerate(inputs) if isinstance(v, torch.Tensor)}
        self._shapes = {i: shape for i, shape in shapes.items() if any(_is_open(n) for n in shape)}
        self._places: dict[Any, tuple[int, int | None]] = {}  # symbol -> the input whose value (None) or dim it is
        for i, number in self._numbers.items():
            self._places.setdefault(number, (i, None))
        for i, shape in self._shapes.items():
            for d, n in enumerate(shape):
                self._places.setdefault(n, (i, d))
        found = {symbol: None for shape in self._shapes.values() for n in shape for symbol in _symbols(n)}
        found |= {symbol: None for number in self._numbers.values() for symbol in _symbols(number)}
        self._symbols = sorted(found, key=str)
        self.names = tuple(map(str, self._symbols))
        self._units: dict[Any, int] = {}
        self._env = next((v.node.shape_env for v in inputs if isinstance(v, torch.SymInt)), None)
        extents = {n for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor) for n in map(_expression, v.shape)}
        self._rounded = [n for n in extents if _is_open(n) and _is_rounded(n) and n.free_symbols <= found.keys()]

    @property
    def rounded(self) -> list[Callable[[Sequence[Any]], Any]]:
        """The extents that depend on a quotient, each as a function of the sizes, which may be traced."""
        return [lambda sizes, n=n: _computed(n, dict(zip(self._symbols, sizes, strict=True))) for n in sorted(self._rounded, key=str)]

    @property
    def is_known(self) -> bool:
        """Whether the inputs of a call determine the value of each symbol."""
        return all(symbol in self._places for symbol in self._symbols)

    @property
    def positions(self) -> list[int]:
        """Positions of the tensors with symbols in their shape."""
        return list(self._shapes)

    def of(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The sizes of a call."""
        found = (self._places[symbol] for symbol in self._symbols)
        return tuple(int(args[i]) if d is None else int(args[i].shape[d]) for i, d in found)

    def varies(self, position: int, which: Collection[int]) -> bool:
        """Whether the shape of the input at `position` depends on one of these sizes."""
        return any(self._symbols.index(symbol) in which for n in self._shapes.get(position, ()) for symbol in _symbols(n))

    def shape(self, position: int, sizes: Sizes) -> tuple[int, ...]:
        """The shape of a varying input for other sizes."""
        return tuple(_value(n, self._values(sizes)) for n in self._shapes[position])

    def replaced(self, args: Sequence[Any], sizes: Sizes) -> list[Any]:
        """The inputs of a call, with integers for other sizes."""
        values = self._values(sizes)
        return [_value(self._numbers[i], values) if i in self._numbers else a for i, a in enumerate(args)]

    def parts(self, position: int, which: int, parts: Sequence[int]) -> int:
        """The multiple that a size must be so that each dim of an input splits into `parts` shards; 0 if no multiple does."""
        found = 1
        for n, count in zip(self._shapes.get(position, ()), parts, strict=False):
            if count > 1 and self._symbols[which] in _symbols(n):
                found = math.lcm(found, count) if n == self._symbols[which] else 0
        return found

    def limits(self, which: int, sizes: Sizes) -> tuple[int, int | None]:
        """The smallest and largest valid size of the graph, given the other sizes; None: there is no largest."""
        least, most = self._range(which)
        unit = max(1, self.unit(which, sizes))
        small = (unit * n for n in range(-(-least // unit), sizes[which] // unit))
        return next((n for n in itertools.islice(small, _TRIED) if self._holds(which, n, sizes)), max(least, sizes[which])), most

    def _range(self, which: int) -> tuple[int, int | None]:
        known = None if self._env is None else self._env.var_to_range.get(self._symbols[which])
        if known is None:
            return 2, None
        least, most = (int(n) if isinstance(n, sympy.Integer) else None for n in (known.lower, known.upper))
        return max(2, least or 0), None if most is None or most > 1 << 40 else most

    def unit(self, which: int, sizes: Sizes) -> int:
        """The smallest number whose multiples, from today's size on, satisfy all guards of Dynamo, given the other sizes.

        Returns:
            The number, or 0 if there is none.
        """
        key = which, *sizes
        if key not in self._units:
            found = (n for n in _divisors(sizes[which]) if all(self._holds(which, size, sizes) for size in self._tried(which, n, sizes)))
            self._units[key] = next(found, 0)
        return self._units[key]

    def _tried(self, which: int, unit: int, sizes: Sizes) -> list[int]:
        """Sizes close to today's and far from it."""
        most = self._range(which)[1]
        found = {sizes[which] + unit * n for n in (1, 2, 3, 5, 10, 37, 100)}
        return sorted(n for n in found if most is None or n <= most) or [sizes[which] - unit]

    def _holds(self, which: int, size: int, sizes: Sizes) -> bool:
        return self.refusal([size if i == which else n for i, n in enumerate(sizes)]) is None

    def refusal(self, sizes: Sizes) -> str | None:
        """A guard of Dynamo that these sizes violate, as text; None if they violate none."""
        values = self._values(sizes)
        return next((f"Dynamo's graph holds only where {g}" for g in self._guards() if g.xreplace(values) == sympy.false), None)

    def _guards(self) -> list[Any]:
        return [] if self._env is None else [guard.expr.xreplace(self._env.replacements) for guard in self._env.guards]

    def _values(self, sizes: Sizes) -> dict[Any, Any]:
        return {symbol: sympy.Integer(n) for symbol, n in zip(self._symbols, sizes, strict=True)}


def _is_open(size: Any) -> bool:
    """Whether it is an expression of symbols and not an int."""
    return isinstance(size, sympy.Expr)


def _expression(size: Any) -> Any:
    """The size as an int, or else its expression of symbols."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    return int(expression) if expression.is_number else expression


def _divisors(size: int) -> list[int]:
    return [n for n in range(1, min(size, _LARGEST_UNIT) + 1) if size % n == 0]


def _is_rounded(expression: Any) -> bool:
    """Whether it contains integer quotients, and nothing that `_computed` cannot evaluate."""
    parts = [*sympy.preorder_traversal(expression)]
    return any(type(part).__name__ in _QUOTIENTS for part in parts) and all(
        part.is_Add or part.is_Mul or part.is_Symbol or part.is_Integer or type(part).__name__ in _QUOTIENTS for part in parts
    )


def _computed(expression: Any, values: dict[Any, Any]) -> Any:
    """Evaluate an expression for integers or traced values."""
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return values[expression]
    parts = [_computed(part, values) for part in expression.args]
    if expression.is_Add:
        return sum(parts)
    return math.prod(parts) if expression.is_Mul else _QUOTIENTS[type(expression).__name__](*parts)


def _symbols(expression: Any) -> Collection[Any]:
    return expression.free_symbols if _is_open(expression) else ()


def _value(expression: Any, values: dict[Any, Any]) -> int:
    return int(expression.xreplace(values)) if _is_open(expression) else expression


__all__ = ["GraphSizes"]

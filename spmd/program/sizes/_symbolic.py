"""Combines the traces of one function at several sizes into one program with symbolic dims of jax: `[batch, 4]`, `[batch * seq]`.

Nothing is padded. Numbers that differ between the traces are formulas of the sizes (Note [Points]), and the program's equations are traced
again with these formulas over symbols. jax's shape rules then prove that each operation is valid for all sizes, or refuse it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from spmd.base._convert import exact_dtypes
from spmd.base._jax import InconclusiveDimensionOperation
from spmd.program.sizes._evaluate import LOOPS, RULES, Equation, Evaluation
from spmd.program.sizes._expressions import Expression, tree_of
from spmd.program.sizes._family import Family, require_alike
from spmd.program.sizes._formulas import Inexact, Points, Values
from spmd.program.sizes._padded import Padded, Room
from spmd.program.sizes._trace_points import more_points, points_within
from spmd.program.sizes._window_extents import WINDOWED, ends_padding, window_padding
from spmd.program.trace._captured import Captured
from spmd.program.xla._jaxpr import functions_of, with_constants_first

_REFUSALS = (InconclusiveDimensionOperation, TypeError, ValueError, NotImplementedError)


@dataclass(frozen=True)
class Range:
    """The sizes that a name may have: from `least` to `most`, all with the remainder `rest` modulo `multiple`."""

    least: int
    most: int
    multiple: int = 1
    rest: int = 0

    def sizes(self) -> Any:
        """All sizes: int64[n]."""
        return np.arange(self.least, self.most + 1, self.multiple)

    def within(self, multiple: int, rest: int) -> Range:
        """The subrange of sizes with the remainder `rest` modulo `multiple`, a multiple of the range's own."""
        least, most = self.least + (rest - self.least) % multiple, self.most - (self.most - rest) % multiple
        return Range(least, most, multiple, rest)


class Symbols:
    """Symbolic sizes.

    Attributes:
        points: points of the traces.
        constraints: their constraints, in the syntax of `jax.export.symbolic_shape`.
        sizes: for each name, `multiple * symbol + rest` of its range.
    """

    def __init__(self, names: Sequence[str], points: Points, ranges: Sequence[Range], extents: Sequence[Values]) -> None:
        """`extents`: extents that occur in the traces, each at least 2."""
        self.points = points
        texts = [_symbol(name, i, own) for i, (name, own) in enumerate(zip(names, ranges, strict=True))]
        free = _symbols(texts, ())
        found = [f"{points.integer(values)(free)} >= 2" for values in extents]
        for text, own in zip(texts, ranges, strict=True):
            found += [f"{text} >= {own.least}", f"{text} <= {own.most}"]
        self.constraints = tuple(dict.fromkeys(found))
        self.sizes = _symbols(texts, self.constraints)

    def shape(self, shapes: Sequence[Sequence[int]]) -> tuple[Any, ...]:
        """Symbolic shape, given the shape at each point."""
        return tuple(self.points.integer(tuple(column))(self.sizes) for column in zip(*shapes, strict=True)) if shapes[0] else ()


def _symbol(name: str, place: int, own: Range) -> str:
    is_word = name.isidentifier() and name.isascii() and name not in ("floordiv", "mod", "max", "min", "non_negative")
    symbol = name if is_word else f"size{place}"
    multiple = symbol if own.multiple == 1 else f"{own.multiple}*{symbol}"
    return f"{multiple} + {own.rest}" if own.rest else multiple


def _symbols(texts: Sequence[str], constraints: Sequence[str]) -> list[Any]:
    scope = export.SymbolicScope(constraints)
    return [export.symbolic_shape(text, scope=scope)[0] for text in texts]


class SymbolicRoom(Room):
    """Shapes of a program whose sizes are symbols, without padding."""

    def __init__(self, points: Points, sizes: Sequence[Any], today: Sequence[Any]) -> None:
        super().__init__(points, points.at[0], points.at[0], today)
        self.bucket = tuple(sizes)

    def size(self, values: Values) -> Any:
        """A quantity as an expression of the symbols."""
        return self.points.integer(values)(self.bucket)


class SymbolicEvaluation(Evaluation):
    """Evaluator of traces at symbolic sizes. Its values have no padding, so their `dims` are empty."""

    def fixed(self, array: Any) -> Padded:
        return Padded(array, ())

    def operation(self, eqn: Equation, operands: list[Padded]) -> list[Padded]:
        """Results of an equation at symbolic sizes.

        Raises:
            Inexact: jax cannot prove that it is valid for all sizes.
        """
        try:
            if eqn.name == "scan":
                return self._scan(eqn, operands)
            if eqn.name in LOOPS:
                return RULES[eqn.name](self, eqn, operands)
            changed = {"padding": window_padding(eqn.each, self.room.size)} if eqn.name in WINDOWED else {}
            if eqn.name == "pad":
                changed = {"padding_config": ends_padding(eqn.each, self.room.size)}
            return [Padded(array, ()) for array in eqn.bind(*(v.array for v in operands), **changed)]
        except _REFUSALS as error:
            raise Inexact(f"jax: {str(error).splitlines()[0]}") from error

    def _scan(self, eqn: Equation, operands: list[Padded]) -> list[Padded]:
        num_consts, num_carry = eqn.fixed("num_consts"), eqn.fixed("num_carry")
        consts, arrays = operands[:num_consts], [v.array for v in operands[num_consts:]]

        def step(carry: Any, row: Any) -> Any:
            found = [v.array for v in self.call(eqn.param("jaxpr"), [*consts, *(Padded(a, ()) for a in (*carry, *row))])]
            return tuple(found[:num_carry]), tuple(found[num_carry:])

        rows = tuple(arrays[num_carry:])
        length = None if rows else self.room.size(tuple(eqn.param("length")))
        last, stacked = lax.scan(step, tuple(arrays[:num_carry]), rows, length=length, reverse=eqn.fixed("reverse"))
        return [Padded(array, ()) for array in (*last, *stacked)]


def evaluated(
    points: Points, sizes: Sequence[Any], jaxprs: Sequence[Any], consts: Sequence[Sequence[Any]], args: Sequence[Any]
) -> list[Any]:
    """Results of a program at symbolic sizes, inside a trace of jax.

    Args:
        sizes: a symbol for each name.
        jaxprs, consts: the open jaxpr of each point, and its constants.
        args: arguments, shared by all points.
    """
    room = SymbolicRoom(points, sizes, [jnp.asarray(size, np.int64) for size in sizes])
    return [v.array for v in SymbolicEvaluation(room).run(jaxprs, consts, [Padded(array, ()) for array in args])]


def extents(jaxprs: Sequence[Any]) -> list[Values]:
    """Extents of dims that differ between the points, with their value at each point."""
    found: dict[Values, None] = {}

    def visit(opened: Sequence[Any]) -> None:
        for each in zip(*(j.eqns for j in opened), strict=False):
            for same in zip(*(one.outvars for one in each), strict=False):
                shapes = [getattr(v.aval, "shape", ()) for v in same]
                found.update((tuple(column), None) for column in zip(*shapes, strict=False) if len(set(column)) > 1)
            for same in zip(*(functions_of(one) for one in each), strict=False):
                visit([getattr(j, "jaxpr", j) for j in same])

    visit([getattr(j, "jaxpr", j) for j in jaxprs])
    return list(found)


@dataclass(frozen=True)
class SymbolicTrace:
    """The traces of a family, combined into one.

    Attributes:
        captured: the first trace, with a jaxpr over symbols.
        symbols: the symbols.
        limits: conditions that the sizes of a call must fulfill, as plain data.
    """

    captured: Captured
    symbols: Symbols
    limits: list[Any]


def symbolic(family: Family, ranges: Sequence[Range]) -> SymbolicTrace:
    """One program for all sizes in these ranges that fulfill its limits.

    Raises:
        Inexact: it is not proved that one program covers them; `equation` is the cause.
    """
    captured, (points, closed_jaxprs) = family.captured, family.traces
    jaxprs = [c.jaxpr for c in closed_jaxprs]
    require_alike(jaxprs)
    own = extents(closed_jaxprs)
    symbols = Symbols(family.names, points, ranges, own)
    kept = [i for i, b in enumerate(captured.state.consts) if b is not None]
    consts = [list(column) for column in zip(*(c.consts for c in closed_jaxprs), strict=True)]

    def run(state: list[Any], given: list[Any]) -> list[Any]:
        for i, value in zip(kept, state, strict=True):
            consts[i] = [value] * len(jaxprs)
        return evaluated(points, symbols.sizes, jaxprs, [list(c) for c in zip(*consts, strict=True)] or [[]] * len(jaxprs), given)

    def example(same: Sequence[Any]) -> Any:
        return jax.ShapeDtypeStruct(symbols.shape([v.aval.shape for v in same]), same[0].aval.dtype)

    with exact_dtypes():
        closed = jax.make_jaxpr(run)(
            [example([j.constvars[i] for j in jaxprs]) for i in kept],
            [example(same) for same in zip(*(j.invars for j in jaxprs), strict=True)],
        )
    closed = with_constants_first(closed, len(kept))
    buffers = [captured.state.consts[i] for i in kept]
    state = replace(captured.state, consts=[*buffers, *([None] * (len(closed.consts) - len(kept)))])
    found = replace(captured, jaxpr=closed, state=state)
    return SymbolicTrace(found, symbols, limits(points, family.names, own, family.asked))


def limits(points: Points, names: Sequence[str], own: Sequence[Values], asked: tuple[Sequence[Values], Sequence[Any]]) -> list[Any]:
    """Conditions that sizes must fulfill, as plain data.

    Every dim must keep two elements, since a dim of one would broadcast, and every Python condition must keep its result.

    Args:
        own: extents in the traces.
        asked: sizes that Python read, at each point, and its conditions on them with their results.

    Raises:
        Inexact: a condition cannot be evaluated for symbols.
    """
    sizes = [Expression(name) for name in names]
    known = [points.integer(values)(sizes) for values in own]
    found = [number >= 2 for number in known if number.tree not in names]  # a size itself is limited by its range
    leaves, questions = asked
    numbers = [points.integer(values)(sizes) for values in leaves]
    for tree, answer in questions:
        try:
            question = tree(numbers)
        except TypeError as error:
            raise Inexact(f"a Python condition on a size cannot be evaluated for symbols: {error}") from error
        if isinstance(question, Expression):
            found.append(question == answer)
    return list({str(limit.tree): tree_of(limit) for limit in found}.values())


def points_of(ranges: Sequence[Range], shift: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Points at which to trace, and more points for the case that these are not enough. Another `shift` gives other points.

    The largest size is not among them, since it is usually a constant of the model.
    """
    steps = [(own.multiple, own.rest) for own in ranges]
    limits = [(own.least, own.most - (1 + shift) * own.multiple) for own in ranges]
    found = points_within(limits, steps, shift)
    return found, more_points(found, steps)


__all__ = ["Range", "SymbolicTrace", "Symbols", "evaluated", "extents", "limits", "points_of", "symbolic"]

"""The traces of one function at several sizes as one program whose sizes are symbols of jax's: `[batch, 4]`, `[batch * seq]`.

Nothing is padded: what differs between the traces is a formula of the sizes (Note [Points]), and the program's equations are recorded
once more with these formulas of symbols. jax's rules for shapes then prove that an operation has a meaning for all sizes, or refuse it.
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
    """The sizes that a name may have: from `least` to `most`, which has `rest` beyond a multiple of `multiple` as all of them."""

    least: int
    most: int
    multiple: int = 1
    rest: int = 0

    def sizes(self) -> Any:
        """int64[n]: all of them."""
        return np.arange(self.least, self.most + 1, self.multiple)

    def within(self, multiple: int, rest: int) -> Range:
        """Those with a remainder by a multiple of the own one."""
        least, most = self.least + (rest - self.least) % multiple, self.most - (self.most - rest) % multiple
        return Range(least, most, multiple, rest)


class Symbols:
    """Sizes as symbols.

    Attributes:
        points: of the traces.
        constraints: what holds of them, in the words of `jax.export.symbolic_shape`.
        sizes: one for each name: a symbol, or a multiple of one.
    """

    def __init__(self, names: Sequence[str], points: Points, ranges: Sequence[Range], extents: Sequence[Values]) -> None:
        """`extents`: those that occur in the traces."""
        self.points = points
        texts = [_symbol(name, i, own) for i, (name, own) in enumerate(zip(names, ranges, strict=True))]
        free = _symbols(texts, ())
        found = [f"{points.integer(values)(free)} >= 2" for values in extents]
        for text, own in zip(texts, ranges, strict=True):
            found += [f"{text} >= {own.least}", f"{text} <= {own.most}"]
        self.constraints = tuple(dict.fromkeys(found))
        self.sizes = _symbols(texts, self.constraints)

    def shape(self, shapes: Sequence[Sequence[int]]) -> tuple[Any, ...]:
        """A shape, from what it is at each point."""
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
    """The sizes are symbols."""

    def __init__(self, points: Points, sizes: Sequence[Any], today: Sequence[Any]) -> None:
        super().__init__(points, points.at[0], points.at[0], today)
        self.bucket = tuple(sizes)

    def size(self, values: Values) -> Any:
        """A quantity, as an expression of the symbols."""
        return self.points.integer(values)(self.bucket)


class SymbolicEvaluation(Evaluation):
    """Traces evaluated at symbols. Its values have no padding, and carry no dims."""

    def fixed(self, array: Any) -> Padded:
        return Padded(array, ())

    def operation(self, eqn: Equation, operands: list[Padded]) -> list[Padded]:
        """The equation at the symbols.

        Raises:
            Inexact: jax cannot say that it has a meaning for all sizes.
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
    """The results of open jaxprs, one for each point, at symbols; inside a trace."""
    room = SymbolicRoom(points, sizes, [jnp.asarray(size, np.int64) for size in sizes])
    return [v.array for v in SymbolicEvaluation(room).run(jaxprs, consts, [Padded(array, ()) for array in args])]


def extents(jaxprs: Sequence[Any]) -> list[Values]:
    """The extents of dims, at each point, that are not the same at all."""
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
    """The traces of a family as one.

    Attributes:
        captured: the first of them, its jaxpr over symbols.
        symbols: these.
        limits: what must be true of the sizes of a call, as plain data.
    """

    captured: Captured
    symbols: Symbols
    limits: list[Any]


def symbolic(family: Family, ranges: Sequence[Range]) -> SymbolicTrace:
    """One program for all sizes in these ranges for which its limits hold.

    Raises:
        Inexact: it is not proved that there is one; with the equation.
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
    """What must be true of sizes, as plain data: dims keep two elements, as one would broadcast, and Python's questions their answers.

    Args:
        own: extents in the traces.
        asked: sizes that Python read, at each point, and what it asked of them with the answers.
    """
    sizes = [Expression(name) for name in names]
    known = [points.integer(values)(sizes) for values in own]
    found = [number >= 2 for number in known if number.tree not in names]  # a size itself is within its range
    leaves, questions = asked
    numbers = [points.integer(values)(sizes) for values in leaves]
    for tree, answer in questions:
        try:
            question = tree(numbers)
        except TypeError as error:
            raise Inexact(f"Python asks of a size what cannot be asked again: {error}") from error
        if isinstance(question, Expression):
            found.append(question == answer)
    return list({str(limit.tree): tree_of(limit) for limit in found}.values())


def points_of(ranges: Sequence[Range], shift: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Sizes at which to trace, and more of them if these leave a doubt; `shift`: another number gives others.

    The largest is not among them: as a rule it is one of the model's own.
    """
    steps = [(own.multiple, own.rest) for own in ranges]
    limits = [(own.least, own.most - (1 + shift) * own.multiple) for own in ranges]
    found = points_within(limits, steps, shift)
    return found, more_points(found, steps)


__all__ = ["Range", "SymbolicTrace", "Symbols", "evaluated", "extents", "limits", "points_of", "symbolic"]

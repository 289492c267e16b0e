"""Torch code on arrays whose sizes are symbols of `jax.export.symbolic_shape`: traced at a few sizes, recorded once over the symbols.

The sizes of a torch tensor are numbers. The traces are generalized to one program as a function of the sizes (Note [Points]). It is valid
for sizes for which no dim has fewer than two elements and Python's conditions on sizes have the same outcomes as in the traces. JAX must
be able to prove this from the constraints of the symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from spmd.base._errors import SpmdError, TraceError, message, place_of
from spmd.base._jax import InconclusiveDimensionOperation, bounds_of, size_at, symbols_in
from spmd.interop._exported_program import value_of
from spmd.program.sizes._family import questions, require_alike
from spmd.program.sizes._formulas import Inexact, Points
from spmd.program.sizes._size_reads import SizeReads, sizes_read
from spmd.program.sizes._symbolic import Range, evaluated, extents, limits, points_of
from spmd.program.sizes._window_extents import learn_extents

_UNBOUNDED_RANGE = 61  # range of traced sizes for a symbol without an upper bound
Run = Callable[..., list[Any]]


def has_symbols(arrays: Sequence[Any]) -> bool:
    """Whether an array has a symbolic size."""
    return any(not isinstance(n, int) for array in arrays for n in array.shape)


class SymbolicSizes:
    """The symbols in the shapes of some arrays, and the sizes at which a function of them is traced.

    Attributes:
        points: the sizes of all symbols, for each trace.
    """

    def __init__(self, arrays: Sequence[Any], shift: int = 0) -> None:
        self._symbols = symbols_in(arrays)
        ranges = [self._range(name, symbol) for name, symbol in self._symbols.items()]
        points, more = points_of(ranges, shift)
        self.points = [*points, *more]
        self._limits = [(own.least, own.most) for own in ranges]

    def _range(self, name: str, symbol: Any) -> Range:
        low, high = bounds_of(symbol)
        least = max(2, int(low))
        most = least + _UNBOUNDED_RANGE if high == float("inf") else int(high)
        if most < least + 5:
            what = f"symbol {name!r} varies from {int(low)} to {most}: too few sizes to trace at several of them"
            raise TraceError(message(what, fix="trace the function for each size, as jax.jit does by itself"))
        return Range(least, most)

    def recorded(self, runs: Sequence[Run], arrays: Sequence[Any]) -> list[Any]:
        """Record functions of flat arrays, one for each point, as one program over the symbols. Returns its results.

        Raises:
            TraceError: it is not proved that they are one program for all sizes that the symbols may have.
        """
        jaxprs, reads = list[Any](), list[SizeReads]()
        for point, run in zip(self.points, runs, strict=True):
            values = dict(zip(self._symbols, point, strict=True))
            examples = [jax.ShapeDtypeStruct(tuple(size_at(n, values) for n in a.shape), a.dtype) for a in arrays]
            with sizes_read() as read:
                jaxprs.append(_traced(run, examples, values))
            reads.append(read)
        try:
            return self._evaluated(jaxprs, reads, arrays)
        except Inexact as error:
            raise _refused(error) from error

    def _evaluated(self, jaxprs: Sequence[Any], reads: Sequence[SizeReads], arrays: Sequence[Any]) -> list[Any]:
        opened, points = [closed.jaxpr for closed in jaxprs], Points(self.points)
        require_alike(opened)
        learn_extents(points, jaxprs, self._limits)
        asked = questions(points, reads)
        self._require(limits(points, list(self._symbols), extents(jaxprs), asked))
        return evaluated(points, list(self._symbols.values()), opened, [closed.consts for closed in jaxprs], arrays)

    def _require(self, found: Sequence[Any]) -> None:
        """Raise if JAX cannot prove a limit, or cannot prove that a symbol is at least 2."""
        unknown = [f"{name} >= 2" for name, symbol in self._symbols.items() if bounds_of(symbol)[0] < 2]
        for limit in found:
            try:
                is_true = _decided(limit, self._symbols)
            except InconclusiveDimensionOperation:
                is_true = False
            if not is_true:
                unknown.append(_text(limit, self._symbols))
        if unknown:
            constraints = [text.replace("!=", ">") for text in dict.fromkeys(unknown)]
            raise TraceError(
                message(
                    "torch code is one program for the sizes of these symbols only if more is known about them",
                    *(f"not known: {text}" for text in dict.fromkeys(unknown)),
                    "a dim of one element would broadcast, and every condition on a size in Python must have a single outcome",
                    fix=f"jax.export.symbolic_shape({', '.join(self._symbols)!r}, constraints={constraints!r})",
                )
            )


def _traced(run: Run, examples: Sequence[Any], values: Mapping[str, int]) -> Any:
    try:
        return jax.make_jaxpr(run)(*examples)
    except SpmdError:
        raise
    except Exception as error:
        listed = ", ".join(f"{name} = {size}" for name, size in values.items())
        name = next(iter(values))
        raise TraceError(
            message(
                f"torch code raises {type(error).__name__} for {listed}, which the symbols allow",
                str(error).partition("\n")[0],
                fix=f"restrict them: jax.export.symbolic_shape({', '.join(values)!r}, constraints=['{name} >= 8', '{name} <= 64'])",
            )
        ) from error


def _decided(limit: Any, symbols: Mapping[str, Any]) -> bool:
    """Whether a limit holds for symbols.

    Raises:
        InconclusiveDimensionOperation: JAX cannot prove it for all of their values.
    """
    sign, one, other = limit
    if isinstance(other, bool):
        return _decided(one, symbols) == other
    if sign not in ("==", "!="):
        return bool(value_of(limit, symbols))
    first, second = value_of(one, symbols), value_of(other, symbols)
    if first == second:  # true in JAX if equal for all values
        return sign == "=="
    if _is_above(first, second) or _is_above(second, first):
        return sign == "!="
    raise InconclusiveDimensionOperation(f"{first} {sign} {second}")


def _is_above(first: Any, second: Any) -> bool:
    try:
        return bool(first >= second + 1)
    except InconclusiveDimensionOperation:
        return False


_NOT = {"<": ">=", ">=": "<", ">": "<=", "<=": ">", "==": "!=", "!=": "=="}


def _text(limit: Any, symbols: Mapping[str, Any]) -> str:
    """A limit as a constraint of `jax.export.symbolic_shape`, which has no "!="."""
    sign, one, other = limit
    if isinstance(other, bool):
        sign, one, other = one if other else (_NOT[one[0]], *one[1:])
    first, second = value_of(one, symbols), value_of(other, symbols)
    texts = {"<": f"{second} >= {first + 1}", ">": f"{first} >= {second + 1}", "<=": f"{second} >= {first}"}
    return texts.get(sign, f"{first} {sign} {second}")


def _refused(error: Inexact) -> TraceError:
    details = [str(error)]
    if error.equation is not None:
        shapes = ", ".join(str(v.aval) for v in error.equation.invars)
        where = place_of(error.equation.source_info.traceback)
        details.insert(0, f"operation {error.equation.primitive.name} of {shapes}, {where}")
    return TraceError(
        message(
            "torch code is not one program for all sizes that the symbols may have",
            *details,
            fix='narrow them, jax.export.symbolic_shape("b, 4", constraints=["b >= 8"]), or trace each size, as jax.jit does by itself',
        )
    )


__all__ = ["SymbolicSizes", "has_symbols"]

"""Classifies the operands and results of the passes of a repeat: invariant values, carries, and one value per pass.

Note [Operands of a pass]
    A repeat becomes a loop only if every operand of its equations is of one of five kinds in all passes: a result of the same pass; a
    result of the previous pass (a carry, whose initial value comes from outside the loop); one value from outside the loop for all
    passes; literals; or a different value from outside for each pass (these are stacked to one array). Otherwise the equations stay
    unrolled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spmd.base._jax import is_literal
from spmd.program.roll._repeats import Repeat

_PRODUCTS = frozenset(("dot_general", "conv_general_dilated", "shard_map", "while", "scan", "cond", "custom_call", "pallas_call"))


@dataclass(frozen=True)
class Each:
    """Operand: a different value from outside for each pass. `index` is its position in `Passes.each`."""

    index: int


@dataclass(frozen=True)
class Carried:
    """Operand: a result of the previous pass. `index` is its position in `Passes.first` and `Passes.carried`."""

    index: int


Operand = Any  # a variable of the first pass or from outside the loop, a literal, Each or Carried


class NotALoop(Exception):
    """An operand is of none of the kinds that a loop supports. The message names it."""


@dataclass
class Passes:
    """The body of a loop: one pass of a repeat, with its operands and results.

    Attributes:
        count: number of passes.
        equations: the equations of the first pass.
        names: for each equation, the name stack that all passes have in common.
        operands: for each equation, its operands.
        each: for each `Each` operand, its variables or literals in all passes: [count].
        first: for each carry, its initial value; None for zeros.
        carried: for each carry, the variable of the first pass whose value the next pass takes.
        left: results that are read outside the loop from other passes than the last: their variables in all passes, [count] each.
        last: (variable of the last pass that is read outside the loop, index of the carry that contains its value).
    """

    count: int
    equations: list[Any]
    names: list[Any]
    operands: list[list[Operand]] = field(default_factory=list[list[Operand]])
    each: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    first: list[Any] = field(default_factory=list[Any])
    carried: list[Any] = field(default_factory=list[Any])
    left: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    last: list[tuple[Any, int]] = field(default_factory=list[tuple[Any, int]])

    @property
    def is_batch(self) -> bool:
        """Whether all passes can be computed as one batch: none needs a result of another, and none has products, which take memory."""
        return not self.first and not any(eqn.primitive.name in _PRODUCTS for eqn in self.equations)


def passes_of(jaxpr: Any, repeat: Repeat, names: list[Any], readers: Mapping[Any, int]) -> Passes:
    """The repeat as the body of a loop. See Note [Operands of a pass].

    Args:
        names: name stack of each equation of a pass.
        readers: number of reads of each variable in the whole program.

    Raises:
        NotALoop: an operand is of none of the five kinds.
    """
    period, count = repeat.period, repeat.passes
    all_equations = [[jaxpr.eqns[place] for place in repeat.places[k * period : (k + 1) * period]] for k in range(count)]
    made = {v: (k, i, o) for k, eqns in enumerate(all_equations) for i, eqn in enumerate(eqns) for o, v in enumerate(eqn.outvars)}
    found = Passes(count, all_equations[0], names)
    finder = _Operands(found, made)
    for i, eqn in enumerate(all_equations[0]):
        operands = (tuple(eqns[i].invars[slot] for eqns in all_equations) for slot in range(len(eqn.invars)))
        found.operands.append([finder.operand(eqn, atoms) for atoms in operands])
    _add_results(found, all_equations, made, readers)
    return found


class _Operands:
    """Classifies operands, and fills `each`, `first` and `carried` of `found`."""

    def __init__(self, found: Passes, made: Mapping[Any, tuple[int, int, int]]) -> None:
        self._found, self._made = found, made
        self._each: dict[tuple[Any, ...], Each] = {}
        self._carries: dict[tuple[Any, Any], Carried] = {}

    def operand(self, eqn: Any, atoms: tuple[Any, ...]) -> Operand:
        """The operand of an equation whose variables or literals in the passes are `atoms`."""
        if all(map(is_literal, atoms)):
            values = [np.asarray(a.val) for a in atoms]
            return atoms[0] if all(_same(values[0], v) for v in values) else self._new_each(atoms, tuple(map(id, atoms)))
        places = [None if is_literal(v) else self._made.get(v) for v in atoms]
        if not any(map(is_literal, atoms)):
            if all(place is None for place in places):
                return atoms[0] if len(set(atoms)) == 1 else self._new_each(atoms, atoms)
            if _is_made_in_pass(places, 0):
                return atoms[0]
            if places[0] is None and _is_made_in_pass(places[1:], 0):
                return self._new_carry(eqn, atoms[0], places[1])
        raise NotALoop(f"an operand of {eqn.primitive.name} is computed by different operations in different passes")

    def _new_each(self, atoms: tuple[Any, ...], key: tuple[Any, ...]) -> Each:
        if key not in self._each:
            self._each[key] = Each(len(self._found.each))
            self._found.each.append(atoms)
        return self._each[key]

    def _new_carry(self, eqn: Any, first: Any, at: Any) -> Carried:
        variable = self._found.equations[at[1]].outvars[at[2]]
        if (first.aval.shape, first.aval.dtype) != (variable.aval.shape, variable.aval.dtype):
            raise NotALoop(f"an operand of {eqn.primitive.name} is {first.aval} in the first pass and {variable.aval} in the others")
        key = first, variable
        if key not in self._carries:
            self._carries[key] = Carried(len(self._found.first))
            self._found.first.append(first)
            self._found.carried.append(variable)
        return self._carries[key]


def _is_made_in_pass(places: Sequence[tuple[int, int, int] | None], first: int) -> bool:
    """Whether `places[k]` is in pass `first + k` for all k, and all are the same output of the same equation."""
    at = places[0]
    return at is not None and all(place == (first + k, *at[1:]) for k, place in enumerate(places))


def _same(a: Any, b: Any) -> bool:
    """Whether two numbers have the same bits."""
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _add_results(found: Passes, all_equations: list[list[Any]], made: Mapping[Any, Any], readers: Mapping[Any, int]) -> None:
    """Fill `left` and `last` with the results that are read outside the loop: of all passes, or only of the last one."""
    inside: dict[Any, int] = {}
    for v in (v for eqns in all_equations for eqn in eqns for v in eqn.invars):
        if not is_literal(v) and v in made:
            inside[v] = inside.get(v, 0) + 1
    for i, eqn in enumerate(found.equations):
        for o, variable in enumerate(eqn.outvars):
            family = tuple(eqns[i].outvars[o] for eqns in all_equations)
            is_read = [readers.get(v, 0) > inside.get(v, 0) for v in family]
            if any(is_read[:-1]):
                found.left.append(family)
            elif is_read[-1]:
                if variable not in found.carried:
                    found.first.append(None)
                    found.carried.append(variable)
                found.last.append((family[-1], found.carried.index(variable)))


__all__ = ["Carried", "Each", "NotALoop", "Passes", "passes_of"]

"""What the passes of a repeat read and leave: the same value all of them, the last one's, or each its own.

Note [Operands of a pass]
    An operand of an equation, seen over all passes, is one of five: made in the same pass; made in the pass before (a carry, whose
    first value comes from outside); one value from outside; numbers written into the equations; or a value from outside for each
    pass, of which all together are one stacked array. If an operand is none of these, the passes stay as they are.
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
    """Operand: a value from outside for each pass, by its place among `Passes.each`."""

    index: int


@dataclass(frozen=True)
class Carried:
    """Operand: what the pass before left, by its place among `Passes.first`."""

    index: int


Operand = Any  # a variable of the first pass or of the outside, a literal, Each or Carried


class NotALoop(Exception):
    """An operand that no loop can give each pass; the text says which."""


@dataclass
class Passes:
    """One pass of a repeat, and how the passes hang together.

    Attributes:
        count: how many passes.
        equations: those of the first pass.
        names: of each equation, what the passes have in common of its name.
        operands: for each equation.
        each: variables of the passes, or numbers written into their equations: [count] each.
        first: for each carry the value that the first pass takes; None: zeros.
        carried: for each carry the variable of the first pass that the next one takes.
        left: variables of which somebody outside reads more than the last pass's: [count] each.
        last: variables of the last pass that are read outside, and which carry holds them.
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
        """Whether all passes can be computed at once: none needs what another gives, and they multiply no matrices, which take memory."""
        return not self.first and not any(eqn.primitive.name in _PRODUCTS for eqn in self.equations)


def passes_of(jaxpr: Any, repeat: Repeat, names: list[Any], readers: Mapping[Any, int]) -> Passes:
    """How the passes hang together. See Note [Operands of a pass].

    Args:
        names: name stack of each equation of a pass.
        readers: how often each variable is read in the whole program.

    Raises:
        NotALoop: they do not.
    """
    period, count = repeat.period, repeat.passes
    all_equations = [[jaxpr.eqns[place] for place in repeat.places[k * period : (k + 1) * period]] for k in range(count)]
    made = {v: (k, i, o) for k, eqns in enumerate(all_equations) for i, eqn in enumerate(eqns) for o, v in enumerate(eqn.outvars)}
    found = Passes(count, all_equations[0], names)
    finder = _Operands(found, made)
    for i, eqn in enumerate(all_equations[0]):
        alike = (tuple(eqns[i].invars[slot] for eqns in all_equations) for slot in range(len(eqn.invars)))
        found.operands.append([finder.operand(eqn, atoms) for atoms in alike])
    _note_results(found, all_equations, made, readers)
    return found


class _Operands:
    """What an operand is, over all passes; fills `each`, `first` and `carried`."""

    def __init__(self, found: Passes, made: Mapping[Any, tuple[int, int, int]]) -> None:
        self._found, self._made = found, made
        self._each: dict[tuple[Any, ...], Each] = {}
        self._carries: dict[tuple[Any, Any], Carried] = {}

    def operand(self, eqn: Any, atoms: tuple[Any, ...]) -> Operand:
        """The operand of an equation, whose atoms in the passes these are."""
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
        raise NotALoop(f"an operand of {eqn.primitive.name} comes from elsewhere in each pass")

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
    """Whether place k is that of one output of one equation in pass `first + k`."""
    at = places[0]
    return at is not None and all(place == (first + k, *at[1:]) for k, place in enumerate(places))


def _same(a: Any, b: Any) -> bool:
    """Whether two numbers have the same bits."""
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _note_results(found: Passes, all_equations: list[list[Any]], made: Mapping[Any, Any], readers: Mapping[Any, int]) -> None:
    """Which values the outside reads: of every pass, or of the last one only."""
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

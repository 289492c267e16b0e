"""Finds repeated equations in a traced program: the blocks of a model in the forward pass, the backward pass and the optimizer.

Note [Repeats]
    Two equations are alike if they bind the same primitive with the same parameters to operands of the same types. A stretch of the
    program in which every equation is like the one `period` before it is a repeat of its first `period` equations. Candidates for the
    period are the most frequent distances between equations that are alike. The stretch that saves the most equations is taken first.
    A pass may begin at any equation of the stretch. It begins where the fewest bytes cross from one pass to the next, which in a model
    is the border between two blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from spmd.base._jax import common_names, is_jaxpr, is_literal
from spmd.program.xla._jaxpr import constants_within

MIN_PASSES = 3
_MIN_SHARE = 0.1  # the first repeat must save this share of the program's equations; otherwise the program has no layers
_MIN_SAVING = 8  # equations
_MAX_PERIODS = 64  # candidates for the period of a stretch
_MAX_SKIPPED = 16  # consecutive equations that only the first pass has


@dataclass(frozen=True)
class Repeat:
    """A sequence of `period` equations that occurs `passes` times. Each occurrence is a pass, which becomes an iteration of the loop.

    Attributes:
        places: indices of the equations in the program, pass after pass.
        before: indices of equations that lie among those of the first pass but read no result of it. They run before the loop, and all
            passes may use their results.
    """

    period: int
    places: tuple[int, ...]
    before: tuple[int, ...]

    @property
    def passes(self) -> int:
        """How often the sequence occurs."""
        return len(self.places) // self.period

    def names(self, jaxpr: Any) -> list[Any]:
        """The name stack of each equation of a pass, "*" where the passes differ."""
        return [
            common_names(jaxpr.eqns[a], jaxpr.eqns[b]) for a, b in zip(self.places[: self.period], self.places[self.period :], strict=False)
        ]


@dataclass(frozen=True)
class Stretch:
    """Equations, each of which is like the one `period` before it.

    Attributes:
        places, before: see `Repeat`. The last pass may be incomplete.
    """

    period: int
    places: list[int]
    before: list[int]


def stretches(jaxpr: Any) -> list[Stretch]:
    """The stretches of a jaxpr, in program order. See Note [Repeats]."""
    numbers = np.array(kinds(jaxpr.eqns), np.int64)
    free = np.ones(len(numbers), bool)
    found: list[Stretch] = []
    while True:
        best = max((_longest(numbers, free, period) for period in _periods(numbers, free)), key=_saving, default=None)
        if best is None or _saving(best)[0] < (_MIN_SAVING if found else max(_MIN_SAVING, _MIN_SHARE * len(numbers))):
            return sorted(found, key=lambda r: r.places[0])
        start, period, length = best
        places, before = _extended_backwards(jaxpr.eqns, numbers, free, start, period, length)
        free[places[0] : places[-1] + 1] = False
        found.append(Stretch(period, places, before))


def _saving(stretch: tuple[int, int, int]) -> tuple[int, int]:
    """Sort key: the number of equations that a loop saves; among equals, the shortest period is largest."""
    _, period, length = stretch
    return (length // period - 1) * period if length // period >= MIN_PASSES else 0, -period


def kinds(equations: Sequence[Any]) -> list[int]:
    """A number for each equation. Equations that are alike have the same number."""
    known: dict[Any, int] = {}
    parameters: dict[Any, int] = {}
    texts: dict[int, Any] = {}
    contexts: dict[int, str] = {}
    described: dict[int, Any] = {}  # by id of the parameters: equations from one trace of a rule share the dict

    def text(jaxpr: Any) -> Any:
        if id(jaxpr) not in texts:
            texts[id(jaxpr)] = str(jaxpr), tuple(map(id, constants_within(jaxpr)))
        return texts[id(jaxpr)]

    def comparable(value: Any) -> Any:
        if is_jaxpr(value):
            return text(value)
        if isinstance(value, (list, tuple)):
            return tuple(map(comparable, value))
        try:
            hash(value)
        except TypeError:
            return id(value)
        return value

    def kind(eqn: Any) -> Any:
        if eqn.effects:
            return id(eqn)
        if id(eqn.ctx) not in contexts:
            contexts[id(eqn.ctx)] = repr(eqn.ctx)
        params = described.get(id(eqn.params))
        if params is None:
            params = tuple((name, comparable(value)) for name, value in sorted(eqn.params.items()) if name not in _NOT_COMPARED)
            params = described[id(eqn.params)] = parameters.setdefault(params, len(parameters))
        return eqn.primitive, contexts[id(eqn.ctx)], params, tuple(map(_type, eqn.invars)), tuple(v.aval for v in eqn.outvars)

    return [known.setdefault(kind(eqn), len(known)) for eqn in equations]


# derivative rules, which are new objects for each call of the same function and which loops do not use, and names
_NOT_COMPARED = frozenset(("jvp_jaxpr_fun", "jvp", "fwd_jaxpr_thunk", "bwd", "call", "name"))


def _type(atom: Any) -> Any:
    """The part of an operand that must agree for equations to be alike. The values of scalar literals may differ."""
    if is_literal(atom):
        return "literal", atom.aval, None if atom.aval.shape == () else id(atom.val)
    return atom.aval


def _periods(kinds: np.ndarray[Any, Any], free: np.ndarray[Any, Any]) -> list[int]:
    """Distances between equations that are alike, most frequent first."""
    places = np.argsort(kinds, kind="stable")  # grouped by kind, in program order within a kind
    taken = np.cumsum(~free)
    one, other = places[:-1], places[1:]
    is_pair = (kinds[one] == kinds[other]) & free[one] & free[other] & (taken[one] == taken[other])
    shares = 1 / np.bincount(kinds)[kinds[one[is_pair]]]  # rare kinds weigh more: one that occurs once per pass gives the period
    weights = np.bincount((other - one)[is_pair], shares)
    found = np.argsort(-weights, kind="stable")[:_MAX_PERIODS]
    return [int(period) for period in found if weights[period] > 0]


def _longest(kinds: np.ndarray[Any, Any], free: np.ndarray[Any, Any], period: int) -> tuple[int, int, int]:
    """(start, period, length) of the longest stretch with this period."""
    same = (kinds[:-period] == kinds[period:]) & free[:-period] & free[period:]
    edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
    starts, stops = edges[::2], edges[1::2]
    if not len(starts):
        return 0, period, 0
    i = int(np.argmax(stops - starts))
    return int(starts[i]), period, int(stops[i] - starts[i]) + period


def _extended_backwards(
    equations: Sequence[Any], kinds: np.ndarray[Any, Any], free: np.ndarray[Any, Any], start: int, period: int, length: int
) -> tuple[list[int], list[int]]:
    """Extend a stretch towards the start of the program across equations that only the first pass has.

    Returns:
        (indices of the stretch's equations, indices of the skipped equations). The stretch is unchanged if no whole pass is gained.
    """
    places = deque(range(start, start + length))
    skipped: list[int] = []
    since_match = 0
    for place in range(start - 1, -1, -1):
        if not free[place] or since_match > _MAX_SKIPPED:
            break
        if kinds[place] == kinds[places[period - 1]]:
            places.appendleft(place)
            since_match = 0
        else:
            skipped.append(place)
            since_match += 1
    inside = {v: place for place in places for v in equations[place].outvars}
    first = places[0]
    for place in skipped:  # latest first; an equation that reads a result of the first pass cannot be moved before the loop
        if place > first and any(not is_literal(v) and v in inside for v in equations[place].invars):
            first = place + 1
            break
    while places[0] < first:
        places.popleft()
    if len(places) // period == length // period:  # no pass gained: leave these equations to other repeats
        return list(range(start, start + length)), []
    return list(places), [place for place in reversed(skipped) if place > places[0]]


def best_repeat(equations: Sequence[Any], stretch: Stretch, known: Mapping[Any, tuple[Any, int]]) -> Repeat:
    """The repeat of a stretch, with the best start of a pass.

    The best start is the one at which the fewest bytes cross from one pass to the next. Among equals, most operands of consecutive
    passes are consecutive members of a known family.

    Args:
        known: for a variable of an earlier loop, its family (the variables that correspond to it in the passes) and its pass.
    """
    period, places = stretch.period, stretch.places
    passes = len(places) // period
    crossing = _crossing_bytes(equations, places, period)

    def cost(border: int) -> tuple[int, int, int]:
        pairs = (
            (known.get(v), known.get(w))
            for i in range(border, border + period)
            for v, w in zip(equations[places[i]].invars, equations[places[i + period]].invars, strict=True)
            if not is_literal(v) and not is_literal(w) and v is not w
        )
        return int(crossing[border % period]), sum(not _are_neighbours(a, b) for a, b in pairs), border

    first = min(range(len(places) - passes * period + 1), key=cost)
    taken = places[first : first + passes * period]
    return Repeat(period, tuple(taken), tuple(place for place in stretch.before if place > taken[0]))


def _are_neighbours(one: tuple[Any, int] | None, other: tuple[Any, int] | None) -> bool:
    """Whether two operands are consecutive members of one known family, or both belong to none."""
    if one is None or other is None:
        return one is other
    return one[0] == other[0] and abs(one[1] - other[1]) == 1


def _crossing_bytes(equations: Sequence[Any], places: list[int], period: int) -> np.ndarray[Any, Any]:
    """int64[period]: bytes that cross from one pass to the next if passes begin at that equation of the period."""
    made = {v: i for i, place in enumerate(places) for v in equations[place].outvars}
    last_use: dict[Any, int] = {}
    for i, place in enumerate(places):
        for v in equations[place].invars:
            if not is_literal(v) and v in made and i - made[v] <= period:
                last_use[v] = i
    # a value made at d and last used at u crosses every border in (d, u]; u is at most a period later (a layer's residual is)
    crossing = np.zeros(period, np.int64)
    middle = (len(places) // period // 2) * period
    for v, use in last_use.items():
        if middle <= use < middle + period:
            crossing[[border % period for border in range(made[v] + 1, use + 1)]] += num_bytes(v.aval)
    return crossing


def num_bytes(aval: Any) -> int:
    """Bytes of a value; for random keys, the bytes of their words."""
    return prod(aval.shape) * getattr(aval.dtype, "itemsize", 8)


__all__ = ["MIN_PASSES", "Repeat", "Stretch", "best_repeat", "kinds", "num_bytes", "stretches"]

"""Families of traces by the sizes for which they are valid, and the search for new ones.

The search first tries traces that are valid for all sizes, then for all sizes that are not small, then for the sizes of one bucket. If
Python divides a size and rounds (`n // 2`, `n % 8`), it tries the same for the sizes with one remainder, for which the quotient is linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from spmd.device._storage import Buffer
from spmd.program.reads import recorded_together
from spmd.program.sizes._dims import SMALLEST
from spmd.program.sizes._evaluate import SizeDecides
from spmd.program.sizes._family import Family
from spmd.program.sizes._formulas import Inexact, Points
from spmd.program.sizes._size_reads import SizeReads
from spmd.program.sizes._trace_points import more_points, points_within, with_enough_points
from spmd.program.trace._captured import Captured

_MOST_REMAINDERS = 4  # with their own traces; beyond that, each size gets its own program
_LONGEST_PERIOD = 128
Trace = Callable[[Sequence[int]], tuple[Captured, SizeReads]]
Limits = tuple[tuple[int, int], ...]
Steps = tuple[tuple[int, int], ...]


class Sizes(NamedTuple):
    """The dims of a call that vary.

    Attributes:
        names: their names; the other attributes are in this order.
        now: sizes in the call.
        bucket: sizes of the program that runs the call.
        least, most: smallest size, at least 2, and largest size.
        multiples: number of shards, which divides the bucket.
    """

    names: tuple[str, ...]
    now: tuple[int, ...]
    bucket: tuple[int, ...]
    least: tuple[int, ...]
    most: tuple[int, ...]
    multiples: tuple[int, ...]


class Families:
    """The families of one compiled function. See the module."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[Family]] = {}
        self._failed: set[Hashable] = set()
        self._at: dict[Hashable, Family] = {}  # by the points of its traces
        self._periods: dict[Hashable, int] = {}
        self._remainders: dict[Hashable, set[tuple[int, ...]]] = {}

    def __iter__(self) -> Iterator[Family]:
        return (family for families in self._known.values() for family in families)

    def clear(self) -> None:
        """Forget all traces."""
        self.__init__()

    def of(self, key: Hashable) -> list[Family]:
        """Families for calls that differ only in their sizes."""
        return self._known.get(key, [])

    def search(self, key: Hashable, sizes: Sizes, buffers: list[Buffer], trace: Trace) -> Family:
        """Trace the function for the sizes of a call.

        Args:
            key: equal for calls that differ only in their sizes.
            buffers: buffers of the call's arguments.
            trace: traces the function at a point.

        Raises:
            Inexact: no traces are proved to be valid for the call.
        """
        why: Inexact = SizeDecides("earlier calls showed that each size needs its own program")
        periods = [self._periods.get(key, 1)]
        for period in periods:
            steps = self._steps(key, sizes, period)
            if steps is None:
                continue
            for number, limits in enumerate(_ranges(sizes)):
                place = key, number, limits, steps
                points = points_within(limits, steps, int(number == 1))
                holds_for = tuple((low if number else least, most) for low, (least, most) in zip(points[0], limits, strict=True))
                if place in self._failed or not _within(sizes.now, holds_for):
                    continue
                known = self._at.get(place)
                if known is not None and known.reason(sizes.now) is not None:  # new traces at these points would have the same reason
                    why = SizeDecides(known.reason(sizes.now))
                    continue
                divisors = set[int]()

                def traced(point: Sequence[int], divisors: set[int] = divisors) -> tuple[Captured, SizeReads]:
                    captured, reads = trace(point)
                    divisors |= reads.divisors
                    return captured, reads

                try:
                    more = more_points(points, steps)
                    family = family_at(sizes.names, points, more, period, holds_for, traced, lambda f: f.padded(sizes.bucket, buffers))
                except Inexact as error:
                    why = error
                    if not error.may_depend_on_range:
                        raise
                    self._failed.add(place)
                    found = math.lcm(*divisors)
                    if period == 1 and 1 < found <= _LONGEST_PERIOD:
                        self._periods[key] = found
                        periods.append(found)
                        break
                    continue
                self._known.setdefault(key, []).insert(0, family)
                self._at[place] = family
                reason = family.reason(sizes.now)
                if reason is None:
                    return family
                why = SizeDecides(reason)
        raise why

    def _steps(self, key: Hashable, sizes: Sizes, period: int) -> Steps | None:
        """For each name, (step, remainder) of the sizes that can be points; None if no such sizes exist."""
        if period > 1:
            remainders = self._remainders.setdefault(key, set())
            own = tuple(n % period for n in sizes.now)
            if len(remainders) == _MOST_REMAINDERS and own not in remainders:
                return None
            remainders.add(own)
        found = list[tuple[int, int]]()
        for n, multiple in zip(sizes.now, sizes.multiples, strict=True):
            step = math.lcm(multiple, period)
            fitting = [r for r in range(0, step, multiple) if (r - n) % period == 0]
            if not fitting:
                return None
            found.append((step, fitting[0]))
        return tuple(found)


def _within(sizes: Sequence[int], limits: Limits) -> bool:
    return all(low <= n <= high for n, (low, high) in zip(sizes, limits, strict=True))


def _ranges(sizes: Sizes) -> list[Limits]:
    """Ranges for which one set of traces may be valid: all sizes; all that are not small; those of the bucket."""
    both = [*zip(sizes.least, sizes.most, strict=True)]
    bucket = tuple((max(low, n // 2 + 1) if n > SMALLEST else low, n) for low, n in zip(sizes.least, sizes.bucket, strict=True))
    found: list[Limits] = [tuple(both), tuple((max(low, n // 6), n) for low, n in both), bucket]
    found = [limits for limits in found if _within(sizes.now, limits)]
    found = [limits for i, limits in enumerate(found) if limits not in found[:i]]
    return [*found[:1], *found]  # again at other points, since a point may equal a constant of the model


def family_at(
    names: tuple[str, ...],
    points: Sequence[Sequence[int]],
    more: Sequence[Sequence[int]],
    period: int,
    limits: Limits,
    trace: Trace,
    use: Callable[[Family], Any],
) -> Family:
    """Family of the traces at these points, and at `more` points if the first are not enough.

    Args:
        period: divisor for which each size has the same remainder at all points.
        limits: for each name, the smallest and the largest size for which the family is valid.
        trace: traces the function at a point.
        use: computes all formulas that are needed, so that doubts show.

    Raises:
        Inexact: the traces are not the same program.
    """
    made = list[tuple[Any, Captured, SizeReads]]()

    def family(at: Sequence[Sequence[int]]) -> Family:
        with recorded_together():
            made.extend((point, *trace(point)) for point in at[len(made) :])
        found = Family(names, Points([point for point, _, _ in made], period), [t for _, t, _ in made], [r for _, _, r in made], limits)
        use(found)
        return found

    return with_enough_points(family, points, more)


__all__ = ["Families", "Sizes", "family_at"]

"""Chooses the sizes at which a function is traced. See Note [Points]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from spmd.program.sizes._formulas import Unknown

SHARES = (0.618, 0.31)  # of the range, for the two points with all names in between
MORE_SHARES = (0.82, 0.46)


def points_within(limits: Sequence[tuple[int, int]], steps: Sequence[tuple[int, int]], shift: int = 0) -> list[tuple[int, ...]]:
    """k + 3 points for k names: all small; each one large in turn; all in between, twice.

    The points of a name span a prime number of steps, a different prime for each name. So any function that is periodic in the sizes
    (`n // 4 * 4`, `(n + m) % 3`), with any period except the step's, has different values at the points.

    Args:
        limits: for each name, the smallest and the largest size. If the range has fewer than four sizes, points exceed its upper end.
        steps: for each name, a step and a remainder. Each size is the remainder plus a multiple of the step.
        shift: 1 gives other points within the same limits.
    """
    low, spans = list[int](), list[int]()
    for place, ((least, most), (step, rest)) in enumerate(zip(limits, steps, strict=True)):
        bottom = -(-(max(least + shift * step, min(3 + 2 * place + 4 * shift, most // 2)) - rest) // step)
        top = (most - rest) // step
        fitting = [n for n in range(top - bottom, 2, -1) if n not in spans and _is_prime(n)]
        span = fitting[0] if fitting else next(n for n in range(3, 1000) if n not in spans and _is_prime(n))
        low.append(rest + bottom * step)
        spans.append(span)
    high = [n + span * step for n, span, (step, _) in zip(low, spans, steps, strict=True)]
    found = [tuple(low), *(tuple(high[j] if j == i else n for j, n in enumerate(low)) for i in range(len(low)))]
    for share in SHARES:
        found.append(_between(found, spans, steps, share + 0.06 * shift, 4))
    return found


def more_points(points: Sequence[tuple[int, ...]], steps: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Two more points in between, for formulas that may fit the other points by chance."""
    low = points[0]
    spans = [(points[1 + i][i] - n) // step for i, (n, (step, _)) in enumerate(zip(low, steps, strict=True))]
    found = [*points]
    for share in MORE_SHARES:
        found.append(_between(found, spans, steps, share, 8))
    return [point for point in found[len(points) :] if point not in points]


class _Certain(Protocol):
    @property
    def is_certain(self) -> bool: ...


_Made = TypeVar("_Made", bound=_Certain)


def with_enough_points(
    make: Callable[[Sequence[Sequence[int]]], _Made], points: Sequence[Sequence[int]], more: Sequence[Sequence[int]]
) -> _Made:
    """Result of `make` for the traces at `points`, or at `more` points too if the first are not enough.

    Args:
        make: a function of all points so far, whose first points are those of the previous call.

    Raises:
        Unknown: a number fits no form at any of the points.
    """
    try:
        found = make(points)
    except Unknown:  # more points choose between two forms; if none fits, this is raised again
        return make([*points, *more])
    return found if found.is_certain else make([*points, *more])


def _between(
    points: Sequence[Sequence[int]], spans: Sequence[int], steps: Sequence[tuple[int, int]], share: float, period: int
) -> tuple[int, ...]:
    """A point inside the range. If possible, all names have different sizes, and each has a remainder that it has at no other point.

    Args:
        points: the other points, the one with all small first.
        period: divisor of the remainder, in steps. The number of strided windows depends on the remainder.
    """
    found = list[int]()
    for i, (n, span, (step, _)) in enumerate(zip(points[0], spans, steps, strict=True)):
        first = min(span - 1, max(1, int(span * share)))
        inside = [n + ((first + k - 1) % (span - 1) + 1) * step for k in range(span - 1)]
        free = [size for size in inside if size not in found] or inside[:1]
        had = {(point[i] - n) // step % period for point in points}
        found.append(next((size for size in free if (size - n) // step % period not in had), free[0]))
    return tuple(found)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % n for n in range(2, int(number**0.5) + 1))


__all__ = ["more_points", "points_within", "with_enough_points"]

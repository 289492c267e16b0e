"""Checks of arguments before a call, for any sizes: the bound of an index may be a size.

x.gather(0, index)      # the elements of `index` are less than x.shape[0]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spmd.device._indices import Bound
from spmd.program.sizes._evaluate import SizeDecides
from spmd.program.sizes._formulas import Points
from spmd.program.trace._known_inputs import ArgumentCheck


class SizedChecks:
    """The checks of traces at several points.

    Args:
        checks: those of each trace.

    Raises:
        SizeDecides: the traces check different arguments.
        Inexact: no known formula gives a bound.
    """

    def __init__(self, points: Points, checks: Sequence[Sequence[ArgumentCheck]]) -> None:
        if len({tuple(check.argument for check in of_one) for of_one in checks}) > 1:
            raise SizeDecides("the size decides which arguments are indices")
        self._first = list(checks[0])
        self._bounds = [points.integer(tuple(check.check.bound.size for check in same)) for same in zip(*checks, strict=True)]
        self._latest: tuple[Sequence[int], list[ArgumentCheck]] | None = None

    def at(self, sizes: Sequence[int]) -> list[ArgumentCheck]:
        """The checks for a call with these sizes."""
        if self._latest is None or self._latest[0] != sizes:
            resized = [
                replace(check, check=replace(check.check, bound=_with_size(check.check.bound, int(bound(sizes)))), seen=None)
                for check, bound in zip(self._first, self._bounds, strict=True)
            ]
            self._latest = sizes, resized
        return self._latest[1]


def _with_size(bound: Bound, size: int) -> Bound:
    return replace(bound, size=size, text=bound.text.replace(str(bound.size), str(size)))


__all__ = ["SizedChecks"]

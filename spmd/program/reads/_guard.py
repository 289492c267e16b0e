"""Whether all that a trace read is as it was: asked before every call, so mostly of versions and not of values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from spmd.program.reads._places import DictPlace, NumberPlace, Place
from spmd.program.reuse._versions import DictVersions


class ReadsGuard:
    """A guard over places: a reason to trace again, or None."""

    def __init__(self, places: Sequence[Place]) -> None:
        """`places`: as they are now is how they are expected."""
        # the order of an OrderedDict changes without a write to the dict
        self._dicts = [p for p in places if isinstance(p, DictPlace) and not isinstance(p.holder, OrderedDict)]
        self._others = [p for p in places if not isinstance(p, DictPlace) or isinstance(p.holder, OrderedDict)]
        self._versions = DictVersions([place.holder for place in self._dicts])

    def __call__(self) -> str | None:
        if not self._versions.are_known():
            for place in self._versions.changed(self._dicts):
                difference = place.difference()
                if difference is not None:
                    return difference
            self._versions.know()
        for place in self._others:
            difference = place.difference()
            if difference is not None:
                return difference
        return None

    def changed_numbers(self) -> list[NumberPlace]:
        """The ints and floats that are others now."""
        return [number for place in (*self._dicts, *self._others) for number in place.changed_numbers()]

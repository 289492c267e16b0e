"""All guards of one program, asked before every call: does what its trace baked in still hold?

Note [Columns]
    Thousands of values are looked at in the time of one call of a jitted function, so none costs a step of Python while nothing
    changed. A guard says what its answer depends on: dicts, of which the version is compared (of an empty one that it is empty),
    and what is read of objects, which is compared by identity or, numbers, by value. What all guards look at in the same way is one
    column, read in one pass in C. Only guards that look at something that differs are asked, and those that can name nothing to
    look at; what they accept is what is expected next.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from operator import call, is_, is_not, ne
from typing import Any, NamedTuple

from spmd.base._torch import dict_version

Guard = Callable[[], str | None]
Read = Callable[[Any], Any]

_call: Any = call
_version: Any = dict_version
_joined: Any = chain.from_iterable
_FEW = 6  # objects of which a column is read one by one
_EMPTIABLE = (dict, collections.OrderedDict, collections.defaultdict)
_GONE = (AttributeError, ValueError, LookupError)  # an unset slot, an empty cell, a list that got shorter


class _Columns:
    """What is read of objects, each column in one way, and which guard looks at it, by its place in their order.

    A column of few objects costs more to begin than to read: those are read one by one, each object in its own way.
    """

    def __init__(self) -> None:
        self._columns: dict[Read, tuple[list[Any], list[int]]] = {}
        self._ranks: list[int] = []
        self.alone: tuple[list[Read], list[Any]] = [], []
        self.columns: tuple[list[Read], list[list[Any]]] = [], []

    def add(self, read: Read, objects: Sequence[Any], rank: int) -> None:
        """Read these objects too."""
        column = self._columns.setdefault(read, ([], []))
        column[0].extend(objects)
        column[1].extend([rank] * len(objects))

    def arrange(self) -> None:
        """All are there: put them in the order in which they are read."""
        alone = [(read, *column) for read, column in self._columns.items() if len(column[0]) < _FEW]
        wide = [(read, *column) for read, column in self._columns.items() if len(column[0]) >= _FEW]
        self.alone = [read for read, objects, _ in alone for _ in objects], [o for _, objects, _ in alone for o in objects]
        self.columns = [read for read, _, _ in wide], [objects for _, objects, _ in wide]
        self._ranks = [rank for _, _, ranks in (*alone, *wide) for rank in ranks]

    def now(self) -> Iterable[Any]:
        """What is read."""
        return chain(map(_call, *self.alone), _joined(map(map, *self.columns)))

    def differing(self, differs: Callable[[Any, Any], bool], now: list[Any], known: list[Any]) -> Iterable[int]:
        """The guards that look at something that differs."""
        return compress(self._ranks, map(differs, now, known))

    def filled(self) -> Iterable[int]:
        """The guards that look at something that is neither None nor empty."""
        return compress(self._ranks, self.now())


class _Dicts:
    """Dicts, each once, and which guards look at each."""

    def __init__(self) -> None:
        self.dicts: list[dict[Any, Any]] = []
        self.ranks: list[list[int]] = []
        self._index: dict[int, int] = {}

    def add(self, holder: dict[Any, Any], rank: int) -> None:
        """Look at this one too."""
        index = self._index.setdefault(id(holder), len(self.dicts))
        if index == len(self.dicts):
            self.dicts.append(holder)
            self.ranks.append([])
        self.ranks[index].append(rank)


class _Seen(NamedTuple):
    """What was read when all guards held."""

    versions: list[int]
    numbers: list[Any]
    values: list[Any]
    parts: list[list[Any]]


class Guards:
    """Guards in the order in which they are asked; each gives a reason to trace again, or None."""

    def __init__(self) -> None:
        self._guards: list[Guard] = []
        self._always: list[int] = []
        self._dicts, self._empty = _Dicts(), _Dicts()
        self._numbers, self._values, self._blank = _Columns(), _Columns(), _Columns()
        self._part_readers, self._part_holders, self._part_ranks = list[Read](), list[Any](), list[int]()
        self._is_arranged = False
        self._known: _Seen | None = None
        self._known_items: list[Any] = []  # its values and parts, one after the other

    def add(
        self,
        guard: Guard,
        *,
        dicts: Sequence[dict[Any, Any]] = (),
        values: Iterable[tuple[Read, Sequence[Any]]] = (),
        numbers: Iterable[tuple[Read, Sequence[Any]]] = (),
        parts: Iterable[tuple[Read, Any]] = (),
        blank: Iterable[tuple[Read, Sequence[Any]]] = (),
    ) -> None:
        """Add a guard, to be asked when something that it looks at differs; before every call if it looks at nothing.

        Args:
            dicts: any write to one of them counts.
            values: (read, objects): of each object `read(object)`, by identity.
            numbers: the same, by value, where `==` tells apart all that differs: ints, flags, code, None.
            parts: (read, object): all that `read(object)` gives, by identity.
            blank: (read, objects): whether `read(object)` is still empty or None; the guard holds only if it is.
        """
        rank = len(self._guards)
        self._guards.append(guard)
        self._known, self._is_arranged = None, False
        values, numbers, parts, blank = list(values), list(numbers), list(parts), list(blank)
        if not (dicts or values or numbers or parts or blank):
            self._always.append(rank)
        for holder in dicts:
            if type(holder) in _EMPTIABLE and not holder:
                self._empty.add(holder, rank)
            else:
                self._add_dict(holder, rank)
        for read, objects in values:
            self._values.add(read, objects, rank)
        for read, objects in [*numbers, *((len, [holder]) for read, holder in parts if read is iter)]:
            self._numbers.add(read, objects, rank)
        for read, objects in blank:
            self._blank.add(read, objects, rank)
        for read, holder in parts:
            self._part_readers.append(read)
            self._part_holders.append(holder)
            self._part_ranks.append(rank)

    def _add_dict(self, holder: dict[Any, Any], rank: int) -> None:
        if _version is None or isinstance(holder, collections.OrderedDict):  # whose order changes without its version
            self._always.append(rank)
        else:
            self._dicts.add(holder, rank)

    def reason(self) -> str | None:
        """The first reason for which the program does not hold any more, or None."""
        if self._is_as_known():
            for rank in self._always:
                reason = self._guards[rank]()
                if reason is not None:
                    return reason
            return None
        self._arrange()
        seen = self._seen()
        ranks = range(len(self._guards)) if seen is None else sorted(self._differing(seen).union(self._always))
        for rank in ranks:
            reason = self._guards[rank]()
            if reason is not None:
                return reason
        if any(self._empty.dicts):
            self._expect_filled()
            seen = None if seen is None else self._seen()
        self._known = seen
        self._known_items = [] if seen is None else [*seen.values, *_joined(seen.parts)]
        return None

    def _arrange(self) -> None:
        if not self._is_arranged:
            for columns in (self._numbers, self._values, self._blank):
                columns.arrange()
            self._is_arranged = True

    def _is_as_known(self) -> bool:
        known = self._known
        if known is None or any(self._empty.dicts):
            return False
        blank, numbers, values = self._blank, self._numbers, self._values
        parts = _joined(map(_call, self._part_readers, self._part_holders))
        try:  # each as in `now`, without its call
            return (
                list(map(_version, self._dicts.dicts)) == known.versions
                and not any(chain(map(_call, *blank.alone), _joined(map(map, *blank.columns))))
                and list(chain(map(_call, *numbers.alone), _joined(map(map, *numbers.columns)))) == known.numbers
                and all(map(is_, chain(map(_call, *values.alone), _joined(map(map, *values.columns)), parts), self._known_items))
            )
        except _GONE:
            return False

    def _seen(self) -> _Seen | None:
        """What there is now; None if some of it is gone."""
        try:
            parts = list(map(list, map(_call, self._part_readers, self._part_holders)))
            return _Seen(list(map(_version, self._dicts.dicts)), list(self._numbers.now()), list(self._values.now()), parts)
        except _GONE:
            return None

    def _differing(self, now: _Seen) -> set[int]:
        """The guards that look at something that is not as it was when all of them held. What is alike as a whole is not walked."""
        known = self._known
        if known is None:
            return set(range(len(self._guards)))
        found: set[int] = set()
        if any(self._empty.dicts):
            found.update(_joined(compress(self._empty.ranks, self._empty.dicts)))
        if now.versions != known.versions:
            found.update(_joined(compress(self._dicts.ranks, map(ne, now.versions, known.versions))))
        if any(self._blank.now()):
            found.update(self._blank.filled())
        if now.numbers != known.numbers:
            found.update(self._numbers.differing(ne, now.numbers, known.numbers))
        if not all(map(is_, now.values, known.values)):
            found.update(self._values.differing(is_not, now.values, known.values))
        if not all(map(is_, _joined(now.parts), _joined(known.parts))) or list(map(len, now.parts)) != list(map(len, known.parts)):
            found.update(compress(self._part_ranks, map(_differ, now.parts, known.parts)))
        return found

    def _expect_filled(self) -> None:
        """From now on the versions of dicts count that were empty and are not."""
        looked_at, self._empty = self._empty, _Dicts()
        for holder, ranks in zip(looked_at.dicts, looked_at.ranks, strict=True):
            for rank in ranks:
                if holder:
                    self._add_dict(holder, rank)
                else:
                    self._empty.add(holder, rank)


def _differ(now: list[Any], known: list[Any]) -> bool:
    return len(now) != len(known) or any(map(is_not, now, known))


__all__ = ["Guard", "Guards"]

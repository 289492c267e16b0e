"""The guards of one program, evaluated before every call: are the assumptions of its trace still true?

Note [Columns]
    Thousands of values are compared in the time of one call of a jitted function, so a value that has not changed must not cost a
    step of the Python interpreter. A guard declares what its result depends on. Dicts are compared by version (an empty dict by being
    empty). Values read from objects are compared by identity, or by value if they are numbers. All values that guards read in the same
    way are one column, which is read in one pass in C. Only guards that read a value that differs are evaluated, and guards that
    cannot declare what they read. If they accept the new values, the next call is compared with these.
"""

from __future__ import annotations

import collections
import weakref
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
_NARROW = 6  # columns of fewer objects are read object by object
_EMPTIABLE = (dict, collections.OrderedDict, collections.defaultdict)
_GONE = (AttributeError, ValueError, LookupError)  # an unset slot, an empty cell, a list that got shorter


class _Columns:
    """Values read from objects, in columns of equal reads, each with the rank of the guard that depends on it.

    For a column of few objects the start costs more than the reads. These are read in one common pass, each object by its own function.
    """

    def __init__(self) -> None:
        self._columns: dict[Read, tuple[list[Any], list[int]]] = {}
        self._ranks: list[int] = []
        self.alone: tuple[list[Read], list[Any]] = [], []
        self.columns: tuple[list[Read], list[list[Any]]] = [], []

    def add(self, read: Read, objects: Sequence[Any], rank: int) -> None:
        """Add `read(object)` for each of these objects, for the guard `rank`."""
        column = self._columns.setdefault(read, ([], []))
        column[0].extend(objects)
        column[1].extend([rank] * len(objects))

    def arrange(self) -> None:
        """Fix the order of the reads, after all were added."""
        alone = [(read, *column) for read, column in self._columns.items() if len(column[0]) < _NARROW]
        wide = [(read, *column) for read, column in self._columns.items() if len(column[0]) >= _NARROW]
        self.alone = [read for read, objects, _ in alone for _ in objects], [o for _, objects, _ in alone for o in objects]
        self.columns = [read for read, _, _ in wide], [objects for _, objects, _ in wide]
        self._ranks = [rank for _, _, ranks in (*alone, *wide) for rank in ranks]

    def now(self) -> Iterable[Any]:
        """The current values, in the order of the reads."""
        return chain(map(_call, *self.alone), _joined(map(map, *self.columns)))

    def differing(self, differs: Callable[[Any, Any], bool], now: list[Any], known: list[Any]) -> Iterable[int]:
        """Ranks of the guards whose values differ, according to `differs`."""
        return compress(self._ranks, map(differs, now, known))

    def filled(self) -> Iterable[int]:
        """Ranks of the guards that read a value that is true, not None or empty."""
        return compress(self._ranks, self.now())


class _Dicts:
    """Dicts, each once, with the ranks of the guards that depend on it."""

    def __init__(self) -> None:
        self.dicts: list[dict[Any, Any]] = []
        self.ranks: list[list[int]] = []
        self._index: dict[int, int] = {}

    def add(self, holder: dict[Any, Any], rank: int) -> None:
        """Add a dict for the guard `rank`."""
        index = self._index.setdefault(id(holder), len(self.dicts))
        if index == len(self.dicts):
            self.dicts.append(holder)
            self.ranks.append([])
        self.ranks[index].append(rank)


class _Snapshot(NamedTuple):
    """The values at a time when all guards were satisfied."""

    versions: list[int]
    numbers: list[Any]
    values: list[Any]
    parts: list[list[Any]]


class Guards:
    """Guards in the order of their evaluation. Each returns a reason to retrace, or None.

    Attributes:
        added: the arguments of each call of `add`, until the trace is stored.
    """

    def __init__(self) -> None:
        self._guards: list[Guard] = []
        self.added: list[tuple[Guard, dict[str, Any]]] = []
        self._always: list[int] = []
        self._dicts, self._empty = _Dicts(), _Dicts()
        self._numbers, self._values, self._blank = _Columns(), _Columns(), _Columns()
        self._part_readers, self._part_holders, self._part_ranks = list[Read](), list[Any](), list[int]()
        self._owners: dict[int, weakref.ReferenceType[Any]] = {}
        self._is_arranged = False
        self._known: _Snapshot | None = None
        self._known_items: list[Any] = []  # the values and parts of `_known`, concatenated

    def add(
        self,
        guard: Guard,
        *,
        dicts: Sequence[dict[Any, Any]] = (),
        values: Iterable[tuple[Read, Sequence[Any]]] = (),
        numbers: Iterable[tuple[Read, Sequence[Any]]] = (),
        parts: Iterable[tuple[Read, Any]] = (),
        blank: Iterable[tuple[Read, Sequence[Any]]] = (),
        owner: weakref.ReferenceType[Any] | None = None,
    ) -> None:
        """Add a guard. It is evaluated when something that it depends on has changed, or before every call if nothing is given.

        Args:
            guard: returns a reason to retrace, or None.
            dicts: it depends on the contents of these dicts; every write to one counts as a change.
            values: (read, objects): it depends on `read(object)` of each object, compared by identity.
            numbers: the same, compared by value. For values where `==` is exact: ints, flags, code, None.
            parts: (read, object): it depends on all items of the iterable `read(object)`, compared by identity.
            blank: (read, objects): it depends on `read(object)` being empty or None, and can be satisfied only if it is.
            owner: it is about this object, and there is nothing to guard once the object does not exist any more.
        """
        rank = len(self._guards)
        if owner is not None:
            self._owners[rank] = owner
        self._guards.append(guard)
        self._known, self._is_arranged = None, False
        values, numbers, parts, blank = list(values), list(numbers), list(parts), list(blank)
        what = {"dicts": dicts, "values": values, "numbers": numbers, "parts": parts, "blank": blank}
        self.added.append((guard, {name: given for name, given in what.items() if given}))
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

    def drop_dead(self) -> None:
        """Drop guards about objects that do not exist any more, such as CPU tensors that the trace itself created."""
        dead = {rank for rank, owner in self._owners.items() if owner() is None}
        self._always = [rank for rank in self._always if rank not in dead]
        self.added = [given for rank, given in enumerate(self.added) if rank not in dead]

    def _add_dict(self, holder: dict[Any, Any], rank: int) -> None:
        if _version is None or isinstance(holder, collections.OrderedDict):  # its order can change without a new version
            self._always.append(rank)
        else:
            self._dicts.add(holder, rank)

    def reason(self) -> str | None:
        """The first reason to retrace, or None if all guards are satisfied."""
        if self._is_unchanged():
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

    def _is_unchanged(self) -> bool:
        known = self._known
        if known is None or any(self._empty.dicts):
            return False
        blank, numbers, values = self._blank, self._numbers, self._values
        parts = _joined(map(_call, self._part_readers, self._part_holders))
        try:  # `now()` of each, inlined
            return (
                list(map(_version, self._dicts.dicts)) == known.versions
                and not any(chain(map(_call, *blank.alone), _joined(map(map, *blank.columns))))
                and list(chain(map(_call, *numbers.alone), _joined(map(map, *numbers.columns)))) == known.numbers
                and all(map(is_, chain(map(_call, *values.alone), _joined(map(map, *values.columns)), parts), self._known_items))
            )
        except _GONE:
            return False

    def _seen(self) -> _Snapshot | None:
        """The current values; None if one cannot be read any more."""
        try:
            parts = list(map(list, map(_call, self._part_readers, self._part_holders)))
            return _Snapshot(list(map(_version, self._dicts.dicts)), list(self._numbers.now()), list(self._values.now()), parts)
        except _GONE:
            return None

    def _differing(self, now: _Snapshot) -> set[int]:
        """Ranks of the guards with a value that differs from the last satisfied state. Columns that are equal as a whole are skipped."""
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
            found.update(compress(self._part_ranks, map(differ, now.parts, known.parts)))
        return found

    def _expect_filled(self) -> None:
        """Compare dicts that were empty, and are not any more, by version from now on."""
        before, self._empty = self._empty, _Dicts()
        for holder, ranks in zip(before.dicts, before.ranks, strict=True):
            for rank in ranks:
                if holder:
                    self._add_dict(holder, rank)
                else:
                    self._empty.add(holder, rank)


def differ(now: Sequence[Any], known: Sequence[Any]) -> bool:
    """Whether two sequences have other objects."""
    return len(now) != len(known) or any(map(is_not, now, known))


__all__ = ["Guard", "Guards", "differ"]

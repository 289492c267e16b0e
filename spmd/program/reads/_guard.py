"""Whether all that a trace read is as it was, asked before every call.

Note [Columns]
    Thousands of values are compared in the time of one call of a jitted function, so none costs a step of Python while nothing
    changed. Of a dict its version is compared, of an empty one that it is empty. Of other places of one kind (cells, slots,
    functions, items of lists) the values are read in one pass in C, a `_Column`, and compared by identity. Only where that finds
    another object is a `Place` asked whether the difference means something; what it accepts is what the column expects next.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, call, getitem, is_
from typing import Any

from spmd.program.reads._places import INPUT, CellPlace, DictPlace, FunctionPlace, Like, ListPlace, NumberPlace, Place, SlotPlace
from spmd.program.reuse._versions import DictVersions

_call: Any = call
_contents = attrgetter("cell_contents")
_DICTS, _SEQUENCES = (dict, collections.OrderedDict, collections.defaultdict), (list, collections.deque)
_DEFINITION = tuple(map(attrgetter, ("__code__", "__defaults__", "__kwdefaults__")))


class _Column:
    """Places that are unchanged as long as what is read of them, in one pass, are the very same objects."""

    def __init__(self, places: Sequence[Place], read: Callable[[], Iterable[Any]], sizes: Callable[[], Iterable[int]] = tuple) -> None:
        """`sizes`: compared as well, of places that give several objects each."""
        self._places = places
        self._read = read
        self._sizes = sizes
        self._known: tuple[list[int], list[Any]] | None = None

    def difference(self) -> str | None:
        """What differs from the trace, in words; None if nothing does."""
        try:
            sizes, now = list(self._sizes()), list(self._read())
        except (AttributeError, ValueError, IndexError):  # an unset slot, an empty cell, a list that got shorter
            return _first_difference(self._places)
        if self._known is not None and sizes == self._known[0] and len(now) == len(self._known[1]) and all(map(is_, now, self._known[1])):
            return None
        difference = _first_difference(self._places)
        if difference is None:
            self._known = sizes, now
        return difference


class ReadsGuard:
    """A guard over places: a reason to trace again, or None."""

    def __init__(self, places: Sequence[Place]) -> None:
        """`places`: as they are now is how they are expected."""
        self._places = places
        dicts, rest = _parted(places, _has_version)
        self._watch(dicts)
        cells, rest = _parted(rest, lambda place: isinstance(place, CellPlace) and _is_fixed(place.content))
        slots, rest = _parted(rest, lambda place: isinstance(place, SlotPlace) and _is_fixed(place.content))
        functions, rest = _parted(rest, lambda place: isinstance(place, FunctionPlace) and not place.holder.__kwdefaults__)
        sequences, rest = _parted(rest, _is_whole_sequence)
        items, self._others = _parted(rest, _is_of_items)
        made = (_of_cells(cells), _of_slots(slots), _of_functions(functions), _of_sequences(sequences), _of_items(items))
        self._columns = [column for column in made if column._places]

    def __call__(self) -> str | None:
        if any(self._empty_dicts):
            difference = _first_difference(self._empty)
            if difference is not None:
                return difference
            self._watch([*self._dicts, *self._empty])
        if not self._versions.unchanged():
            difference = _first_difference(self._versions.changed(self._dicts))
            if difference is not None:
                return difference
            self._versions.know()
        for column in self._columns:
            difference = column.difference()
            if difference is not None:
                return difference
        return _first_difference(self._others)

    def _watch(self, dicts: list[DictPlace]) -> None:
        self._empty, self._dicts = _parted(dicts, lambda place: type(place.holder) in _DICTS and not place.holder)
        self._empty_dicts = [place.holder for place in self._empty]
        self._versions = DictVersions([place.holder for place in self._dicts])

    def changed_numbers(self) -> list[NumberPlace]:
        """The ints and floats that are others now."""
        return [number for place in self._places for number in place.changed_numbers()]


def _first_difference(places: Iterable[Place]) -> str | None:
    for place in places:
        difference = place.difference()
        if difference is not None:
            return difference
    return None


def _parted(places: Iterable[Place], belongs: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    """The places that belong, and the rest."""
    places = list(places)
    flags = list(map(belongs, places))
    return [p for p, flag in zip(places, flags, strict=True) if flag], [p for p, flag in zip(places, flags, strict=True) if not flag]


def _has_version(place: Place) -> bool:
    """Whether a dict's version tells of all that may change; the order of an OrderedDict of two changes without it."""
    return isinstance(place, DictPlace) and not (isinstance(place.holder, collections.OrderedDict) and dict.__len__(place.holder) > 1)


def _is_fixed(value: Any) -> bool:
    return value is not INPUT and not isinstance(value, Like)


def _is_sequence(place: Place) -> bool:
    return isinstance(place, ListPlace) and type(place.holder) in _SEQUENCES


def _is_whole_sequence(place: Any) -> bool:
    return _is_sequence(place) and place.whole is not None and all(map(_is_fixed, place.whole))


def _is_of_items(place: Any) -> bool:
    """A list of which some items were read and not all."""
    return _is_sequence(place) and place.whole is None and all(map(_is_fixed, place.items.values()))


def _of_cells(places: list[CellPlace]) -> _Column:
    cells = [place.holder for place in places]
    return _Column(places, lambda: map(_contents, cells))


def _of_slots(places: list[SlotPlace]) -> _Column:
    readers, instances = [place.descriptor.__get__ for place in places], [place.holder for place in places]
    return _Column(places, lambda: map(_call, readers, instances))


def _of_functions(places: list[FunctionPlace]) -> _Column:
    functions = [place.holder for place in places]
    return _Column(places, lambda: chain.from_iterable(map(part, functions) for part in _DEFINITION))


def _of_sequences(places: list[ListPlace]) -> _Column:
    holders = [place.holder for place in places]
    return _Column(places, lambda: chain.from_iterable(holders), lambda: map(len, holders))


def _of_items(places: list[ListPlace]) -> _Column:
    holders, indexes = [place.holder for place in places for _ in place.items], [index for place in places for index in place.items]
    return _Column(places, lambda: map(getitem, holders, indexes))

"""Turns the places that a trace read into guards. For each place, says which values show that nothing changed. See Note [Columns]."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable
from contextvars import ContextVar
from operator import attrgetter, call, itemgetter, methodcaller
from typing import Any

from spmd.program.reads._classes import ORDER, AbstractPlace, ClassPlace, SpecialPlace, registrations
from spmd.program.reads._content_places import AttributePlace, CellPlace, FunctionPlace
from spmd.program.reads._number_place import ABSENT, INPUT
from spmd.program.reads._places import (
    PLAIN,
    ContentPlace,
    DictPlace,
    Like,
    ListPlace,
    Place,
    SlotPlace,
)
from spmd.program.reads._replaced import holds_replaced
from spmd.program.reuse._columns import Guards

_CONTENTS = attrgetter("cell_contents")
_SET = methodcaller("get", ABSENT)
_DEFINITION = tuple(map(attrgetter, ("__code__", "__defaults__", "__kwdefaults__")))
_CALL: Any = call


def guard_places(guards: Guards, places: Iterable[Place]) -> None:
    """Guard the places: each has to keep the content that it expects now."""
    for place in places:
        guards.add(place.difference, **_columns_of(place))


def _columns_of(place: Place) -> dict[str, Any]:
    """What `place.difference()` depends on, as arguments of `Guards.add`; empty if that cannot be said, so that every call evaluates it."""
    holder = place.holder
    if any(map(holds_replaced, place.values())):  # the contents of another object
        return {}
    if isinstance(place, DictPlace):
        return {"dicts": [holder]}
    if isinstance(place, ClassPlace):
        return {"values": [(read, [holder]) for read in place.columns]}
    if isinstance(place, SpecialPlace):
        return {"dicts": place.dicts, "values": [(ORDER, [holder])]}
    if isinstance(place, AbstractPlace):
        return {"numbers": [(registrations, [holder])]}
    if isinstance(place, AttributePlace):
        return {"numbers" if isinstance(place.content, (*PLAIN, tuple)) else "values": [(place.getter, [holder])]}
    if isinstance(place, CellPlace) and _is_fixed(place.content):
        return {"values": [(_CONTENTS, [holder])]}
    if isinstance(place, SlotPlace) and _is_fixed(place.content):
        return {"values": [(place.descriptor.__get__, [holder])]}
    if isinstance(place, FunctionPlace) and holder.__kwdefaults__ is None:
        if holder.__defaults__ is None:
            return {"numbers": [(read, [holder]) for read in _DEFINITION]}
        return {"values": [(read, [holder]) for read in _DEFINITION]}
    if type(place) is ContentPlace and isinstance(holder, (set, frozenset)):
        return {"parts": [(iter, holder)]}
    if type(place) is ContentPlace and isinstance(holder, ContextVar):
        return {"values": [(_SET, [holder])]}
    if type(place) is ContentPlace and isinstance(place.content, (bool, type(None))):  # compared by identity: singletons
        return {"values": [(_CALL, [place.read])]}
    if isinstance(place, ListPlace) and type(holder) in (list, collections.deque):
        if place.whole is not None and all(map(_is_fixed, place.whole)):
            return {"parts": [(iter, holder)]}
        if place.whole is None and all(map(_is_fixed, place.items.values())):
            items = [(_items(tuple(place.items)), holder)] if place.items else []
            return {"parts": items, "numbers": [(len, [holder])] if place.length is not None else []}
    return {}


def _is_fixed(value: Any) -> bool:
    return value is not INPUT and not isinstance(value, Like)


@functools.lru_cache
def _items(indexes: tuple[int, ...]) -> itemgetter[Any]:
    return itemgetter(*indexes, *indexes[:1])  # at least two indexes, so that the result is a tuple


__all__ = ["guard_places"]

"""What was read of Python is compared before every call: each kind of place, changed, put back, and replaced by an equal value."""

import collections
import types
from collections.abc import Callable
from typing import Any

import pytest

from spmd.program.reads._content_places import CellPlace, FunctionPlace
from spmd.program.reads._guard import guard_places
from spmd.program.reads._number_place import INPUT
from spmd.program.reads._places import ContentPlace, DictPlace, ListPlace, Place, SlotPlace
from spmd.program.reads._replaced import changes
from spmd.program.reuse._columns import Guards


class Slotted:
    __slots__ = ("a",)
    a: Any


def function(x: int = 1000, *, y: int = 2000) -> int:
    return x + y


def plain(x: int = 1000) -> int:
    return x


def twice(x: int = 1000) -> int:
    return 2 * x


def guard_of(places: list[Any]) -> Callable[[], str | None]:
    guards = Guards()
    guard_places(guards, places)
    return guards.reason


def whole(place: Any) -> Any:
    """The place with all of its holder read."""
    holder = place.holder
    place.whole = dict(holder) if isinstance(holder, dict) else list(holder)
    return place


def of_dict() -> tuple[Place, Any, Any]:
    holder = {"a": 1000.0, "b": 2.0}
    place = DictPlace(holder, "d[{!r}]")
    place.entries["a"] = holder["a"]
    return place, lambda: holder.__setitem__("a", 3.0), lambda: holder.__setitem__("a", float("1000"))


def of_empty_dict() -> tuple[Place, Any, Any]:
    holder: dict[str, float] = {}
    place = DictPlace(holder, "d[{!r}]")
    place.present["a"] = False
    return place, lambda: holder.__setitem__("a", 3.0), lambda: (holder.__setitem__("b", 1.0), holder.pop("a", None))


def of_ordered_dict() -> tuple[Place, Any, Any]:
    holder = collections.OrderedDict(a=1, b=2)
    return whole(DictPlace(holder, "d[{!r}]")), lambda: holder.move_to_end("a"), lambda: holder.move_to_end("b")


def of_cell() -> tuple[Place, Any, Any]:
    cell = types.CellType(1000.0)
    return CellPlace(cell, "c"), lambda: setattr(cell, "cell_contents", 3.0), lambda: setattr(cell, "cell_contents", float("1000"))


def of_emptied_cell() -> tuple[Place, Any, Any]:
    cell = types.CellType(1000.0)
    return CellPlace(cell, "c"), lambda: delattr(cell, "cell_contents"), lambda: setattr(cell, "cell_contents", float("1000"))


def of_slot(change: str = "set") -> tuple[Place, Any, Any]:
    instance = Slotted()
    instance.a = 1000.0
    place = SlotPlace(instance, Slotted.__dict__["a"], "s.a")
    changed = (lambda: setattr(instance, "a", 3.0)) if change == "set" else (lambda: delattr(instance, "a"))
    return place, changed, lambda: setattr(instance, "a", float("1000"))


def of_function(part: str, value: Any, fn: Callable[..., Any] = plain) -> tuple[Place, Any, Any]:
    copy = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__)
    copy.__kwdefaults__ = dict(fn.__kwdefaults__) if fn.__kwdefaults__ else None
    before = getattr(copy, part)
    equal = before if isinstance(before, types.CodeType) else type(before)(before) if before else None
    return FunctionPlace(copy, "f"), lambda: setattr(copy, part, value), lambda: setattr(copy, part, equal)


def of_keyword_default() -> tuple[Place, Any, Any]:
    copy = types.FunctionType(function.__code__, function.__globals__, "f", function.__defaults__)
    keywords = copy.__kwdefaults__ = {"y": 2000}
    return FunctionPlace(copy, "f"), lambda: keywords.__setitem__("y", 1), lambda: keywords.__setitem__("y", 2000)


def of_list(kind: Any) -> tuple[Place, Any, Any]:
    holder = kind([1000.0, 2.0])
    return whole(ListPlace(holder, "l[{}]")), lambda: holder.append(3.0), lambda: (holder.clear(), holder.extend([float("1000"), 2.0]))


def of_item(change: str) -> tuple[Place, Any, Any]:
    holder = [1000.0, 2.0]
    place = ListPlace(holder, "l[{}]")
    place.items[0] = holder[0]
    changed = (lambda: holder.__setitem__(0, 3.0)) if change == "set" else holder.clear
    return place, changed, lambda: holder.__setitem__(slice(None), [float("1000"), 7.0])


def of_setting() -> tuple[Place, Any, Any]:
    flags = [True]
    return ContentPlace(flags, "a setting", lambda: flags[0]), lambda: flags.__setitem__(0, False), lambda: flags.__setitem__(0, True)


PLACES: dict[str, Callable[[], tuple[Place, Any, Any]]] = {
    "an entry of a dict": of_dict,
    "a dict that was empty": of_empty_dict,
    "the order of an OrderedDict": of_ordered_dict,
    "a cell": of_cell,
    "a cell that was emptied": of_emptied_cell,
    "a slot": of_slot,
    "a slot that was deleted": lambda: of_slot("delete"),
    "a function's code": lambda: of_function("__code__", twice.__code__),
    "a function's defaults": lambda: of_function("__defaults__", (5,)),
    "a function's first keyword defaults": lambda: of_function("__kwdefaults__", {"y": 1}),
    "a function's keyword default": of_keyword_default,
    "a setting": of_setting,
    "a list": lambda: of_list(list),
    "a deque": lambda: of_list(collections.deque),
    "an item": lambda: of_item("set"),
    "an item of a list that got shorter": lambda: of_item("clear"),
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside others"])
def test_a_change_is_seen_until_an_equal_value_is_there(name: str, beside: bool) -> None:
    place, change, put_equal = PLACES[name]()
    others = [make()[0] for make in PLACES.values()] if beside else []
    guard = guard_of([*others, place])
    assert guard() is None and guard() is None
    change()
    assert guard() is not None and guard() is not None
    put_equal()
    assert guard() is None and guard() is None
    change()
    assert guard() is not None


def test_an_item_that_moved_from_one_list_to_the_next_is_seen() -> None:
    one, two = [1.5, 2.5], [3.5]
    guard = guard_of([whole(ListPlace(one, "one[{}]")), whole(ListPlace(two, "two[{}]"))])
    assert guard() is None
    two.insert(0, one.pop())
    assert guard() == "one has 1 items, it had 2"


@pytest.mark.parametrize("kind", ["a cell", "a slot", "a list"])
def test_what_is_an_input_of_the_program_may_change(kind: str) -> None:
    place, change, _ = PLACES[kind]()
    place.settle(lambda holder, key, value: INPUT)
    guard = guard_of([place])
    assert guard() is None
    if kind != "a list":  # its length is no input
        change()
    else:
        place.holder[0] = 5.0
    assert guard() is None
    assert INPUT in place.values()


def test_the_places_whose_numbers_changed_are_named() -> None:
    cell, entries = types.CellType(1.0), {"a": 1, "b": 2}
    places: list[Any] = [CellPlace(cell, "c"), whole(DictPlace(entries, "d[{!r}]"))]
    cell.cell_contents, entries["b"] = 2.0, 3
    assert [(number.read(), number.kind) for number in changes(places)] == [(2.0, float), (3, int)]

"""`NumberPlace`: a place that holds a number of Python or numpy, alone or in tuples. One that changes can become an input of the program.

`ObjectPlace` is a place that holds another object from call to call. See Note [Replaced objects].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()
INPUT: Any = type("Input", (), {"__repr__": lambda self: "an input"})()
LENGTH: Any = type("Length", (), {"__repr__": lambda self: "its length"})()  # the key of the length of a list
Path = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One variable, attribute or item: of an object that stays, or of the object that is now in another place.

    Attributes:
        token: identifies it: equal for the same entry only.
        key: its name or index in the holder.
        holder: gives the dict, list, cell or object that holds it now, or ABSENT. Keeps a holder that stays alive, so that the token
            stays unique.
        look: gives its value now, or ABSENT.
        put: sets its value.
        within: the place of the object that it belongs to; None if that object stays.
    """

    token: Any
    key: Any
    holder: Callable[[], Any]
    look: Callable[[], Any]
    put: Callable[[Any], None]
    within: ObjectPlace | None = None


@dataclass(frozen=True)
class PartPlace:
    """An entry, or an item of nested tuples in it.

    Attributes:
        entry: the entry.
        path: indices into nested tuples that lead to the item; empty for the value of the entry itself.
        kind: the class of the value.
    """

    entry: Entry
    path: Path
    kind: type

    @property
    def token(self) -> tuple[Any, ...]:
        """Identifies the place: equal for the same place and kind of place only."""
        return type(self), self.entry.token, self.path

    def read(self) -> Any:
        """The value now, or ABSENT."""
        return part_of(self.entry.look(), self.path)

    def tuples(self) -> Iterator[tuple[Any, Callable[[], Any]]]:
        """Each tuple around the value, with a function that gives the tuple at the same position later."""
        for length in range(len(self.path)):
            path = self.path[:length]
            yield part_of(self.entry.look(), path), partial(self._part, path)

    def _part(self, path: Path) -> Any:
        return part_of(self.entry.look(), path)


class NumberPlace(PartPlace):
    """A place that holds an int, a float or a number of numpy."""

    @property
    def slot(self) -> tuple[int, Any]:
        """(id of the holder, key) of the entry now."""
        return id(self.entry.holder()), self.entry.key

    def put(self, number: Any) -> None:
        """Set the number. Tuples around it are replaced by new ones."""
        self.entry.put(with_part(self.entry.look(), self.path, number))


class ObjectPlace(PartPlace):
    """A place whose object is replaced from call to call by another one of the same class."""


def is_tuple(value: Any) -> bool:
    """Whether a value is a tuple, or a named tuple, without any state besides its items."""
    return type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields") and not hasattr(value, "__dict__"))


def exact_item(value: Any) -> Any:
    """An item of a set, in a form in which 1, 1.0 and True are three values, and 0.0 and -0.0 are two."""
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def part_of(value: Any, path: Path) -> Any:
    """The item of nested tuples at `path`, or ABSENT."""
    for index in path:
        if not is_tuple(value) or index >= len(value):
            return ABSENT
        value = value[index]
    return value


def with_part(value: Any, path: Path, part: Any) -> Any:
    """A copy of nested tuples with `part` at `path`."""
    if not path:
        return part
    parts = list(value)
    parts[path[0]] = with_part(parts[path[0]], path[1:], part)
    return tuple.__new__(type(value), parts)


def with_inputs(value: Any, paths: Collection[Path]) -> Any:
    """The value with INPUT at `paths`: what a guard expects where these numbers are inputs."""
    for path in paths:
        if part_of(value, path) is not ABSENT:
            value = with_part(value, path, INPUT)
    return value


__all__ = [
    "ABSENT",
    "INPUT",
    "Entry",
    "NumberPlace",
    "ObjectPlace",
    "PartPlace",
    "Path",
    "exact_item",
    "is_tuple",
    "part_of",
    "with_inputs",
    "with_part",
]

"""`NumberPlace`: a place that holds a Python number, alone or in tuples. A number that changes can become an input of the program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()
INPUT: Any = type("Input", (), {"__repr__": lambda self: "an input"})()
Path = tuple[int, ...]


@dataclass(frozen=True)
class NumberPlace:
    """A place that holds a Python number, or a tuple with one inside.

    Attributes:
        holder: the object that holds the value. Kept alive, so that the token stays unique.
        key: the entry of the holder.
        path: indices into nested tuples that lead to the number; empty if the place holds the number itself.
        kind: int or float.
        look: gives the value of the place now.
        place: sets the value of the place.
    """

    holder: Any
    key: Any
    path: Path
    kind: type
    look: Callable[[], Any]
    place: Callable[[Any], None]

    @property
    def token(self) -> tuple[int, Any, Path]:
        """Identifies the place: equal for the same place only."""
        return id(self.holder), self.key, self.path

    def read(self) -> Any:
        """The number now, or ABSENT."""
        return part_of(self.look(), self.path)

    def put(self, number: Any) -> None:
        """Set the number. Tuples around it are replaced by new ones."""
        self.place(with_part(self.look(), self.path, number))

    def tuples(self) -> Iterator[tuple[Any, Callable[[], Any]]]:
        """Each tuple around the number, with a function that gives the tuple at the same position later."""
        for length in range(len(self.path)):
            path = self.path[:length]
            yield part_of(self.look(), path), partial(self._part, path)

    def _part(self, path: Path) -> Any:
        return part_of(self.look(), path)


def is_tuple(value: Any) -> bool:
    """Whether a value is a tuple, or a named tuple, without any state besides its items."""
    return type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields") and not hasattr(value, "__dict__"))


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


def paths_of(new: Any, old: Any, has_changed: Callable[[Any, Any], bool]) -> Iterator[Path]:
    """The paths at which `has_changed(new, old)` is true, in nested tuples of the same structure."""
    if is_tuple(new) and is_tuple(old) and type(new) is type(old) and len(new) == len(old):
        for index, (part, before) in enumerate(zip(new, old, strict=True)):
            yield from ((index, *path) for path in paths_of(part, before, has_changed))
    elif has_changed(new, old):
        yield ()


__all__ = ["ABSENT", "INPUT", "NumberPlace", "Path", "is_tuple", "part_of", "paths_of", "with_inputs", "with_part"]

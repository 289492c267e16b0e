"""Walks containers inside containers, each once: a list can be in itself.

names.append(names); log.append(names)    # Python accepts both
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def inside(value: Any, items_of: Callable[[Any], Iterable[Any] | None]) -> Iterator[Any]:
    """The parts of a value that are no containers, in order; the value itself if it is none.

    Args:
        value: the value.
        items_of: the items of a container, None for any other value.
    """
    items = items_of(value)
    if items is None:
        yield value
        return
    seen, waiting = {id(value)}, [iter(items)]
    while waiting:
        for part in waiting[-1]:
            if (items := items_of(part)) is None:
                yield part
            elif id(part) not in seen:
                seen.add(id(part))
                waiting.append(iter(items))
                break
        else:
            waiting.pop()


def holds_itself(value: Any, items_of: Callable[[Any], Iterable[Any] | None]) -> bool:
    """Whether a container is in itself, or one inside it is. `items_of`: see `inside`."""
    items = items_of(value)
    if items is None:
        return False
    around, waiting, done = {id(value)}, [(id(value), iter(items))], set[int]()
    while waiting:
        for part in waiting[-1][1]:
            if (items := items_of(part)) is not None and id(part) not in done:
                if id(part) in around:
                    return True
                around.add(id(part))
                waiting.append((id(part), iter(items)))
                break
        else:
            number, _ = waiting.pop()
            around.discard(number)
            done.add(number)
    return False


def any_inside(value: Any, is_container: Callable[[Any], bool], test: Callable[[Any], bool]) -> bool:
    """Whether `test` is true for a value, or for one inside it."""
    return any(map(test, inside(value, lambda part: part if is_container(part) else None)))


__all__ = ["any_inside", "holds_itself", "inside"]

"""Tensors, alone or in containers, that a place holds and the function replaces in every call: inputs of its program.

The next call finds others there, which are as good if they are like them (`like`): hidden state, caches, running values.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from spmd.device._storage import Buffer, buffer_of, is_device_tensor
from spmd.program.reads._journal import Effect
from spmd.program.reads._number_place import is_tuple
from spmd.program.reads._places import Place, all_in, is_same, items_in
from spmd.program.reads._varying import Varying
from spmd.program.reuse._columns import Guards


class ReplacedState(NamedTuple):
    """A tensor or container that the trace found in a place.

    Attributes:
        value: it.
        read: what lies there now.
    """

    value: Any
    read: Callable[[], Any]


def replaced(effect: Effect, effects: Sequence[Effect], places: Iterable[Place], is_fixed: Callable[[Any], bool]) -> list[ReplacedState]:
    """What the place of `effect` held, outside in, if the program can take what it holds today; empty if not.

    Args:
        effects: all that the trace wrote.
        places: all that it read.
        is_fixed: whether a tensor is something else too: an argument, or shown by a result under another name.
    """
    found, now = all_in(effect.before), effect.read()
    tensors = [value for value in found if is_device_tensor(value)]
    if (
        not effect.was_read
        or not _stood_for(effect.before, now)
        or not tensors
        or not _is_alike(effect.before, effect.value)
        or any(map(is_fixed, tensors))
    ):
        return []
    own = {id(value) for value in found if items_in(value)}
    if any(id(other.holder) in own for other in effects):
        return []
    holders = Counter(i for place in places if id(place.holder) not in own for i in _ids_in(place, effect.before))
    if holders[id(effect.before)] != 1 or any(holders[id(value)] for value in found[1:] if id(value) in own or is_device_tensor(value)):
        return []
    return list(_with_readers(now, effect.read))


def touched_by(held: Sequence[ReplacedState], buffers: Sequence[Buffer]) -> list[tuple[int, int]]:
    """(position among `held`, position among `buffers`) of the tensors whose value the program has as state."""
    return [
        (i, buffers.index(buffer_of(h.value))) for i, h in enumerate(held) if is_device_tensor(h.value) and buffer_of(h.value) in buffers
    ]


def guard_who(guards: Guards, held: Sequence[ReplacedState]) -> None:
    """Places that held one tensor in the trace hold one, those that held two hold two: a write to one is seen by the other, or not."""
    places = [h.read for h in held if is_device_tensor(h.value)]

    def who() -> list[int]:
        first: dict[int, int] = {}
        return [first.setdefault(id(buffer_of(read())), len(first)) for read in places]

    expected = who()

    def check() -> str | None:
        return None if who() == expected else "names that held different tensors hold one now, or the other way round"

    if len(places) > 1:
        guards.add(check)


def _stood_for(before: Any, now: Any) -> bool:
    """Whether a value stood in the trace for what its place holds: it is that, or has a number that varies where that has its own."""
    if before is now or type(before) is Varying:
        return True
    return is_tuple(before) and type(before) is type(now) and all(map(_stood_for, before, now))


def _is_alike(before: Any, value: Any) -> bool:
    """Whether a container is of the build of another, with a tensor where that has one, and a number where that has one that varies."""
    if type(before) is Varying:
        return type(value) is Varying or type(value) in (int, float)
    if is_device_tensor(before):
        return is_device_tensor(value)
    parts, others = items_in(before), items_in(value)
    if not parts:
        return is_same(value, before)
    if type(value) is not type(before) or len(parts) != len(others) or (isinstance(before, dict) and list(before) != list(value)):
        return False
    return all(map(_is_alike, parts, others))


def _ids_in(place: Place, root: Any) -> set[int]:
    """What a place holds, as far as tuples go, but not what `root` holds."""
    found: set[int] = set()
    waiting = list(place.values())
    while waiting:
        value = waiting.pop()
        found.add(id(value))
        if isinstance(value, tuple) and value is not root:
            waiting.extend(value)
    return found


def _with_readers(value: Any, read: Callable[[], Any]) -> Iterable[ReplacedState]:
    yield ReplacedState(value, read)
    keys = value if isinstance(value, dict) else range(len(items_in(value)))
    for key, part in zip(keys, items_in(value), strict=True):
        yield from _with_readers(part, partial(_item, read, key))


def _item(read: Callable[[], Any], key: Any) -> Any:
    return operator.getitem(read(), key)


__all__ = ["ReplacedState", "guard_who", "replaced", "touched_by"]

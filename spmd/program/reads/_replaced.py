"""Tensors, alone or in containers, that the function reads in a place and replaces in every call: hidden state, caches, running values.

They are inputs of the program. The next call finds other tensors in that place, and the guard accepts them if they are of the same kind
(`_places.like`).
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
    """A tensor or container that the trace found in a place and replaced.

    Attributes:
        value: the value that the trace found.
        read: gives the value that is there now.
    """

    value: Any
    read: Callable[[], Any]


def replaced(effect: Effect, effects: Sequence[Effect], places: Iterable[Place], is_fixed: Callable[[Any], bool]) -> list[ReplacedState]:
    """The value that the place of `effect` held, and everything inside it from the outside in, if the program can take it as inputs.

    Args:
        effect: the write that replaces the value.
        effects: all writes of the trace.
        places: all reads of the trace.
        is_fixed: whether a tensor has another role too: it is an argument, or a result refers to it.

    Returns:
        The values; empty if the program cannot take them.
    """
    found, now = all_in(effect.before), effect.read()
    tensors = [value for value in found if is_device_tensor(value)]
    if (
        not effect.was_read
        or not _stands_for(effect.before, now)
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
    """(index in `held`, index in `buffers`) of each tensor whose buffer is state of the program."""
    return [
        (i, buffers.index(buffer_of(h.value))) for i, h in enumerate(held) if is_device_tensor(h.value) and buffer_of(h.value) in buffers
    ]


def guard_who(guards: Guards, held: Sequence[ReplacedState]) -> None:
    """Guard which of these places hold the same tensor, because a write through one is visible in the others."""
    places = [h.read for h in held if is_device_tensor(h.value)]

    def identities() -> list[int]:
        first: dict[int, int] = {}
        return [first.setdefault(id(buffer_of(read())), len(first)) for read in places]

    expected = identities()

    def check() -> str | None:
        return None if identities() == expected else "names that held different tensors hold the same tensor now, or the other way round"

    if len(places) > 1:
        guards.add(check)


def _stands_for(before: Any, now: Any) -> bool:
    """Whether `before`, seen by the trace, represents `now`: the same object, or tuples of it, with varying numbers for plain ones."""
    if before is now or type(before) is Varying:
        return True
    return is_tuple(before) and type(before) is type(now) and all(map(_stands_for, before, now))


def _is_alike(before: Any, value: Any) -> bool:
    """Whether `value` has the structure of `before`: tensors where it has tensors, numbers where it has varying numbers."""
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
    """Ids of the values in a place, through tuples, except those inside `root`."""
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

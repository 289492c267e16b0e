"""Python values that a function reads by name, and whether they are still what its trace saw.

A trace reads each Python value once: the flag of a trainer, an entry of a config, a number in a closure, the tensor that an
attribute holds. A program may run again only while all of them are what they were when the trace began. What the trace
itself changed (`self.calls += 1`, `model.train()`) is done again by every call, since it follows from the same values.

It knows where values are held, not how they are found (`_discover`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any

import numpy as np
import torch

from spmd._errors import TraceError, message
from spmd.device._storage import Buffer, buffer_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.generic)
ABSENT: Any = type("absent", (), {"__repr__": lambda self: "absent"})()
MAX_ITEMS = 1000


@dataclass
class Held:
    """Named values in one holder.

    Attributes:
        title: how the key is written: "{}" alone, "self.{}", "config[{!r}]".
        keys: what is read, in order.
        read: the values now, one per key; another number of them if the holder got or lost entries.
        write: puts a value under a key.
        restore: makes the holder hold these values again.
    """

    title: str
    keys: tuple[Any, ...]
    read: Callable[[], Sequence[Any]]
    write: Callable[[Any, Any], None]
    restore: Callable[[Sequence[Any]], None]

    def name(self, position: int) -> str:
        """What a message calls the value at `position`."""
        return self.title.format(self.keys[position])

    def changed(self, values: Sequence[Any]) -> str | None:
        """What differs from `values`, or None."""
        now = self.read()
        if len(now) == len(values) and all(map(is_, now, values)):
            return None
        if len(now) != len(values):
            return f"{self.title.partition('{')[0].rstrip('.[')} got or lost entries"
        for i, (new, old) in enumerate(zip(now, values, strict=True)):
            if not _same(new, old):
                return f"{self.name(i)} changed from {_shown(old)} to {_shown(new)}"
        return None


def in_attributes(title: str, holder: dict[str, Any], keys: Sequence[str]) -> Held:
    """Some entries of a dict, there or not: attributes of an object by name, globals."""
    names = tuple(keys)

    def write(key: str, value: Any) -> None:
        if value is ABSENT:
            holder.pop(key, None)
        else:
            holder[key] = value

    def restore(values: Sequence[Any]) -> None:
        for key, value in zip(names, values, strict=True):
            if holder.get(key, ABSENT) is not value:
                write(key, value)

    return Held(title, names, lambda: [holder.get(name, ABSENT) for name in names], write, restore)


def in_dict(title: str, holder: dict[Any, Any]) -> Held:
    """All entries of a dict."""
    keys = tuple(holder)

    def restore(values: Sequence[Any]) -> None:
        holder.clear()
        holder.update(zip(keys, values, strict=True))

    return Held(title, keys, lambda: tuple(holder.values()), holder.__setitem__, restore)


def in_list(title: str, holder: list[Any]) -> Held:
    """All items of a list."""
    return Held(
        title,
        tuple(range(len(holder))),
        lambda: tuple(holder),
        holder.__setitem__,
        lambda values: holder.__setitem__(slice(None), list(values)),
    )


def in_class(title: str, holder: type, keys: Sequence[str]) -> Held:
    """Some attributes of a class."""
    names, entries = tuple(keys), vars(holder)

    def write(key: str, value: Any) -> None:
        setattr(holder, key, value)

    def restore(values: Sequence[Any]) -> None:
        for key, value in zip(names, values, strict=True):
            if entries.get(key, ABSENT) is not value:
                write(key, value)

    return Held(title, names, lambda: [entries.get(name, ABSENT) for name in names], write, restore)


def in_closure(names: Sequence[str], cells: Sequence[Any]) -> Held:
    """The variables of a closure."""
    by_name = dict(zip(names, cells, strict=True))

    def write(key: str, value: Any) -> None:
        by_name[key].cell_contents = value

    def restore(values: Sequence[Any]) -> None:
        for cell, value in zip(cells, values, strict=True):
            if _content(cell) is not value:
                cell.cell_contents = value

    return Held("{}", tuple(names), lambda: [_content(cell) for cell in cells], write, restore)


def in_module(name: str, module: torch.nn.Module) -> list[Held]:
    """A module's plain attributes and tensors, and the parameters, buffers and children it holds."""
    attributes = module.__dict__
    keys = tuple(k for k, v in attributes.items() if isinstance(v, (*PLAIN, torch.Tensor)))
    count, some = len(attributes), itemgetter(*keys)

    def read() -> Sequence[Any]:
        if len(attributes) == count:
            try:
                return some(attributes)
            except KeyError:
                pass
        return tuple(attributes.values())

    def restore(values: Sequence[Any]) -> None:
        for key in [k for k in attributes if k not in before]:
            del attributes[key]
        attributes.update(zip(keys, values, strict=True))

    before = frozenset(attributes)
    own = Held(f"{name}.{{}}", keys, read, attributes.__setitem__, restore)
    return [own, *(in_dict(f"{name}.{{}}", attributes[r]) for r in ("_parameters", "_buffers", "_modules") if attributes[r])]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the name is bound later
        return ABSENT


Effect = Callable[[], None]


class Snapshot:
    """All held values as they are before a trace, and what has become of them."""

    def __init__(self, places: Sequence[Held]) -> None:
        self.places = [(held, list(held.read())) for held in places]

    def put_back(self) -> None:
        """Undo what the trace changed."""
        for held, values in self.places:
            now = held.read()
            if len(now) != len(values) or not all(map(is_, now, values)):
                held.restore(values)

    def assigned(self, is_newborn: Callable[[Buffer], bool]) -> Iterator[tuple[str, Any, torch.Tensor, Callable[[Any], None]]]:
        """(name, what was held before, the tensor made in the trace that is held now, to accept it) of every such place."""
        for held, values in self.places:
            now = held.read()
            if len(now) != len(values) or all(map(is_, now, values)):
                continue
            for i, (old, new) in enumerate(zip(values, now, strict=True)):
                if new is not old and is_device_tensor(new) and is_newborn(buffer_of(new)):
                    yield held.name(i), old, new, lambda value, values=values, i=i: values.__setitem__(i, value)

    def effects(self) -> list[Effect]:
        """For each value that the trace changed otherwise: to change it again."""
        found: list[Effect] = []
        for held, values in self.places:
            now = held.read()
            if len(now) == len(values) and not all(map(is_, now, values)):
                changes = zip(held.keys, values, now, strict=True)
                found.extend(lambda w=held.write, k=k, v=v: w(k, v) for k, old, v in changes if v is not old and not is_device_tensor(v))
        return found

    def guards(self) -> list[Callable[[], str | None]]:
        """One for each holder: a reason to trace again, or None."""
        return [lambda held=held, values=values: held.changed(values) for held, values in self.places]


def refuse_lost_update(name: str) -> TraceError:
    """The error for a tensor that a function reads and then replaces by a new one."""
    return TraceError(
        message(
            f"{name} is read and then assigned a new tensor inside the compiled function",
            "the next call would read the old tensor again",
            fix=f"update it in place: {name}.copy_(new)",
        )
    )


def is_device_tensor(value: Any) -> bool:
    """True for a tensor on device 'jax'."""
    return isinstance(value, torch.Tensor) and value.device.type == "jax"


def _same(new: Any, old: Any) -> bool:
    if new is old:
        return True
    if type(new) is not type(old) or not isinstance(new, PLAIN):
        return False
    return bool(new == old) or (new != new and old != old)


def _shown(value: Any) -> str:
    if isinstance(value, PLAIN) or value is ABSENT:
        return repr(value)
    return f"{'a tensor' if isinstance(value, torch.Tensor) else type(value).__name__} at {id(value):#x}"

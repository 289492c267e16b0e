"""Python values that a function reads by name, and whether they are still what its trace saw.

A trace reads each Python value once: the flag of a trainer, an entry of a config, a number in a closure, the tensor that an
attribute holds. A program may run again only while all of them are what they were when the trace began. What the trace
changed (`self.calls += 1`, `model.train()`) every call changes again, since it follows from the same values.

It knows how values are held, not how holders are found (`_discover`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import call, is_, itemgetter
from typing import Any

import numpy as np
import torch

from spmd.base._errors import TraceError, message
from spmd.base._exact import exactly
from spmd.device._storage import Buffer, buffer_of, is_device_tensor
from spmd.program.reuse._versions import DictVersions

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.generic)
ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()
MAX_ITEMS = 1000

Action = Callable[[], None]


@dataclass(frozen=True)
class Held:
    """Named values in one holder.

    Attributes:
        title: how a key is written: "{}" alone, "self.{}", "config[{!r}]".
        keys: what is read, in order.
        read: the values now, one per key; another number of them if the holder got or lost entries.
        remember: remembers the holder as it is now and returns what makes it so again.
        quick: a dict and a C function of it that gives the values, while the dict has as many entries as now.
    """

    title: str
    keys: tuple[Any, ...]
    read: Callable[[], Collection[Any]]
    remember: Callable[[], Action]
    quick: tuple[Callable[[Any], Iterable[Any]], dict[Any, Any]] | None = None

    def is_same(self, values: Sequence[Any]) -> bool:
        """Whether the holder holds these very values."""
        now = self.read()
        return len(now) == len(values) and all(map(is_, now, values))

    def difference(self, values: Sequence[Any]) -> str | None:
        """What differs from `values`, in words; None if nothing does."""
        now = self.read()
        if len(now) != len(values):
            return f"{self.title.partition('{')[0].rstrip('.[')} got or lost entries"
        for key, new, old in zip(self.keys, now, values, strict=True):
            if not _is_equal(new, old):
                return f"{self.title.format(key)} changed from {_shown(old)} to {_shown(new)}"
        return None


def in_object(title: str, attributes: dict[str, Any], named: Collection[str]) -> Held:
    """The attributes of an object that have one of these names, whether they are there yet or not."""
    names = tuple(name for name in attributes if name in named)
    absent = frozenset(named).difference(names)
    count, put_names = len(attributes), (*names, *absent)

    def read() -> list[Any]:
        values = [attributes.get(name, ABSENT) for name in names]
        if len(attributes) != count and not absent.isdisjoint(attributes):
            values.extend(attributes[name] for name in absent if name in attributes)
        return values

    return Held(title, names, read, lambda: _remember_entries(attributes, put_names))


def in_globals(holder: dict[str, Any], names: Sequence[str]) -> Held:
    """Some global variables."""
    keys = tuple(names)
    return Held("{}", keys, lambda: [holder.get(name, ABSENT) for name in keys], lambda: _remember_entries(holder, keys))


def _remember_entries(holder: dict[str, Any], names: Sequence[str]) -> Action:
    kept = [(name, holder.get(name, ABSENT)) for name in names]

    def put() -> None:
        for name, value in kept:
            if value is ABSENT:
                holder.pop(name, None)
            elif holder.get(name, ABSENT) is not value:
                holder[name] = value

    return put


def in_dict(title: str, holder: dict[Any, Any]) -> Held:
    """All entries of a dict."""

    def remember() -> Action:
        kept = dict(holder)

        def put() -> None:
            holder.clear()
            holder.update(kept)

        return put

    return Held(title, tuple(holder), holder.values, remember, (dict.values, holder))


def in_list(title: str, holder: list[Any]) -> Held:
    """All items of a list."""

    def remember() -> Action:
        kept = list(holder)
        return lambda: holder.__setitem__(slice(None), kept)

    return Held(title, tuple(range(len(holder))), lambda: holder, remember)


def in_class(title: str, holder: type, keys: Sequence[str]) -> Held:
    """Some attributes of a class."""
    names, entries = tuple(keys), vars(holder)

    def remember() -> Action:
        kept = read()

        def put() -> None:
            for name, value in zip(names, kept, strict=True):
                if entries.get(name, ABSENT) is not value:
                    setattr(holder, name, value)

        return put

    def read() -> list[Any]:
        return [entries.get(name, ABSENT) for name in names]

    return Held(title, names, read, remember)


def in_closure(names: Sequence[str], cells: Sequence[Any]) -> Held:
    """The variables of a closure."""

    def remember() -> Action:
        kept = read()

        def put() -> None:
            for cell, value in zip(cells, kept, strict=True):
                if value is not ABSENT:
                    cell.cell_contents = value

        return put

    def read() -> list[Any]:
        return [_content(cell) for cell in cells]

    return Held("{}", tuple(names), read, remember)


def in_module(name: str, module: torch.nn.Module) -> list[Held]:
    """A module's plain attributes and tensors, and the parameters, buffers and children it holds."""
    attributes = module.__dict__
    keys = tuple(k for k, v in attributes.items() if isinstance(v, (*PLAIN, torch.Tensor)))
    count, some, names = len(attributes), itemgetter(*keys), frozenset(keys)

    def read() -> Sequence[Any]:
        is_whole = len(attributes) == count and names <= attributes.keys()
        return some(attributes) if is_whole else (*keys, ABSENT)  # one more than the keys: entries came or went

    def remember() -> Action:
        kept = dict(attributes)

        def put() -> None:
            for key in attributes.keys() - kept.keys():
                del attributes[key]
            attributes.update(kept)

        return put

    registries = [attributes[r] for r in ("_parameters", "_buffers", "_modules") if attributes[r]]
    return [Held(f"{name}.{{}}", keys, read, remember, (some, attributes)), *(in_dict(f"{name}.{{}}", registry) for registry in registries)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the name is bound later
        return ABSENT


@dataclass
class Assigned:
    """A tensor made in the trace that a name holds now.

    Attributes:
        name: what holds it.
        before: what the name held before.
        tensor: the tensor.
        accept: call it with what the name may hold when the program is used again.
    """

    name: str
    before: Any
    tensor: torch.Tensor
    accept: Callable[[Any], None]


class Snapshot:
    """Held values as they are before a trace, and what the trace made of them."""

    def __init__(self, places: Sequence[Held]) -> None:
        self._places = [(held, list(held.read()), held.remember()) for held in places]

    def put_back(self) -> None:
        """Undo what the trace changed."""
        for held, values, put in self._places:
            if not held.is_same(values):
                put()

    def assigned(self, is_newborn: Callable[[Buffer], bool]) -> Iterator[Assigned]:
        """Every name that now holds a tensor made in the trace."""
        for held, values, _ in self._places:
            now = held.read()
            if held.is_same(values) or len(now) != len(values):
                continue
            for i, (old, new) in enumerate(zip(values, now, strict=True)):
                if new is not old and is_device_tensor(new) and is_newborn(buffer_of(new)):
                    yield Assigned(held.title.format(held.keys[i]), old, new, lambda value, v=values, i=i: v.__setitem__(i, value))

    def effects(self) -> list[Action]:
        """What makes the holders that the trace changed as they are now."""
        return [held.remember() for held, values, _ in self._places if not held.is_same(values)]

    def expected(self) -> list[tuple[Held, list[Any]]]:
        """Each holder with the values under which the program may run again."""
        return [(held, values) for held, values, _ in self._places]


class PythonState:
    """Snapshots of all Python values that a function reaches. A context: on leaving, what the trace changed is undone."""

    def __init__(self, places: Sequence[Held], modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
        self._shared = Snapshot(places)
        self._modules = {id(module): Snapshot(in_module(name, module)) for name, module in modules}

    def __enter__(self) -> PythonState:
        return self

    def __exit__(self, *error: object) -> None:
        for snapshot in self._all():
            snapshot.put_back()

    def assigned(self, is_newborn: Callable[[Buffer], bool]) -> list[Assigned]:
        """Every name that now holds a tensor made in the trace."""
        return [assigned for snapshot in self._all() for assigned in snapshot.assigned(is_newborn)]

    def effects(self) -> list[Action]:
        """What repeats the changes that the trace made."""
        return [action for snapshot in self._all() for action in snapshot.effects()]

    def guard(self, modules: frozenset[int]) -> Callable[[], str | None]:
        """Of everything but the attributes of modules whose id is not in `modules`: a reason to trace again, or None."""
        kept = [self._shared, *(snapshot for key, snapshot in self._modules.items() if key in modules)]
        expected = [(held.read, values, held) for snapshot in kept for held, values in snapshot.expected()]
        others = [entry for entry in expected if entry[2].quick is None]
        quick = [(*held.quick, values) for _, values, held in expected if held.quick is not None]
        getters, holders = [getter for getter, _, _ in quick], [holder for _, holder, _ in quick]
        sizes, flat = [len(holder) for holder in holders], [value for _, _, values in quick for value in values]
        versions = DictVersions(holders)

        def is_same() -> bool:  # loops in C: a model has hundreds of holders, and this runs in every call
            if versions.are_known():
                return True
            try:
                now = chain.from_iterable(map(call, getters, holders))  # pyright: ignore[reportArgumentType]
                is_right = list(map(len, holders)) == sizes and all(map(is_, now, flat))
            except KeyError:
                return False
            if is_right:
                versions.know()
            return is_right

        def check() -> str | None:
            for read, values, held in others if is_same() else expected:
                now = read()
                if len(now) != len(values) or not all(map(is_, now, values)):
                    difference = held.difference(values)
                    if difference is not None:
                        return difference
            return None

        return check

    def _all(self) -> list[Snapshot]:
        return [self._shared, *self._modules.values()]


def lost_update(name: str) -> TraceError:
    """The error for a tensor that a function reads and then replaces by a new one."""
    return TraceError(
        message(
            f"the compiled function reads {name} and then assigns a new tensor to it",
            "the next call would read the old tensor again",
            fix=f"update it in place: {name}.copy_(new)",
        )
    )


def _is_equal(new: Any, old: Any) -> bool:
    if new is old:
        return True
    if type(new) is not type(old) or not isinstance(new, PLAIN):
        return False
    return bool(exactly(new) == exactly(old))


def _shown(value: Any) -> str:
    if isinstance(value, PLAIN) or value is ABSENT:
        return repr(value)
    return f"{'a tensor' if isinstance(value, torch.Tensor) else type(value).__name__} at {id(value):#x}"

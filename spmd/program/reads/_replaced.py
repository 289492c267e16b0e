"""Objects and tensors that the function reads in a place and that are others in every call: hidden state, caches, counters.

Note [Replaced objects]
    A place that a trace read is guarded by the identity of the object in it. But a step may leave a new object there in every call:

        self.state = replace(self.state, n=self.state.n + 1)        # a dataclass, a named tuple, a plain object
        self.recent = (self.recent + [value])[-3:]                  # a list, a dict, a tuple

    Such a place is guarded by the class of its object, and by what the trace read of it (`LikeObject`): its attributes and items are
    compared in the object that is there now. A number among them that changes is an input of the program, named by the way that leads
    to it (`Entry.within`). A tensor among them is state of the program, read anew in every call (`Like`, `ReplacedState`).

    A place is known to hold other objects in two ways (`changes`): the trace itself leaves another object of the same class there, or
    the guards of an earlier trace failed because there was one. All the rest stays guarded by identity, as do the places of an object
    for which one of these holds, since the program would then depend on which object it is:

    - Its identity was asked: `is`, `id()`, `hash()`, an `==` that compares identities, a key, an argument of a library's function.
    - It was also found in a place that is guarded by identity, or inside an object of C code.
    - Its class is not plain (`is_data`): a module, an optimizer, a set, a class with methods or attributes that are not recorded.

    An object may refer back to one that has it (a child to its parent). It is named by the first place that leads to it, and the walks
    here look into each object once (`_once`).

    A write to such an object is repeated on the object that a call finds (`Effect.held`). Which of these places hold the same object is
    guarded too (`Replacements.guard`). So reads and writes of one object through two names stay right, and a call never finds an object
    here that the function writes to elsewhere. Results refer to the object that a call finds.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from spmd.device._generator import DeviceGenerator
from spmd.device._storage import Buffer, buffer_of, is_device_tensor, is_whole
from spmd.program.find._static import attributes_of
from spmd.program.reads._classes import ClassPlace
from spmd.program.reads._journal import Effect
from spmd.program.reads._number_place import ABSENT, Entry, NumberPlace, ObjectPlace, PartPlace, Path, is_tuple, with_part
from spmd.program.reads._numpy_numbers import NUMBER_TYPES
from spmd.program.reads._parts import inside_c, is_data
from spmd.program.reads._places import PLAIN, DictPlace, Like, Place, is_same
from spmd.program.reuse._columns import Guards

PlacesOf = Callable[[Any], Sequence[Place]]


class ReplacedState(NamedTuple):
    """An object or tensor that the trace found in a place where every call may find another.

    Attributes:
        value: the value that the trace found.
        read: gives the value that is there now.
    """

    value: Any
    read: Callable[[], Any]


class LikeObject(Like):
    """Expected value for an object that is another one in every call: an object of the same class, with what the trace read of it.

    Attributes:
        cls: its class.
        places: what was read of it.
    """

    def __init__(self, value: Any, places: Sequence[Place], title: str) -> None:
        """`title` names it in messages."""
        self._title = title
        self.cls = type(value)
        self.places = [place.within(None) for place in places]
        self._size = value.maxlen if isinstance(value, collections.deque) else None

    @property
    def text(self) -> str:
        return f"a {self.cls.__name__} like the first"

    def fits(self, value: Any) -> bool:
        return self.difference(value) is None

    def difference(self, value: Any) -> str | None:
        """A message that says what differs in `value`; None if nothing does."""
        if type(value) is not self.cls or (isinstance(value, collections.deque) and value.maxlen != self._size):
            return f"{self._title} is a {type(value).__name__} now, it was a {self.cls.__name__}"
        for place in self.places:
            holder = place.holder_in(value)
            why = f"{self._title} has no attributes" if holder is ABSENT else place.within(holder).difference()
            if why is not None:
                return why
        return None


def holds_replaced(value: Any) -> bool:
    """Whether an expected value is a `LikeObject`, or a tuple with one."""
    return isinstance(value, LikeObject) or (is_tuple(value) and any(map(holds_replaced, value)))


def changes(places: Iterable[Place]) -> Iterator[PartPlace]:
    """The places of numbers that have changed, and of objects and tensors that are others of the same kind now."""
    by_owner: dict[int, list[Place]] = {}
    for place in (places := list(places)):
        by_owner.setdefault(id(_owner_of(place)), []).append(place)
    for place in places:
        for key, old in place.entries_read():
            places_of = _once(lambda value: by_owner.get(id(value), []))
            yield from _changes(place.entry(key), (), old, place.get(place.holder, key), places_of)


def _once(places_of: PlacesOf) -> PlacesOf:
    """`places_of` for one walk: nothing for an object that it has met, because objects may refer to each other."""
    met: set[int] = set()

    def places(value: Any) -> Sequence[Place]:
        is_met = id(value) in met
        met.add(id(value))
        return () if is_met else places_of(value)

    return places


def _changes(entry: Entry, path: Path, old: Any, new: Any, places_of: PlacesOf) -> Iterator[PartPlace]:
    if new is old:
        return
    if is_tuple(new) and is_tuple(old):
        if type(new) is type(old) and len(new) == len(old):
            for index, (before, now) in enumerate(zip(old, new, strict=True)):
                yield from _changes(entry, (*path, index), before, now, places_of)
    elif type(old) in NUMBER_TYPES:
        if type(new) is type(old) and not is_same(new, old):
            yield NumberPlace(entry, path, type(new))
    elif isinstance(old, LikeObject):
        if type(new) is old.cls:
            yield from _changes_inside(ObjectPlace(entry, path, old.cls), new, old.places, places_of)
    elif isinstance(old, torch.Tensor):
        if is_device_tensor(old) and is_device_tensor(new) and not old.requires_grad and Like(old).fits(new):
            yield ObjectPlace(entry, path, type(new))
    elif type(new) is type(old) and is_data(old):
        place = ObjectPlace(entry, path, type(new))
        yield place
        yield from _changes_inside(place, new, places_of(old), places_of)


def _changes_inside(owner: ObjectPlace, new: Any, places: Sequence[Place], places_of: PlacesOf) -> Iterator[PartPlace]:
    for place in places:
        holder = place.holder_in(new)
        if holder is not ABSENT:
            for key, old in place.entries_read():
                yield from _changes(place.entry_within(owner, key), (), old, place.get(holder, key), places_of)


def _owner_of(place: Place) -> Any:
    """The object whose content a place is: for a `__dict__`, the object that has it."""
    return place.owner if isinstance(place, DictPlace) and place.owner is not None else place.holder


def _is_key(key: Any, other: Any) -> bool:
    return key is other or (isinstance(key, PLAIN) and type(key) is type(other) and key == other)


def _left_by(effect: Effect, key: Any) -> Any:
    """What `effect` leaves in the entry `key` of its holder; ABSENT if it writes another one."""
    if not effect.is_content:
        return effect.value if effect.key is ABSENT or _is_key(effect.key, key) else ABSENT
    if isinstance(effect.value, dict):
        return effect.value.get(key, ABSENT)
    is_item = isinstance(effect.value, list) and type(key) is int and -len(effect.value) <= key < len(effect.value)
    return effect.value[key] if is_item else ABSENT


def _replaced_by(value: Any, entry: Entry, old: Any, places_of: PlacesOf) -> Iterator[ObjectPlace]:
    """The places in an entry where `value`, which the trace leaves there, has another object or tensor than `old`, which it found."""
    places_of = _once(places_of)

    def walk(entry: Entry, path: Path, old: Any, new: Any) -> Iterator[ObjectPlace]:
        if new is old or isinstance(old, PLAIN):
            return
        if is_tuple(old):
            if type(new) is type(old) and len(new) == len(old):
                for index, (before, now) in enumerate(zip(old, new, strict=True)):
                    yield from walk(entry, (*path, index), before, now)
        elif is_device_tensor(old):
            if is_device_tensor(new):
                yield ObjectPlace(entry, path, type(old))
        elif type(new) is type(old) and is_data(old):
            place = ObjectPlace(entry, path, type(old))
            yield place
            for inner in places_of(old):
                holder = inner.holder_in(new)
                for key, before in inner.entries_read() if holder is not ABSENT else ():
                    yield from walk(inner.entry_within(place, key), (), before, inner.get(holder, key))

    return walk(entry, (), old, value)


def _depth(part: ObjectPlace) -> int:
    return 0 if part.entry.within is None else 1 + _depth(part.entry.within)


@dataclass
class Replacements:
    """Finds the places of one trace that may hold another object in every call. See Note [Replaced objects].

    Attributes:
        places: the places that the trace read.
        effects: the writes of the trace. Those to an object that is another one in every call are set to write to that one (`Effect.held`).
        owner_of: gives the object that has a dict as its attributes, or the holder itself.
        is_fixed: whether the program depends on the identity of a value, in another way than through its places.
        compared: pairs of objects that the trace compared by identity.
        held: the values in these places, each with its place, the outer before the inner. Set by `find`.
    """

    places: list[Place]
    effects: list[Effect]
    owner_of: Callable[[Any], Any]
    is_fixed: Callable[[Any], bool]
    compared: Sequence[tuple[Any, Any]] = ()
    held: list[ReplacedState] = field(default_factory=list[ReplacedState])

    def __post_init__(self) -> None:
        self._by_owner: dict[int, list[Place]] = {}
        self._by_holder: dict[int, list[Place]] = {}
        for place in self.places:
            self._by_owner.setdefault(id(_owner_of(place)), []).append(place)
            self._by_holder.setdefault(id(place.holder), []).append(place)
        self.effects = [effect for effect in self.effects if not isinstance(effect.holder, tuple)]
        self._written: dict[int, list[Effect]] = {}
        for effect in self.effects:
            for written in {id(effect.holder), id(self.owner_of(effect.holder))}:
                self._written.setdefault(written, []).append(effect)
        self._found: dict[Any, ObjectPlace] = {}

    def places_of(self, value: Any) -> list[Place]:
        """What the trace read of an object."""
        return self._by_owner.get(id(value), [])

    def find(self, place_of: Callable[[Any, Any], Place | None], known: Iterable[ObjectPlace]) -> Replacements:
        """Find the places: those that the trace replaces, and those that are `known` to be replaced from call to call."""
        replaced = [(e, place_of(e.holder, e.key)) for e in self.effects if e.was_read]
        read = set(map(id, self.places))
        left = [(e, place) for e, place in replaced if place is not None and id(place) in read]
        known, fixed, before = list(known), set[int](), -1
        while before != len(fixed):
            before = len(fixed)
            self._found = self._candidates(left, known, fixed)
            fixed.update(self._drop_fixed())
        seen: set[int] = set()
        for part in self._found.values():
            for value, look in (*part.tuples(), (part.read(), part.read)):
                if id(value) not in seen or not isinstance(value, tuple):
                    self.held.append(ReplacedState(value, look))
                seen.add(id(value))
        for number, (value, _) in enumerate(self.held):
            for effect in self._written.get(id(value), ()):
                effect.held = number, _itself if effect.holder is value else attributes_of
        return self

    def _candidates(self, left: Sequence[tuple[Effect, Place]], known: Sequence[ObjectPlace], fixed: set[int]) -> dict[Any, ObjectPlace]:
        """The places that the writes `left` replace, and those in `known`, without objects whose ids are in `fixed`; the outer first."""
        found = {part.token: part for part in known if id(part.read()) not in fixed}
        num = -1
        while num != len(found):  # an object inside another is named by the place of the outer one, which may be found after it
            num = len(found)
            owners: dict[int, ObjectPlace] = {}  # each object by its first place: one that refers back to it has other names without end
            for part in found.values():
                owners.setdefault(id(part.read()), part)
            for effect, place in left:
                owner = owners.get(id(_owner_of(place)))
                for key, old in place.entries_read():
                    entry = place.entry(key) if owner is None else place.entry_within(owner, key)
                    for part in _replaced_by(_left_by(effect, key), entry, old, self.places_of):
                        if id(part.read()) not in fixed:
                            found.setdefault(part.token, part)
        ids = {id(part.read()) for part in found.values()}
        inner = [part for part in found.values() if part.entry.within is not None or id(self.owner_of(part.entry.holder())) not in ids]
        return {part.token: part for part in sorted(inner, key=_depth)}

    def _drop_fixed(self) -> set[int]:
        """Drop the places whose object the program depends on, until the others hold only objects that are found in them alone.

        Returns:
            The ids of these objects. A place inside one of them is dropped too, but its own object may still be replaced there.
        """
        found, fixed, before = self._occurrences(), set[int](), -1
        while before != len(self._found):
            before = len(self._found)
            inner = {token for token, part in self._found.items() if part.entry.within and part.entry.within.token not in self._found}
            positions = {token: self._position(part) for token, part in self._found.items()}
            own = set(positions.values())
            kept = {
                token: part
                for token, part in self._found.items()
                if positions[token] is not None
                and self._may_be_another(part.read())
                and not self._is_compared(part.read())
                and found[id(_memory_of(part.read())[-1])] <= own
            }
            fixed.update(id(part.read()) for token, part in self._found.items() if token not in kept and token not in inner)
            self._found = {token: part for token, part in kept.items() if token not in inner}
        return fixed

    def _may_be_another(self, value: Any) -> bool:
        if is_device_tensor(value):
            return is_whole(value, buffer_of(value)) and not self.is_fixed(value) and not self.places_of(value)
        if not is_data(value) or self.is_fixed(value) or (type(value) is DeviceGenerator and not self.places_of(value)):
            return False  # or what library code draws from a generator is not recorded
        attributes = attributes_of(value)
        if any(e.put_in is None or (e.holder is not value and e.holder is not attributes) for e in self._written.get(id(value), ())):
            return False
        return all(type(place) is ClassPlace or place.holder_in(value) is place.holder for place in self.places_of(value))

    def _is_compared(self, value: Any) -> bool:
        """Whether the object was compared with one that is not in one of the places. `guard` answers for two that are."""
        own = {id(part.read()) for part in self._found.values()}
        return any(value is a and id(b) not in own for pair in self.compared for a, b in (pair, pair[::-1]))

    def _position(self, part: ObjectPlace) -> tuple[int, Any, Path] | None:
        """The place that the trace read and the entry and path in it; None if it did not read this one."""
        place = self._place(part)
        return None if place is None else (id(place), part.entry.key, part.path)

    def _place(self, part: ObjectPlace) -> Place | None:
        key = part.entry.key
        here = self._by_holder.get(id(part.entry.holder()), [])
        return next((place for place in here if any(_is_key(key, other) for other, _ in place.entries_read())), None)

    def _occurrences(self) -> dict[int, set[Any]]:
        """By id of each value that was read, or of the buffer of a tensor, where it was found.

        That is (id of the place, key, path), or None for other ways than entries.
        """
        found: dict[int, set[Any]] = collections.defaultdict(set)

        def walk(value: Any, at: Any, path: Path) -> None:
            if isinstance(value, PLAIN):
                return
            found[id(_memory_of(value)[-1])].add(None if at is None else (*at, path))
            if is_tuple(value):
                for index, part in enumerate(value):
                    walk(part, at, (*path, index))
            else:
                for part in inside_c(value):
                    found[id(part)].add(None)

        for place in self.places:
            entries = place.entries_read()
            for key, _ in entries:
                walk(place.get(place.holder, key), (id(place), key), ())
            if not entries and type(place) is not ClassPlace:
                for value in (*place.values(), *inside_c(place.holder)):
                    walk(value, None, ())
        return found

    def expect(self) -> list[Place]:
        """After the places are settled: expect objects like those that were found. Returns the places that are still guarded themselves."""
        inside: set[int] = set()
        found = [(part.read(), part, place) for part in self._found.values() if (place := self._place(part)) is not None]  # without inputs
        first = {id(value): part for value, part, _ in reversed(found)}
        for value, part, place in reversed(found):  # the inner before the outer, which has the reads of the inner
            if is_device_tensor(value):
                like = Like(value)
            else:
                # an object in several places is compared in the first; the others must hold the same one (see `guard`)
                its = self.places_of(value) if first[id(value)] is part else []
                inside.update(map(id, its))
                like = LikeObject(value, [each for each in its if type(each) is not ClassPlace], place.name_of(part.entry.key))
            expected = next(old for key, old in place.entries_read() if _is_key(key, part.entry.key))
            place.expect(part.entry.key, with_part(expected, part.path, like))
        return [place for place in self.places if id(place) not in inside]

    def guard(self, guards: Guards, written_buffers: Iterable[Buffer], read_buffers: Iterable[Buffer]) -> None:
        """Guard which of these places hold the same object or memory, because a write through one is visible in the others.

        No object that is written to may be found in a place that held another one, nor may one that is read elsewhere be written to here.

        Args:
            guards: get the guard.
            written_buffers, read_buffers: state that the program writes to, and all that it reads.
        """
        held = [(value, look) for value, look in self.held if not isinstance(value, tuple)]
        own = {id(part) for value, _ in held for part in _memory_of(value)}
        changed = self._written.keys() | set(map(id, written_buffers))
        written = changed - own
        read = (changed | self._by_owner.keys() | set(map(id, read_buffers))) - own  # guards, effects and the program keep these alive
        places = [(look, read if any(id(part) in changed for part in _memory_of(value)) else written) for value, look in held]

        def identities() -> list[int]:
            first: dict[int, int] = {}
            found: list[int] = []
            for look, others in places:
                for part in _memory_of(look()):
                    found.append(-1 if id(part) in others else first.setdefault(id(part), len(first)))
            return found

        expected = identities()

        def check() -> str | None:
            return None if identities() == expected else "names that held different objects hold the same one now, or the other way round"

        if len(places) > 1 or any(others for _, others in places):
            guards.add(check)


def _memory_of(value: Any) -> tuple[Any, ...]:
    """The object, and the buffer of a tensor."""
    return (value, buffer_of(value)) if is_device_tensor(value) else (value,)


def _itself(value: Any) -> Any:
    return value


def touched_by(held: Sequence[ReplacedState], buffers: Sequence[Buffer]) -> list[tuple[int, int]]:
    """(index in `held`, index in `buffers`) of each tensor whose buffer is state of the program."""
    return [
        (i, buffers.index(buffer_of(h.value))) for i, h in enumerate(held) if is_device_tensor(h.value) and buffer_of(h.value) in buffers
    ]


__all__ = ["LikeObject", "ReplacedState", "Replacements", "changes", "holds_replaced", "touched_by"]

"""The places that a trace read, each once, with a name for messages; what lies in them is noted as it is met."""

from __future__ import annotations

import collections
import gc
import types
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from spmd.base._errors import TraceError, message
from spmd.program.find._static import attributes_of
from spmd.program.reads._classes import ORDER, ClassPlace, SpecialPlace
from spmd.program.reads._host_bytes import host_bytes
from spmd.program.reads._journal import Journal
from spmd.program.reads._library import is_recorded
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._outside import Question, answer_place
from spmd.program.reads._places import (
    PLAIN,
    AttributePlace,
    ContentPlace,
    DictPlace,
    ListPlace,
    Place,
    content_place,
    items_of,
    shown_key,
)

PROXIES = frozenset(weakref.ProxyTypes)
VIEWS = frozenset(type(view) for held in ({}, collections.OrderedDict[Any, Any]()) for view in (held.keys(), held.values(), held.items()))
_STAND_INS = ("HostArgument", "HostItem")  # for tensors that every call brings
_HEAP = 1 << 9  # a class made by Python code


class PlacesRead:
    """What was read.

    Attributes:
        places: by id of their holder.
        journal: what was written; a place that the trace wrote to before it read it guards nothing.
        met: ids of the dicts that something else guards of which the code itself read or wrote something.
    """

    def __init__(self, names: dict[int, str], owners: dict[int, Any], ignored: set[Any]) -> None:
        """
        Args:
            names: by id of an object, its name in messages.
            owners: by id of a dict, the object whose attributes it holds.
            ignored: ids of dicts, and (id of a dict, key) of entries, that something else guards and puts back.
        """
        self.journal = Journal(lambda holder, key: (id(holder), key) in ignored)
        self.places: dict[int, Place] = {}
        self._names = names
        self._owners = owners
        self._ignored = ignored
        self.met: set[int] = set()
        self._classes: dict[type, list[dict[str, Any]]] = {}
        self._missing: list[tuple[DictPlace, Any]] = []
        self._found_in_class: dict[tuple[type, int, str], tuple[Any]] = {}  # until the trace writes to a class
        self._are_watched: dict[type, bool] = {}

    def _entry(self, holder: dict[Any, Any], key: Any, of: Any, mark: str) -> None:
        """An entry of a dict is read. Messages name it after `of` (an object or its name) and `mark`: ".", " ", "[" or nothing."""
        if self._is_ignored(holder) or self.journal.is_written(holder, key):
            return
        place: Any = self.places.get(id(holder)) or self._dict(holder, self._named(of, mark, "{}", "{!r}"))
        if key not in place.entries:
            value = place.entries[key] = dict.get(holder, key, ABSENT)
            if not isinstance(value, PLAIN):
                self._met(value, self._named(of, mark, key, shown_key(key) if mark == "[" else ""))

    def _is_ignored(self, holder: Any) -> bool:
        """Whether something else guards a container of which something is read or written now."""
        if id(holder) not in self._ignored:
            return False
        self.met.add(id(holder))
        return True

    def _named(self, of: Any, mark: str, key: Any, item: str) -> str:
        if not mark:
            return str(key)
        title = of if type(of) is str else self._title(of)
        return f"{title}[{item}]" if mark == "[" else f"{title}{mark}{key}"

    def miss(self, owner: Any, holder: dict[Any, Any], key: Any, title: str) -> None:
        """A key was missing in a dict that `owner` keeps: it is in every call, even if the trace leaves it there."""
        self._owners[id(holder)] = owner
        place = self._dict(holder, title)
        if key not in place.entries:
            place.entries[key] = ABSENT
            self._missing.append((place, key))

    def expect_missing(self) -> None:
        """Of what is expected when it is settled: what was missing."""
        for place, key in self._missing:
            place.expect(key, ABSENT)

    def ask(self, holder: Any, question: Question | None) -> None:
        """Something outside Python's objects was asked of `holder`: its answer is expected in every call."""
        if question is not None and hash(question[0]) not in self.places:
            place = answer_place(holder, question)
            if place is not None:
                self.places[hash(question[0])] = place

    def place_of(self, holder: Any, key: Any) -> Place | None:
        """What was read of the entry `key` of a holder, or of all of it."""
        slot = self.places.get(hash((id(holder), key))) if type(key) is str else None
        return slot or self.places.get(id(holder))

    def has_met(self, holder: Any) -> bool:
        """Whether something of a container was read or written."""
        return id(holder) in self.places or self.journal.has_met(holder)

    def name_of(self, value: Any) -> str:
        """The name under which a value was found."""
        return self._title(value)

    def class_of(self, value: Any) -> None:
        """It matters of which class an object is."""
        cls = type(value)
        is_watched = self._are_watched.get(cls)
        if is_watched is None:
            is_watched = self.meet(cls)
        if is_watched and (key := hash(("class", id(value)))) not in self.places:
            self.places[key] = ClassPlace(value, self._title(value))

    def meet(self, cls: Any) -> bool:
        """Code does something with a class or an object of it: so it matters what Python looks up there by itself.

        Returns:
            Whether objects of the class may become ones of another.
        """
        if cls in self._are_watched:
            return self._are_watched[cls]
        may_change = _may_change(cls)
        self._are_watched[cls] = may_change and not issubclass(cls, (torch.Tensor, type))
        if may_change:
            dicts = [self._class_dicts(base)[0] for base in ORDER(cls) if _may_change(base)]
            self.places[hash(("special", id(cls)))] = SpecialPlace(cls, dicts)
        if type(cls) is not type:
            self.meet(type(cls))
        return self._are_watched[cls]

    def attribute_names(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        """The names of attributes that were read or written of these tensors; what they hold is expected of no call."""
        found: set[str] = set()
        for attributes in map(self.attributes, tensors):
            place: Any = self.places.pop(id(attributes), None)
            if place is not None:
                found.update(place.entries, place.present, place.whole[0] if place.whole else ())
            found.update(name for name in attributes or () if self.journal.is_written(attributes, name))
        return frozenset(found)

    def _dict(self, holder: dict[Any, Any], title: str) -> DictPlace:
        place: Any = self.places.get(id(holder))
        if place is None:
            owner = self._owners.get(id(holder))
            if owner is not None:
                title = f"{self._title(owner)}.{{}}"
            put = partial(type.__setattr__, owner) if isinstance(owner, type) else None
            place = self.places[id(holder)] = DictPlace(holder, title, put)
        return place

    def _whole_dict(self, holder: dict[Any, Any]) -> None:
        if self._is_ignored(holder):
            return
        place = self._dict(holder, f"{self._title(holder)}[{{!r}}]")
        if place.whole is None:
            content = self._content_before(holder, lambda: dict(items_of(holder)))
            place.whole = list(content), list(content.values())
            place.replaced = [key for key in self.journal.entries_of(holder) if key in content and key not in place.entries]
            for key, value in content.items():
                if key not in place.replaced:
                    self._met(value, f"{self._title(holder)}[{shown_key(key)}]")

    def _list(self, holder: Any) -> ListPlace:
        place: Any = self.places.get(id(holder))
        if place is None:
            place = self.places[id(holder)] = ListPlace(holder, f"{self._title(holder)}[{{}}]")
        return place

    def _whole_list(self, holder: Any) -> None:
        place = self._list(holder)
        if place.whole is None:
            base: Any = collections.deque if isinstance(holder, collections.deque) else list
            place.whole = list(self._content_before(holder, lambda: list(base.__iter__(holder))))
            place.items.clear()
            for index, value in enumerate(place.whole):
                self._met(value, f"{self._title(holder)}[{index}]")

    def _item(self, holder: Any, index: int) -> None:
        if self.journal.is_written(holder):
            self._whole_list(holder)
            return
        place = self._list(holder)
        if place.whole is not None:
            return
        if any((index < 0) != (other < 0) for other in place.items):  # whether they are one item, its length says
            self._whole_list(holder)
        elif index not in place.items and -len(holder) <= index < len(holder):
            value = place.items[index] = holder[index]
            self._met(value, f"{self._title(holder)}[{index}]")
        elif not -len(holder) <= index < len(holder):
            self._whole_list(holder)

    def _content_before(self, holder: Any, now: Any) -> Any:
        before = self.journal.before(holder)
        if before is ABSENT:
            return now()
        return before

    def _content(self, value: Any) -> bool:
        """Note all that an object holds which is neither a dict nor a list; False if there is nothing to read."""
        if id(value) in self.places and not isinstance(value, torch.Tensor):
            return True
        place = content_place(value, self._title(value))
        if place is not None:
            self.places[id(value)] = place
            before = self.journal.before(value)
            if before is not ABSENT:
                place.content = before
            for part in place.values():
                self._met(part, f"an item of {self._title(value)}")
        return place is not None

    def _host_tensor(self, value: torch.Tensor) -> None:
        if value.device.type == "cpu" and type(value).__name__ not in _STAND_INS and id(value) not in self.places:
            self.places[id(value)] = ContentPlace(value, self._title(value), lambda: host_bytes(value))

    def function(self, fn: Any) -> None:
        """A function of the user's is loaded or called: its code and defaults."""
        if isinstance(fn, types.MethodType):
            fn = fn.__func__
        if isinstance(fn, types.FunctionType) and is_recorded(fn.__module__):
            self._title_of(fn, fn.__qualname__)
            self._content(fn)

    def attribute_of_class(self, cls: Any, name: str) -> None:
        """An attribute of a class: its own or its bases', or of what it is made by."""
        self.meet(cls)
        self._class_attribute(cls.__mro__, name)
        if type(cls) is not type:
            self._class_attribute(type(cls).__mro__, name)
        if isinstance(type.__dict__.get(name), types.GetSetDescriptorType):
            self.attribute_in_c(cls, name)

    def attribute_in_c(self, instance: Any, name: str, is_property: bool = False) -> None:
        """An attribute that C code keeps, or a property that a library computes."""
        key = hash(("in C", id(instance), name))
        if key not in self.places and not self.journal.is_written(instance, name):
            title = f"{self._title(instance)}.{name}"
            if is_property:
                place = ContentPlace(instance, title, partial(_computed, instance, name))
            else:
                place = AttributePlace(instance, name, title)
            if isinstance(place.content, (*PLAIN, tuple)) or place.read() is place.content:  # others are made whenever they are asked for
                self.places[key] = place
                self._met(place.content, place.title)

    def _class_attribute(self, mro: tuple[type, ...], name: str) -> Any:
        """What a class or its bases hold under `name`; each that was asked is guarded."""
        asked = mro[0], len(mro), name
        found = self._found_in_class.get(asked)
        if found is None:
            found = self._found_in_class[asked] = (self._find_in_class(mro, name),)
        return found[0]

    def _find_in_class(self, mro: tuple[type, ...], name: str) -> Any:
        for cls in mro:
            own = self._class_dicts(cls)[0]
            if cls.__module__ != "builtins" and not (cls.__flags__ & 0x100):  # an immutable type
                self._entry(own, name, cls.__qualname__, ".")
            if name in own:
                return own[name]
        return ABSENT

    def _class_dicts(self, cls: type) -> list[dict[str, Any]]:
        found = self._classes.get(cls)
        if found is None:
            found = self._classes[cls] = gc.get_referents(cls.__dict__)[:1]
            self._owners[id(found[0])] = cls
        return found

    def _met(self, value: Any, name: str) -> None:
        """A value was found in an object that existed before the trace."""
        if isinstance(value, PLAIN):
            return
        self._title_of(value, name)
        self.function(value)

    def _title_of(self, value: Any, name: str) -> None:
        self._names.setdefault(id(value), name)

    def _title(self, value: Any) -> str:
        if type(value) is types.ModuleType:
            return value.__name__
        return self._names.get(id(value)) or type(value).__name__

    def _behind(self, proxy: types.MappingProxyType[Any, Any]) -> dict[Any, Any]:
        """The dict that a read-only one shows."""
        return self.parts(proxy, gc.get_referents(proxy)[0])

    def parts(self, owner: Any, inner: dict[Any, Any]) -> dict[Any, Any]:
        """A dict that belongs to `owner`, and was there if that was."""
        self._owners.setdefault(id(inner), owner)
        return inner

    def shown_by(self, view: Any) -> Any:
        """The dict of which a view shows the keys, values or items: it was there if the view was."""
        held = gc.get_referents(view)[0]
        self.places.setdefault(id(view), ContentPlace(view, "a view", lambda: held))
        return held

    def attributes(self, instance: Any) -> dict[str, Any] | None:
        """The dict of an object's attributes, known to be its."""
        found = attributes_of(instance)
        if found is not None:
            self._owners[id(found)] = instance
        return found


def behind(proxy: Any) -> Any:
    """What a weak proxy stands for; None if that is gone."""
    try:
        return proxy.__repr__.__self__
    except ReferenceError:
        return None


def _computed(instance: Any, name: str) -> Any:
    try:
        return getattr(instance, name)
    except Exception:  # a library's, which the function meets itself
        return ABSENT


def itself(value: Any) -> Any:
    """A value, or what it stands for."""
    return behind(value) if type(value) in PROXIES else value


def _may_change(cls: type) -> bool:
    return bool(cls.__flags__ & _HEAP) and is_recorded(cls.__module__)


def is_simple(key: Any) -> bool:
    """Whether a dict can be asked for the key again without the user's code."""
    if type(key) is tuple:
        return all(map(is_simple, key))
    return isinstance(key, (*PLAIN, torch.Tensor, type, types.FunctionType)) or type(key).__hash__ is object.__hash__


def written_tensor(place: Place) -> TraceError:
    """The error for a CPU tensor that the function read and then updated."""
    return TraceError(
        message(
            f"the compiled function updates {place.title} in place, which is on the CPU (shape {tuple(place.holder.shape)})",
            "it would be updated by the trace alone, not by every call",
            fix="move it to the device: .to('jax'), or keep a number of Python's",
        )
    )

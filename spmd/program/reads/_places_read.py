"""`PlacesRead`: the places that a trace read, each recorded once, and the names of objects in messages."""

from __future__ import annotations

import collections
import gc
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from spmd.base._torch import get_unwrapped, is_functorch_wrapped_tensor
from spmd.program.find._static import attributes_of, class_dict, is_python_class
from spmd.program.reads._builtin_attributes import read_module_attribute
from spmd.program.reads._classes import ORDER, ClassPlace, SpecialPlace
from spmd.program.reads._content_places import AttributePlace, content_place
from spmd.program.reads._definitions import read_function
from spmd.program.reads._enumerations import read_members_by_name
from spmd.program.reads._host_bytes import host_bytes
from spmd.program.reads._journal import Effect, Journal
from spmd.program.reads._library import is_library, is_recorded
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._outside import answer_place
from spmd.program.reads._parts import WITH_ITEMS, is_data, memory_owners, objects_in
from spmd.program.reads._places import (
    PLAIN,
    ContentPlace,
    DictPlace,
    ListPlace,
    Place,
    SlotPlace,
    items_of,
    shown_key,
)
from spmd.program.reads._questions import Question
from spmd.program.reads._trace_errors import identity_of_argument

if TYPE_CHECKING:
    from spmd.program.reads._varying import Varying

PROXIES = frozenset(weakref.ProxyTypes)
VIEWS = frozenset(type(view) for held in ({}, collections.OrderedDict[Any, Any]()) for view in (held.keys(), held.values(), held.items()))
_CALL_TENSORS = ("HostArgument", "HostItem", "HostCopy")  # classes of CPU tensors whose values each call provides
_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


class PlacesRead:
    """The places that one trace read.

    Attributes:
        places: the places, by id of their holder, or by a hash where a holder has several.
        journal: the writes. A place that the trace wrote before it read it is not guarded.
        met: ids of those ignored dicts that the code has read or written.
        asked: objects whose identity the function depends on, by id.
        compared: pairs of objects that were compared by identity.
        lengths: the lengths of lists that are inputs, by id of the list.
        has_input: whether an entry (holder, key) has a number that is an input.
        given: the caller's objects, by id of the copy that the trace has as an argument.
    """

    def __init__(self, names: dict[int, str], owners: dict[int, Any], ignored: set[Any]) -> None:
        """
        Args:
            names: names of objects in messages, by id of the object.
            owners: objects whose attributes a dict holds, by id of the dict.
            ignored: ids of dicts, and (id of a dict, key) of entries, that something else guards and restores.
        """
        self.journal = Journal(lambda holder, key: (id(holder), key) in ignored)
        self.places: dict[int, Place] = {}
        self._names = names
        self._owners = owners
        self._ignored = ignored
        self.met: set[int] = set()
        self.asked: dict[int, Any] = {}
        self._searched: dict[bool, dict[int, Any]] = {}  # members of sets that were searched with tensors and without, by id
        self.compared: list[tuple[Any, Any]] = []
        self.lengths: Mapping[int, Varying] = {}
        self.has_input: Callable[[Any, Any], bool] = lambda holder, key: False
        self.given: Mapping[int, Any] = {}
        self._arguments: list[Any] = []
        self._classes: dict[type, list[dict[str, Any]]] = {}
        self._missing: list[tuple[DictPlace, Any]] = []
        self._found_in_class: dict[tuple[type, int, str], tuple[Any]] = {}  # until the trace writes to a class
        self._class_may_change: dict[type, bool] = {}

    def _entry(self, holder: dict[Any, Any], key: Any, of: Any, mark: str) -> None:
        """Record the read of an entry. Messages name it by `of` (an object or its name), `mark` (".", " ", "[" or nothing) and the key."""
        if self._is_ignored(holder) or self.journal.is_written(holder, key):
            return
        place: Any = self.places.get(id(holder)) or self._dict(holder, self._named(of, mark, "{}", "{!r}"))
        if key not in place.entries:
            value = place.entries[key] = dict.get(holder, key, ABSENT)
            if not isinstance(value, PLAIN):
                self._note_value(value, self._named(of, mark, key, shown_key(key) if mark == "[" else ""))

    def _is_ignored(self, holder: Any) -> bool:
        """Whether something else guards this container. Notes in `met` that the code reads or writes it."""
        if id(holder) not in self._ignored:
            return False
        self.met.add(id(holder))
        return True

    def _named(self, of: Any, mark: str, key: Any, item: str) -> str:
        if not mark:
            return str(key)
        title = of if type(of) is str else self._title(of)
        return f"{title}[{item}]" if mark == "[" else f"{title}{mark}{key}"

    def read_missing(self, owner: Any, holder: dict[Any, Any], key: Any, title: str) -> None:
        """Record that a key was missing in a dict of `owner`. Every call expects it missing, even if the trace adds it."""
        self._owners[id(holder)] = owner
        place = self._dict(holder, title)
        if key not in place.entries:
            place.entries[key] = ABSENT
            self._missing.append((place, key))

    def expect_missing(self) -> None:
        """After the places are settled: expect the keys of `read_missing` to be missing."""
        for place, key in self._missing:
            place.expect(key, ABSENT)

    def expect_removed(self, effects: Iterable[Effect]) -> None:
        """Record that the entries that the trace removes from dicts were there: removing one that is not raises an error."""
        for effect in effects:
            if effect.value is ABSENT and effect.before is not ABSENT and isinstance(effect.holder, dict):
                self._dict(effect.holder, effect.title).present.setdefault(effect.key, True)

    def ask(self, holder: Any, question: Question | None) -> None:
        """Record the answer to a question about state outside Python objects (see `_outside`). Every call expects the same answer."""
        if question is not None and hash(question[0]) not in self.places:
            place = answer_place(holder, question)
            if place is not None:
                self.places[hash(question[0])] = place

    def place_of(self, holder: Any, key: Any) -> Place | None:
        """The place for the slot `key` of a holder, or for the holder itself; None if neither was read."""
        slot = self.places.get(hash((id(holder), key))) if type(key) is str else None
        return slot or self.places.get(id(holder))

    def has_met(self, holder: Any) -> bool:
        """Whether any part of a container was read or written."""
        return id(holder) in self.places or self.journal.has_met(holder)

    def name_of(self, value: Any) -> str:
        """The name of a value in messages."""
        return self._title(value)

    def read_class_of(self, value: Any, *, with_dict: bool = False) -> None:
        """Record the class of an object, where `__class__ = ...` may change it, and its special methods; `with_dict`: its `__dict__`."""
        cls = type(value)
        may_change = self._class_may_change.get(cls)
        if may_change is None:
            may_change = self.read_special_methods(cls)
        if (may_change or with_dict) and (key := hash(("class", id(value)))) not in self.places:
            self.places[key] = ClassPlace(value, self._title(value))

    def read_special_methods(self, cls: Any) -> bool:
        """Record the special methods and base classes of a class, which Python looks up without an instruction (see `_classes`).

        Returns:
            Whether `__class__ = ...` may change the class of its instances.
        """
        if cls in self._class_may_change:
            return self._class_may_change[cls]
        may_change = _may_change(cls)
        self._class_may_change[cls] = may_change and not issubclass(cls, (torch.Tensor, type))
        if may_change:
            dicts = [self._class_dicts(base)[0] for base in ORDER(cls) if _may_change(base)]
            self.places[hash(("special", id(cls)))] = SpecialPlace(cls, dicts)
        if type(cls) is not type:
            self.read_special_methods(type(cls))
        return self._class_may_change[cls]

    def read_classes(self, cls: type) -> list[Any]:
        """Record all attributes of a class and of its bases, except for those of libraries: code that is not recorded may read any.

        Returns:
            The plain objects among them.
        """
        found: list[Any] = []
        for base in cls.__mro__:
            if is_python_class(base) and not is_library(base.__module__):
                own = self._class_dicts(base)[0]
                self._whole_dict(own)
                found += (value for value in own.values() if is_python_class(type(value)) and is_data(value))
        return found

    def ask_identity(self, *values: Any, of_tensors: bool = True) -> None:
        """Record that the function depends on which objects these are, and all objects and, with `of_tensors`, tensors in them."""
        for value in values:
            if isinstance(value, PLAIN):
                continue
            if type(value) is set:  # one that grows (`if module not in seen`) is not searched as a whole for each item
                value = self._not_searched(value, self._searched.setdefault(of_tensors, {}))
            self.asked.update((id(part), part) for part in objects_in(value, with_tensors=of_tensors))

    @staticmethod
    def _not_searched(members: set[Any], searched: dict[int, Any]) -> tuple[Any, ...]:
        found = tuple(member for member in members if id(member) not in searched)
        searched.update((id(member), member) for member in found)
        return found

    def note_pair(self, left: Any, right: Any) -> None:
        """Record that two objects are compared by identity."""
        if type(left) is type(right) and (is_data(left) or isinstance(left, torch.Tensor)):
            self.compared.append((left, right))

    def identical(self, left: Any, right: Any) -> Any:
        """Before `left is right`. Returns the left operand to use instead: an argument is the caller's object."""
        self.note_pair(left, right)
        one, other = self.given.get(id(left)), self.given.get(id(right))
        if (one is None) == (other is None):
            return left
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            raise identity_of_argument("compares a tensor among its arguments (on the CPU, or a view) by identity")
        return right if one is right or other is left else left

    def require_no_key(self, key: Any) -> None:
        """Raise TraceError if a key, or an object whose `id()` is asked, is an argument, of which the trace has a copy."""
        if id(key) in self.given and type(key).__hash__ is object.__hash__:
            raise identity_of_argument(f"uses an argument of class {type(key).__name__} as a key, or asks its id()")

    def reached(self) -> dict[int, Any]:
        """The containers and objects that were read or written by name, and what was compared by identity, by id."""
        holders = [*(place.holder for place in self.places.values()), *self.journal.holders()]
        owners = (self._owners.get(id(holder), holder) for holder in holders)
        found = [o for o in owners if is_data(o) or isinstance(o, WITH_ITEMS)]
        if self.compared:  # an argument is compared with itself (`query is key`) without being reached by name
            named = {id(value) for place in self.places.values() for value in place.values()}
            given = set(map(id, self._arguments)) - named
            found += [o for pair in self.compared for o in pair if id(o) not in given]
        return {id(o): o for o in found if self.is_before(o) and id(o) not in self._ignored and id(o) not in self.given}

    def is_before(self, holder: Any) -> bool:
        """Whether an object existed before the trace."""
        raise NotImplementedError

    def note_comparison(self, left: Any, right: Any) -> Any:
        """Before a comparison: record the objects in it that it compares by identity. Returns the left operand to use instead."""
        if self.given and type(left).__eq__ is object.__eq__:
            left = self.identical(left, right)
        for value, other in ((left, right), (right, left)):
            if type(value).__eq__ is object.__eq__:
                self.note_pair(value, other)
            elif isinstance(value, WITH_ITEMS):  # equal items may be found by identity
                self.asked.update((id(part), part) for part in objects_in(value, with_tensors=True) if part is not value)
        return left

    def attribute_names(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        """Names of their attributes that were read or written; "__dict__" for all. Drops these places, so they are not guarded."""
        found: set[str] = set()
        for attributes in map(self.attributes, tensors):
            place: Any = self.places.pop(id(attributes), None)
            if place is not None:
                found.update(place.entries, place.present, ("__dict__",) if place.whole else ())
            found.update(name for name in attributes or () if self.journal.is_written(attributes, name))
        return frozenset(found)

    def _dict(self, holder: dict[Any, Any], title: str) -> DictPlace:
        place: Any = self.places.get(id(holder))
        if place is None:
            owner = self._owners.get(id(holder))
            if owner is not None:
                title = f"{self._title(owner)}.{{}}"
            put = partial(type.__setattr__, owner) if isinstance(owner, type) and self._class_dicts(owner)[0] is holder else None
            is_of_attributes = owner is not None and attributes_of(owner) is holder
            place = self.places[id(holder)] = DictPlace(holder, title, put, owner if is_of_attributes else None)
        return place

    def _whole_dict(self, holder: dict[Any, Any]) -> None:
        if self._is_ignored(holder):
            return
        place = self._dict(holder, f"{self._title(holder)}[{{!r}}]")
        if place.whole is None:
            content = place.whole = dict(self._content_before(holder, lambda: dict(items_of(holder))))
            place.replaced = {key for key in self.journal.entries_of(holder) if key in content and key not in place.entries}
            for key, value in content.items():
                if key not in place.replaced:
                    self._note_value(value, f"{self._title(holder)}[{shown_key(key)}]")

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
                self._note_value(value, f"{self._title(holder)}[{index}]")

    def read_length(self, holder: Any) -> Any:
        """Record that the length of a list or deque is read, and not its content. Returns the length."""
        self.read_special_methods(type(holder))
        if self._is_ignored(holder):
            return len(holder)
        place, now = self._list(holder), len(holder)
        before = len(self._content_before(holder, lambda: holder))
        number: Any = self.lengths.get(id(holder))
        if place.whole is None:
            place.length = before
            if number is not None:
                return number + (now - before) if now != before else number
        return now

    def _content_before(self, holder: Any, now: Any) -> Any:
        before = self.journal.before(holder)
        if before is ABSENT:
            return now()
        return before

    def _content(self, value: Any) -> bool:
        """Record the whole content of an object that is neither a dict nor a list. False if it has none that can change."""
        if id(value) in self.places and not isinstance(value, torch.Tensor):
            return True
        place = content_place(value, self._title(value))
        if place is not None:
            self.places[id(value)] = place
            before = self.journal.before(value)
            if before is not ABSENT:
                place.content = before
            for part in place.values():
                self._note_value(part, f"an item of {self._title(value)}")
        return place is not None

    def _host_tensor(self, value: torch.Tensor) -> None:
        while is_functorch_wrapped_tensor(value):
            value = get_unwrapped(value)
        if value.device.type == "cpu" and type(value).__name__ not in _CALL_TENSORS and id(value) not in self.places:
            self.places[id(value)] = ContentPlace(value, self._title(value), lambda: host_bytes(value))

    def read_function(self, fn: Any) -> None:
        """Record the code and the defaults of a function, or of the functions in a descriptor, unless they are a library's."""
        read_function(self, fn)

    def read_class_attribute(self, cls: Any, name: str) -> None:
        """Record the read of an attribute of a class: its own, of its bases, or of its metaclass."""
        self.read_special_methods(cls)
        self._class_attribute(cls.__mro__, name)
        if type(cls) is not type:
            self._class_attribute(type(cls).__mro__, name)
            read_members_by_name(self, cls, name)
        if isinstance(type.__dict__.get(name), types.GetSetDescriptorType):
            self.read_c_attribute(cls, name)

    def read_slot(self, instance: Any, descriptor: types.MemberDescriptorType) -> None:
        """Record the read of a slot, unless it is of a library's class."""
        name = descriptor.__name__
        if not self.journal.is_written(instance, name) and is_recorded(type(instance).__module__):
            title = f"{self._title(instance)}.{name}"
            place: Any = self.places.setdefault(hash((id(instance), name)), SlotPlace(instance, descriptor, title))
            self._note_value(place.content, title)

    def read_module_attribute(self, module: types.ModuleType, name: str) -> None:
        """Record the read of an attribute of a module: an entry of its dict, or what its `__getattr__` gives."""
        read_module_attribute(self, module, name)

    def read_c_attribute(self, instance: Any, name: str, is_property: bool = False) -> None:
        """Record the read of an attribute that is stored in C, or of a property that a library computes.

        If each read creates a new object, as `array.T`, it is of what the object holds instead.
        """
        key = hash(("in C", id(instance), name))
        if key not in self.places and not self.journal.is_written(instance, name):
            title = f"{self._title(instance)}.{name}"
            if is_property:
                place = ContentPlace(instance, title, partial(_computed, instance, name))
            else:
                place = AttributePlace(instance, name, title)
            if isinstance(place.content, (*PLAIN, tuple)) or place.read() is place.content:
                self.places[key] = place
                self._note_value(place.content, place.title)
            elif not isinstance(instance, (torch.Tensor, torch.nn.Module)) and not self._content(instance) and is_property:
                self._whole_dict(self.attributes(instance) or {})

    def _class_attribute(self, mro: tuple[type, ...], name: str) -> Any:
        """The attribute `name` of the first class in `mro` that has it, or ABSENT. Records the read in each class that was searched."""
        key = mro[0], len(mro), name
        found = self._found_in_class.get(key)
        if found is None:
            found = self._found_in_class[key] = (self._find_in_class(mro, name),)
        return found[0]

    def _find_in_class(self, mro: tuple[type, ...], name: str) -> Any:
        for cls in mro:
            own = self._class_dicts(cls)[0]
            if cls.__module__ != "builtins" and not (cls.__flags__ & _IMMUTABLE_TYPE):
                self._entry(own, name, cls.__qualname__, ".")
            if name in own:
                return own[name]
        return ABSENT

    def _class_dicts(self, cls: type) -> list[dict[str, Any]]:
        """A list with the dict behind the read-only `cls.__dict__`."""
        found = self._classes.get(cls)
        if found is None:
            found = self._classes[cls] = [class_dict(cls)]
            self._owners[id(found[0])] = cls
        return found

    def _note_value(self, value: Any, name: str) -> None:
        """Name a value that was read in a place; if it is a function, record that too."""
        if isinstance(value, PLAIN):
            return
        self._title_of(value, name)
        self.read_function(value)

    def _title_of(self, value: Any, name: str) -> None:
        self._names.setdefault(id(value), name)

    def _title(self, value: Any) -> str:
        if type(value) is types.ModuleType:
            return value.__name__
        return self._names.get(id(value)) or type(value).__name__

    def _proxied_dict(self, proxy: types.MappingProxyType[Any, Any]) -> dict[Any, Any]:
        """The dict behind a `MappingProxyType`."""
        return self.owned(proxy, gc.get_referents(proxy)[0])

    def owned(self, owner: Any, inner: Any) -> Any:
        """`inner`, an object that belongs to `owner`: it existed before the trace if its owner did."""
        self._owners.setdefault(id(inner), owner)
        return inner

    def memory_of(self, value: Any) -> Iterator[Any]:
        """See `memory_owners`. An owner that the garbage collector does not know belongs to `value`."""
        for owner in memory_owners(value):
            yield owner if gc.is_tracked(owner) else self.owned(value, owner)

    def viewed_dict(self, view: Any) -> Any:
        """The dict behind a view of its keys, values or items: it existed before the trace if the view did."""
        held = gc.get_referents(view)[0]
        self.places.setdefault(id(view), ContentPlace(view, "a view", lambda: held))
        return held

    def attributes(self, instance: Any) -> dict[str, Any] | None:
        """The dict of an object's attributes, or None; notes the object as its owner."""
        found = attributes_of(instance)
        if found is not None:
            self._owners[id(found)] = instance
        return found


def referent(proxy: Any) -> Any:
    """The referent of a weak proxy; None if it is dead."""
    try:
        return proxy.__repr__.__self__
    except ReferenceError:
        return None


def _computed(instance: Any, name: str) -> Any:
    try:
        return getattr(instance, name)
    except Exception:  # raised by a property of a library; the traced function gets it from its own read
        return ABSENT


def resolved(value: Any) -> Any:
    """The referent of a weak proxy; any other value itself."""
    return referent(value) if type(value) in PROXIES else value


def _may_change(cls: type) -> bool:
    return is_python_class(cls) and (is_recorded(cls.__module__) or issubclass(cls, torch.Tensor))


def is_simple(key: Any) -> bool:
    """Whether a dict can look up the key without running user code (`__hash__`, `__eq__`)."""
    if type(key) is tuple:
        return all(map(is_simple, key))
    return isinstance(key, (*PLAIN, torch.Tensor, type, types.FunctionType)) or type(key).__hash__ is object.__hash__

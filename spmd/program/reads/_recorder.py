"""The recording of one trace: the places that were read, with what they held, and those that were written.

Note [Reads]. While a function is traced, all code outside the libraries is instrumented (`_instrument`): before it loads a global,
a closure's variable, an attribute or an item, iterates, compares, tests, calls or writes, it tells the recording the operands.
A read becomes a guard: the same place is looked at again before each call, without running the user's code. Properties,
`__getitem__`, hooks and schedulers need nothing of their own: they are Python, so what they read is recorded when they run. A
library's function is not looked into: what it is handed counts as read, as deep as it can change. Objects that the trace itself
made guard nothing: see `_heap`. What has no place to be read again (an older iterator, a
random generator, a clock) is refused.
"""

from __future__ import annotations

import builtins
import collections
import collections.abc
import decimal
import functools
import gc
import sys
import threading
import types
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from spmd.program.find._static import attributes_of
from spmd.program.reads import _calls, _hooks, _swap
from spmd.program.reads._choices import Choice, entered
from spmd.program.reads._heap import HEAP
from spmd.program.reads._hooks import QUIET
from spmd.program.reads._journal import Effect, is_environment
from spmd.program.reads._library import is_librarys_property, is_recorded
from spmd.program.reads._membership import asked
from spmd.program.reads._memos import read_registry, require_unwritten
from spmd.program.reads._module_reads import RunModule
from spmd.program.reads._number_calls import beside_mapped, beside_numpy, matched
from spmd.program.reads._number_place import ABSENT, INPUT
from spmd.program.reads._outside import Question, setting_of
from spmd.program.reads._places import CDATA, CellPlace, ContentPlace, Expected, Place, SlotPlace, items_in, like, shown_key
from spmd.program.reads._places_read import PROXIES, VIEWS, behind, is_simple, itself, written_tensor
from spmd.program.reads._places_written import KEPT_IN_C, MEMOS, WITH_PARTS, PlacesWritten
from spmd.program.reads._process_settings import SETTINGS, of_class, of_text
from spmd.program.reads._random_generators import is_generator, state_of
from spmd.program.reads._replaced import ReplacedState, replaced
from spmd.program.reads._varying import Varying, beside, fixed, is_noted, plain_key
from spmd.program.reads._varying_index import may_vary, read_at

_TENSOR_NAMES = frozenset(dir(torch.Tensor)) | {"__dict__", "jax", "is_jax"}  # the last two once the device is registered
_CODE = (types.FunctionType, type, types.ModuleType, types.BuiltinFunctionType)
_MAX_DEPTH = 50


class Recording(PlacesWritten):
    """What one trace reads and writes of Python. Made by `recorded`.

    Attributes:
        has_own_context: whether context variables are set in a copy, so that none has to be unset.
        run_module: calls what it is given, the run of a module.
        note_gradient: is told of each tensor whose `grad` is read.
    """

    def __init__(self, names: dict[int, str], owners: dict[int, Any], ignored: set[Any]) -> None:
        super().__init__(names, owners, ignored)
        self.advanced: dict[int, tuple[Any, str]] = {}
        self.caches: dict[int, Any] = {}
        self.generators: dict[int, tuple[Any, Any]] = {}
        self.choice: Choice | None = None
        self.run_module: RunModule = lambda module, run: run()
        self.note_gradient: Callable[[torch.Tensor], None] = lambda tensor: None
        self.has_own_context = self.is_busy = False
        self.seen: dict[Any, Any] = {}
        self._handed: dict[int, Any] = {}
        self._accepted: list[tuple[Effect, Any]] = []
        self._gone: set[int] = set()  # ids of containers that the next call does not meet
        self._born: frozenset[int] = frozenset()
        self._known: set[int] = set()
        self._given: list[Any] = []

    # reads

    def load_global(self, variables: dict[str, Any], name: str) -> None:
        self.seen[id(variables), name] = variables
        if name in variables:
            self._entry(variables, name, "", "")
        else:
            self._dict(variables, "{}").present.setdefault(name, False)
            found = variables.get("__builtins__", builtins)
            self._entry(found if type(found) is dict else found.__dict__, name, "builtins", ".")

    def imported(self, module: str, level: int) -> None:
        """A module is about to be imported: which one Python has under the name."""
        for name in {module, module.partition(".")[0]} if level == 0 else ():
            if name in sys.modules:
                self._entry(sys.modules, name, "sys.modules", "[")

    def load_cell(self, cell: Any, name: str) -> None:
        self.seen[id(cell)] = cell
        if not self.journal.is_written(cell):
            place = self.places[id(cell)] = CellPlace(cell, name)
            self._met(place.content, name)

    def load_attr(self, instance: Any, name: str) -> None:
        cls: type = type(instance)
        if cls in QUIET:
            return
        key = (id(instance), name)
        if cls in PROXIES:
            self.seen[key], instance = instance, behind(instance)
            cls, key = type(instance), (id(instance), name)
        if name == "grad" and isinstance(instance, torch.Tensor):
            self.note_gradient(instance)
            return
        if key in self.seen or name in MEMOS:
            return
        self.seen[key] = instance
        if isinstance(instance, torch.Tensor):
            attributes = None if name in _TENSOR_NAMES else self.attributes(instance)
            if attributes is not None:
                self._entry(attributes, name, "a tensor's", " ")
        elif isinstance(instance, types.ModuleType):
            self._owners[id(instance.__dict__)] = instance
            if cls is not types.ModuleType:
                self.ask(instance, setting_of(instance, name, instance.__name__))
            self._entry(instance.__dict__, name, instance, ".")
        elif isinstance(instance, type):
            self.attribute_of_class(instance, name)
        elif cls is super:
            mro = instance.__self_class__.__mro__
            self.meet(instance.__self_class__)
            self._class_attribute(mro[mro.index(instance.__thisclass__) + 1 :], name)
        elif cls.__module__ == "builtins" and cls is not types.FunctionType:
            return
        else:
            self._instance_attribute(instance, cls, name)
            if cls in WITH_PARTS and name in ("__kwdefaults__", "keywords"):
                self.parts(instance, getattr(instance, name))
            if name == "__dict__" and (attributes := attributes_of(instance)) is not None:
                self._owners[id(attributes)] = instance

    def _instance_attribute(self, instance: Any, cls: type, name: str) -> None:
        self.class_of(instance)
        found = self._class_attribute(cls.__mro__, name)
        self.class_of(found)
        if isinstance(found, functools.singledispatchmethod):
            read_registry(self, found.dispatcher)
        if isinstance(instance, KEPT_IN_C) and isinstance(found, (types.MemberDescriptorType, types.GetSetDescriptorType)):
            self._content(instance) if name == "flags" else self.attribute_in_c(instance, name)
        elif is_librarys_property(found):
            self.attribute_in_c(instance, name, is_property=True)
        elif isinstance(instance, CDATA):
            self._content(instance)
        if isinstance(found, types.MemberDescriptorType):
            if not self.journal.is_written(instance, name) and is_recorded(cls.__module__):
                title = f"{self._title(instance)}.{name}"
                place = self.places[hash((id(instance), name))] = SlotPlace(instance, found, title)
                self._met(place.content, title)
        elif not hasattr(type(found), "__set__"):  # a property is Python: what it reads is recorded when it runs
            attributes = attributes_of(instance)
            if found is ABSENT and name not in (attributes or ()) and (question := setting_of(instance, name, self._title(instance))):
                self.ask(instance, question)
            if attributes is not None:
                if isinstance(instance, threading.local):
                    self._content(instance)
                self._owners[id(attributes)] = instance
                self._entry(attributes, name, instance, ".")
                if isinstance(found, functools.cached_property) and name not in attributes:
                    self.journal.entry(attributes, name, f"{self._title(instance)}.{name}")

    def load_item(self, holder: Any, key: Any) -> tuple[Any, Any]:
        """An item is about to be read; returns the key and the container to use."""
        holder = itself(holder)
        self.look_into_key(key)
        if may_vary(holder, key):
            if not self.fixes_indices and (found := read_at(holder, key)) is not None:
                self.look_into(holder)
                return 0, (found,)
            key = fixed(key)
        elif not isinstance(holder, torch.Tensor):
            key = plain_key(key)
        self._read_item(holder, key)
        return key, holder

    def _read_item(self, holder: Any, key: Any) -> None:
        cls = type(holder)
        if cls in QUIET or isinstance(holder, torch.Tensor):
            self.operate(holder, key)
            return
        if self._is_ignored(holder):
            return
        if isinstance(holder, dict) and is_simple(key):
            if cls.__getitem__ is dict.__getitem__ or not is_recorded(cls.__module__):
                self._entry(holder, key, holder, "[")
                if isinstance(holder, collections.defaultdict) and key not in holder:
                    self.attribute_in_c(holder, "default_factory")
                    self.journal.entry(holder, key, f"{self._title(holder)}[{shown_key(key)}]")
        elif isinstance(holder, (list, collections.deque)) and type(key) in (int, bool):
            if cls.__getitem__ in (list.__getitem__, collections.deque.__getitem__):
                self._item(holder, key)
        elif isinstance(holder, types.MappingProxyType):
            self._entry(self._behind(holder), key, "", "")
        else:
            self.look_into(holder)

    def contains(self, item: Any, holder: Any) -> Any:
        """`item in holder` is about to be asked; returns the item to ask for."""
        return asked(self, item, itself(holder))

    def operate(self, left: Any, right: Any) -> Any:
        """Both are about to be operands; returns the first one to use."""
        left = self._operands(left, right)
        return beside_mapped(left, right)

    def _operands(self, left: Any, right: Any) -> Any:
        left = beside(left, right) if is_noted(right) else beside_numpy(left, right)
        self.look_into(left)
        self.look_into(right)
        if type(left) is str and type(right) not in QUIET - {tuple}:  # "%s" % right
            self.ask_all(of_text(right))
        return left

    def show(self, value: Any) -> None:
        """A value is about to be made text."""
        self.look_into(value)
        self.ask_all(of_text(value))

    def ask_all(self, questions: Iterable[Question]) -> None:
        """Settings of the whole process matter."""
        for question in questions:
            self.ask(SETTINGS, question)

    def operate_in_place(self, left: Any, right: Any) -> Any:
        if isinstance(left, list):
            self.look_into(right)
            for item in right if isinstance(right, (list, tuple)) else ():
                self.journal.append(left, item, partial(list.append, left), self._title(left))
            if not isinstance(right, (list, tuple)):
                self.mutate(left)
            return left
        if isinstance(left, (dict, set, collections.deque, bytearray, np.ndarray)):
            self.mutate(left)
        return self._operands(left, right)

    def iterate(self, value: Any) -> None:
        value = itself(value)
        if isinstance(value, collections.abc.Iterator):
            self.advance(value, "iterated")
        else:
            self.look_into(value)

    def advance(self, iterator: Any, how: str) -> None:
        """An iterator from before the trace cannot be advanced again by every call, unless Python says how."""
        self.look_into(iterator) if is_python(iterator) else self.advanced.setdefault(id(iterator), (iterator, how))

    def look_into(self, value: Any) -> None:
        """All of a container, and nothing of what lies in it."""
        cls = type(value)
        if cls in PROXIES or cls in VIEWS:
            value = behind(value) if cls in PROXIES else self.shown_by(value)
            cls = type(value)
        if cls in QUIET or self._is_ignored(value):
            return
        self.meet(cls)
        self.ask(SETTINGS, of_class(cls))
        if isinstance(value, torch.Tensor):
            self._host_tensor(value)
        elif isinstance(value, dict):
            self._whole_dict(value)
        elif isinstance(value, (list, collections.deque)):
            self._whole_list(value)
        elif isinstance(value, types.MappingProxyType):
            self._whole_dict(self._behind(value))
        elif is_environment(value):
            self._title_of(value._data, "os.environ")
            self._whole_dict(self.parts(value, value._data))
        elif isinstance(value, (collections.UserDict, collections.UserList)):
            self.load_attr(value, "data")
            self.look_into(value.data)
        elif isinstance(value, type):
            self.meet(value)
        elif not isinstance(value, _CODE):
            self.class_of(value)
            if not self._content(value) and not is_recorded(cls.__module__):
                for part in _calls.parts_of(value, self):  # a library's container: what it is made of
                    self.hand(part)

    def hand(self, value: Any, depth: int = 0) -> None:
        """A value goes to code that is not recorded: all of it counts as read, as deep as it can change."""
        value = itself(value)
        if type(value) in QUIET and type(value) is not tuple:
            return
        if id(value) in self._handed or depth > _MAX_DEPTH:
            return
        if isinstance(value, collections.abc.Iterator) and not is_python(value):
            self.advance(value, "handed to a library")
            return
        self._handed[id(value)] = value
        if is_generator(value):
            self.generators.setdefault(id(value), (value, state_of(value)))
            return
        if id(value) not in self._ignored:
            self.look_into(value)
            if isinstance(value, _calls.CONTAINERS) and id(value) not in self._owners:
                self.journal.content(value, self._title(value))
        for part in (*_calls.parts_of(value, self), *_calls.shown_by(value)):
            self.hand(part, depth + 1)

    def call(self, fn: Any, *args: Any) -> Any:
        """A call is about to happen; returns what is to be called."""
        if self.choice is not None and sys._getframe(3) is self.choice.frame:
            self.choice.require_pure(fn, args)
        return _calls.note_call(self, fn, args)

    def call_ex(self, fn: Any, args: Any, kwargs: Any = None) -> Any:
        """The same with `*args` and `**kwargs`."""
        self.iterate(args)
        given = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        if isinstance(kwargs, dict):
            self.look_into(kwargs)
            given += tuple(kwargs.values())
        return _calls.note_call(self, fn, given)

    def choose(self, condition: Any, enters_if: bool) -> bool | Choice:
        """Whether a block runs that only changes names. See Note [Choices]."""
        found = entered(condition, enters_if, sys._getframe(2))
        self.choice = found if isinstance(found, Choice) else None
        return found

    def chosen(self, choice: Choice, before: Any, after: Any) -> Any:
        """What a name holds behind such a block."""
        self.choice = choice.frame = None
        return choice.chosen(before, after)

    def match_class(self, value: Any, cls: Any, names: tuple[str, ...], num_positional: int) -> Any:
        """A class pattern is about to look at a value; returns the value to match."""
        value = matched(value.concrete() if type(value) is Varying else value, bool(num_positional or names))
        if num_positional:
            self.load_attr(cls, "__match_args__")
        if isinstance(value, cls):
            for name in (*getattr(cls, "__match_args__", ())[:num_positional], *names):
                self.load_attr(value, name)
        return value

    def _find_born(self) -> None:
        """Which objects the trace made: those that exist now and did not before."""
        self._born = HEAP.made()
        self._known = set(map(id, self._given))
        for place in self.places.values():  # in the order of reading: what lies in an older object existed too
            if self.is_before(place.holder):
                self._known.update(map(id, _with_those_in_tuples(place.values())))

    def _refuse_advanced(self) -> None:
        for iterator, how in self.advanced.values():
            if self.is_before(iterator) and not _calls.is_endless(iterator):
                raise _calls.refused(f"an iterator from before the call ({type(iterator).__name__}) was {how}")

        for generator, state in self.generators.values():
            if (self.is_before(generator) or not gc.is_tracked(generator)) and state_of(generator) != state:
                raise _calls.refused(f"a {type(generator).__name__} from before the call was drawn from: random numbers of the host")

    def _refuse_unseen_writes(self) -> None:
        """Where an array or CPU tensor that was read holds something else, and no write was seen: put back and refused."""
        for place in self.places.values():
            held, kinds = place.holder, (np.ndarray, torch.Tensor)
            if not isinstance(held, kinds) or not isinstance(place, ContentPlace) or self.journal.is_written(held, ABSENT):
                continue
            if self.is_before(held) and place.difference() is not None:
                place.put_back()
                what = f"{place.title} was written to by code that is not recorded"
                raise written_tensor(place) if isinstance(held, torch.Tensor) else _calls.refused(what)

    def is_before(self, holder: Any) -> bool:
        """Whether an object existed before the trace."""
        owner = self._owners.get(id(holder))  # Python makes an object's `__dict__` when it is first asked for
        if owner is not None:
            return self.is_before(owner)
        # the collector tracks a dict of plain values only from when something else is put into it
        return id(holder) in self._known or (gc.is_tracked(holder) and id(holder) not in self._born)

    def run(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `fn`, and find out which objects it made."""
        self._given = [*_calls.nested((args, kwargs)), decimal.getcontext()]  # of which the collector does not know
        before = _hooks.start(self)
        try:
            result = self.call(fn, *args)(*args, **kwargs)
        finally:
            _hooks.stop(before)
            self._find_born()
        self._refuse_advanced()
        self._refuse_unseen_writes()
        require_unwritten(self.caches.values())
        return result

    def tensors_asked(self, name: str = "") -> dict[int, torch.Tensor]:
        """Tensors from before the trace of which it read an attribute (shape, dtype), or this one, by their ids."""
        read = ((key, value) for key, value in self.seen.items() if isinstance(value, torch.Tensor) and name in ("", key[1]))
        return {id(value): value for _, value in read if self.is_before(value)}

    def read_places(self) -> list[Place]:
        """What the trace read of objects that existed before it."""
        return [place for place in self.places.values() if id(place.holder) not in self._gone and self.is_before(place.holder)]

    def settled(self, expected: Expected) -> list[Place]:
        """All that was read, as it is now, when what the trace wrote is undone: so it is expected, but for inputs of the program."""
        places = self.read_places()
        for place in places:
            place.settle(lambda holder, key, value: INPUT if (id(holder), key) in self._ignored else expected(holder, key, value))
        for effect, value in self._accepted:
            if effect.holder is not ABSENT and (place := self.place_of(effect.holder, effect.key)) is not None:
                place.expect(effect.key, value)
        return places

    def accept(self, effect: Effect, value: Any) -> None:
        """The program may run again when the place of `effect` holds `value`."""
        self._accepted.append((effect, value))

    def held(self, effects: list[Effect], is_fixed: Callable[[Any], bool]) -> list[ReplacedState]:
        """What the function reads under a name and then replaces, if its program can take what is there in the next call."""
        found: list[ReplacedState] = []
        places = self.read_places()
        for effect in effects:
            here = replaced(effect, effects, places, is_fixed)
            if here:
                self.accept(effect, like(effect.before))
                self._gone.update(id(h.value) for h in here if items_in(h.value))
            found.extend(here)
        return found

    def effects(self) -> list[Effect]:
        """What it wrote to objects that existed before it."""

        def is_read(holder: Any, key: Any) -> bool:
            place = self.place_of(holder, key)
            return place is not None and place.has_read(key)

        return self.journal.effects(self.is_before, is_read)


def _with_those_in_tuples(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield value
        if isinstance(value, tuple):
            yield from _with_those_in_tuples(value)


def is_python(iterator: Any) -> bool:
    """Whether an iterator is an object of the user's whose `__next__` is Python: what it reads and writes is recorded."""
    cls: Any = type(iterator)
    return is_recorded(cls.__module__) and type(getattr(cls, "__next__", None)) is types.FunctionType


@contextmanager
def recorded(
    names: dict[int, str] | None = None, owners: dict[int, Any] | None = None, ignored: set[Any] | None = None
) -> Generator[Recording]:
    """Make ready to record (`Recording.run`); afterwards everything that was written holds its old value again."""
    recording = Recording(names or {}, owners or {}, ignored or set())
    swapped = _swap.swap(HEAP.functions())
    try:
        with HEAP.set_apart():
            yield recording
    finally:
        _swap.restore(swapped)
        recording.journal.undo(recording.is_before)
        for cache in recording.caches.values():
            cache.forget()


__all__ = ["Recording", "is_python", "recorded"]

"""`Recording`: the Python values that one trace reads and writes. See Note [Reads] in `spmd.program.reads`."""

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
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from spmd.base._signals import handlers_run
from spmd.program.find._static import attributes_of
from spmd.program.reads import _calls, _hooks, _noted_sizes, _observers, _parts, _swap
from spmd.program.reads._builtin_attributes import note_builtin_attribute, note_missing_attribute, origin_of
from spmd.program.reads._c_methods import BY_NAME, note_c_attribute
from spmd.program.reads._choices import Choice, choose
from spmd.program.reads._container_methods import CONTAINERS
from spmd.program.reads._content_places import CellPlace
from spmd.program.reads._decimal_flags import Flags
from spmd.program.reads._definitions import read_text_of
from spmd.program.reads._dropped_objects import SUSPENDED, FilesOfTrace, end_dropped, handles_of
from spmd.program.reads._enumerations import read_members
from spmd.program.reads._heap import HEAP
from spmd.program.reads._hidden_state import IN_MEMORY, LOCKS, SIGNALS, has_hidden_state, is_output, lock_question
from spmd.program.reads._hooks import QUIET
from spmd.program.reads._imports import note_import
from spmd.program.reads._in_place import in_place
from spmd.program.reads._item_reads import read_item
from spmd.program.reads._journal import Effect, is_environment
from spmd.program.reads._late_writes import with_late_writes
from spmd.program.reads._library import is_library_property, is_recorded
from spmd.program.reads._membership import membership_key
from spmd.program.reads._memos import forgetting, left_in_caches, read_registry
from spmd.program.reads._module_reads import RunModule
from spmd.program.reads._number_calls import numpy_operand, tensor_operand
from spmd.program.reads._number_operands import integer_operand
from spmd.program.reads._number_place import ABSENT, INPUT, ObjectPlace
from spmd.program.reads._pending import operand
from spmd.program.reads._pending_outputs import with_outputs
from spmd.program.reads._pending_texts import texts_needed
from spmd.program.reads._places import CDATA, Expected, Place
from spmd.program.reads._places_read import PROXIES, VIEWS, referent, resolved
from spmd.program.reads._places_written import MEMOS, WITH_PARTS, PlacesWritten, is_kept_in_c
from spmd.program.reads._pointed_memory import note_field
from spmd.program.reads._process_settings import SETTINGS, question_of_content, questions_of_text
from spmd.program.reads._questions import Question
from spmd.program.reads._raised import make_plain
from spmd.program.reads._random_generators import note_generator
from spmd.program.reads._replaced import Replacements
from spmd.program.reads._tensor_attributes import note_tensor_attribute
from spmd.program.reads._tensor_numbers import TextOperand, formats_tensors
from spmd.program.reads._unseen import refuse_unseen
from spmd.program.reads._varying import fixed
from spmd.program.reads._varying_index import may_vary, read_at

_CODE = (types.FunctionType, type, types.ModuleType, types.BuiltinFunctionType)
_MAX_DEPTH = 50


class Recording(PlacesWritten):
    """The Python values that one trace reads and writes. Created by `recorded`.

    Instrumented code calls the methods with the name of a hook (`load_attr`, `store_item`, `call`) before each instruction of that kind.

    Attributes:
        advanced: iterators that the trace advanced, by id, each with functions that give it as long as it lives, and how.
        caches: functions of `functools.lru_cache` that were called, by id.
        flags: the flags of decimal contexts.
        generators: random generators that a library received, by id, each with its state at that time.
        choice, no_choices: the block that runs without a known condition; the places of those that cannot. See Note [Choices].
        run_module: called as `run_module(module, run)`; returns `run()`, the result of the module's call.
        note_gradient: called with each tensor whose `grad` is read.
        imported, leaves_cached: names of modules that were imported for this trace; as in `TraceSettings`.
        has_own_context: whether the trace runs in a copy of the context, so that no context variable has to be unset.
        is_busy: whether the recording itself inspects objects now; hooks return at once.
        seen: holders of reads that are recorded already, by (id, name) or id of a cell; their hooks return at once.
    """

    def __init__(self, names: dict[int, str], owners: dict[int, Any], ignored: set[Any]) -> None:
        super().__init__(names, owners, ignored)
        self.advanced: dict[int, tuple[list[Callable[[], Any]], str]] = {}
        self.caches: dict[int, Any] = {}
        self.flags = Flags()
        self.generators: dict[int, tuple[Any, Any]] = {}
        self.choice: Choice | None = None
        self.run_module: RunModule = lambda module, run: run()
        self.note_gradient: Callable[[torch.Tensor], None] = lambda tensor: None
        self.has_own_context, self.is_busy, self.leaves_cached = False, False, True
        self.imported, self.no_choices = frozenset[str](), frozenset[Any]()
        self.seen: dict[Any, Any] = {}
        self.files = FilesOfTrace()
        self._passed: dict[int, Any] = {}
        self._copied: dict[int, Any] = {}
        self._replacements: Replacements | None = None
        self._made_ids: frozenset[int] = frozenset()
        self._existing_ids: set[int] = set()

    def load_global(self, variables: dict[str, Any], name: str) -> None:
        self.seen[id(variables), name] = variables
        if name in variables:
            return self._entry(variables, name, "", "")
        self._dict(variables, "{}").present.setdefault(name, False)
        found = variables.get("__builtins__", builtins)
        return self._entry(found if type(found) is dict else found.__dict__, name, "builtins", ".")

    def import_module(self, module: str, level: int, names: Sequence[str] | None, package: str | None) -> None:
        note_import(self, module, level, names, package)

    def load_cell(self, cell: Any, name: str) -> None:
        self.seen[id(cell)] = cell
        if not self.journal.is_written(cell):
            place = self.places[id(cell)] = CellPlace(cell, name)
            self._note_value(place.content, name)

    def load_attr(self, instance: Any, name: str) -> None:
        cls: type = type(instance)
        if cls in QUIET or instance in self.files:
            return
        key = (id(instance), name)
        if cls in PROXIES:
            self.seen[key], instance = instance, referent(instance)
            cls, key = type(instance), (id(instance), name)
        if name == "grad" and isinstance(instance, torch.Tensor) and instance.device.type != "cpu":
            self.note_gradient(instance)
            return
        if key in self.seen or name in MEMOS:
            return
        if cls in SUSPENDED:
            return note_builtin_attribute(self, instance, name)
        self.seen[key] = instance
        if isinstance(instance, torch.Tensor):
            note_tensor_attribute(self, instance, name)
        elif isinstance(instance, types.ModuleType):
            self.read_module_attribute(instance, name)
        elif isinstance(instance, type):
            self.read_class_attribute(instance, name)
        elif cls is super:
            mro = instance.__self_class__.__mro__
            self.read_special_methods(instance.__self_class__)
            self._class_attribute(mro[mro.index(instance.__thisclass__) + 1 :], name)
        elif cls.__module__ == "builtins" and cls is not types.FunctionType and not issubclass(cls, BaseException):
            note_builtin_attribute(self, instance, name)
        else:
            self._instance_attribute(instance, cls, name)
            if cls in WITH_PARTS and name in ("__kwdefaults__", "keywords"):
                self.owned(instance, getattr(instance, name))
            if name == "__dict__" and (attributes := attributes_of(instance)) is not None:
                self._owners[id(attributes)] = instance

    def _instance_attribute(self, instance: Any, cls: type, name: str) -> None:
        if (origin := origin_of(instance)) is not instance:  # `Holder[int].name`
            self.load_attr(origin, name)
        self.read_class_of(instance)
        found = self._class_attribute(cls.__mro__, name)
        if not _parts.is_recorded_descriptor(found):
            self.ask_identity(instance, of_tensors=False)
        self.read_class_of(found)
        if isinstance(found, functools.singledispatchmethod):
            read_registry(self, found.dispatcher)
        if issubclass(cls, BY_NAME):
            note_c_attribute(self, instance, name)
        if is_kept_in_c(instance, found):
            self._content(instance) if name == "flags" else self.read_c_attribute(instance, name)
        elif is_library_property(found):
            self.read_c_attribute(instance, name, is_property=True)
        elif isinstance(instance, CDATA):
            note_field(self, instance, name)
        if isinstance(found, types.MemberDescriptorType):
            self.read_slot(instance, found)
        elif not hasattr(type(found), "__set__"):  # a property is Python code: its reads are recorded when it runs
            attributes = attributes_of(instance)
            if found is ABSENT and name not in (attributes or ()):
                note_missing_attribute(self, instance, name)
            if attributes is not None:
                if isinstance(instance, threading.local):
                    self._content(instance)
                self._owners[id(attributes)] = instance
                self.read_class_of(instance, with_dict=True)
                self._entry(attributes, name, instance, ".")
                if isinstance(found, functools.cached_property) and name not in attributes:
                    self.journal.entry(attributes, name, f"{self._title(instance)}.{name}")

    def load_item(self, holder: Any, key: Any) -> tuple[Any, Any]:
        """Before `holder[key]`. Returns the key and the container to use instead."""
        holder = resolved(holder)
        self.read_key(key)
        if may_vary(holder, key):
            if not self.fixes_indices and (found := read_at(holder, key)) is not None:
                self.read_content(holder)
                return 0, (self.copies.note(found, holder, key),)
            key = fixed(key)
        elif not isinstance(holder, torch.Tensor):
            key = _noted_sizes.plain_key(key)
        self._read_item(holder, key)
        return key, holder

    _read_item = read_item

    def contains(self, item: Any, holder: Any) -> Any:
        """Before `item in holder`. Returns the item to use instead."""
        self.ask_identity(item, *([holder] if type(item) not in QUIET else ()))
        if isinstance(holder, collections.abc.Iterator):
            self.advance(holder, "searched by `in`")
        return membership_key(self, item, resolved(holder))

    def compare(self, left: Any, right: Any) -> Any:
        """Before a comparison. Returns the left operand to use instead."""
        return tensor_operand(self._operands(self.note_comparison(left, right), right), right)

    def operate(self, left: Any, right: Any) -> Any:
        """Before an operator. Returns the left operand to use instead."""
        return integer_operand(tensor_operand(self._operands(left, right), right), right)

    def _operands(self, left: Any, right: Any) -> Any:
        left = TextOperand(self._operands, left) if formats_tensors(left, right) else operand(self, left, right)
        left = _noted_sizes.float_operand(left, right) if _noted_sizes.is_noted(right) else numpy_operand(left, right)
        for value in (left, right):
            self.read_content(value)
            _calls.note_operand(self, value)
        if type(left) is str and type(right) not in QUIET - {tuple}:  # "%s" % right
            self.ask_all(questions_of_text(right))
        return left

    def read_text(self, value: Any) -> None:
        """Before a value is converted to text."""
        self.ask_identity(value)  # a default `__repr__` shows the address
        read_text_of(self, value)
        self.iterate(value)
        self.ask_all(questions_of_text(value))

    def ask_all(self, questions: Iterable[Question]) -> None:
        """Record the answers to questions about settings of the process."""
        for question in questions:
            self.ask(SETTINGS, question)

    def operate_in_place(self, left: Any, right: Any) -> Any:
        """Before `left += right` and the like. Returns the left operand to use instead."""
        return in_place(self, left, right)

    def iterate(self, value: Any) -> None:
        value = resolved(value)
        if isinstance(value, collections.abc.Iterator):
            self.advance(value, "iterated")
        else:
            self.read_content(value)

    def advance(self, iterator: Any, how: str) -> None:
        """Before an iterator is advanced. Unless its `__next__` is Python code, no call can repeat that for one from before the trace."""
        if _parts.is_python(iterator):
            self.read_content(iterator)
        elif isinstance(iterator, IN_MEMORY):
            self.mutate(iterator)
        elif not is_output(iterator):
            self.use_up(iterator, how)

    def use_up(self, value: Any, how: str) -> None:
        """Note that an object is changed in a way that no call can repeat for one from before the trace."""
        self.advanced.setdefault(id(value), (handles_of(value), how))

    def read_content(self, value: Any, asks_identity: bool = True) -> None:
        """Record the whole content of a container, but not the content of its items. `asks_identity`: see `read_deep`."""
        self.late.require_unread(value)
        cls = type(value)
        if cls in PROXIES or cls in VIEWS:
            value = referent(value) if cls in PROXIES else self.viewed_dict(value)
            cls = type(value)
        if cls in QUIET or self._is_ignored(value) or value in self.files:
            return
        self.read_special_methods(cls)
        self.ask(SETTINGS, question_of_content(value, cls))
        if isinstance(value, torch.Tensor):
            self._host_tensor(value)
        elif isinstance(value, dict):
            self._whole_dict(value)
        elif isinstance(value, (list, collections.deque)):
            self._whole_list(value)
        elif isinstance(value, types.MappingProxyType):
            self.read_content(self._proxied_dict(value))
        elif cls in LOCKS:
            self.ask(value, lock_question(value, self._title(value)))
        elif has_hidden_state(cls):
            self.use_up(value, "read, which no other call can check")
        elif is_environment(value):
            self._title_of(value._data, "os.environ")
            self._whole_dict(self.owned(value, value._data))
        elif isinstance(value, (collections.UserDict, collections.UserList)):
            self.load_attr(value, "data")
            self.read_content(value.data)
        elif isinstance(value, type):
            self.read_special_methods(value)
            read_members(self, value)
        elif cls is SIGNALS and value is decimal.getcontext().flags:
            self.flags.require_cleared(value)
        elif not isinstance(value, _CODE):
            self.read_class_of(value)
            read_members(self, value)
            if not self._content(value) and not is_recorded(cls.__module__):
                for part in _parts.parts_of(value, self):  # a container of a library's class
                    self.read_deep(part, asks_identity=asks_identity)

    def read_deep(self, value: Any, depth: int = 0, asks_identity: bool = True) -> None:
        """Record all mutable objects that are reachable from a value as read, and containers as possibly written.

        For values that are passed to code that is not recorded. `asks_identity`: it may depend on which objects these are.
        """
        value = resolved(value)
        if type(value) in QUIET and type(value) is not tuple:
            return
        done = self._passed if asks_identity else self._copied
        if id(value) in self._passed or id(value) in done or depth > _MAX_DEPTH:
            return
        if value in self.files:
            return
        if isinstance(value, collections.abc.Iterator) and not _parts.is_python(value):
            self.advance(value, "passed to a library")
            return
        done[id(value)] = value
        if note_generator(self, value):
            return
        if asks_identity and id(value) not in self.asked:  # otherwise it was found in a container that was asked
            self.ask_identity(value, of_tensors=False)
        if id(value) not in self._ignored:
            self.read_content(value, asks_identity)
            if isinstance(value, (*CONTAINERS, *CDATA, SIGNALS)) and not isinstance(self._owners.get(id(value)), (type, types.ModuleType)):
                self.journal.content(value, self._title(value))
        of_class = self.read_classes(value if isinstance(value, type) else type(value))
        for part in (*_parts.parts_of(value, self), *self.memory_of(value), *of_class):
            self.read_deep(part, depth + 1, asks_identity)

    def call(self, fn: Any, *args: Any) -> Any:
        """Before `fn(*args)`. Returns the callable to use instead."""
        if self.choice is not None and sys._getframe(3) is self.choice.frame:
            self.choice.require_pure(fn, args)
        return self.copies.around(fn, _swap.before_call(_calls.note_call(self, fn, args)))

    def call_ex(self, fn: Any, args: Any, kwargs: Any = None) -> Any:
        """Before `fn(*args, **kwargs)`. Returns the callable to use instead."""
        self.iterate(args)
        given = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        if isinstance(kwargs, dict):
            self.read_content(kwargs)
            given += tuple(kwargs.values())
        return self.copies.around(fn, _swap.before_call(_calls.note_call(self, fn, given)))

    def choose(self, condition: Any, enters_if: bool) -> bool | Choice:
        """Before a block that only assigns local names: whether it runs, or a `Choice` if only the program knows. See Note [Choices]."""
        found = choose(condition, enters_if, sys._getframe(2), self.no_choices)
        self.choice = found if isinstance(found, Choice) else None
        return found

    def chosen(self, choice: Choice, before: Any, after: Any) -> Any:
        """After such a block: the value of a name that the block assigned."""
        self.choice = choice.frame = None
        return choice.chosen(before, after)

    def match_class(self, value: Any, cls: Any, names: tuple[str, ...], num_positional: int) -> Any:
        """Before `case cls(...)` is matched against a value. Returns the value to use instead."""
        return _calls.note_match(self, value, cls, names, num_positional)

    def _find_made(self) -> None:
        """Find the objects that the trace created, and those that existed before although the garbage collector does not know them."""
        self._made_ids = HEAP.made()
        found = [result for cache in self.caches.values() for result in _parts.with_tuple_items(cache.found)]
        self._existing_ids = set(map(id, [*self._arguments, *found]))
        for place in self.places.values():  # in the order of the reads: the values in an older object are older than the trace too
            if self.is_before(place.holder):
                self._existing_ids.update(map(id, _parts.with_tuple_items(place.values())))

    def is_before(self, holder: Any) -> bool:
        """Whether an object existed before the trace."""
        if id(holder) in self._existing_ids:  # a dict of plain values, which the collector does not track until another object is put in
            return True
        if (owner := self._owners.get(id(holder))) is not None:  # CPython creates an object's `__dict__` lazily, so ask its owner
            return self.is_before(owner)
        return gc.is_tracked(holder) and id(holder) not in self._made_ids

    def run(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `fn`, and find the objects that it created.

        Raises:
            TraceError: the call did something that later calls cannot repeat.
        """
        bound = fn.__self__ if type(fn) is types.MethodType else fn
        self._arguments = [*_parts.nested((args, kwargs)), bound, decimal.getcontext()]  # which the collector may not track
        before = _hooks.start(self)
        self.flags.use(decimal.getcontext())
        try:
            with handlers_run():
                result = self.call(fn, *args)(*args, **kwargs)
        except Exception as error:
            make_plain(error)
            raise
        finally:
            self.flags.restore()
            _hooks.stop(before)
            self._find_made()
        refuse_unseen(self)
        end_dropped(self)
        return result

    def tensors_asked(self, name: str = "") -> dict[int, torch.Tensor]:
        """Tensors from before the trace, by id, whose attribute `name` was read; any attribute (shape, dtype) if `name` is empty."""
        read = (value for key, value in self.seen.items() if isinstance(value, torch.Tensor) and name in ("", key[1]))
        return {id(value): value for value in filter(self.is_before, read)}

    def read_places(self) -> list[Place]:
        """The places that the trace read in objects that existed before it."""
        return [place for place in self.places.values() if self.is_before(place.holder)]

    def settled(self, expected: Expected) -> list[Place]:
        """The places that were read, set to expect what they hold now, when the writes are undone.

        Args:
            expected: gives the value to expect of an entry, with INPUT for numbers that are inputs of the program.
        """
        replaced, self._replacements = self._replacements, None  # which refer to this recording
        places = self.read_places() if replaced is None else replaced.places
        for place in places:
            place.settle(lambda holder, key, value: INPUT if (id(holder), key) in self._ignored else expected(holder, key, value))
        return places if replaced is None else replaced.expect()

    def held(self, effects: list[Effect], is_fixed: Callable[[Any], bool], known: Iterable[ObjectPlace]) -> Replacements:
        """Tensors and objects in places where every call may find another. See Note [Replaced objects].

        Args:
            effects: the writes.
            is_fixed: whether a value has another role in the program too: it is an argument, or a result refers to it.
            known: places where calls are known to find another object.
        """
        arguments = set(map(id, self._arguments))
        found = Replacements(
            self.read_places(),
            effects,
            lambda holder: self._owners.get(id(holder), holder),
            lambda value: id(value) in arguments or id(value) in self.asked or is_fixed(value),
            [pair for pair in self.compared if all(map(self.is_before, pair))],
        )
        self._replacements = found.find(self.place_of, known)
        return found

    def effects(self) -> list[Effect]:
        """The writes to objects that existed before the trace, as every call repeats them."""

        def is_read(holder: Any, key: Any) -> bool:
            return (place := self.place_of(holder, key)) is not None and place.has_read(key)

        found = self.journal.effects(self.is_before, is_read) + self.flags.effects(self.is_before)
        self.expect_removed(found)
        return with_late_writes(with_outputs([*found, *left_in_caches(self)], self), self)


@contextmanager
def recorded(
    names: dict[int, str] | None = None, owners: dict[int, Any] | None = None, ignored: set[Any] | None = None
) -> Generator[Recording]:
    """Instrument the functions of the process for `Recording.run`. On exit, restore them, and undo every recorded write.

    Args:
        names: names of objects in messages, by id of the object.
        owners: objects whose attributes a dict holds, by id of the dict.
        ignored: ids of dicts, and (id of a dict, key) of entries, that something else guards and restores.
    """
    recording = Recording(names or {}, owners or {}, ignored or set())
    swapped = _swap.swap(HEAP.functions())
    with forgetting(recording.caches):
        try:
            with texts_needed(recording), HEAP.set_apart(), _observers.trace_functions_apart():
                yield recording
        finally:
            _swap.restore(swapped)
            recording.journal.undo(recording.is_before)


__all__ = ["Recording", "recorded"]

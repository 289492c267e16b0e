"""Records the effects of a call before it happens: reads of its arguments, writes to containers. Refuses calls that no program can repeat.

`note_call` decides by the kind of the callable. Instrumented Python code records its own reads. Of C code and of library functions, the
tables and functions here say what they read and write. By default, all that is passed to them counts as read and possibly written.
"""

from __future__ import annotations

import abc
import builtins
import collections
import copy
import dataclasses
import datetime
import functools
import importlib
import io
import logging
import math
import operator
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from spmd.device._numbers import is_of_host
from spmd.program.find._static import attributes_of, slots_of
from spmd.program.reads._attribute_readers import with_readers
from spmd.program.reads._builtin_attributes import origin_of
from spmd.program.reads._c_methods import note_c_method
from spmd.program.reads._classes import ask_classes, ask_names
from spmd.program.reads._container_methods import CONTAINERS, STORE, update
from spmd.program.reads._copies import note_copy
from spmd.program.reads._definitions import note_inspection, read_text_of
from spmd.program.reads._dropped_objects import let_go_before
from spmd.program.reads._enumerations import note_lookup
from spmd.program.reads._hidden_state import IN_MEMORY
from spmd.program.reads._imports import note_import, note_named_import
from spmd.program.reads._journal import is_environment
from spmd.program.reads._known_items import for_known_items
from spmd.program.reads._late_writes import late_method
from spmd.program.reads._library import is_library, is_recorded, user_frame
from spmd.program.reads._logging_calls import note_logging
from spmd.program.reads._membership import lookup
from spmd.program.reads._memos import Cache, num_keys, read_registry
from spmd.program.reads._nested import any_inside
from spmd.program.reads._noted_sizes import for_noted_sizes
from spmd.program.reads._number_calls import (
    for_numbers,
    holds_lifted,
    is_converted,
    is_lifted,
    known,
    matched_value,
    needs_known,
    require_known_name,
    with_known,
)
from spmd.program.reads._ordering import with_key_function
from spmd.program.reads._outside import question_of, questions_of_files
from spmd.program.reads._parts import inherits_state, is_sized
from spmd.program.reads._pending_calls import for_pending
from spmd.program.reads._pending_outputs import only_writes_to, require_no_late_output
from spmd.program.reads._plain_numbers import limited_deque
from spmd.program.reads._pointed_memory import require_no_address
from spmd.program.reads._process_only import ADDRESSES, question_of_hashes, questions_of_output
from spmd.program.reads._process_settings import TEXTS, questions_of_call, setting_of_call
from spmd.program.reads._questions import INSTEAD, why_not_repeated
from spmd.program.reads._random_generators import question_of_generator
from spmd.program.reads._source_text import note_source
from spmd.program.reads._tensor_numbers import for_tensors
from spmd.program.reads._trace_errors import refused
from spmd.program.reads._varying import (
    NumberMethod,
    NumbersNeeded,
    Varying,
    fixed,
    fixed_if_varying,
    is_sequence,
    is_varying,
    with_fixed_keys,
)
from spmd.program.reads._varying_calls import conversion, only_reads, substitute
from spmd.program.reads._varying_index import for_items

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

# these read only the class of an argument
_NO_READS = frozenset(map(id, (builtins.isinstance, builtins.issubclass, builtins.type, builtins.id, builtins.super, builtins.callable)))
_OF_CLASSES = ("__instancecheck__", "__subclasscheck__")
_ASK_CLASSES = (builtins.isinstance, builtins.issubclass, builtins.callable)
_SHALLOW = frozenset(
    map(id, (len, bool, iter, list, tuple, enumerate, zip, reversed, range))  # do not read the content of the items
)
# these take one number
_OF_A_NUMBER = frozenset(map(id, (int, round, str, repr, format, math.floor, math.ceil, math.trunc)))
_NEED_VALUES = frozenset(map(id, (int, round, str, repr, format)))  # the others have an equivalent on the device
_CLOCKS = frozenset(
    id(getattr(time, n))
    for n in dir(time)
    if n.startswith(("time", "perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime"))
) | set(map(id, (time.localtime, time.gmtime, time.ctime)))
_CONCURRENT = {  # functions that run code in another thread or process, by package: it may wait for the trace, which waits for it
    "threading": ("start",),
    "_thread": ("start_new_thread",),
    "concurrent": ("submit", "map"),
    "multiprocessing": ("start", "apply", "apply_async", "map", "map_async", "starmap", "starmap_async", "imap", "imap_unordered"),
    "asyncio": ("run", "to_thread", "run_in_executor", "run_until_complete"),
    "subprocess": ("run", "call", "check_call", "check_output", "getoutput", "getstatusoutput"),
    "os": ("popen",),
    os.name: ("system",),
}
_NOT_REPEATED = {"secrets": "random numbers of the host", "uuid": "random numbers of the host"}
_IN_C = frozenset((types.BuiltinFunctionType, type, np.ufunc, type(np.sum)))


def note_call(recording: Recording, fn: Any, args: tuple[Any, ...]) -> Any:
    """Record what a call of `fn` reads and writes. Returns the callable to use instead: `fn`, or one that takes the numbers among `args`.

    Raises:
        TraceError: no program can repeat the call.
        TraceAgain: the trace has to be repeated with other settings.
    """
    if (instead := _with_numbers(recording, fn, args)) is not None:
        return instead
    if type(fn) in _IN_C and (of_noted := for_noted_sizes(fn, args)) is not None:
        return of_noted
    return _record(recording, fn, args)


def _record(recording: Recording, fn: Any, args: tuple[Any, ...]) -> Any:
    """The same, for arguments that `fn` takes as they are."""
    kind = type(fn)
    inner = fn.__dict__.get("_torchdynamo_orig_callable") if kind is types.FunctionType else None
    if inner is not None:  # a function of torch.compile: the original runs inline, as part of this trace
        return note_call(recording, inner, args)
    if kind is types.MethodType and isinstance(fn.__func__, functools._lru_cache_wrapper):
        return functools.partial(note_call(recording, fn.__func__, (fn.__self__, *args)), fn.__self__)
    let_go_before(recording, fn, args)
    files = questions_of_files(fn, args)
    require_no_late_output(recording, fn, args, files)
    recording.ask_all((*questions_of_call(fn, args), *questions_of_output(fn, args), *files))
    if id(fn) in TEXTS:
        read_text_of(recording, args[0] if args else None)
    if (setting := setting_of_call(fn, args)) is not None:
        recording.set_setting(setting)
    if (instead := INSTEAD.get(id(fn))) is not None:
        return instead
    if kind is types.MethodType and isinstance(fn.__func__, (types.MethodDescriptorType, types.WrapperDescriptorType)):  # in C
        _record(recording, fn.__func__, (fn.__self__, *args))
    elif kind is types.MethodType:
        _python_function(recording, fn.__func__, (fn.__self__, *args))
        recording.read_function(fn)
    elif kind is types.FunctionType:
        _python_function(recording, fn, args)
    elif kind is types.BuiltinFunctionType and fn.__name__ == "update" and isinstance(fn.__self__, dict):
        return functools.partial(update, recording, fn)
    elif isinstance(fn, (types.BuiltinFunctionType, types.MethodWrapperType)):  # a method that gets its class has a type of its own
        _builtin_function(recording, fn, args)
    elif kind is types.MethodDescriptorType or kind is types.WrapperDescriptorType:
        if args:
            note_c_method(recording, args[0], fn.__name__, args[1:])
    elif isinstance(fn, type):
        _class_call(recording, fn, args)
        if fn in (dict, set, frozenset) and any(map(_lists_varying, args)):
            return lambda *given, **options: with_fixed_keys(fn(*given, **options))
    elif isinstance(fn, functools.partial):
        for part in ("func", "args"):
            recording.read_c_attribute(fn, part)
        recording.read_content(recording.owned(fn, fn.keywords))
        inner = note_call(recording, fn.func, (*fn.args, *args, *fn.keywords.values()))
        return fn if inner is fn.func else functools.partial(inner, *fn.args, **fn.keywords)
    elif origin_of(fn) is not fn:  # `Holder[int](...)`
        note_call(recording, fn.__origin__, args)
    elif isinstance(fn, functools._lru_cache_wrapper):
        recording.read_deep(args)
        recording.read_function(getattr(fn, "__wrapped__", None))
        return functools.partial(recording.caches.setdefault(id(fn), Cache(fn)).call, recording)
    elif not is_recorded(kind.__module__):
        _library_object(recording, fn, args)
    else:
        recording.read_class_of(fn)
    return fn


def _library_object(recording: Recording, fn: Any, args: tuple[Any, ...]) -> None:
    """Record a call of an object of a library's class."""
    require_no_address(fn, args)
    if type(fn).__module__ == "unittest.mock":
        recording.use_up(fn, "called, which it notes")
    recording.ask(fn, question_of(fn, args))
    recording.read_deep(args)
    if not isinstance(fn, torch.nn.Module):
        recording.read_deep(fn)


def _with_numbers(recording: Recording, fn: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The callable to use where `fn` receives or returns numbers that are inputs, or that only the device knows; None if `fn` does."""
    instead = for_known_items(fn, args) or late_method(recording, fn, args) or for_tensors(recording, fn, args, note_call)
    instead = instead or limited_deque(recording, fn, args, _record)
    instead = instead or for_pending(recording, fn, args, _takes_varying, _record) or with_key_function(recording, fn, args)
    if (instead := instead or with_readers(recording, fn, args)) is not None:
        return instead
    if (instead := _call_with_varying(recording, fn, args)) is not None:
        return instead
    if fn is len and len(args) == 1 and is_sized(args[0]):
        return recording.read_length
    if args and isinstance(args[0], torch.SymFloat):
        if id(fn) == id(float) and is_of_host(args[0]) and args[0].node.kind is float:
            return lambda number: number  # a learning rate stays an input
        if id(fn) in _OF_A_NUMBER and is_of_host(args[0], asks=id(fn) in _NEED_VALUES):
            return lambda number, *more, **options: fn(known(number), *more, **options)
    if is_converted(fn, args):
        return for_numbers(fn)
    if (converted := conversion(fn, args)) is not None:
        recording.read_class_of(args[0])
        return converted
    if type(fn) is Varying:
        return fn.concrete()
    if any(map(is_lifted, args)) and (own := for_numbers(fn)) is not fn:
        note_call(recording, fn, tuple(a for a in args if not is_lifted(a)))
        return own
    return with_known(fn) if any(type(a) is dict for a in args) and needs_known(fn) and any(map(holds_lifted, args)) else None


def _call_with_varying(recording: Recording, fn: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The callable to use where `fn` or its arguments have varying numbers, with its reads recorded; None if `fn` takes them."""
    if type(fn) is NumberMethod:
        return fn.vary
    if args and is_varying(args[0]) and getattr(fn, "__name__", "") in _KEYED and isinstance(getattr(fn, "__self__", None), CONTAINERS):
        note_call(recording, fn, (fixed(args[0]), *args[1:]))
        return lambda key, *rest: fn(fixed(key), *rest)
    if (instead := lookup(recording, fn, args)) is not None:
        return instead
    if (instead := for_items(fn, args, recording.fixes_indices)) is not None:
        return instead
    if any(map(is_varying, args)) and any(map(is_varying, args[: (num_fixed := num_keys(fn))])):
        chosen = note_call(recording, fn, (*map(fixed_if_varying, args[:num_fixed]), *args[num_fixed:]))
        return lambda *given, **options: chosen(*map(fixed_if_varying, given[:num_fixed]), *given[num_fixed:], **options)
    return _with_varying(recording, fn, args) if any(map(_holds_varying, args)) else None


def _with_varying(recording: Recording, fn: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The callable to use when some arguments vary, with its reads recorded; None if `fn` takes them."""
    if (fn is collections.Counter or type(getattr(fn, "__self__", None)) is collections.Counter) and is_sequence(args[0]):
        note_call(recording, fn, (keys := list(map(fixed_if_varying, args[0])), *args[1:]))
        return lambda _, **counts: fn(keys, **counts)
    if _takes_varying(fn):
        return None
    if getattr(fn, "__module__", None) in _KEEP_NUMBERS and not fn.__name__.startswith("bisect"):
        raise NumbersNeeded
    given = substitute(fn, args)
    if given is not None:
        for listed in (lists := [a for a in args if _lists_varying(a)] if only_reads(fn) else []):
            recording.read_content(listed)
        _record(recording, fn, tuple(a.evaluate() if type(a) is Varying else a for a in args if all(a is not b for b in lists)))
    return given


def _lists_varying(value: Any) -> bool:
    return is_sequence(value) and any(map(_holds_varying, value))


def _holds_varying(value: Any) -> bool:
    return any_inside(value, is_sequence, lambda part: type(part) is Varying)


def _takes_varying(fn: Any) -> bool:
    """Whether `fn` takes varying numbers: instrumented code, and functions that only store their arguments."""
    if any(fn is copies for copies in _COPY) or fn is types.SimpleNamespace:
        return True
    if isinstance(fn, (types.FunctionType, types.MethodType)):
        of_tuple = getattr(fn, "__self__", None) if fn.__name__ in ("_replace", "_make") else None
        module = getattr(fn, "__module__", "builtins")  # a bound method of C has none
        return is_recorded(module) or hasattr(of_tuple, "_fields") or fn is torch.func.functional_call  # passes them to a module
    if isinstance(fn, type):
        return fn in (list, tuple, set, frozenset, *_STORES) or (is_recorded(fn.__module__) and fn.__module__ != "builtins")
    if isinstance(fn, functools.partial):
        return _takes_varying(fn.func)
    call = getattr(type(fn), "__call__", None)  # noqa: B004 - an instance whose class has one: a module, a schedule
    if isinstance(call, types.FunctionType):
        return is_recorded(call.__module__)
    owner = getattr(fn, "__self__", None)
    name = getattr(fn, "__name__", "")
    if type(owner) is types.GeneratorType:  # its code is that of the function that made it
        return name == "send" and owner.gi_frame is not None and is_recorded(owner.gi_frame.f_globals.get("__name__"))
    return (isinstance(owner, CONTAINERS) and name in STORE) or name in ("setattr", "__setattr__")


_STORES = (dict, collections.deque, collections.OrderedDict, collections.defaultdict)  # classes that store what they are given
# these copy what they are given, and store varying numbers as they are
_COPY = (dataclasses.replace, dataclasses.asdict, dataclasses.astuple, dataclasses.fields, copy.copy, copy.deepcopy)
_KEEP_NUMBERS = ("_heapq", "_bisect", "heapq", "bisect")  # C code that stores numbers in the caller's lists, except for searches
_KEYED = frozenset(("setdefault", "__setitem__", "insert"))  # methods whose first argument is a key


def _python_function(recording: Recording, fn: types.FunctionType, args: tuple[Any, ...]) -> None:
    """Record a call of a function in Python: of a library's, the reads of its arguments."""
    if is_recorded(fn.__module__):
        recording.read_function(fn)
        read_registry(recording, fn, args)
        return
    if fn.__module__ in _NOT_REPEATED and fn.__name__ not in ("uuid3", "uuid5"):  # these two are hashes
        raise refused(f"{fn.__module__}.{fn.__name__}(): {_NOT_REPEATED[fn.__module__]}")
    if fn.__module__ == "os" and fn.__name__ in ("getenv", "getenvb"):
        recording.read_content(fn.__globals__["environ"])
    _refuse_by_name(fn)
    require_no_address(fn, args)
    if fn is importlib.import_module:
        note_named_import(recording, *args)
    if fn is logging.addLevelName:
        for names in (logging._levelToName, logging._nameToLevel):
            recording.mutate(recording.owned(logging, names))
    if fn.__name__ == "register" and fn.__module__ == "abc" and not issubclass(args[1], args[0]):
        raise refused(f"{args[0].__qualname__}.register({args[1].__qualname__}): no call can undo it")
    if fn.__name__ == "dispatch" and fn.__module__ == "functools":
        for cell in fn.__closure__ or ():
            recording.read_content(cell.cell_contents)
    if fn.__module__ in ("logging", "logging.handlers"):
        note_logging(recording, fn, args)
    if args:
        _note_method(recording, fn.__name__, args[0])
        note_inspection(recording, fn, args)
        note_copy(recording, fn, args)
    recording.ask(fn, question_of(fn, args))
    is_ours = fn.__module__.partition(".")[0] in ("spmd", "mesh")
    for arg in args:
        if not (is_ours and isinstance(arg, (torch.nn.Module, torch.optim.Optimizer))):  # our functions read only its tensors
            recording.read_deep(arg, asks_identity=not (fn in _COPY or fn.__name__ in ("_replace", "_asdict")))


def _refuse_by_name(fn: Any) -> None:
    if (why := why_not_repeated(fn.__name__, fn.__module__ or "")) is not None:
        raise refused(f"{fn.__module__}.{fn.__qualname__}(): {why}")
    if fn.__name__ in _CONCURRENT.get((fn.__module__ or "").partition(".")[0], ()):
        raise refused(f"{fn.__module__}.{fn.__qualname__}(): code that runs in another thread, event loop or process")


def _note_method(recording: Recording, name: str, owner: Any) -> None:
    """Record the writes of those library methods whose effect other code reads as an attribute or an item."""
    if is_environment(owner) and name in ("pop", "popitem", "update", "setdefault", "clear"):
        recording.mutate(owner)
    if (question := question_of_generator(name, owner)) is not None:
        recording.ask_all([question])
    if isinstance(owner, threading.Event):
        recording.load_attr(owner, "_flag")
        if name in ("set", "clear"):
            recording.store_attr(owner, "_flag")
    elif isinstance(owner, RemovableHandle) and name in ("remove", "__exit__"):
        for handle in getattr(owner, "handles", (owner,)):  # a handle of several hooks has a handle for each
            for registry in (ref() for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref)):
                if registry is not None and handle.id in registry:
                    recording.delete_item(registry, handle.id)


def _builtin_function(recording: Recording, fn: Any, args: tuple[Any, ...]) -> None:
    """Record a call of a builtin function, or of a builtin method bound to its object."""
    owner = fn.__self__
    if id(fn) in _NO_READS:
        if fn is builtins.id:
            recording.require_no_key(*args)
            recording.ask_identity(*args)
            recording.ask(fn, ADDRESSES)
        if args and fn in _ASK_CLASSES:
            ask_classes(recording, fn, args)
        return
    if (
        (id(fn) in _CLOCKS and not (args and args[0] is not None and fn in (time.localtime, time.gmtime, time.ctime)))
        or fn is os.urandom
        or (fn in (time.strftime, time.asctime) and len(args) == (fn is time.strftime))
        or (isinstance(owner, type) and issubclass(owner, datetime.date) and fn.__name__ in ("now", "utcnow", "today"))
    ):
        raise refused(f"{fn.__qualname__}(): {'random numbers of the host' if fn is os.urandom else 'a clock'}")
    if owner is None or isinstance(owner, types.ModuleType):
        _refuse_by_name(fn)
        _module_function(recording, fn, args)
    elif isinstance(owner, type):
        require_no_address(fn, args)
        if (owner is object and fn.__name__ == "__new__") or fn.__name__ in _OF_CLASSES:
            return
        if fn.__name__ == "__subclasses__":
            ask_names(recording, owner, "the subclasses", fn)
        for arg in args:
            recording.read_deep(arg)
    else:
        note_c_method(recording, owner, fn.__name__, args)


def _module_function(recording: Recording, fn: Any, given: Sequence[Any]) -> None:
    """Record a call of a function of a C module."""
    args: Any = given
    recording.ask(fn, question_of(fn, args))
    note_copy(recording, fn, args)
    if fn is builtins.__import__ and len(args) < 5:
        note_import(recording, args[0], 0, None, None)
    if fn is builtins.__build_class__:
        recording.load_attr(builtins, "__build_class__")
    if (fn is builtins.eval or fn is builtins.exec) and not any(isinstance(arg, dict) for arg in args[1:]):
        note_source(recording, args[0], user_frame(sys._getframe()))
    if fn is builtins.hash:
        recording.require_no_key(*args)
        recording.ask_identity(*args)
        recording.ask(fn, question_of_hashes(args))
    elif (fn is operator.is_ or fn is operator.is_not) and len(args) == 2:
        recording.note_pair(*args)
    if fn in (builtins.getattr, builtins.hasattr) and len(args) >= 2 and isinstance(args[1], str):
        require_known_name(args[0], args[1])
        recording.load_attr(args[0], args[1])
    elif fn in (builtins.setattr, builtins.delattr) and isinstance(args[1], str):
        (recording.store_attr if fn is builtins.setattr else recording.delete_attr)(args[0], args[1])
    elif fn is builtins.next:
        recording.advance(args[0], "advanced by next()")
    elif fn is builtins.vars or fn is builtins.dir:
        for arg in args:
            if fn is builtins.dir and isinstance(type(arg).__dir__, types.MethodDescriptorType):
                ask_names(recording, arg, "the names", functools.partial(dir, arg))
            elif fn is builtins.dir:
                recording.read_deep(arg)
            recording.load_attr(arg, "__dict__")
            attributes = getattr(arg, "__dict__", None)
            if attributes is not None:
                recording.read_content(attributes)
    elif fn is builtins.globals or fn is builtins.locals:
        return
    elif id(fn) in _SHALLOW:
        for arg in args:
            recording.iterate(arg)
    else:
        if fn is builtins.print and isinstance(sys.stdout, IN_MEMORY) and not any(isinstance(arg, io.IOBase) for arg in args):
            recording.mutate(sys.stdout)
        for arg in args:
            if not only_writes_to(fn, arg):
                recording.read_deep(arg)


def note_operand(recording: Recording, value: Any) -> None:
    """Record what the operators of a class of Python's library read of an object of a class of the user's that inherits from it."""
    if inherits_state(type(value)):
        recording.read_deep(value)
        if any(type(held) is Varying for held in (*(attributes_of(value) or {}).values(), *slots_of(value).values())):
            raise NumbersNeeded


def note_match(recording: Recording, value: Any, cls: type, names: tuple[str, ...], num_positional: int) -> Any:
    """Record what `case cls(...)` reads of a value. Returns the value to use instead."""
    ask_classes(recording, isinstance, (value, cls))
    value = matched_value(value.concrete() if type(value) is Varying else value, bool(num_positional or names))
    if num_positional:
        recording.load_attr(cls, "__match_args__")
    if isinstance(value, cls):
        for name in (*getattr(cls, "__match_args__", ())[:num_positional], *names):
            recording.load_attr(value, name)
    return value


def _class_call(recording: Recording, cls: type, args: tuple[Any, ...]) -> None:
    """Record a call of a class."""
    if id(cls) in _NO_READS:
        if cls is type and len(args) == 1:
            ask_classes(recording, cls, args)
        elif cls is type:
            recording.read_deep(args)
        return
    if id(cls) in _SHALLOW:
        for arg in args:
            recording.iterate(arg)
        return
    if cls is types.SimpleNamespace:
        return
    if not is_recorded(cls.__module__):
        if cls is weakref.finalize or (issubclass(cls, weakref.ref) and len(args) == 2 and args[1] is not None):
            raise refused(f"weakref.{cls.__name__}() with a function, which runs when the trace drops the object")
        recording.ask(cls, question_of(cls, args))
        if issubclass(cls, (set, frozenset, collections.Counter)):
            recording.ask_identity(*args)
        for arg in args:
            recording.read_deep(arg, asks_identity=cls not in _STORES)
    else:
        if type(deleter := getattr(cls, "__del__", None)) is types.FunctionType and is_recorded(deleter.__module__):
            raise refused(f"{cls.__qualname__} has a __del__, which runs when the trace drops the object")
        recording.read_special_methods(cls)
        note_lookup(recording, cls, args)
        if isinstance(cls, abc.ABCMeta):
            recording.load_attr(cls, "__abstractmethods__")
        for name in ("__new__", "__init__"):
            recording.load_attr(cls, name)
        makers = (getattr(type(cls), "__call__", None), cls.__new__, cls.__init__)  # noqa: B004 - the function of the metaclass
        if any(type(fn) is types.FunctionType and is_library(fn.__module__) and not is_recorded(fn.__module__) for fn in makers):
            recording.read_classes(cls)

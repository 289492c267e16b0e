"""Takes containers, objects, functions and weak references that a trace created into parts, from which every call creates them anew.

Tensors are left to the caller (`_output_tree`). An object that cannot be taken apart is copied by every call if its copy is another object;
otherwise all calls share it.
"""

from __future__ import annotations

import _thread
import collections
import copy
import functools
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch

from spmd.base._torch import pytree
from spmd.program.find._objects import is_object
from spmd.program.find._static import attributes_of, is_python_class, slots_of
from spmd.program.reads import Pending, Varying, code_of, is_library
from spmd.program.trace._array_parts import array_parts
from spmd.program.trace._exception_parts import exception_parts

# A constructor of the empty object, or None if it can only be created with its parts; (empty object or None, parts) -> object; the parts.
ObjectParts = tuple[Callable[[], Any] | None, Callable[[Any, list[Any]], Any], Sequence[Any]]

_COLLECTIONS = (collections.Counter, collections.UserDict, collections.UserList, collections.ChainMap)
_OF_LIBRARIES = ("queue", "threading", "string", "textwrap")  # standard modules whose objects are taken apart too
_NOT_APART = (threading.Thread, threading.local)
_CONTAINERS = (dict, list, set, collections.deque)
_RANDOM = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_PROXIES = frozenset(weakref.ProxyTypes)
_VIEWS = {type(getattr(cls(), name)()): name for cls in (dict, collections.OrderedDict) for name in ("keys", "values", "items")}
RUNNING = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, map, filter, zip, enumerate, reversed)
_MAY_HAVE_ATTRIBUTES = (collections.OrderedDict,)
_MAX_LOOKS = 10_000
_LOCK, _RLOCK = type(_thread.allocate_lock()), type(threading.RLock())


def parts_of(value: Any) -> ObjectParts | None:
    """The parts of a container, and the functions that create it from them; None if `value` cannot be taken apart."""
    return _parts_of(value, type(value))


def _parts_of(value: Any, cls: Any) -> ObjectParts | None:
    if cls is Pending:
        compute = value.computes()
        return None, lambda _, parts: compute(parts), value.parts
    if cls is list:
        return list, list.extend, list(value)
    if cls in _MAY_HAVE_ATTRIBUTES and attributes_of(value):  # `state_dict()` returns one with attributes
        return _object_parts(value, cls)
    if cls is dict or cls is collections.OrderedDict:
        return cls, _fill_dict, _pairs(value)
    if cls is collections.deque:
        return functools.partial(cls, maxlen=value.maxlen), cls.extend, list(value)
    if cls is tuple or (cls not in _PROXIES and isinstance(value, tuple) and hasattr(cls, "_fields")):
        return None, lambda _, parts: cast(Any, tuple).__new__(cls, parts), list(value)
    if cls is set:
        return set, set.update, list(value)
    if cls is frozenset:
        return None, lambda _, parts: frozenset(parts), list(value)
    if cls is collections.defaultdict:
        return _object_parts(value, cls)
    if cls is np.ndarray:
        return array_parts(cast(Any, value))
    if cls is bytearray:
        return (lambda: copy.copy(value)), (lambda made, parts: made), ()
    if cls in (types.FunctionType, types.CellType, types.MethodType, functools.partial, staticmethod, classmethod, property):
        return _code_parts(value, cls)
    if (found := _shown_parts(value, cls)) is not None:
        return found
    if issubclass(cls, BaseException):
        return exception_parts(cast(BaseException, value))
    if not pytree.tree_is_leaf(value):
        parts, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
        return None, lambda _, parts: pytree.tree_unflatten(parts, spec), parts
    if isinstance(value, _NOT_APART):
        return None
    is_of_library = isinstance(value, _COLLECTIONS) or cls.__module__ in _OF_LIBRARIES
    is_module = isinstance(value, torch.nn.Module)
    return _object_parts(value, cls) if is_module or is_object(value) or is_of_library else None


def is_proxy(value: Any) -> bool:
    """Whether a value is a weak proxy. `isinstance` sees the class of its referent."""
    return type(value) in _PROXIES


def copied_parts(value: Any) -> ObjectParts | None:
    """A copy for every call, for an object that cannot be taken apart.

    None if it cannot be copied, or if a copy is the same object or shares a container with it.
    """
    cls: Any = type(value)
    if isinstance(value, (type, *RUNNING)) or str(cls.__module__).partition(".")[0] not in sys.stdlib_module_names | {"numpy"}:
        return None
    try:
        copied = copy.deepcopy if isinstance(value, _RANDOM) else copy.copy
        kept = copied(value)
    except Exception:  # a class can raise anything when it refuses to be copied
        return None
    if kept is value or (copied is copy.copy and _shares_content(kept, value)):
        return None
    return (lambda: copied(kept)), _as_made, ()


def _shares_content(kept: Any, value: Any) -> bool:
    """Whether a copy has an attribute that is the same container as in the original."""
    held = attributes_of(kept) or {}
    return any(held.get(name) is part and isinstance(part, _CONTAINERS) for name, part in (attributes_of(value) or {}).items())


def holds_varying(value: Any, is_before: Callable[[Any], bool]) -> bool:
    """Whether `value`, or any object reachable from it that is new in the trace, is a number that varies."""
    waiting, seen = [value], {id(value)}
    while waiting and len(seen) < _MAX_LOOKS:
        found = waiting.pop()
        if type(found) is Varying:
            return True
        if isinstance(found, (torch.Tensor, types.ModuleType, types.FrameType)):
            continue
        for part in gc.get_referents(found):
            if id(part) not in seen and (type(part) is Varying or (gc.is_tracked(part) and not is_before(part))):
                seen.add(id(part))
                waiting.append(part)
    return False


def existing_within(values: Iterable[Any], is_before: Callable[[Any], bool]) -> dict[int, Any]:
    """The objects from before the trace, by id, that objects of the trace refer to."""
    found: dict[int, Any] = {}
    waiting = list(values)
    seen = set(map(id, waiting))
    while waiting:
        for part in gc.get_referents(waiting.pop()):
            if id(part) not in seen and gc.is_tracked(part):
                seen.add(id(part))
                if is_before(part):
                    found[id(part)] = part
                else:
                    waiting.append(part)
    return found


def _fill_dict(made: dict[Any, Any], parts: list[Any]) -> None:
    made.update(zip(parts[::2], parts[1::2], strict=True))


def _pairs(value: dict[Any, Any]) -> list[Any]:
    return [part for pair in value.items() for part in pair]


def _shown_parts(value: Any, cls: Any) -> ObjectParts | None:
    """The parts of views, bound methods of builtins, weak references, slices and locks."""
    if cls is types.MappingProxyType:
        return None, lambda _, parts: types.MappingProxyType(parts[0]), gc.get_referents(value)
    if cls in _VIEWS:
        return None, lambda _, parts: getattr(parts[0], _VIEWS[cls])(), gc.get_referents(value)
    if cls in (types.BuiltinMethodType, types.MethodWrapperType):
        owner = value.__self__
        return None if owner is None or isinstance(owner, (type, types.ModuleType)) else (None, _method_of(value.__name__), [owner])
    if cls is weakref.ReferenceType or cls in _PROXIES:
        refer = weakref.ref if cls is weakref.ReferenceType else weakref.proxy
        referent = value() if cls is weakref.ReferenceType else _behind(value)
        callback = value.__callback__ if cls is weakref.ReferenceType else None
        return None if referent is None else (None, lambda _, parts: refer(*parts), [referent, *([callback] if callback else [])])
    if cls is slice:
        return None, lambda _, parts: slice(*parts), [value.start, value.stop, value.step]
    if cls is _LOCK or cls is _RLOCK:
        return (threading.Lock if cls is _LOCK else threading.RLock), _as_held if "unlocked" not in repr(value) else _as_made, ()
    return None


def _as_made(made: Any, parts: list[Any]) -> Any:
    return made


def _as_held(lock: Any, parts: list[Any]) -> Any:
    lock.acquire()
    return lock


def _method_of(name: str) -> Callable[[Any, list[Any]], Any]:
    return lambda _, parts: getattr(parts[0], name)


def _behind(proxy: Any) -> Any:
    try:
        return proxy.__repr__.__self__
    except ReferenceError:
        return None


def _code_parts(value: Any, cls: type) -> ObjectParts | None:
    """The parts of functions, cells, methods, partials and properties."""
    if cls is types.MethodType:
        return None, lambda _, parts: types.MethodType(*parts), [value.__func__, value.__self__]
    if cls is staticmethod or cls is classmethod:
        return None, lambda _, parts: cls(parts[0]), [value.__func__]
    if cls is property:
        return None, lambda _, parts: property(*parts), [value.fget, value.fset, value.fdel, value.__doc__]
    if cls is functools.partial:
        return None, _partial_of, [value.func, value.args, value.keywords, vars(value)]
    if cls is types.CellType:
        try:
            return types.CellType, lambda made, parts: setattr(made, "cell_contents", parts[0]), [value.cell_contents]
        except ValueError:  # empty
            return types.CellType, lambda made, parts: made, []
    if is_library(value.__module__):
        return None
    code, cells, names = code_of(value), list(value.__closure__ or ()), list(vars(value))

    def function(_: Any, parts: list[Any]) -> Any:
        defaults, keywords, *rest = parts
        closure = rest[len(names) :]
        made = types.FunctionType(code, value.__globals__, value.__name__, defaults, tuple(closure) or None)
        made.__kwdefaults__, made.__qualname__, made.__doc__ = keywords, value.__qualname__, value.__doc__
        made.__module__, made.__annotations__ = value.__module__, value.__annotations__
        made.__dict__.update(zip(names, rest, strict=False))
        return made

    return None, function, [value.__defaults__, value.__kwdefaults__, *vars(value).values(), *cells]


def _partial_of(_: Any, parts: list[Any]) -> Any:
    function, args, keywords, attributes = parts
    made = functools.partial(function, *args, **keywords)
    vars(made).update(attributes)
    return made


def _object_parts(value: Any, cls: Any) -> ObjectParts | None:
    """The parts of an object: its attributes, its slots, and the items of the builtin container class that it derives from."""
    own = next((c for c in cls.__mro__ if not is_python_class(c)), object)
    kind = next((kind for kind in _KINDS if issubclass(own, kind)), None) if own is not object else None
    if own is not object and (kind is None or own is not kind):
        return None
    attributes, slots = attributes_of(value) or {}, slots_of(value)
    names, num_slots = list(attributes), len(slots)
    items, start, put = _KINDS[kind](value) if kind is not None else _OBJECT

    def fill(made: Any, parts: list[Any]) -> Any:
        rest = parts[names_end:]
        if made is None:
            made = start(cls, rest)
        held = attributes_of(made)
        if held is not None:
            held.update(zip(names, parts, strict=False))
        for descriptor, part in zip(slots, parts[len(names) :], strict=False):
            descriptor.__set__(made, part)
        if put is not None:
            put(made, rest)
        return made

    names_end = len(names) + num_slots
    is_at_once = kind is not None and put is None
    return None if is_at_once else (lambda: start(cls)), fill, [*attributes.values(), *slots.values(), *items]


# The items; a constructor (class, or class and items if there is no third); and a function that adds the items, or None.
_Kind = tuple[list[Any], Callable[..., Any], Callable[[Any, list[Any]], None] | None]


def _of_dict(own: Any) -> Callable[[Any], _Kind]:
    def kind(value: Any) -> _Kind:
        def put(made: Any, parts: list[Any]) -> None:
            for key, part in zip(parts[::2], parts[1::2], strict=True):
                own.__setitem__(made, key, part)  # without the class's own __setitem__

        return [part for pair in own.items(value) for part in pair], own.__new__, put

    return kind


def _of_default_dict(value: Any) -> _Kind:
    def put(made: Any, parts: list[Any]) -> None:
        made.default_factory = parts[0]
        for key, part in zip(parts[1::2], parts[2::2], strict=True):
            dict.__setitem__(made, key, part)

    return [value.default_factory, *(part for pair in dict.items(value) for part in pair)], collections.defaultdict.__new__, put


def _of_deque(value: Any) -> _Kind:
    def put(made: Any, parts: list[Any]) -> None:
        collections.deque.__init__(made, parts, value.maxlen)

    return list(collections.deque.__iter__(value)), collections.deque.__new__, put


_OBJECT: _Kind = [], object.__new__, None
_KINDS: dict[Any, Callable[[Any], _Kind]] = {
    collections.defaultdict: _of_default_dict,
    collections.OrderedDict: _of_dict(collections.OrderedDict),
    dict: _of_dict(dict),
    list: lambda value: (list(list.__iter__(value)), list.__new__, list.extend),
    set: lambda value: (list(set.__iter__(value)), set.__new__, set.update),
    collections.deque: _of_deque,
    tuple: lambda value: (list(tuple.__iter__(value)), tuple.__new__, None),
    frozenset: lambda value: (list(frozenset.__iter__(value)), frozenset.__new__, None),
    types.SimpleNamespace: lambda value: ([], types.SimpleNamespace.__new__, lambda made, parts: None),
}


__all__ = ["RUNNING", "ObjectParts", "copied_parts", "existing_within", "holds_varying", "is_proxy", "parts_of"]

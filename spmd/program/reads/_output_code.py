"""What output runs or fills that the function may see: handlers and filters of loggers, `showwarning`, files in Python code or in memory.

class Counting(logging.Handler):
    def emit(self, record): self.texts.append(record.getMessage())

Every call runs such code when it ends, and with it all output of the function, in order. So the function must not read what the code may
change, and what the code reads must be what it was when the function made the output. `OwnCode` finds both by the names in the code.
"""

from __future__ import annotations

import array
import collections
import dis
import gc
import inspect
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from spmd.base._errors import TraceAgain
from spmd.program.find._static import attributes_of, slots_of, static_attribute
from spmd.program.reads._hidden_state import IN_MEMORY
from spmd.program.reads._journal import copier_of, is_same_content
from spmd.program.reads._library import is_library, is_recorded
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._places import content_of

if TYPE_CHECKING:
    from spmd.program.reads._questions import Question
    from spmd.program.reads._recorder import Recording
    from spmd.program.trace._trace_settings import TraceSettings

_CONTAINERS = (list, dict, set, collections.deque, bytearray, array.array, *IN_MEMORY)
_CHANGE = frozenset(
    (
        *("append", "appendleft", "extend", "extendleft", "insert", "add", "update", "setdefault", "pop", "popleft", "popitem", "remove"),
        *("discard", "clear", "reverse", "sort", "write", "writelines", "truncate", "seek", "frombytes"),
    )
)
_NOT_LED_THROUGH = (types.ModuleType, types.FunctionType, types.CodeType, type, torch.Tensor, torch.nn.Module, str, bytes)
_RUN_BY_LOGGERS = frozenset(  # libraries add other methods to the class
    name for fn in vars(logging.Logger).values() if isinstance(fn, types.FunctionType) for name in fn.__code__.co_names
)
_MADE_BEFORE = ("__init__", "__new__", "__repr__")  # methods that no output runs
_MOST_OBJECTS = 1_000


class OutputsPutOff(TraceAgain):
    """Output runs code of the user's. In the next trace all output waits for the end of the call.

    `num_written`: number of outputs that the trace has written.
    """

    def __init__(self, num_written: int) -> None:
        super().__init__()
        self._num_written = num_written

    def other_settings(self, settings: TraceSettings) -> TraceSettings:
        return replace(settings, puts_off_outputs=True, num_written=max(settings.num_written, self._num_written))


class OutputsAtOnce(TraceAgain):
    """Output that runs code of the user's cannot wait for the end of the call. The next trace makes it at once, and records the code."""

    def other_settings(self, settings: TraceSettings) -> TraceSettings:
        return replace(settings, puts_off_outputs=False)


class _Place(NamedTuple):
    """A place that the code may read.

    Attributes:
        holder, key: a dict or an object with slots and a key, or a container or closure variable and ABSENT.
        value: what it held when the function made the output.
        may_change: whether the code may change it.
    """

    holder: Any
    key: Any
    value: Any
    may_change: bool

    def is_used(self, recording: Recording) -> bool:
        """Whether the function reads or writes a place that the code may change, or has written it since it made the output."""
        return (self.may_change and self._is_met(recording)) or not is_same_content(_value(self.holder, self.key), self.value)

    def _is_met(self, recording: Recording) -> bool:
        if self.key is ABSENT:
            return recording.has_met(self.holder)
        found = recording.place_of(self.holder, self.key)
        return (found is not None and found.has_read(self.key)) or recording.journal.is_written(self.holder, self.key)


class OwnCode(NamedTuple):
    """The code of the user's that one output runs.

    Attributes:
        objects: the functions, and the objects whose methods they are.
        places: what it may read.
    """

    objects: list[Any]
    places: list[_Place]

    def is_used(self, recording: Recording) -> bool:
        """Whether it cannot run when a call ends: the function has made it, reads what it changes, or changes what it reads."""
        return not all(map(recording.is_before, self.objects)) or any(place.is_used(recording) for place in self.places)


def own_code(fn: Any, args: Iterable[Any]) -> OwnCode | None:
    """The code of the user's that a call of an output function runs, with what it may read now; None if there is none."""
    objects = list({id(value): value for value in _own_objects(fn, args)}.values())
    return OwnCode(objects, list(_places_of(objects))) if objects else None


def question_of_own_code(fn: Any) -> Question:
    """What tells whether a call of an output function runs other code of the user's than before: the functions and objects of that code."""
    name, owner = fn.__name__, getattr(fn, "__self__", None)
    return ("own code", id(owner), name), f"what {name}() runs", partial(_identities, fn, dict[int, Any]())


def _identities(fn: Any, kept: dict[int, Any]) -> tuple[Any, ...]:
    """The ids of the objects of the user's. Files in memory do not count, since a program may have another one in each call.

    `kept`: gets these objects, so that no later one has the id of one of them.
    """
    found = [value.__self__ if type(value) is types.MethodType else value for value in _run_by(fn)]
    own = [value for value in found if _is_own_function(value) or not is_library(type(value).__module__)]
    kept.update((id(value), value) for value in own)
    return tuple(map(id, own))


def _run_by(fn: Any) -> list[Any]:
    """The functions and objects whose code a call of an output function may run, other than its owner and arguments."""
    if fn is warnings.warn:
        found = _of_warnings()
    elif getattr(fn, "__module__", None) == "logging":
        found = _of_logger(getattr(fn, "__self__", None))
    else:
        found = iter([sys.stdout])
    return [inspect.unwrap(value) if type(value) is types.FunctionType else value for value in found]


def _own_objects(fn: Any, args: Iterable[Any]) -> Iterator[Any]:
    owner = getattr(fn, "__self__", None)
    held = attributes_of(owner) or {}
    files = [owner, *(held.get(name) for name in ("fp", "file", "stream")), *files_of_rows(owner)]
    found = _run_by(fn)
    yield from (value for value in (*files, *found, *args) if has_own_write(value))
    yield from (value for value in (*files, *found) if isinstance(value, IN_MEMORY))
    for value in found:
        its = value.__self__ if type(value) is types.MethodType else value
        if _is_own_function(its) or any(True for _ in _methods(its)):
            yield its


def has_own_write(value: Any) -> bool:
    """Whether an object has a method `write` in code of the user's."""
    if isinstance(value, type):
        return False
    write = (attributes_of(value) or {}).get("write") or static_attribute(type(value), "write")
    return _is_own_function(write) and not is_library(type(value).__module__)


def _of_warnings() -> Iterator[Any]:
    """The functions and files that show a warning."""
    shows: list[Any] = [getattr(warnings, name, None) for name in ("showwarning", "formatwarning", "_showwarnmsg", "_showwarnmsg_impl")]
    yield from (sys.stderr, *shows)
    if shows[0] is getattr(logging, "_showwarning", None):  # of `logging.captureWarnings`
        yield from _of_logger(logging.getLogger("py.warnings"))


def _of_logger(logger: Any) -> Iterator[Any]:
    """The objects that a record of a logger passes."""
    yield from (logging.getLogRecordFactory(), sys.stderr)
    logger = logger or logging.root
    while isinstance(logger, logging.LoggerAdapter):
        yield logger
        logger = logger.logger
    while isinstance(logger, logging.Logger):
        yield from (logger, *logger.filters)
        for handler in logger.handlers:
            held = attributes_of(handler) or {}
            yield from (handler, held.get("formatter"), held.get("stream"), held.get("target"), *held.get("filters", ()))
        logger = logger.parent if logger.propagate else None


def files_of_rows(writer: Any) -> list[Any]:
    """The file of a writer of CSV, which only its method `write` refers to."""
    if type(writer).__module__ not in ("csv", "_csv"):
        return []
    return [part.__self__ for part in gc.get_referents(getattr(writer, "writer", writer)) if hasattr(part, "__self__")]


def _is_own_function(value: Any) -> bool:
    return type(value) in (types.FunctionType, types.MethodType) and is_recorded(value.__module__)


def _methods(value: Any) -> Iterator[types.FunctionType]:
    """The functions of the user's that an object has as methods or attributes."""
    if value is None or isinstance(value, _NOT_LED_THROUGH):
        return
    held = [(attributes_of(value) or {}).items(), *(vars(cls).items() for cls in type(value).__mro__ if cls is not object)]
    for name, found in (item for items in held for item in items):
        fn = found.__func__ if type(found) is types.MethodType else found
        is_run = name in _RUN_BY_LOGGERS if isinstance(value, logging.Logger) else name not in _MADE_BEFORE
        if is_run and type(fn) is types.FunctionType and _is_own_function(fn):
            yield fn


class _Names(NamedTuple):
    """The names in a function: attributes that it loads and sets, global and closure variables that it loads and sets."""

    loaded: frozenset[str]
    stored: frozenset[str]
    variables: frozenset[str]
    changes: bool  # whether it may change a container


@cache
def _names(code: types.CodeType) -> _Names:
    loaded, stored, changes = set[str](), set[str](), False
    variables = set[str]()
    for step in dis.get_instructions(code):
        kind, name = step.opname, str(step.argval)
        if kind in ("STORE_ATTR", "DELETE_ATTR"):
            stored.add(name)
        elif kind in ("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL", "DELETE_DEREF"):
            variables.add(name)
        elif kind in ("LOAD_ATTR", "LOAD_METHOD"):
            loaded.add(name)
        changes = changes or kind in ("STORE_SUBSCR", "DELETE_SUBSCR") or name in _CHANGE
    for its in (_names(inner) for inner in code.co_consts if type(inner) is types.CodeType):
        loaded, stored, variables, changes = loaded | its.loaded, stored | its.stored, variables | its.variables, changes or its.changes
    return _Names(frozenset(loaded), frozenset(stored), frozenset(variables), changes)


def _places_of(objects: list[Any]) -> Iterator[_Place]:
    """What the code of objects may read: attributes by the names in it, variables of its functions, and containers in these."""
    functions = _functions_of(objects)
    names = [_names(_code_of(fn)) for fn in functions]
    stored = frozenset[str]().union(*(each.stored for each in names))
    named, changes = stored.union(*(each.loaded for each in names)), any(each.changes for each in names)
    waiting: list[Any] = [value for value in objects if not isinstance(value, types.FunctionType)]
    for fn, its in zip(functions, names, strict=True):
        for name, holder, key in _variables_of(fn):
            value = _value(holder, key)
            yield _Place(holder, key, value, name in its.variables)
            waiting.append(value)
    done = dict[int, Any]()
    while waiting and len(done) < _MOST_OBJECTS:
        value = waiting.pop()
        if id(value) in done or value is None or isinstance(value, _NOT_LED_THROUGH):
            continue
        done[id(value)] = value
        if isinstance(value, _CONTAINERS):
            yield _Place(value, ABSENT, _value(value, ABSENT), changes or any(value is each for each in objects))
        if isinstance(value, (tuple, list, dict, collections.deque)):
            waiting += dict.values(value) if isinstance(value, dict) else value
        if (attributes := attributes_of(value)) is not None:
            held = [name for name in named if name in stored or name in attributes]
            yield from (_Place(attributes, name, _value(attributes, name), name in stored) for name in held)
            waiting += [attributes.get(name) for name in held]
        slots = {descriptor.__name__: item for descriptor, item in slots_of(value).items() if descriptor.__name__ in named}
        yield from (_Place(value, name, item, name in stored) for name, item in slots.items())
        waiting += slots.values()


def _functions_of(objects: list[Any]) -> list[types.FunctionType]:
    """The functions of the user's that are called there, as far as their names say."""
    found = dict[int, types.FunctionType]()
    waiting = [fn for value in objects for fn in ([value] if type(value) is types.FunctionType else _methods(value))]
    while waiting and len(found) < _MOST_OBJECTS:
        fn = waiting.pop()
        if id(fn) not in found:
            found[id(fn)] = fn
            values = [_value(holder, key) for _, holder, key in _variables_of(fn)]
            waiting += [value for value in values if type(value) is types.FunctionType and _is_own_function(value)]
    return list(found.values())


def _variables_of(fn: types.FunctionType) -> Iterator[tuple[str, Any, Any]]:
    """The closure variables and globals that a function names: the name, the holder and the key of each."""
    code = _code_of(fn)
    yield from ((name, cell, ABSENT) for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=False))
    codes = [code, *(inner for inner in code.co_consts if type(inner) is types.CodeType)]
    yield from ((name, fn.__globals__, name) for each in codes for name in each.co_names if name in fn.__globals__)


def _code_of(fn: types.FunctionType) -> types.CodeType:
    from spmd.program.reads._swap import code_of

    return code_of(fn)


def _value(holder: Any, key: Any) -> Any:
    """What a place holds: of a container a copy of its content."""
    if isinstance(holder, dict) and key is not ABSENT:
        return dict.get(holder, key, ABSENT)
    if key is not ABSENT:
        return next((item for descriptor, item in slots_of(holder).items() if descriptor.__name__ == key), ABSENT)
    if type(holder) is types.CellType:
        return content_of(holder)
    copied: tuple[Callable[[], Any], Any] | None = copier_of(holder)
    return ABSENT if copied is None else copied[0]()


__all__ = ["OutputsAtOnce", "OutputsPutOff", "OwnCode", "files_of_rows", "has_own_write", "own_code", "question_of_own_code"]

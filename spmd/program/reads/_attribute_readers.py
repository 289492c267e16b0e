"""`attrgetter`, `methodcaller`, `getattr` and `"{0.name}".format` as values: called, as a key, or given to a function that calls them.

sorted(layers, key=operator.attrgetter("depth"))
functools.reduce(getattr, "encoder.norm".split("."), model)
"{0.name} {1[lr]}".format(model, options)

The attributes, items and methods that they name are recorded.
"""

from __future__ import annotations

import bisect
import builtins
import functools
import heapq
import importlib
import itertools
import json
import operator
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spmd.program.reads._hooks import without_hooks
from spmd.program.reads._library import is_recorded
from spmd.program.reads._places import PLAIN
from spmd.program.reads._tensor_attributes import ASKING
from spmd.program.reads._varying import Varying

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

_string: Any = importlib.import_module("_string")  # the parser of `str.format`
# functions that call one of their arguments, and keep it no longer than the trace
_CALL_IT = frozenset(
    map(
        id,
        (
            *(functools.reduce, itertools.starmap, itertools.groupby, itertools.takewhile, itertools.dropwhile, itertools.filterfalse),
            *(heapq.nlargest, heapq.nsmallest, heapq.merge, bisect.bisect, bisect.bisect_left, bisect.insort, bisect.insort_left),
            *(itertools.accumulate, json.dumps, json.dump, np.apply_along_axis),
        ),
    )
)


def reader(recording: Recording, fn: Any) -> Callable[..., Any] | None:
    """A function that records what `fn` reads, and reads it; None for other functions."""
    kind = type(fn)
    if fn is builtins.getattr:

        def read(owner: Any, name: str, *default: Any) -> Any:
            recording.load_attr(owner, name)
            return getattr(owner, name, *default)

        return read
    if _formats(fn):
        return _formatter(recording, fn.__self__, fn)
    if kind is operator.methodcaller:
        return _caller(recording, fn)
    if kind is not operator.attrgetter:
        return None
    paths = [path.split(".") for path in fn.__reduce__()[1]]
    step: Any = reader(recording, builtins.getattr)

    def get(owner: Any) -> Any:
        found = tuple(functools.reduce(step, path, owner) for path in paths)
        return found[0] if len(paths) == 1 else found

    return get


def is_reader(fn: Any) -> bool:
    """Whether `reader` may give a function for `fn`."""
    return fn is builtins.getattr or type(fn) in (operator.attrgetter, operator.methodcaller) or _formats(fn)


def _formats(fn: Any) -> bool:
    """Whether it is `template.format` where the template names attributes or items."""
    return type(fn) is types.BuiltinMethodType and fn.__name__ in _FORMATS and isinstance(fn.__self__, str) and _has_paths(fn.__self__)


def _caller(recording: Recording, fn: Any) -> Callable[[Any], Any]:
    """What a `methodcaller` does: it calls a method by its name."""
    made = fn.__reduce__()
    options = made[0].keywords if isinstance(made[0], functools.partial) else {}
    name, *given = (*made[0].args, *made[1]) if options else made[1]

    def call(owner: Any) -> Any:
        without_hooks(recording, recording.load_attr, owner, name)
        return _called(recording, getattr(owner, name), *given, **options)

    return call


def _called(recording: Recording, fn: Any, *given: Any, **options: Any) -> Any:
    return without_hooks(recording, recording.call, fn, *given, *options.values())(*given, **options)


_FORMATS = ("format", "format_map")


def _has_paths(template: str) -> bool:
    """Whether a template of `str.format` names attributes or items of what it is given."""
    if "." not in template and "[" not in template:
        return False
    try:
        return any("." in field or "[" in field for field in _fields_in(template))
    except ValueError:  # which `format` raises itself
        return False


def _fields_in(template: str) -> Iterator[str]:
    for _, field, spec, _ in _string.formatter_parser(template):
        if field is not None:
            yield field
            yield from _fields_in(spec)


class _Fields:
    """The values of the fields of a template.

    Attributes:
        values: the values, in the order of the fields.
    """

    def __init__(self, recording: Recording, first: Callable[[Any], Any]) -> None:
        """`first` gives the value of the first name or number of a field."""
        self._recording = recording
        self._first = first
        self._num_unnamed = 0
        self._num_numbered = 0
        self.values: list[Any] = []

    def numbered(self, template: str) -> str:
        """The same template with the numbers of the values as its fields."""
        found: list[str] = []
        for text, field, spec, conversion in _string.formatter_parser(template):
            found.append(text.replace("{", "{{").replace("}", "}}"))
            if field is not None:
                self.values.append(self._value(field))
                number = len(self.values) - 1
                converted = f"!{conversion}" if conversion else ""
                found.append(f"{{{number}{converted}:{self.numbered(spec)}}}" if spec else f"{{{number}{converted}}}")
        return "".join(found)

    def _value(self, field: str) -> Any:
        first, path = _string.formatter_field_name_split(field)
        if isinstance(first, int):
            self._num_numbered += 1
        elif first == "":
            first, self._num_unnamed = self._num_unnamed, self._num_unnamed + 1
        if self._num_numbered and self._num_unnamed:
            raise IndexError("numbers of fields, and fields without one")
        value = self._first(first)
        for is_attribute, name in path:
            if is_attribute:
                without_hooks(self._recording, self._recording.load_attr, value, name)
                value = getattr(value, name)
            else:
                value = _item(self._recording, value, name)
        return value


def _formatter(recording: Recording, template: str, fn: Any) -> Callable[..., str]:
    """What `template.format` or `template.format_map` does: it formats the values of its fields."""

    def form(*given: Any, **named: Any) -> str:
        if fn.__name__ == "format":
            fields = _Fields(recording, lambda first: given[first] if isinstance(first, int) else named[first])
        else:
            fields = _Fields(recording, lambda first: _item(recording, given[0], str(first)))
        try:
            numbered = fields.numbered(template)
        except (IndexError, KeyError):
            return fn(*given, **named)  # raises its own error
        return _called(recording, numbered.format, *fields.values)

    return form


def _item(recording: Recording, holder: Any, name: Any) -> Any:
    key, holder = without_hooks(recording, recording.load_item, holder, name)
    return holder[key]


def with_readers(recording: Recording, fn: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The callable to use where `fn` reads attributes, or calls an argument that does; None for other calls."""
    if fn is not builtins.getattr and (own := reader(recording, fn)) is not None:
        return own
    if id(fn) in ASKING and args:
        recording.load_attr(args[0], fn.__name__)
        return None
    if fn is str.format and args and isinstance(args[0], str) and _has_paths(args[0]):
        return lambda template, *given, **named: _formatter(recording, template, template.format)(*given, **named)
    if type(fn) is types.BuiltinMethodType and fn.__self__ is itertools.chain and args:  # `from_iterable`
        recording.read_deep(args[0])
        return lambda items: fn(map(partial(_noted, recording), items))
    if not (id(fn) in _CALL_IT or _is_sort(fn)) or not any(is_reader(arg) or _is_users(arg) for arg in args):
        return None

    def given(arg: Any) -> Any:
        return _seen(recording, arg) if _is_users(arg) else reader(recording, arg) or arg

    chosen: Any = recording.call(fn, *map(given, args))
    return lambda *items, **options: chosen(*map(given, items), **{name: given(option) for name, option in options.items()})


def _noted(recording: Recording, items: Any) -> Any:
    """A container that code which is not recorded iterates over."""
    without_hooks(recording, recording.iterate, items)
    return items


def _is_users(fn: Any) -> bool:
    return type(fn) is types.FunctionType and is_recorded(fn.__module__)


def _seen(recording: Recording, fn: Any) -> Callable[..., Any]:
    """A function of the user's whose results are given to code that is not recorded: all inside them counts as read."""
    recording.read_function(fn)

    def seen(*given: Any, **options: Any) -> Any:
        found = fn(*given, **options)
        if not isinstance(found, (*PLAIN, torch.Tensor, Varying)):
            without_hooks(recording, recording.read_deep, found)
        return found

    return seen


def _is_sort(fn: Any) -> bool:
    return type(fn) is types.BuiltinMethodType and isinstance(fn.__self__, list) and fn.__name__ == "sort"


__all__ = ["is_reader", "reader", "with_readers"]

"""Takes exceptions that a trace created apart: arguments, cause and context, attributes with notes, slots, and the fields that C keeps.

    try:
        rows = open(path).read()
    except OSError as error:
        self.failed = error   # every call stores an exception of its own, with its errno, filename, __cause__ and __context__

It has no traceback: its frames would be those of the trace.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spmd.program.find._static import attributes_of, is_python_class, slots_of

if TYPE_CHECKING:
    from spmd.program.trace._object_parts import ObjectParts

_NO_FIELDS = ("__suppress_context__", "message", "exceptions")  # set with the context, and by the constructor of a group


def exception_parts(value: BaseException) -> ObjectParts:
    """The parts of an exception, and the functions that create it from them."""
    cls: Any = type(value)
    start: Callable[..., Any] = _class_in_c(cls).__new__
    made_of = [value.message, value.exceptions] if isinstance(value, BaseExceptionGroup) else []
    fields, attributes = _fields_of(value), attributes_of(value) or {}
    puts, names = list(fields), list(attributes)
    # raised while the function handled no exception: its context is the one that the caller handles
    is_of_caller = value.__traceback__ is not None and value.__context__ is sys.exception()
    links = [value.__cause__, None if is_of_caller else value.__context__, value.__suppress_context__]

    def fill(made: Any, parts: list[Any]) -> Any:
        made = start(cls, *parts[: len(made_of)]) if made_of else made
        made.args, made.__cause__, made.__context__, made.__suppress_context__, *rest = parts[len(made_of) :]
        if is_of_caller:
            made.__context__ = sys.exception()
        for put, part in zip(puts, rest, strict=False):
            put(made, part)
        if names:
            made.__dict__.update(zip(names, rest[len(puts) :], strict=True))
        return made

    return None if made_of else (lambda: start(cls)), fill, [*made_of, value.args, *links, *fields.values(), *attributes.values()]


def _class_in_c(cls: Any) -> Any:
    """The class in C that lays an exception's memory out: of several bases it need not be the first."""
    while is_python_class(cls):
        cls = cls.__base__
    return cls


def _fields_of(value: BaseException) -> dict[Callable[[Any, Any], None], Any]:
    """The values of the slots of its classes, and of the fields in C that are set, by the function that sets each.

    A field in C that is not set reads as None, but the text of an exception may depend on whether it is.
    """
    found: dict[Callable[[Any, Any], None], Any] = {}
    holds_none = _num_nones(value) > 0
    for descriptor, part in slots_of(value).items():
        if not is_python_class(descriptor.__objclass__):
            if descriptor.__name__ in _NO_FIELDS:
                continue
            if part is None and not (holds_none and _is_set(value, descriptor)):
                continue
        found[descriptor.__set__] = part
    if isinstance(value, BlockingIOError) and hasattr(value, "characters_written"):
        found[lambda made, part: setattr(made, "characters_written", part)] = value.characters_written
    return found


def _num_nones(value: BaseException) -> int:
    return sum(part is None for part in gc.get_referents(value))


def _is_set(value: BaseException, descriptor: Any) -> bool:
    """Whether a field in C that reads as None is set to it: only then the exception refers to None less often without it."""
    before = _num_nones(value)
    descriptor.__delete__(value)
    if _num_nones(value) == before:
        return False
    descriptor.__set__(value, None)
    return True


__all__ = ["exception_parts"]

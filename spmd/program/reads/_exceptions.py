"""Reads of exceptions from before the call: the fields that C keeps, of which their texts are made, and the exceptions that they refer to.

str(self.failed)                        # OSError: its errno, strerror and filename
traceback.format_exception(self.failed)    # also its cause and context, with their notes
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

from spmd.program.find._static import is_python_class

if TYPE_CHECKING:
    from spmd.program.reads._places_read import PlacesRead

_LINKS = ("__cause__", "__context__", "__suppress_context__")


@functools.cache
def _fields_of(cls: type) -> tuple[str, ...]:
    """The names of the fields in C of an exception class, apart from those of all exceptions."""
    in_c = [base for base in cls.__mro__ if not is_python_class(base) and base is not BaseException]
    return tuple(name for base in in_c for name, found in vars(base).items() if isinstance(found, types.MemberDescriptorType))


def read_exception_text(recording: PlacesRead, value: Any) -> None:
    """Record what the text of an exception is made of, unless a class of the user's makes it, whose code is recorded."""
    for name in ("args", *_fields_of(type(value))):
        recording.read_c_attribute(value, name)


def exceptions_parts(recording: PlacesRead, value: Any) -> list[Any]:
    """Record the content of an exception as read. Returns the objects that a library can reach from it."""
    read_exception_text(recording, value)
    for name in _LINKS:
        recording.read_c_attribute(value, name)
    attributes = recording.attributes(value)
    fields = [getattr(value, name) for name in ("args", *_fields_of(type(value)), *_LINKS)]
    return [*fields, *([] if attributes is None else [attributes])]


__all__ = ["exceptions_parts", "read_exception_text"]

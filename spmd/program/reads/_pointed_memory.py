"""Memory that `ctypes` reaches by its address: refused, because no place says what is there.

ctypes.string_at(address); ctypes.c_int.from_address(address); node.next.contents
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from spmd.program.reads._hidden_state import POINTER
from spmd.program.reads._trace_errors import refused

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

_BY_ADDRESS = frozenset(("string_at", "wstring_at", "from_address", "cast", "memoryview_at"))
_COPY = (ctypes.memmove, ctypes.memset)
_POINTERS = (POINTER, ctypes.c_char_p, ctypes.c_wchar_p, ctypes.c_void_p)


def require_no_address(fn: Any, args: tuple[Any, ...]) -> None:
    """Raise TraceError if a function of `ctypes` is given an address."""
    if any(fn is copies for copies in _COPY):
        is_by_address = any(type(arg) is int for arg in args[: 1 + (fn is ctypes.memmove)])
    else:
        name = getattr(fn, "__name__", "")
        owner = getattr(fn, "__self__", None)
        is_of_ctypes = getattr(fn, "__module__", None) == "ctypes" or (isinstance(owner, type) and hasattr(owner, "from_buffer_copy"))
        is_by_address = name in _BY_ADDRESS and is_of_ctypes and bool(args) and type(args[0]) is int
    if is_by_address:
        raise refused(f"ctypes.{getattr(fn, '__name__', 'memmove')}() of an address")


def note_field(recording: Recording, instance: Any, name: str) -> None:
    """Record the read of a field of a structure or number of `ctypes`."""
    recording._content(instance)
    for field in getattr(type(instance), "_fields_", ()):
        if field[0] == name and isinstance(field[1], type) and issubclass(field[1], _POINTERS):
            recording.use_up(instance, f"followed by its pointer {name}, and no other call can check the memory there")


__all__ = ["note_field", "require_no_address"]

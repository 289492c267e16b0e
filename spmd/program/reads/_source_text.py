"""`eval` and `exec` of a text or of code: the variables of the calling function and its module that the code names are read or written.

scale = eval("1 / (1 + decay * epoch)")   # reads `decay` and `epoch`, and all that is in them
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from spmd.program.find._static import attributes_of, static_attribute
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._places import slot_value

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording


def note_source(recording: Recording, source: Any, frame: types.FrameType) -> None:
    """Record what code that is evaluated in `frame` reads and writes there."""
    _note(recording, source, frame.f_locals, frame.f_globals)


def note_text(recording: Recording, text: str, variables: dict[str, Any]) -> None:
    """Record what a text reads that is evaluated with the variables of a module."""
    _note(recording, text, variables, variables)


def _note(recording: Recording, source: Any, own: Any, variables: dict[str, Any]) -> None:
    if not isinstance(source, types.CodeType):
        try:
            source = compile(source, "<string>", "exec")
        except (SyntaxError, TypeError, ValueError):  # which `eval` raises itself
            return
    for code in _codes_in(source):
        found: list[Any] = []
        for name in code.co_names:
            if name in own and own is not variables:
                found.append(own[name])
            else:
                recording.load_global(variables, name)
                found.append(variables.get(name))
        for value in found:  # and their attributes of these names, which are added to the list
            recording.read_deep(value)
            for name in code.co_names:
                held = _held_by(value, name)
                if held is not ABSENT:
                    recording.load_attr(value, name)
                    if all(held is not other for other in found):
                        found.append(held)
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                recording.store_global(variables, instruction.argval)
            elif instruction.opname in ("STORE_ATTR", "DELETE_ATTR"):
                for value in found:  # of one of these, and a write that changes nothing is not repeated
                    recording.store_attr(value, instruction.argval)


def _held_by(value: Any, name: str) -> Any:
    """The attribute of an object as it is stored, in a slot too; ABSENT if it has none, or computes it."""
    attributes = attributes_of(value) or {}
    found = attributes[name] if name in attributes else static_attribute(value, name, ABSENT)
    if isinstance(found, types.MemberDescriptorType):
        return slot_value(value, found)
    return ABSENT if hasattr(type(found), "__set__") else found


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _codes_in(part)


__all__ = ["note_source", "note_text"]

"""`eval` and `exec` of a text or of code: the variables of the calling function and its module that the code names are read or written.

scale = eval("1 / (1 + decay * epoch)")   # reads `decay` and `epoch`, and all that is in them
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from spmd.program.find._static import attributes_of

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
            attributes = attributes_of(value) or {}
            for name in filter(attributes.__contains__, code.co_names):
                recording.load_attr(value, name)
                if all(attributes[name] is not other for other in found):
                    found.append(attributes[name])
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                recording.store_global(variables, instruction.argval)


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _codes_in(part)


__all__ = ["note_source", "note_text"]

"""Branches of which one side does nothing but raise, found in the code of the function that is about to take one.

    if not valid.all():                    # `side_that_raises(frame)`: it raises if the value is false
        raise ValueError(f"invalid: {x}")

An `assert` is one too. A side that the function itself catches is none. Python 3.11 to 3.13.
"""

from __future__ import annotations

import dis
import functools
import linecache
import os.path
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Raising:
    """The side of a branch that raises.

    Attributes:
        truth: of the value for which the branch goes there.
        kind: the class that it raises.
        text: file, line and source of the branch, on one line.
    """

    truth: bool
    kind: type[Exception]
    text: str


def side_that_raises(frame: types.FrameType) -> Raising | None:
    """The side that raises of the branch whose condition `frame` is just asking for; None if there is no such branch or side."""
    code = frame.f_code
    found = _side_that_raises(code, frame.f_lasti)
    if found is None:
        return None
    truth, names, first, last = found
    loaded = (frame.f_globals.get(name, frame.f_builtins.get(name)) for name in names)
    kind = next((k for k in loaded if isinstance(k, type) and issubclass(k, Exception)), RuntimeError)
    source = " ".join(linecache.getline(code.co_filename, line).strip() for line in range(first, last + 1))
    return Raising(truth, kind, f"{os.path.basename(code.co_filename)}:{first} in {code.co_name}: {source[:300]}")


@functools.cache
def _side_that_raises(code: types.CodeType, offset: int) -> tuple[bool, tuple[str, ...], int, int] | None:
    """(truth that raises, names that the side loads, first and last line) of the conditional jump that the instruction leads to."""
    instructions = list(dis.get_instructions(code))
    index = next((i for i, instruction in enumerate(instructions) if instruction.offset == offset), None)
    if index is None:
        return None
    is_negated = instructions[index].opname == "UNARY_NOT"
    if instructions[index].opname in ("UNARY_NOT", "TO_BOOL"):
        index += 1
    jump = instructions[index]
    if not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    target = next(i for i, instruction in enumerate(instructions) if instruction.offset == jump.argval)
    taken_if = jump.opname.endswith("TRUE") != is_negated
    sides = {taken_if: _only_raises(code, instructions[target:]), not taken_if: _only_raises(code, instructions[index + 1 :])}
    found = [(truth, side) for truth, side in sides.items() if side is not None]
    if len(found) != 1:
        return None
    truth, (names, last) = found[0]
    return truth, names, _line(jump) or last, last


_GOES_ON = (
    "RETURN",
    "YIELD",
    "JUMP",
    "FOR_",
    "SEND",
    "RERAISE",
    "STORE_GLOBAL",
    "STORE_ATTR",
    "STORE_SUBSCR",
    "STORE_DEREF",
    "DELETE_",
    "IMPORT_",
)


def _only_raises(code: types.CodeType, instructions: Sequence[dis.Instruction]) -> tuple[tuple[str, ...], int] | None:
    """Names that are loaded and the last line, if these instructions make an exception and raise it out of the function."""
    names: list[str] = []
    for instruction in instructions[:400]:
        name = instruction.opname
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.append(instruction.argval)
        elif name == "LOAD_ASSERTION_ERROR" or (name == "LOAD_COMMON_CONSTANT" and "AssertionError" in instruction.argrepr):
            names.append("AssertionError")
        elif name == "RAISE_VARARGS":
            if instruction.arg == 0 or _is_caught(code, instruction.offset):
                return None
            return tuple(names), _line(instruction, last=True)
        elif any(part in name for part in _GOES_ON):
            return None
    return None


def _is_caught(code: types.CodeType, offset: int) -> bool:
    """Whether the function itself catches what an instruction raises; a `with` around it does not."""
    instructions = list(dis.get_instructions(code))
    for entry in dis.Bytecode(code).exception_entries:  # pyright: ignore[reportAttributeAccessIssue]
        if entry.start <= offset < entry.end:
            start = next(i for i, instruction in enumerate(instructions) if instruction.offset == entry.target)
            for instruction in instructions[start : start + 12]:
                if instruction.opname in ("WITH_EXCEPT_START", "RERAISE", "CALL_INTRINSIC_1"):
                    break
            else:
                return True
            if any(i.opname in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH") for i in instructions[start : start + 12]):
                return True
    return False


def _line(instruction: dis.Instruction, last: bool = False) -> int:
    positions: Any = instruction.positions
    found = None if positions is None else positions.end_lineno if last else positions.lineno
    return found or 0


__all__ = ["Raising", "side_that_raises"]

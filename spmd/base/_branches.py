"""Finds branches with one side that only raises, in the bytecode of the function that is about to take the branch.

    if not valid.all():                    # `side_that_raises(frame)`: raises if the value is false
        raise ValueError(f"invalid: {x}")

An `assert` is such a branch. A branch whose exception the same function catches is not.
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
        truth: truth value of the condition for which this side runs.
        kind: class of the exception that it raises.
        text: file, line and source of the branch, in one line.
    """

    truth: bool
    kind: type[Exception]
    text: str


def side_that_raises(frame: types.FrameType) -> Raising | None:
    """The raising side of the branch whose condition `frame` is evaluating now; None if it is not at a branch with such a side."""
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
    """Analyze the conditional jump that follows the instruction at `offset`.

    Returns:
        (truth value that raises, names that the raising side loads, first line, last line); None if not exactly one side only raises.
    """
    instructions = list(dis.get_instructions(code))
    index = next((i for i, instruction in enumerate(instructions) if instruction.offset == offset), None)
    if index is None:
        return None
    is_negated = instructions[index].opname == "UNARY_NOT"
    if instructions[index].opname in ("UNARY_NOT", "TO_BOOL", "COMPARE_OP"):  # since Python 3.13 a comparison may convert to bool itself
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


# Parts of the names of instructions that a raising side may not have: they leave it without raising, or have effects.
_NOT_ONLY_RAISING = (
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
    """The names that are loaded and the last line, if these instructions only build an exception and raise it; else None."""
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
        elif any(part in name for part in _NOT_ONLY_RAISING):
            return None
    return None


def _is_caught(code: types.CodeType, offset: int) -> bool:
    """Whether an `except` in the same function handles an exception raised at `offset`. A `with` block does not count."""
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


def catches(frame: types.FrameType, kinds: Sequence[type[Exception]]) -> bool:
    """Whether an `except` of the function of `frame` may handle an error of one of these classes, raised where the frame is now.

    A `finally` and a `with` block do not count.
    """
    for names in _handlers(frame.f_code, frame.f_lasti):
        if names is None:
            return True
        for name, *attributes in names:
            found = frame.f_globals.get(name, frame.f_builtins.get(name))
            for attribute in attributes:
                found = getattr(found, attribute, None)
            if not isinstance(found, type) or any(issubclass(found, kind) or issubclass(kind, found) for kind in kinds):
                return True
    return False


@functools.cache
def _handlers(code: types.CodeType, offset: int) -> tuple[tuple[tuple[str, ...], ...] | None, ...]:
    """For each `except` around `offset`: the names of the classes that it handles, each with its attributes; None if it handles all."""
    instructions = list(dis.get_instructions(code))
    place = {instruction.offset: i for i, instruction in enumerate(instructions)}
    entries: Any = dis.Bytecode(code).exception_entries  # pyright: ignore[reportAttributeAccessIssue]
    found: list[tuple[tuple[str, ...], ...] | None] = []
    targets = list[int]()
    while (target := next((e.target for e in entries if e.start <= offset < e.end), None)) is not None and target not in targets:
        targets.append(offset := target)
        index: int | None = place[target] + (instructions[place[target]].opname == "PUSH_EXC_INFO")
        while index is not None:
            if instructions[index].opname == "POP_TOP":  # a bare `except:`
                found.append(None)
                break
            names, index = _clause(instructions, index)
            found += [names] if index is not None else []
            index = None if index is None else place[instructions[index].argval]
    return tuple(found)


def _clause(instructions: Sequence[dis.Instruction], start: int) -> tuple[tuple[tuple[str, ...], ...], int | None]:
    """The names that one `except` compares, and the index of the jump to the next one; None if no `except` begins at `start`."""
    names: list[tuple[str, ...]] = []
    for index, instruction in enumerate(instructions[start:], start):
        op = instruction.opname
        if op in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF"):  # a local name is not looked up, so it may be any class
            names.append((instruction.argval if op in ("LOAD_GLOBAL", "LOAD_NAME") else "",))
        elif op in ("LOAD_ATTR", "LOAD_METHOD") and names:
            names[-1] += (instruction.argval,)
        elif op in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH"):
            jump = next((i for i in range(index + 1, len(instructions)) if instructions[i].opname.startswith("POP_JUMP")), None)
            return tuple(names), jump
        elif op in ("RERAISE", "WITH_EXCEPT_START", "POP_EXCEPT"):
            break
    return (), None


def _line(instruction: dis.Instruction, last: bool = False) -> int:
    positions: Any = instruction.positions
    found = None if positions is None else positions.end_lineno if last else positions.lineno
    return found or 0


__all__ = ["Raising", "catches", "side_that_raises"]

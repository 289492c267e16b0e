"""Python's instructions in one form, and the sequences that Python 3.11 to 3.14 spell differently.

`plain(code)` splits combined instructions and drops hints to the interpreter, so that instrumentation sees few kinds of instructions. The
other functions give the instructions of a call, of a cell and of a subscript for the running Python.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

import bytecode
from bytecode import BinaryOp, Compare
from bytecode.instr import CellVar, FreeVar

from spmd.base._errors import message

Instr: Any = bytecode.Instr  # its arguments are typed too narrowly: constants may be any object
VERSION = sys.version_info[:2]
NEWEST = (3, 14)

FORMATS = frozenset(("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE"))  # of one value of an f-string
# A condition is converted to bool by its jump or by UNARY_NOT; since 3.13 by an instruction of its own (`plain` splits it off comparisons).
TO_BOOL = (
    frozenset(("TO_BOOL",))
    if VERSION >= (3, 13)
    else frozenset(
        f"{head}{tail}"
        for head in ("POP_JUMP_", "POP_JUMP_FORWARD_", "POP_JUMP_BACKWARD_", "JUMP_")
        for tail in ("IF_TRUE", "IF_FALSE", "IF_TRUE_OR_POP", "IF_FALSE_OR_POP")
    )
    | {"UNARY_NOT"}
)
_PAIRS = {
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": ("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
}
_SAME = {"LOAD_FAST_BORROW": "LOAD_FAST", "LOAD_SMALL_INT": "LOAD_CONST"}


def require_known_python() -> None:
    """Raise on a Python whose instructions are not known here: instrumented code would crash.

    Raises:
        RuntimeError: the running Python is newer than `NEWEST`.
    """
    if VERSION > NEWEST:
        known, running = (".".join(map(str, version)) for version in (NEWEST, VERSION))
        what = f"compiled steps run on Python 3.11 to {known}"
        raise RuntimeError(message(what, f"this is Python {running}", fix=f"python{known} -m venv .venv"))


def plain(code: list[Any]) -> Iterator[Any]:
    """The same instructions with combined ones split, without hints, and with conversions to bool apart from comparisons."""
    for instr in code:
        if not isinstance(instr, Instr):
            yield instr
            continue
        name, arg, at = instr.name, instr.arg, instr.location
        if name in _PAIRS:
            yield from (Instr(single, variable, location=at) for single, variable in zip(_PAIRS[name], arg, strict=True))
        elif name in _SAME:
            yield Instr(_SAME[name], arg, location=at)
        elif name == "COMPARE_OP" and arg.name.endswith("_CAST"):
            yield from (Instr(name, Compare[arg.name.removesuffix("_CAST")], location=at), Instr("TO_BOOL", location=at))
        elif name != "NOT_TAKEN":
            yield instr


def call(load: Any, push: list[Any], num_args: int, at: Any = None) -> list[Any]:
    """Instructions that call the function that `load` pushes, with the `num_args` arguments that `push` pushes."""
    head = [Instr("PUSH_NULL", location=at), load]
    if VERSION >= (3, 13):
        head.reverse()
    before = [Instr("PRECALL", num_args, location=at)] if VERSION < (3, 12) else []
    return [*head, *push, *before, Instr("CALL", num_args, location=at)]


def load_cell(variable: FreeVar | CellVar, at: Any = None) -> Any:
    """Pushes the cell of a variable."""
    return Instr("LOAD_CLOSURE" if VERSION < (3, 13) else "LOAD_FAST", variable, location=at)


def make_function(code: CodeType) -> list[Any]:
    """Pushes a function with this code and with the cells of the running code. Unlike `types.FunctionType`, it causes no audit event."""
    cells = [*(load_cell(FreeVar(name)) for name in code.co_freevars), Instr("BUILD_TUPLE", len(code.co_freevars))]
    push = [*(cells if code.co_freevars else ()), Instr("LOAD_CONST", code)]
    has_cells = 0x08 if code.co_freevars else 0
    if VERSION < (3, 13):
        return [*push, Instr("MAKE_FUNCTION", has_cells)]
    return [*push, Instr("MAKE_FUNCTION"), *([Instr("SET_FUNCTION_ATTRIBUTE", has_cells)] if has_cells else ())]


def is_subscript(instr: Any) -> bool:
    """Whether it is `container[key]`."""
    return instr.name == "BINARY_SUBSCR" or (instr.name == "BINARY_OP" and instr.arg.name == "SUBSCR")


def subscript(at: Any) -> Any:
    """`container[key]`."""
    return Instr("BINARY_SUBSCR", location=at) if VERSION < (3, 14) else Instr("BINARY_OP", BinaryOp["SUBSCR"], location=at)


def format_of(instr: Any) -> tuple[int, str | None, int]:
    """What an instruction of `FORMATS` does.

    Returns:
        (number of operands: the value and perhaps a format above it, the format if it is no operand or None if the value is only
        converted, the conversion: 1, 2, 3 for `!s`, `!r`, `!a`).
    """
    if instr.name == "FORMAT_VALUE":  # until 3.12
        return 1 + bool(instr.arg & 4), "", instr.arg & 3
    if instr.name == "CONVERT_VALUE":
        return 1, None, int(instr.arg)
    return 1 + (instr.name == "FORMAT_WITH_SPEC"), "", 0


def parts_of_texts(code: list[Any]) -> set[int]:
    """The indices of the instructions of `FORMATS` whose text goes into a BUILD_STRING, as far as straight-line code shows it."""
    found: set[int] = set()
    for end, instr in enumerate(code):
        if not isinstance(instr, Instr) or instr.name != "BUILD_STRING":
            continue
        height = lowest = 0  # of the stack after an instruction, and the lowest that later ones reach; 0 is the text's last part
        for index in range(end - 1, -1, -1):
            before = code[index]
            if not isinstance(before, Instr) or "JUMP" in before.name or height <= -instr.arg:
                break
            if before.name in FORMATS and height <= lowest:  # nothing takes its text before BUILD_STRING does
                found.add(index)
            height -= before.stack_effect()
            num_taken = 1 if before.name == "LOAD_METHOD" else max(-before.pre_and_post_stack_effect()[0], 0)
            lowest = min(lowest, height - num_taken)
    return found


def calls_with_self(code: list[Any], index: int) -> bool:
    """Whether the CALL at `index` finds `self` on the stack, and not only the callable and its arguments.

    Such are the calls of generator expressions, of decorators, and of `__enter__` and `__exit__`. Other methods are loaded bound.
    """
    if VERSION < (3, 13):
        return False
    before = [instr for instr in code[max(index - 8, 0) : index] if isinstance(instr, Instr)][::-1]
    num_args, nones = code[index].arg, before[:3]
    if num_args == 0:
        return not (before and _pushes_null(before[0]))
    is_exit = num_args == (2 if VERSION < (3, 14) else 3) and all(i.name == "LOAD_CONST" and i.arg is None for i in nones)
    return is_exit and (VERSION < (3, 14) or not (len(before) > len(nones) and _pushes_null(before[len(nones)])))


def _pushes_null(instr: Any) -> bool:
    """Whether it leaves the NULL of a call on the stack, above the callable."""
    return instr.name == "PUSH_NULL" or (isinstance(instr.arg, tuple) and instr.arg[0] is True)

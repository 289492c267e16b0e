"""Code that tells a recorder what it is about to read, write and call.

`instrumented(code)` is the same code with a call of a hook before each such instruction; line numbers, names and signature stay.
`stub(code)` has the signature alone: it asks for the instrumented code when it is first entered, so that of thousands of functions
only those that run are rewritten. Python 3.11 to 3.13.
"""

from __future__ import annotations

import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import bytecode
from bytecode import BinaryOp, Bytecode
from bytecode.instr import CellVar, FreeVar

from spmd.program.reads import _choices
from spmd.program.reads._special_names import SPECIAL

Instr: Any = bytecode.Instr  # its arguments are typed too narrowly: constants may be any object
_VERSION = sys.version_info
_CONTAINER_FLAGS = 0x01 | 0x02 | 0x04 | 0x08 | 0x10  # optimized, newlocals, varargs, varkeywords, nested: what a stub keeps

Hooks = dict[str, Callable[..., Any]]

_TRUTH = frozenset(
    f"{head}{tail}"
    for head in ("POP_JUMP_", "POP_JUMP_FORWARD_", "POP_JUMP_BACKWARD_", "JUMP_")
    for tail in ("IF_TRUE", "IF_FALSE", "IF_TRUE_OR_POP", "IF_FALSE_OR_POP")
) | {"UNARY_NOT"}
# instruction -> how deep below the top the value lies that it looks into
_LOOKS_INTO = {
    **dict.fromkeys(("GET_LEN", "UNPACK_SEQUENCE", "UNPACK_EX", "LIST_EXTEND", "SET_UPDATE", "BEFORE_WITH"), 1),
    **dict.fromkeys(("UNARY_NEGATIVE", "UNARY_POSITIVE", "UNARY_INVERT"), 1),
    **dict.fromkeys(("DICT_UPDATE", "DICT_MERGE", "MATCH_MAPPING", "MATCH_SEQUENCE", "GET_YIELD_FROM_ITER"), 1),
    "MATCH_KEYS": 2,
}
_OF_ATTRIBUTES = {"IMPORT_FROM": "load_attr", "STORE_ATTR": "store_attr", "DELETE_ATTR": "store_attr"}
_SHOW = frozenset(("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE"))
_HOOK_DEPTH = 16  # a hook's own operands, and what a call has under it


class Instrumenter:
    """Rewrites code objects, each once.

    Attributes:
        original: rewritten code or stub -> the code it stands for.
    """

    def __init__(self, hooks: Hooks, entered: Callable[..., Any]) -> None:
        self._hooks = hooks
        self._entered = entered
        self._made: dict[int, types.CodeType] = {}
        self._given: dict[int, types.CodeType] = {}  # what code is swapped for: its stub, or once it was entered its rewritten form
        self._templates: dict[Any, types.CodeType] = {}
        self.original: dict[int, types.CodeType] = {}
        self._kept: list[types.CodeType] = []  # keys above are ids

    def instrumented(self, code: types.CodeType) -> types.CodeType:
        """`code` with hooks; itself if it has them already."""
        if id(code) in self.original:
            return code
        made = self._made.get(id(code))
        if made is None:
            body = Bytecode.from_code(code, conserve_exception_block_stackdepth=True)
            body[:] = list(self._rewritten(body))
            # a hook takes copies of what lies on the stack, and leaves it as it was: no need to follow every branch (a third of the time)
            depth = 2 * code.co_stacksize + _HOOK_DEPTH
            made = self._made[id(code)] = body.to_code(stacksize=depth, compute_exception_stack_depths=False)
            self._note(made, code)
        return made

    def enter(self, code: types.CodeType) -> tuple[types.CodeType, bool]:
        """`instrumented(code)`, which is `given` from now on, and whether it was not before."""
        made = self.instrumented(code)
        is_first = self._given.get(id(code)) is not made
        self._given[id(code)] = made
        return made, is_first

    def given(self, codes: list[types.CodeType]) -> list[types.CodeType]:
        """For each its stub, or its instrumented form if it was entered; what is one of these, as it is."""
        found = list(map(self._given.get, map(id, codes)))
        for index in itertools.compress(range(len(found)), map(operator.not_, found)):
            found[index] = self.stub(codes[index])
        return cast(list[types.CodeType], found)

    def stub(self, code: types.CodeType) -> types.CodeType:
        """Code with the signature of `code` that calls `entered(code, closure, args, kwargs)`."""
        made = self._given.get(id(code))
        if made is None:
            num_args = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
            shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & 0x0C, len(code.co_freevars))
            template = self._templates.get(shape)
            if template is None:
                template = self._templates[shape] = _template(code, self._entered)
            keywords = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
            made = self._given[id(code)] = template.replace(
                co_name=code.co_name,
                co_qualname=code.co_qualname,
                co_filename=code.co_filename,
                co_firstlineno=code.co_firstlineno,
                co_flags=code.co_flags & _CONTAINER_FLAGS,
                co_varnames=code.co_varnames[:num_args],
                co_nlocals=num_args,
                co_freevars=code.co_freevars,
                co_consts=tuple(_swapped(c, code, keywords) for c in template.co_consts),
            )
            self._note(made, code)
        return made

    def _note(self, made: types.CodeType, code: types.CodeType) -> None:
        self.original[id(made)] = code
        self._given[id(made)] = made
        self._kept += (made, code)

    def _hook(self, name: str, operands: list[Any], location: Any) -> list[Any]:
        """Instructions that call a hook and leave its result; `operands` are instructions that push one value each."""
        null, load = Instr("PUSH_NULL", location=location), Instr("LOAD_CONST", self._hooks[name], location=location)
        head = [null, load] if _VERSION < (3, 13) else [load, null]
        before = [Instr("PRECALL", len(operands), location=location)] if _VERSION < (3, 12) else []
        return [*head, *operands, *before, Instr("CALL", len(operands), location=location)]

    def _tell(self, name: str, operands: list[Any], location: Any) -> list[Any]:
        return [*self._hook(name, operands, location), Instr("POP_TOP", location=location)]

    def _rewritten(self, code: Any) -> Iterator[Any]:
        held: list[Any] = []  # KW_NAMES belongs to the call that follows
        is_compared = False
        found = _choices.blocks(code) if _VERSION < (3, 13) else {}  # there a condition is made a bool before the jump
        ends = {block.end: (block, code[index].location) for index, block in found.items()}
        for index, instr in enumerate(code):
            if index in ends:
                block, at = ends[index]
                yield from _choices.ended(block, self._hook, at)
            if not isinstance(instr, Instr):
                yield instr
                continue
            if instr.name == "RESUME" and instr.arg == 0 and code.argcount and code.name in SPECIAL:
                yield from (instr, *self._tell("entered", self._first_argument(code, instr.location), instr.location))
                continue
            if index in found:
                yield from (*self._tell("look_into", [Instr("COPY", 3, location=instr.location)], instr.location),)
                yield from _choices.begun(found[index], self._hook, instr)
                continue
            if instr.name == "KW_NAMES":
                held.append(instr)
                continue
            if instr.name in _TRUTH and is_compared:  # of a bool
                yield instr
                continue
            if instr.name == "IS_OP" and not (isinstance(code[index - 1], Instr) and code[index - 1].arg is None):
                yield from self._operation("identify", instr.location)
            is_compared = instr.name in ("COMPARE_OP", "CONTAINS_OP", "IS_OP")
            yield from self._with_hooks(instr, held)

    def _first_argument(self, code: Any, at: Any) -> list[Any]:
        """Instructions that push the object of a special method, and the method's name."""
        name = code.argnames[0]
        is_cell = name in code.cellvars
        load = Instr("LOAD_DEREF", CellVar(name), location=at) if is_cell else Instr("LOAD_FAST", name, location=at)
        return [load, Instr("LOAD_CONST", code.name, location=at)]

    def _with_hooks(self, instr: Any, held: list[Any]) -> Iterator[Any]:
        op, arg, at = instr.name, instr.arg, instr.location
        name = arg[-1] if isinstance(arg, tuple) and arg else arg

        def copies(num: int, below: int = 0) -> list[Any]:
            """Push the `num` values that lie under the topmost `below`."""
            return [Instr("COPY", num + 2 + below, location=at)] * num

        def constant(value: Any) -> Any:
            return Instr("LOAD_CONST", value, location=at)

        if op in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield from self._tell("load_global", [constant(name)], at)
        elif op in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF") and isinstance(arg, FreeVar):
            yield from self._tell("load_cell", [_cell(arg, at), constant(arg.name)], at)
        elif op in ("STORE_DEREF", "DELETE_DEREF") and isinstance(arg, FreeVar):
            yield from self._tell("store_cell", [_cell(arg, at), constant(arg.name)], at)
        elif op in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            yield from self._tell("store_global", [constant(name)], at)
        elif op in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            yield from self._attribute(instr, op == "LOAD_METHOD" or (isinstance(arg, tuple) and bool(arg[0])), name)
            return
        elif op == "IMPORT_NAME":  # how many packages up it starts lies on the stack, under the names
            yield from self._tell("imported", [constant(name), Instr("COPY", 5, location=at)], at)
        elif op in _OF_ATTRIBUTES:
            yield from self._tell(_OF_ATTRIBUTES[op], [*copies(1), constant(name)], at)
        elif op in ("BINARY_SUBSCR", "BINARY_SLICE"):
            yield from self._item("load_item", op == "BINARY_SLICE", at)
            instr = Instr("BINARY_SUBSCR", location=at)
        elif op == "MATCH_CLASS":
            yield from self._pattern(instr.arg, at)
        elif op in ("BUILD_MAP", "BUILD_SET"):
            yield from (instr, *self._tell("made_with_keys", copies(1), at))
            return
        elif op in ("MAP_ADD", "SET_ADD"):
            yield from self._replaced("as_key", 1 + (op == "MAP_ADD"), at)
        elif op in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
            yield from self._item("delete_item" if op == "DELETE_SUBSCR" else "store_item", op == "STORE_SLICE", at)
            instr = Instr("STORE_SUBSCR" if op == "STORE_SLICE" else op, location=at)
        elif op == "GET_ITER":
            yield from self._tell("iterate", copies(1), at)
        elif op == "CONTAINS_OP":
            yield from self._operation("contains", at)
        elif op in ("BINARY_OP", "COMPARE_OP"):
            is_in_place = isinstance(arg, BinaryOp) and arg.name.startswith("INPLACE")
            yield from self._operation("operate_in_place" if is_in_place else "operate", at)
        elif op in _TRUTH:
            yield from self._tell("look_into", copies(1), at)
        elif op in _SHOW:  # the format lies on top of the value
            yield from self._replaced("shown", 1 + (op == "FORMAT_WITH_SPEC" or (op == "FORMAT_VALUE" and bool(instr.arg & 4))), at)
        elif op in _LOOKS_INTO:
            yield from self._tell("look_into", copies(1, _LOOKS_INTO[op] - 1), at)
        elif op in ("PRECALL" if _VERSION < (3, 12) else "CALL", "CALL_KW"):
            yield from self._call(arg, held, at, int(op == "CALL_KW"))
            held.clear()
        elif op == "CALL_FUNCTION_EX":
            yield from self._call_ex(2 + (instr.arg & 1), at)
        elif op == "LOAD_CONST" and isinstance(arg, types.CodeType):
            instr = Instr("LOAD_CONST", self.instrumented(arg), location=at)
        yield instr

    def _attribute(self, instr: Any, is_method: bool, name: Any) -> Iterator[Any]:
        """A method is loaded as a bound one: a call then sees what it calls."""
        at = instr.location
        if instr.name == "LOAD_SUPER_ATTR":  # super, class, object: since 3.12
            yield from self._hook("super_of", [Instr("COPY", 5, location=at)] * 3, at)
            yield from (Instr("SWAP", 4, location=at), *[Instr("POP_TOP", location=at)] * 3)
        told = self._tell("load_attr", [Instr("COPY", 3, location=at), Instr("LOAD_CONST", name, location=at)], at)
        load = Instr("LOAD_ATTR", name if _VERSION < (3, 12) else (False, name), location=at)
        null = Instr("PUSH_NULL", location=at)
        if not is_method:
            yield from (*told, load)
        elif _VERSION < (3, 13):
            yield from (null, Instr("SWAP", 2, location=at), *told, load)
        else:
            yield from (*told, load, null)

    def _item(self, name: str, is_slice: bool, at: Any) -> Iterator[Any]:
        """The hook is handed the container and the key, and returns what takes their places, the key first."""
        if is_slice:
            yield Instr("BUILD_SLICE", 2, location=at)
        yield from self._hook(name, [Instr("COPY", 4, location=at)] * 2, at)
        yield Instr("UNPACK_SEQUENCE", 2, location=at)
        for _ in range(2):
            yield from (Instr("SWAP", 3, location=at), Instr("POP_TOP", location=at))

    def _operation(self, name: str, at: Any) -> Iterator[Any]:
        """The hook is handed both operands, and returns what takes the first one's place."""
        yield from self._hook(name, [Instr("COPY", 4, location=at)] * 2, at)
        yield from (Instr("SWAP", 3, location=at), Instr("POP_TOP", location=at))

    def _call_ex(self, num: int, at: Any) -> Iterator[Any]:
        """The same of a call with `*args`, and `**kwargs` if `num` is 3."""
        below = [] if _VERSION < (3, 13) else [Instr("COPY", num + 3, location=at)]
        rest = [Instr("COPY", num + 2, location=at)] * (num - len(below))
        yield from self._hook("call_ex", [*below, *rest], at)
        yield from (Instr("SWAP", num + 1 + bool(below), location=at), Instr("POP_TOP", location=at))

    def _replaced(self, name: str, depth: int, at: Any) -> Iterator[Any]:
        """The hook is handed the value that lies so deep, and returns what takes its place."""
        yield from self._hook(name, [Instr("COPY", depth + 2, location=at)], at)
        yield from (Instr("SWAP", depth + 1, location=at), Instr("POP_TOP", location=at))

    def _pattern(self, num_positional: int, at: Any) -> Iterator[Any]:
        """The hook is handed the value, the class and the names of its attributes, and returns what takes the value's place."""
        yield from self._hook("match_class", [*[Instr("COPY", 5, location=at)] * 3, Instr("LOAD_CONST", num_positional, location=at)], at)
        yield from (Instr("SWAP", 4, location=at), Instr("POP_TOP", location=at))

    def _call(self, num_args: Any, held: list[Any], at: Any, num_above: int) -> Iterator[Any]:
        """The hook is handed the callable and its arguments, and returns what is to be called."""
        num = num_args + 1
        if _VERSION < (3, 13):
            operands, depth = [Instr("COPY", num + 2, location=at)] * num, num + 1
        else:  # callable, NULL, arguments, names
            operands = [Instr("COPY", num + 3 + num_above, location=at), *[Instr("COPY", num + 2 + num_above, location=at)] * num_args]
            depth = num + 2 + num_above
        yield from self._hook("call", operands, at)
        yield from (Instr("SWAP", depth, location=at), Instr("POP_TOP", location=at), *held)


def _cell(variable: FreeVar | CellVar, at: Any) -> Any:
    return Instr("LOAD_CLOSURE" if _VERSION < (3, 13) else "LOAD_FAST", variable, location=at)


def _swapped(constant: Any, code: types.CodeType, keywords: tuple[str, ...]) -> Any:
    if isinstance(constant, types.CodeType):
        return code
    return keywords if type(constant) is tuple else constant


def _template(code: types.CodeType, entered: Callable[..., Any]) -> types.CodeType:
    """A stub for all functions with the signature of `code`."""
    num, keywords = code.co_argcount, code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    rest = list(code.co_varnames[num + len(keywords) :])
    varargs = rest.pop(0) if code.co_flags & 0x04 else None
    varkeywords = rest.pop(0) if code.co_flags & 0x08 else None
    body: Any = Bytecode()
    body.name, body.filename, body.first_lineno = code.co_name, code.co_filename, code.co_firstlineno
    body.argcount, body.posonlyargcount, body.kwonlyargcount = num, code.co_posonlyargcount, len(keywords)
    body.argnames = [*code.co_varnames[: num + len(keywords)], *filter(None, (varargs, varkeywords))]
    body.freevars = list(code.co_freevars)
    body.flags = code.co_flags & _CONTAINER_FLAGS
    load = [Instr("LOAD_CONST", entered)]
    add: list[Any] = [Instr("COPY_FREE_VARS", len(code.co_freevars))] if code.co_freevars else []
    add += [Instr("RESUME", 0), *([Instr("PUSH_NULL"), *load] if _VERSION < (3, 13) else [*load, Instr("PUSH_NULL")])]
    add += [Instr("LOAD_CONST", code), *(_cell(FreeVar(n), None) for n in code.co_freevars), Instr("BUILD_TUPLE", len(code.co_freevars))]
    add += [*(Instr("LOAD_FAST", n) for n in code.co_varnames[:num]), Instr("BUILD_LIST", num)]
    add += [Instr("LOAD_FAST", varargs), Instr("LIST_EXTEND", 1)] if varargs else []
    add += [*(Instr("LOAD_FAST", n) for n in keywords), Instr("LOAD_CONST", tuple(keywords)), Instr("BUILD_CONST_KEY_MAP", len(keywords))]
    add += [Instr("LOAD_FAST", varkeywords), Instr("DICT_UPDATE", 1)] if varkeywords else []
    add += [Instr("PRECALL", 4)] if _VERSION < (3, 12) else []
    body.extend([*add, Instr("CALL", 4), Instr("RETURN_VALUE")])
    return body.to_code()

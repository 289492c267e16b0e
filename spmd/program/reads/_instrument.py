"""Bytecode instrumentation: inserts the call of a hook before each instruction that reads, writes or calls.

`instrumented(code)` returns the same code with these hooks. Line numbers, names and the signature are unchanged. `stub(code)` returns code
that has only the signature, and that decides when it is called whether the instrumented or the original code runs. So of thousands of
functions, only those that run are rewritten. What differs between versions of Python is in `_instructions`.

A hook receives copies of its operands, so the stack stays as it was. Hooks are of two kinds:

- An observing hook (`_observe`) returns nothing: LOAD_ATTR becomes `load_attr(instance, name); LOAD_ATTR`.
- A replacing hook returns the value that takes the place of an operand: CALL becomes `fn = call(fn, *args); CALL`. With it, a recording
  can substitute a callable, a key, a container or a left operand.
"""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

from bytecode import BinaryOp, Bytecode
from bytecode.instr import CellVar, FreeVar

from spmd.program.reads import _choices, _instructions
from spmd.program.reads._instructions import TO_BOOL, VERSION, Instr
from spmd.program.reads._special_names import INTEGERS, SPECIAL

_STUB_FLAGS = 0x01 | 0x02 | 0x04 | 0x08 | 0x10  # flags that a stub keeps: optimized, newlocals, varargs, varkeywords, nested
_KIND_FLAGS = 0x20 | 0x80 | 0x200  # generator, coroutine, async generator: Python 3.13 warns of a `__code__` of another kind

Hooks = dict[str, Callable[..., Any]]

# instruction -> position of the container whose content it reads, counted from the top of the stack (1)
_READS_CONTENT = {
    **dict.fromkeys(("GET_LEN", "BEFORE_WITH", "LOAD_SPECIAL"), 1),
    **dict.fromkeys(("GET_AWAITABLE", "GET_AITER", "GET_ANEXT", "BEFORE_ASYNC_WITH"), 1),
    **dict.fromkeys(("UNARY_NEGATIVE", "UNARY_POSITIVE"), 1),
    **dict.fromkeys(("DICT_UPDATE", "DICT_MERGE", "MATCH_MAPPING", "MATCH_SEQUENCE"), 1),
    "MATCH_KEYS": 2,
}
_ITERATES = frozenset(("GET_ITER", "UNPACK_SEQUENCE", "UNPACK_EX", "LIST_EXTEND", "SET_UPDATE", "GET_YIELD_FROM_ITER"))
_OF_ATTRIBUTES = {"IMPORT_FROM": "load_attr", "STORE_ATTR": "store_attr", "DELETE_ATTR": "delete_attr"}
_HOOK_DEPTH = 16  # stack slots for the call of a hook, without copies of its operands


class Instrumenter:
    """Rewrites code objects, each once.

    Attributes:
        original: id of instrumented code or of a stub -> the code that it was made from.
        stubs: ids of the stubs.
    """

    def __init__(self, hooks: Hooks, on_entry: Callable[..., Any]) -> None:
        """
        Args:
            hooks: the function to call for each name of a hook.
            on_entry: called by a stub as `on_entry(code, original, args, values, kwargs)`, `original` being a new function with the
                original code, `values` those of keyword-only parameters; gives the result of the call.
        """
        self._hooks = hooks
        self._on_entry = on_entry
        _instructions.require_known_python()
        self._made: dict[int, types.CodeType] = {}
        self._replacements: dict[int, types.CodeType] = {}  # id of code -> its stub, or its instrumented form once the stub was called
        self._templates: dict[Any, types.CodeType] = {}
        self.original: dict[int, types.CodeType] = {}
        self.stubs: set[int] = set()
        self._kept: list[types.CodeType] = []  # keeps alive the code whose ids are keys above

    def instrumented(self, code: types.CodeType) -> types.CodeType:
        """`code` with hooks; `code` itself if it has them already."""
        if id(code) in self.original:
            return code
        made = self._made.get(id(code))
        if made is None:
            body = Bytecode.from_code(code, conserve_exception_block_stackdepth=True)
            body[:] = list(_instructions.plain(body))
            body[:] = list(self._rewritten(body))
            # a hook pops only copies, so this bound holds without following every branch, which would take a third of the time
            depth = 2 * code.co_stacksize + _HOOK_DEPTH
            made = self._made[id(code)] = body.to_code(stacksize=depth, compute_exception_stack_depths=False)
            self._note(made, code)
        return made

    def enter(self, code: types.CodeType) -> tuple[types.CodeType, bool]:
        """Make the instrumented form of `code` its replacement from now on. Returns that form, and whether this is the first time."""
        made = self.instrumented(code)
        is_first = self._replacements.get(id(code)) is not made
        self._replacements[id(code)] = made
        return made, is_first

    def stub_again(self, code: types.CodeType) -> bool:
        """Make a stub the replacement of `code` again. Returns whether that was its instrumented form."""
        made = self._replacements.get(id(code))
        if made is None or id(made) in self.stubs:
            return False
        del self._replacements[id(code)]
        self.stub(code)
        return True

    def replacements(self, codes: list[types.CodeType]) -> list[types.CodeType]:
        """The replacement of each code: its stub, or its instrumented form once the stub was called. Replacements replace themselves."""
        found = list(map(self._replacements.get, map(id, codes)))
        for index in itertools.compress(range(len(found)), map(operator.not_, found)):
            found[index] = self.stub(codes[index])
        return cast(list[types.CodeType], found)

    def stub(self, code: types.CodeType) -> types.CodeType:
        """Code with the signature of `code` that calls `on_entry(code, original, args, values, kwargs)`."""
        made = self._replacements.get(id(code))
        if made is None:
            num_args = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
            shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & 0x0C, len(code.co_freevars))
            template = self._templates.get(shape)
            if template is None:
                template = self._templates[shape] = _template(code, self._on_entry)
            made = self._replacements[id(code)] = template.replace(
                co_name=code.co_name,
                co_qualname=code.co_qualname,
                co_filename=code.co_filename,
                co_firstlineno=code.co_firstlineno,
                co_flags=code.co_flags & (_STUB_FLAGS | _KIND_FLAGS),
                co_varnames=code.co_varnames[:num_args],
                co_nlocals=num_args,
                co_freevars=code.co_freevars,
                co_consts=tuple(code if isinstance(c, types.CodeType) else c for c in template.co_consts),
            )
            self.stubs.add(id(made))
            self._note(made, code)
        return made

    def _note(self, made: types.CodeType, code: types.CodeType) -> None:
        self.original[id(made)] = code
        self._replacements[id(made)] = made
        self._kept += (made, code)

    def _hook(self, name: str, operands: list[Any], location: Any) -> list[Any]:
        """Instructions that call a hook and leave its result on the stack; each of `operands` is an instruction that pushes one value."""
        return _instructions.call(Instr("LOAD_CONST", self._hooks[name], location=location), operands, len(operands), location)

    def _observe(self, name: str, operands: list[Any], location: Any) -> list[Any]:
        """Instructions that call a hook and drop its result."""
        return [*self._hook(name, operands, location), Instr("POP_TOP", location=location)]

    def _rewritten(self, code: Any) -> Iterator[Any]:
        held: list[Any] = []  # the names of keywords, or their NULL, wait for their call, so that no hook comes between them
        is_compared = False
        found = _choices.blocks(code)
        parts = _instructions.parts_of_texts(code)
        ends = {block.end: (block, code[index].location) for index, block in found.items()}
        for index, instr in enumerate(code):
            if index in ends:
                block, at = ends[index]
                yield from _choices.after_block(block, self._hook, at)
            if not isinstance(instr, Instr):
                yield instr
                continue
            if instr.name == "RESUME" and instr.arg == 0 and code.argcount and code.name in SPECIAL:
                yield from (instr, *self._observe("special_method", self._first_argument(code, instr.location), instr.location))
                continue
            if index in found:
                yield from (*self._observe("test", [Instr("COPY", 3, location=instr.location)], instr.location),)
                yield from _choices.before_block(found[index], self._hook, instr)
                continue
            if instr.name == "KW_NAMES" or (instr.name == "PUSH_NULL" and _is_call_ex(code[index + 1])):
                held.append(instr)
                continue
            if instr.name == "TO_BOOL" and index + 1 in found:  # the hook of the choice converts
                continue
            if instr.name == "CALL" and _instructions.calls_with_self(code, index):
                yield instr
                continue
            if instr.name in TO_BOOL and is_compared:  # the outcome of a comparison is a bool
                yield instr
                continue
            if instr.name == "BUILD_STRING" or instr.name in _instructions.FORMATS:
                yield from self._text(instr, index in parts)
                is_compared = False
                continue
            if instr.name == "RETURN_VALUE" and code.name in INTEGERS:
                yield from self._replaced("as_hash" if code.name == "__hash__" else "as_key", 1, instr.location)
            if instr.name == "IS_OP" and not (isinstance(code[index - 1], Instr) and code[index - 1].arg is None):
                yield from self._operation("identity", instr.location)
            is_compared = instr.name in ("COMPARE_OP", "CONTAINS_OP", "IS_OP")
            is_updated = isinstance(code[index - 1], Instr) and code[index - 1].name == "COPY"  # an item, in `holder[key] += value`
            yield from self._with_hooks(instr, held, is_updated)

    def _first_argument(self, code: Any, at: Any) -> list[Any]:
        """Instructions that push the first argument of a special method (the object), and the method's name."""
        name = code.argnames[0]
        is_cell = name in code.cellvars
        load = Instr("LOAD_DEREF", CellVar(name), location=at) if is_cell else Instr("LOAD_FAST", name, location=at)
        return [load, Instr("LOAD_CONST", code.name, location=at)]

    def _with_hooks(self, instr: Any, held: list[Any], is_updated: bool) -> Iterator[Any]:
        op, arg, at = instr.name, instr.arg, instr.location
        name = arg[-1] if isinstance(arg, tuple) and arg else arg

        def copies(num: int, below: int = 0) -> list[Any]:
            """Push copies of the `num` values under the topmost `below`."""
            return [Instr("COPY", num + 2 + below, location=at)] * num

        def constant(value: Any) -> Any:
            return Instr("LOAD_CONST", value, location=at)

        if op in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield from self._observe("load_global", [constant(name)], at)
        elif op in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF") and isinstance(arg, FreeVar):
            yield from self._observe("load_cell", [_instructions.load_cell(arg, at), constant(arg.name)], at)
        elif op in ("STORE_DEREF", "DELETE_DEREF") and isinstance(arg, FreeVar):
            yield from self._observe("store_cell", [_instructions.load_cell(arg, at), constant(arg.name)], at)
        elif op in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            yield from self._observe("store_global", [constant(name)], at)
        elif op in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            yield from self._attribute(instr, op == "LOAD_METHOD" or (isinstance(arg, tuple) and bool(arg[0])), name)
            return
        elif op == "IMPORT_NAME":  # the stack holds the level of a relative import, and above it the names
            yield from self._observe("imported", [constant(name), *[Instr("COPY", 5, location=at)] * 2], at)
        elif op in _OF_ATTRIBUTES:
            yield from self._observe(_OF_ATTRIBUTES[op], [*copies(1), constant(name)], at)
        elif op == "BINARY_SLICE" or _instructions.is_subscript(instr):
            yield from self._item("load_updated" if is_updated else "load_item", op == "BINARY_SLICE", at)
            instr = _instructions.subscript(at)
        elif op == "MATCH_CLASS":
            yield from self._pattern(instr.arg, at)
        elif op in ("BUILD_MAP", "BUILD_SET"):
            yield from (instr, *self._observe("made_with_keys", copies(1), at))
            return
        elif op in ("MAP_ADD", "SET_ADD"):
            yield from self._replaced("as_key", 1 + (op == "MAP_ADD"), at)
        elif op in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
            yield from self._item("delete_item" if op == "DELETE_SUBSCR" else "store_item", op == "STORE_SLICE", at)
            instr = Instr("STORE_SUBSCR" if op == "STORE_SLICE" else op, location=at)
        elif op in _ITERATES:
            yield from self._observe("iterate", copies(1), at)
        elif op == "CONTAINS_OP":
            yield from self._operation("contains", at)
        elif op in ("BINARY_OP", "COMPARE_OP"):
            is_in_place = isinstance(arg, BinaryOp) and arg.name.startswith("INPLACE")
            operation = "power" if arg is BinaryOp.POWER else "operate"
            yield from self._operation("operate_in_place" if is_in_place else "compare" if op == "COMPARE_OP" else operation, at)
        elif op == "UNARY_INVERT":
            yield from (*self._observe("read_content", copies(1), at), *self._replaced("invert", 1, at))
        elif op in TO_BOOL:
            yield from self._observe("test", copies(1), at)
        elif op in _READS_CONTENT:
            yield from self._observe("read_content", copies(1, _READS_CONTENT[op] - 1), at)
        elif op in ("PRECALL" if VERSION < (3, 12) else "CALL", "CALL_KW"):
            yield from self._call(arg, held, at, int(op == "CALL_KW"))
        elif op == "CALL_FUNCTION_EX":
            yield from self._call_ex(2 + bool(not held if VERSION >= (3, 14) else instr.arg & 1), held, at)
        elif op == "LOAD_CONST" and isinstance(arg, types.CodeType):
            instr = Instr("LOAD_CONST", self.instrumented(arg), location=at)
        yield instr

    def _attribute(self, instr: Any, is_method: bool, name: Any) -> Iterator[Any]:
        """Load an attribute. A method is loaded as a bound method, so that the hook of its call sees the method's object."""
        at = instr.location
        if instr.name == "LOAD_SUPER_ATTR":  # since 3.12; on the stack: super, class, object
            yield from self._hook("super_of", [Instr("COPY", 5, location=at)] * 3, at)
            yield from (Instr("SWAP", 4, location=at), *[Instr("POP_TOP", location=at)] * 3)
        observed = self._observe("load_attr", [Instr("COPY", 3, location=at), Instr("LOAD_CONST", name, location=at)], at)
        load = Instr("LOAD_ATTR", name if VERSION < (3, 12) else (False, name), location=at)
        null = Instr("PUSH_NULL", location=at)
        if not is_method:
            yield from (*observed, load)
        elif VERSION < (3, 13):
            yield from (null, Instr("SWAP", 2, location=at), *observed, load)
        else:
            yield from (*observed, load, null)

    def _item(self, name: str, is_slice: bool, at: Any) -> Iterator[Any]:
        """The hook receives the container and the key, and returns the key and the container that take their places."""
        if is_slice:
            yield Instr("BUILD_SLICE", 2, location=at)
        yield from self._hook(name, [Instr("COPY", 4, location=at)] * 2, at)
        yield Instr("UNPACK_SEQUENCE", 2, location=at)
        for _ in range(2):
            yield from (Instr("SWAP", 3, location=at), Instr("POP_TOP", location=at))

    def _operation(self, name: str, at: Any) -> Iterator[Any]:
        """The hook receives both operands, and returns the value that takes the place of the left one."""
        yield from self._hook(name, [Instr("COPY", 4, location=at)] * 2, at)
        yield from (Instr("SWAP", 3, location=at), Instr("POP_TOP", location=at))

    def _call_ex(self, num: int, held: list[Any], at: Any) -> Iterator[Any]:
        """As `_call`, for a call with `*args`, and also with `**kwargs` if `num` is 3."""
        below = [] if VERSION < (3, 13) else [Instr("COPY", num + 3, location=at)]
        rest = [Instr("COPY", num + 2, location=at)] * (num - len(below))
        yield from self._hook("call_ex", [*below, *rest], at)
        yield from (Instr("SWAP", num + 1 + bool(below), location=at), Instr("POP_TOP", location=at), *held)
        held.clear()

    def _text(self, instr: Any, is_part: bool) -> Iterator[Any]:
        """A hook in the place of an instruction of an f-string: its result may be a text that is not known yet."""
        at = instr.location
        if instr.name == "BUILD_STRING":
            num, constants = instr.arg, []
        else:
            num, spec, conversion = _instructions.format_of(instr)
            constants = [Instr("LOAD_CONST", constant, location=at) for constant in (*([] if num == 2 else [spec]), conversion, is_part)]
        yield from self._hook(
            "joined" if instr.name == "BUILD_STRING" else "formatted", [*[Instr("COPY", num + 2, location=at)] * num, *constants], at
        )
        yield from (Instr("SWAP", num + 1, location=at), *[Instr("POP_TOP", location=at)] * num)

    def _replaced(self, name: str, depth: int, at: Any) -> Iterator[Any]:
        """The hook receives the value at this depth of the stack, and returns the value that takes its place."""
        yield from self._hook(name, [Instr("COPY", depth + 2, location=at)], at)
        yield from (Instr("SWAP", depth + 1, location=at), Instr("POP_TOP", location=at))

    def _pattern(self, num_positional: int, at: Any) -> Iterator[Any]:
        """The hook receives the value, the class and the names of the attributes, and returns the value to match instead."""
        yield from self._hook("match_class", [*[Instr("COPY", 5, location=at)] * 3, Instr("LOAD_CONST", num_positional, location=at)], at)
        yield from (Instr("SWAP", 4, location=at), Instr("POP_TOP", location=at))

    def _call(self, num_args: Any, held: list[Any], at: Any, num_above: int) -> Iterator[Any]:
        """The hook receives the callable and its arguments, and returns the callable that takes its place."""
        num = num_args + 1
        if VERSION < (3, 13):
            operands, depth = [Instr("COPY", num + 2, location=at)] * num, num + 1
        else:  # on the stack: callable, NULL, arguments, names of keywords
            operands = [Instr("COPY", num + 3 + num_above, location=at), *[Instr("COPY", num + 2 + num_above, location=at)] * num_args]
            depth = num + 2 + num_above
        yield from self._hook("call", operands, at)
        yield from (Instr("SWAP", depth, location=at), Instr("POP_TOP", location=at), *held)
        held.clear()


def _is_call_ex(instr: Any) -> bool:
    return isinstance(instr, Instr) and instr.name == "CALL_FUNCTION_EX" and VERSION >= (3, 14)


def _template(code: types.CodeType, on_entry: Callable[..., Any]) -> types.CodeType:
    """A stub for all functions whose signature has the shape of `code`'s; only names and constants differ."""
    num, keywords = code.co_argcount, code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    rest = list(code.co_varnames[num + len(keywords) :])
    varargs = rest.pop(0) if code.co_flags & 0x04 else None
    varkeywords = rest.pop(0) if code.co_flags & 0x08 else None
    body: Any = Bytecode()
    body.name, body.filename, body.first_lineno = code.co_name, code.co_filename, code.co_firstlineno
    body.argcount, body.posonlyargcount, body.kwonlyargcount = num, code.co_posonlyargcount, len(keywords)
    body.argnames = [*code.co_varnames[: num + len(keywords)], *filter(None, (varargs, varkeywords))]
    body.freevars = list(code.co_freevars)
    body.flags = code.co_flags & _STUB_FLAGS
    head: list[Any] = [Instr("COPY_FREE_VARS", len(code.co_freevars))] if code.co_freevars else []
    load = [Instr("LOAD_CONST", code), *_instructions.make_function(code)]
    load += [*(Instr("LOAD_FAST", n) for n in code.co_varnames[:num]), Instr("BUILD_LIST", num)]
    load += [Instr("LOAD_FAST", varargs), Instr("LIST_EXTEND", 1)] if varargs else []
    load += [*(Instr("LOAD_FAST", n) for n in keywords), Instr("BUILD_TUPLE", len(keywords))]
    load += [Instr("LOAD_FAST", varkeywords) if varkeywords else Instr("BUILD_MAP", 0)]
    call = _instructions.call(Instr("LOAD_CONST", on_entry), load, 5)
    body.extend([*head, Instr("RESUME", 0), *call, Instr("RETURN_VALUE")])
    return body.to_code()

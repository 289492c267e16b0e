"""Branches whose block only assigns local names, found in the bytecode. If only the program knows the condition, both sides are computed.

    if not torch.isfinite(h).all():
        h = torch.clamp(h, min=-largest, max=largest)

Note [Choices]
    The block of such a branch has no jump, writes only local names, and reads each of them before it assigns it, except for names that
    nothing outside the block reads. If only the program knows the condition, the trace runs the block, and then each name gets
    `torch.where(condition, new, old)`. That equals the branch only if the block has no other effect: it may call functions of torch, but
    neither draw random numbers nor write in place. A block that does more needs the condition. See Note [Device branches].

Note [Gradients of choices]
    Gradients through `torch.where` differ from the branch's: the side that is not taken gets a gradient of zero, where PyTorch gives it
    none. Zero times an infinite slope is NaN (`torch.sqrt` of a negative number), and a zero in `.grad` is not None (weight decay
    changes that parameter). So where gradients are recorded, each new value must depend on the old value of its name and on nothing
    else that requires a gradient, and only through functions whose slope is finite.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import torch
from bytecode import BinaryOp
from bytecode.instr import Instr, Label

from spmd.base._errors import TraceAgain
from spmd.device._host_answers import host_answer
from spmd.device._numbers import carried, is_program_number
from spmd.device._random_stream import default_stream
from spmd.device._storage import is_device_tensor, load, recording, wrap
from spmd.program.reads._instructions import VERSION

_ALLOWED = frozenset(
    (
        *("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_CONST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD", "PUSH_NULL", "NOP"),
        *("PRECALL", "CALL", "KW_NAMES", "BINARY_OP", "BINARY_SUBSCR", "UNARY_NEGATIVE", "COMPARE_OP", "BUILD_TUPLE", "STORE_FAST"),
        "CALL_KW",
    )
)
_READ_ALL_LOCALS = ("locals", "vars", "dir", "eval", "exec")
_LOADS = ("LOAD_FAST", "LOAD_FAST_CHECK")
_SLOPES_OF_0_OR_1 = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("Clamp", "ClampMin", "ClampMax", "Add", "Sub", "Neg", "Where", "MaskedFill", "Minimum", "Maximum", "ToCopy", "Clone", "Alias"),
        *("View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "T", "Expand", "Unsqueeze", "Squeeze", "Slice", "Select"),
    )
    for number in range(3)
)
_PLAIN_CALLS = frozenset(map(id, (torch.finfo, torch.iinfo, len, min, max, abs, float, int)))
_STARTS_OF_WRITES = ("set_", "register_", "retain_", "backward", "manual_seed", "seed", "save")


@dataclass(frozen=True)
class Block:
    """The block of a branch.

    Attributes:
        number: position among the blocks of its code.
        end: index of the label after the block.
        enters_if: the truth value of the condition for which the block runs.
        names: the local names that the block reads and then assigns.
    """

    number: int
    end: int
    enters_if: bool
    names: tuple[str, ...]


def blocks(code: list[Any]) -> dict[int, Block]:
    """The blocks, by the index of the jump before each. None in code that reads all its local names: instrumentation adds names."""
    found: dict[int, Block] = {}
    if any(isinstance(i, Instr) and i.name == "LOAD_GLOBAL" and isinstance(i.arg, tuple) and i.arg[-1] in _READ_ALL_LOCALS for i in code):
        return found
    for index, instr in enumerate(code):
        if isinstance(instr, Instr) and instr.name.startswith("POP_JUMP") and instr.name.endswith(("IF_TRUE", "IF_FALSE")):
            if VERSION >= (3, 13) and getattr(code[index - 1], "name", "") != "TO_BOOL":  # a condition that is a bool
                continue
            end = next((i for i in range(index + 1, len(code)) if not _is_allowed(code[i])), len(code))
            names = _assigned(code, index + 1, end) if end < len(code) and code[end] is instr.arg else ()
            if names:
                found[index] = Block(len(found), end, instr.name.endswith("IF_FALSE"), names)
    return found


def _is_allowed(instr: Any) -> bool:
    if not isinstance(instr, Instr) or instr.name not in _ALLOWED:
        return False
    return not (isinstance(instr.arg, BinaryOp) and instr.arg.name.startswith("INPLACE"))


def _assigned(code: list[Any], start: int, end: int) -> tuple[str, ...]:
    """The local names that the instructions from `start` to `end` read and then assign.

    Empty if they assign another name that may be read outside: it would be bound there even if the branch is not taken.
    """
    first: dict[str, str] = {}
    for instr in code[start:end]:
        if instr.name in (*_LOADS, "STORE_FAST"):
            first.setdefault(instr.arg, instr.name)
    stored = dict.fromkeys(instr.arg for instr in code[start:end] if instr.name == "STORE_FAST")
    for name in stored:
        if first[name] == "STORE_FAST" and any(
            isinstance(instr, Instr) and instr.arg == name and instr.name in _LOADS and not _is_stored_before(code, index, name)
            for index, instr in enumerate(code)
        ):
            return ()
    return tuple(name for name in stored if first[name] != "STORE_FAST")


def _is_stored_before(code: list[Any], index: int, name: str) -> bool:
    """Whether the straight-line instructions just before this one assign the name."""
    for instr in reversed(code[:index]):
        if isinstance(instr, Label) or not isinstance(instr, Instr) or "JUMP" in instr.name:
            return False
        if instr.name == "STORE_FAST" and instr.arg == name:
            return True
    return False


class NoChoice(TraceAgain):
    """The block of a branch cannot be computed unless it runs. The next trace needs the condition there."""

    def __init__(self, place: Any) -> None:
        super().__init__()
        self._place = place

    def other_settings(self, settings: Any) -> Any:
        return replace(settings, no_choices=settings.no_choices | {self._place})


class Choice:
    """A block that the trace runs although only the program knows the condition.

    Attributes:
        runs: whether the branch is taken, bool[] on the device.
        frame: the frame of the block while it runs. Only calls from this frame have to be pure; what torch's functions call does not.
        place: of the block.
    """

    def __init__(self, runs: torch.Tensor, frame: types.FrameType, place: Any) -> None:
        self.runs, self.place = runs, place
        self.frame: types.FrameType | None = frame
        self._draws = default_stream.draws
        self._seen: list[tuple[torch.Tensor, int]] = []
        with torch.enable_grad():
            self._first_node = torch.zeros((), requires_grad=True).clone().grad_fn

    def require_pure(self, fn: Any, args: tuple[Any, ...]) -> None:
        """Require that a call has no effect.

        Raises:
            NoChoice: it may have one.
        """
        name = getattr(fn, "__name__", "")
        owner = getattr(fn, "__self__", None)
        module = getattr(fn, "__module__", None) or getattr(owner, "__module__", None) or ""
        is_torch = module.partition(".")[0] == "torch" or isinstance(owner, torch.Tensor)
        is_module = isinstance(fn, (type, torch.nn.Module)) or isinstance(owner, torch.nn.Module)
        writes = name.startswith(_STARTS_OF_WRITES) or (name.endswith("_") and not name.endswith("__"))
        if id(fn) not in _PLAIN_CALLS and (not is_torch or is_module or writes):
            raise NoChoice(self.place)
        self._seen += [(arg, arg._version) for arg in args if isinstance(arg, torch.Tensor) and not arg.is_inference()]

    def chosen(self, before: Any, after: Any) -> Any:
        """The value of a name after the block.

        Raises:
            NoChoice: the block had an effect, or `torch.where` would differ from the branch.
        """
        if default_stream.draws != self._draws or any(tensor._version != version for tensor, version in self._seen):
            raise NoChoice(self.place)
        if before is after:
            return after
        if not (is_device_tensor(before) and is_device_tensor(after)) or (before.shape, before.dtype) != (after.shape, after.dtype):
            raise NoChoice(self.place)
        if not self._is_same_gradient(before, after):
            raise NoChoice(self.place)
        return torch.where(self.runs, after, before)

    def _is_same_gradient(self, before: torch.Tensor, after: torch.Tensor) -> bool:
        """Whether gradients through `torch.where` equal those of the branch. See Note [Gradients of choices]."""
        if not torch.is_grad_enabled() or not (before.requires_grad or after.requires_grad):
            return True
        if after.grad_fn is None:
            return False
        assert self._first_node is not None
        first = self._first_node._sequence_nr()
        waiting: list[Any] = [(after.grad_fn, after.output_nr)]
        seen, reached = set[Any](), set[Any]()
        while waiting:
            node, output = waiting.pop()
            if node.name() == "torch::autograd::AccumulateGrad":
                reached.add((id(node.variable), 0))
            elif node._sequence_nr() < first:
                reached.add((node, output))
            elif node not in seen:
                if node.name() not in _SLOPES_OF_0_OR_1 and not _is_by_constant(node):
                    return False
                seen.add(node)
                waiting.extend(following for following in node.next_functions if following[0] is not None)
        own = (id(before), 0) if before.grad_fn is None else (before.grad_fn, before.output_nr)
        return reached == {own}


def _is_by_constant(node: Any) -> bool:
    """Whether it is the gradient of a product with a finite, nonzero Python number, or of a quotient by one."""
    if node.name() not in ("MulBackward0", "DivBackward0"):
        return False
    other = getattr(node, "_saved_other", None)
    if not isinstance(other, torch.Tensor) or other.device.type != "cpu" or other.dim():
        return False
    return 0 < abs(float(other)) < math.inf


def choose(condition: Any, enters_if: bool, frame: types.FrameType, no_choices: frozenset[Any]) -> bool | Choice:
    """Whether a block runs; a `Choice` if only the program knows.

    Args:
        no_choices: places of blocks that are not computed unless they run.
    """
    value, place = _number(condition), (frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lasti)
    if value is None or host_answer(value) is not None or place in no_choices:
        return bool(condition) is enters_if
    truth = condition if isinstance(condition, torch.Tensor) else wrap(value)
    truth = truth.detach().reshape(()) != 0
    return Choice(truth if enters_if else ~truth, frame, place)


def _number(condition: Any) -> Any:
    """The traced array of one element that a condition carries; None for any other condition."""
    if recording.get() is None:
        return None
    if is_device_tensor(condition) and condition.numel() == 1:
        return load(condition)
    if is_program_number(condition):
        is_of_program = condition.node.evaluate is None and isinstance(carried(condition), jax.Array)
        return carried(condition) if is_of_program else None
    return None


def before_block(block: Block, hook: Any, jump: Any) -> Iterator[Any]:
    """Instructions that replace the jump before a block; `hook` makes those that call a hook."""
    at, token = jump.location, f"$choice{block.number}"
    copy = Instr("COPY", 3, location=at)
    yield from hook("choice", [copy, Instr("LOAD_CONST", block.enters_if, location=at)], at)
    yield from (Instr("SWAP", 2, location=at), Instr("POP_TOP", location=at), Instr("STORE_FAST", token, location=at))
    name = jump.name.replace("IF_TRUE", "IF_FALSE")
    convert = [] if VERSION < (3, 13) else [Instr("TO_BOOL", location=at)]
    yield from (Instr("LOAD_FAST", token, location=at), *convert, Instr(name, jump.arg, location=at))
    checked = "LOAD_FAST" if VERSION < (3, 12) else "LOAD_FAST_CHECK"  # raises for a name that is not bound
    for index, variable in enumerate(block.names):
        yield from (Instr(checked, variable, location=at), Instr("STORE_FAST", f"{token}.{index}", location=at))


def after_block(block: Block, hook: Any, at: Any) -> Iterator[Any]:
    """Instructions after a block: each name that it assigned gets its chosen value."""
    token = f"$choice{block.number}"
    for index, variable in enumerate(block.names):
        operands = [Instr("LOAD_FAST", name, location=at) for name in (token, f"{token}.{index}", variable)]
        yield from hook("chosen", operands, at)
        yield Instr("STORE_FAST", variable, location=at)


__all__ = ["Block", "Choice", "NoChoice", "after_block", "before_block", "blocks", "choose"]

"""Records the sizes that Python reads during a trace and the conditions that it evaluates on them, to evaluate them for other sizes.

`x.shape[0] > 100` is evaluated for the trace's size. The program is then valid for the sizes for which all such conditions have the same
results. Recorded sizes are instances of a subclass of `int`, so that C++ accepts them. An operation that converts one to a plain number, of
which nothing more can be recorded (`int(n)`, `n.bit_length()`), counts as a condition whose result is that number.
"""

from __future__ import annotations

import numbers
import operator
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from spmd.base._errors import user_line
from spmd.base._open_sizes import open_sizes
from spmd.device._storage import recording
from spmd.patches._table import current, replaced
from spmd.program.reads import is_library

Tree = Callable[[Sequence[int]], Any]  # a function of the sizes that were read, in their order


class SizeReads:
    """The sizes that one trace read, and the conditions that it evaluated.

    Attributes:
        leaves: the sizes that were read.
        asked: each condition with its result.
        lines: for each condition, the user's line that evaluated it.
        divisors: numbers by which a size was divided with rounding.
        current: current values of `leaves`: those of the trace, or of the call that the program runs for.
    """

    def __init__(self) -> None:
        self.divisors = set[int]()
        self.leaves: list[int] = []
        self.asked: list[tuple[Tree, Any]] = []
        self.lines: list[str] = []
        self.current: Sequence[int] = self.leaves

    def size(self, value: int) -> int:
        """Record the read of a size."""
        place = len(self.leaves)
        self.leaves.append(int(value))
        return _Size.of(value, lambda leaves: leaves[place])


_BITS = ("and", "or", "xor", "lshift", "rshift")
_DIGIT_OPERATIONS = (
    operator.mod,
    operator.and_,
    operator.or_,
    operator.xor,
    operator.lshift,
    operator.rshift,
    round,
)  # their values at a few points say nothing about other sizes
_CONVERSIONS = (
    *("__int__", "__float__", "__trunc__", "__floor__", "__ceil__", "__invert__", "__divmod__", "__rdivmod__"),
    *("bit_length", "bit_count", "to_bytes", "as_integer_ratio", "__str__", "__repr__", "__format__"),
)
_FLOAT_CONVERSIONS = (
    *("__int__", "__float__", "__trunc__", "__floor__", "__ceil__", "__divmod__", "__rdivmod__"),
    *("as_integer_ratio", "is_integer", "hex", "__str__", "__repr__", "__format__"),
)
_UNRECORDED = frozenset(("jax", "jaxlib", "numpy", "opt_einsum", "spmd", "mesh"))
_reads: ContextVar[SizeReads | None] = ContextVar("spmd_size_reads", default=None)


class _Size(int):
    tree: Tree
    reads: SizeReads

    @staticmethod
    def of(value: Any, tree: Tree) -> Any:
        """A recorded number with its function of the sizes; `value` itself if it is not a number, or if nothing is recorded."""
        kind, reads = _Size if type(value) in (int, _Size) else _SizeFloat if type(value) in (float, _SizeFloat) else None, _reads.get()
        if kind is None or reads is None:
            return value
        found = kind(value)
        found.tree, found.reads = tree, reads
        return found

    def __hash__(self) -> int:
        if not is_library(sys._getframe(1).f_globals.get("__name__", "")):
            self.plain()
        return int.__hash__(self)

    def plain(self) -> int:
        """The plain Python number; its value is recorded as a condition."""
        return _ask(int.__int__(self), self.tree)

    def beside(self, number: float) -> float:
        """Another operand as a recorded number, a constant function of the sizes."""
        return _Size.of(number, lambda leaves: number)

    def through(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Recorded result of a function of numbers."""
        trees = [_tree(a) for a in args]
        return _Size.of(function(*map(_plain, args)), lambda leaves: function(*(tree(leaves) for tree in trees)))

    def now(self) -> int:
        """Its value in the current call."""
        return self.tree(self.reads.current)

    def __reduce__(self) -> Any:
        return int, (int.__int__(self),)


class _SizeFloat(float):
    tree: Tree
    reads: SizeReads

    __hash__ = float.__hash__

    def plain(self) -> float:
        """The plain Python number; its value is recorded as a condition."""
        return _ask(float.__float__(self), self.tree)

    beside, through = _Size.beside, _Size.through

    def now(self) -> float:
        """Its value in the current call."""
        return self.tree(self.reads.current)

    def __reduce__(self) -> Any:
        return float, (float.__float__(self),)


def _ask(answer: Any, tree: Tree) -> Any:
    reads = _reads.get()
    if reads is not None:
        reads.asked.append((tree, answer))
        reads.lines.append(user_line())
    return answer


def _note_divisor(divisor: Any) -> None:
    reads = _reads.get()
    if reads is not None and type(divisor) is int and divisor > 1:
        reads.divisors.add(divisor)


def _is_unrecorded(frame: Any) -> bool:
    """Whether conditions in a frame are not recorded, as they cannot change values: jax's, this package's, torch's reads for arithmetic."""
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in _UNRECORDED or (name == "torch" and frame.f_code.co_name == "sym_float")


def _tree(value: Any) -> Tree:
    return value.tree if isinstance(value, (_Size, _SizeFloat)) else lambda leaves: value


def _plain(value: Any) -> Any:
    return int.__int__(value) if isinstance(value, _Size) else float.__float__(value) if isinstance(value, _SizeFloat) else value


def _operation(function: Callable[..., Any], is_condition: bool, swapped: bool) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        if any(not isinstance(o, (int, float)) for o in others):
            if function is operator.mul and isinstance(others[0], (str, bytes, bytearray, list, tuple)):
                return others[0] * self.plain()
            if isinstance(others[0], (numbers.Number, np.ndarray)) and not isinstance(others[0], (torch.SymFloat, torch.SymInt)):
                self.plain()  # a numpy number, a fraction or a decimal records nothing
            return NotImplemented
        operands = (*others, self) if swapped else (self, *others)
        trees = [_tree(o) for o in operands]
        value = function(*map(_plain, operands))

        def tree(leaves: Sequence[int]) -> Any:
            return function(*(t(leaves) for t in trees))

        if not _is_unrecorded(sys._getframe(1)):
            if function is operator.floordiv:  # the remainder determines for which sizes the quotient is linear
                _ask(operator.mod(*map(_plain, operands)), lambda leaves: operator.mod(*(t(leaves) for t in trees)))
                _note_divisor(operands[1])
            elif is_condition or function in _DIGIT_OPERATIONS or type(value) not in (int, float):
                _ask(value, tree)
                if function is operator.mod:
                    _note_divisor(operands[1])
        if is_condition:
            return value
        return _Size.of(value, tree)

    return method


def _recorded_as_condition(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method that records its result as a condition, since it returns a plain number."""

    def method(self: Any, *others: Any, **options: Any) -> Any:
        value = function(_plain(self), *map(_plain, others), **options)
        if not _is_unrecorded(sys._getframe(1)):
            _ask(value, lambda leaves: function(self.tree(leaves), *map(_plain, others), **options))
        return value

    return method


def _install() -> None:
    for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", *_BITS):
        for kind in (_Size, _SizeFloat) if name not in _BITS else (_Size,):
            function = getattr(operator, f"{name}_" if name in ("and", "or") else name)
            setattr(kind, f"__{name}__", _operation(function, False, False))
            setattr(kind, f"__r{name}__", _operation(function, False, True))
    for kind, own, names in ((_Size, int, _CONVERSIONS), (_SizeFloat, float, _FLOAT_CONVERSIONS)):
        for name in names:
            setattr(kind, name, _recorded_as_condition(getattr(own, name)))
    for name in ("neg", "abs", "pos"):
        for kind in (_Size, _SizeFloat):
            setattr(kind, f"__{name}__", _operation(getattr(operator, name), False, False))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        for kind in (_Size, _SizeFloat):
            setattr(kind, f"__{name}__", _operation(getattr(operator, name), True, False))
    for kind in (_Size, _SizeFloat):
        for name, function in (("bool", bool), ("round", round)):
            setattr(kind, f"__{name}__", _operation(function, name == "bool", False))


_install()


@contextmanager
def sizes_read() -> Generator[SizeReads]:
    """While active, record the sizes that Python reads of tensors in a trace."""
    reads = SizeReads()
    token = _reads.set(reads)

    def noted(tensor: torch.Tensor, found: Any) -> Any:
        if recording.get() is None or _reads.get() is not reads or tensor.is_meta or _is_unrecorded(sys._getframe(2)):
            return found
        if isinstance(found, tuple):
            sizes = [reads.size(n) for n in found]
            return torch.Size(sizes) if type(found) is torch.Size else tuple(sizes)
        return reads.size(found) if type(found) is int else found

    def method(name: str) -> Callable[..., Any]:
        own: Any = current(f"torch.Tensor.{name}")
        return lambda self, *args, **kwargs: noted(self, own(self, *args, **kwargs))

    def attribute(name: str) -> property:
        own: Any = current(f"torch.Tensor.{name}")
        return property(lambda self: noted(self, own.__get__(self)))

    def length(self: torch.Tensor) -> int:
        found = own_length(self)
        if _reads.get() is reads and not _is_unrecorded(sys._getframe(1)):
            size = noted(self, found)
            _ask(found, _tree(size))
        return found

    own_length: Any = current("torch.Tensor.__len__")
    with ExitStack() as stack:
        stack.enter_context(open_sizes())
        for name in ("shape", "nbytes"):
            stack.enter_context(replaced(f"torch.Tensor.{name}", attribute(name)))
        for name in ("size", "numel", "nelement", "stride", "storage_offset"):
            stack.enter_context(replaced(f"torch.Tensor.{name}", method(name)))
        stack.enter_context(replaced("torch.Tensor.__len__", length))
        try:
            yield reads
        finally:
            _reads.reset(token)


__all__ = ["SizeReads", "sizes_read"]

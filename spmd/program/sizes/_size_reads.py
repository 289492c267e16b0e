"""Sizes as Python reads them while a function is traced: what it asks of them is noted, so that it can be asked again for other sizes.

`x.shape[0] > 100` is answered for the trace's size. The program then holds for sizes for which all such answers are the same. Python's own
`int` is what these numbers are, so that C++ takes them. What makes of them a number of which nothing can be noted (`int(n)`,
`n.bit_length()`) counts as a question whose answer is that number.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from spmd.device._storage import recording
from spmd.patches._table import current, replaced
from spmd.program.reads import is_library

Tree = Callable[[Sequence[int]], Any]  # of the sizes that were read, in their order


class SizeReads:
    """What one trace read and asked.

    Attributes:
        leaves: the sizes that were read.
        asked: each question with its answer.
    """

    def __init__(self) -> None:
        self.leaves: list[int] = []
        self.asked: list[tuple[Tree, Any]] = []

    def size(self, value: int) -> int:
        """A size that is read now."""
        place = len(self.leaves)
        self.leaves.append(int(value))
        return _Size.of(value, lambda leaves: leaves[place])


_BITS = ("and", "or", "xor", "lshift", "rshift")
_OF_DIGITS = (
    operator.mod,
    operator.and_,
    operator.or_,
    operator.xor,
    operator.lshift,
    operator.rshift,
)  # a few points say nothing of these
_HIDDEN = (
    *("__int__", "__float__", "__trunc__", "__floor__", "__ceil__", "__invert__", "__divmod__", "__rdivmod__"),
    *("bit_length", "bit_count", "to_bytes", "as_integer_ratio"),
)
_HIDDEN_OF_FLOATS = (
    *("__int__", "__float__", "__trunc__", "__floor__", "__ceil__", "__divmod__", "__rdivmod__"),
    *("as_integer_ratio", "is_integer", "hex"),
)
_OURS = frozenset(("jax", "jaxlib", "numpy", "opt_einsum", "spmd", "mesh"))
_reads: ContextVar[SizeReads | None] = ContextVar("spmd_size_reads", default=None)


class _Size(int):
    tree: Tree

    @staticmethod
    def of(value: Any, tree: Tree) -> Any:
        """A number with what it is a function of."""
        kind = _Size if type(value) in (int, _Size) else _SizeFloat if type(value) in (float, _SizeFloat) else None
        if kind is None:
            return value
        found = kind(value)
        found.tree = tree
        return found

    def __hash__(self) -> int:
        if not is_library(sys._getframe(1).f_globals.get("__name__", "")):
            self.plain()
        return int.__hash__(self)

    def plain(self) -> int:
        """Python's own number; that it was asked for is noted."""
        return _ask(int.__int__(self), self.tree)

    def __reduce__(self) -> Any:
        return int, (int.__int__(self),)


class _SizeFloat(float):
    tree: Tree

    __hash__ = float.__hash__

    def __reduce__(self) -> Any:
        return float, (float.__float__(self),)


def _ask(answer: Any, tree: Tree) -> Any:
    reads = _reads.get()
    if reads is not None:
        reads.asked.append((tree, answer))
    return answer


def _is_ours(frame: Any) -> bool:
    """Whether a frame is one whose questions change no values: jax's, or of this package."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS


def _tree(value: Any) -> Tree:
    return value.tree if isinstance(value, (_Size, _SizeFloat)) else lambda leaves: value


def _plain(value: Any) -> Any:
    return int.__int__(value) if isinstance(value, _Size) else float.__float__(value) if isinstance(value, _SizeFloat) else value


def _operation(function: Callable[..., Any], is_question: bool, swapped: bool) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        if any(not isinstance(o, (int, float)) for o in others):
            return NotImplemented
        operands = (*others, self) if swapped else (self, *others)
        trees = [_tree(o) for o in operands]
        value = function(*map(_plain, operands))

        def tree(leaves: Sequence[int]) -> Any:
            return function(*(t(leaves) for t in trees))

        if (is_question or function in _OF_DIGITS) and not _is_ours(sys._getframe(1)):
            _ask(value, tree)
        if is_question:
            return value
        return _Size.of(value, tree)

    return method


def _hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    """What gives numbers of which nothing is noted."""

    def method(self: Any, *others: Any, **options: Any) -> Any:
        value = function(_plain(self), *map(_plain, others), **options)
        if not _is_ours(sys._getframe(1)):
            _ask(value, lambda leaves: function(self.tree(leaves), *map(_plain, others), **options))
        return value

    return method


def _install() -> None:
    for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", *_BITS):
        for kind in (_Size, _SizeFloat) if name not in _BITS else (_Size,):
            function = getattr(operator, f"{name}_" if name in ("and", "or") else name)
            setattr(kind, f"__{name}__", _operation(function, False, False))
            setattr(kind, f"__r{name}__", _operation(function, False, True))
    for kind, own, names in ((_Size, int, _HIDDEN), (_SizeFloat, float, _HIDDEN_OF_FLOATS)):
        for name in names:
            setattr(kind, name, _hidden(getattr(own, name)))
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
    """While a trace runs: what a tensor says of its size is noted."""
    reads = SizeReads()
    token = _reads.set(reads)

    def noted(tensor: torch.Tensor, found: Any) -> Any:
        if recording.get() is None or _reads.get() is not reads or tensor.is_meta or _is_ours(sys._getframe(2)):
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
        if _reads.get() is reads and not _is_ours(sys._getframe(1)):
            size = noted(self, found)
            _ask(found, _tree(size))
        return found

    own_length: Any = current("torch.Tensor.__len__")
    with ExitStack() as stack:
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

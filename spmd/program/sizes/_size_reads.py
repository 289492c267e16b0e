"""Sizes as Python reads them while a function is traced: what it asks of them is noted, so that it can be asked again for other sizes.

`x.shape[0] > 100` is answered for the trace's size. The program then holds for sizes for which all such answers are the same. Python's own
`int` is what these numbers are, so that C++ takes them; `int(n)` gives one of which nothing is noted.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from spmd.device._storage import recording
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
            _ask(int.__int__(self), self.tree)
        return int.__hash__(self)

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

        if (is_question or function is operator.mod) and not _is_ours(sys._getframe(1)):  # a few points say nothing of a remainder
            _ask(value, tree)
        if is_question:
            return value
        return _Size.of(value, tree)

    return method


def _install() -> None:
    for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow"):
        for kind in (_Size, _SizeFloat):
            setattr(kind, f"__{name}__", _operation(getattr(operator, name), False, False))
            setattr(kind, f"__r{name}__", _operation(getattr(operator, name), False, True))
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
    """While a trace runs: `shape`, `size` and `numel` of tensors give noted sizes."""
    reads = SizeReads()
    token = _reads.set(reads)
    names = ("shape", "size", "numel")
    own = {name: torch.Tensor.__dict__[name] for name in names if name in torch.Tensor.__dict__}
    shape_of, size_of, numel_of = vars(torch._C.TensorBase)["shape"].__get__, torch._C.TensorBase.size, torch._C.TensorBase.numel

    def noted(tensor: torch.Tensor, found: Any) -> Any:
        if recording.get() is None or _reads.get() is not reads or tensor.is_meta or _is_ours(sys._getframe(2)):
            return found
        if type(found) is torch.Size:
            return torch.Size([reads.size(n) for n in found])
        return reads.size(found) if type(found) is int else found

    def shape(self: torch.Tensor) -> Any:
        return noted(self, shape_of(self))

    def size(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return noted(self, size_of(self, *args, **kwargs))

    def numel(self: torch.Tensor) -> Any:
        return noted(self, numel_of(self))

    for name, replacement in zip(names, (property(shape), size, numel), strict=True):
        setattr(torch.Tensor, name, replacement)
    try:
        yield reads
    finally:
        _reads.reset(token)
        for name in names:
            if name in own:
                setattr(torch.Tensor, name, own[name])
            else:
                delattr(torch.Tensor, name)


__all__ = ["SizeReads", "sizes_read"]

"""`.grad` of leaf tensors during a trace: the gradients that the function reads, and those that it leaves.

Gradients of an earlier call are dropped unless `keep_grads` is set, so a function that would add to them must not do so silently. During
the trace a marker stands in for every missing or dropped gradient, and reading a marker raises an error. A function that zeroes its
gradients first never reads one. A function that does read one is traced again with `None` in its place; the program is then valid
only while the gradient is missing.
"""

from __future__ import annotations

import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from spmd.base._convert import to_numpy_dtype
from spmd.base._errors import DroppedValueError, TraceError, message
from spmd.device._storage import Buffer, buffer_of, load, wrap, wrap_strided
from spmd.program.optim._state_rules import stored_like
from spmd.program.reuse._columns import Guards
from spmd.program.trace._accumulator_hooks import AccumulatorHooks
from spmd.program.trace._memory_order import is_permuted, permuted
from spmd.program.trace._trace_settings import TraceSettings

DROPPED_GRADIENT = (
    "this gradient was computed inside a compiled step and not kept\n"
    "  a gradient that leaves the program costs a copy of the parameter\n"
    "  fix: compile with @spmd.compile(keep_grads=True)"
)
STALE_GRADIENT = (
    "the compiled function adds to gradients of an earlier call, which were not kept\n"
    "  fix: call optimizer.zero_grad() inside the function before backward, or compile with keep_grads=True"
)


class StaleGradients(DroppedValueError):
    """The function read a marker. `unzeroed`: ids of the leaf tensors that still had a marker."""

    def __init__(self, unzeroed: frozenset[int]) -> None:
        super().__init__(STALE_GRADIENT)
        self.unzeroed = unzeroed

    def other_settings(self, settings: TraceSettings) -> TraceSettings:
        """Settings under which the function may add to these gradients; equal to `settings` if it already may."""
        return replace(settings, unmarked=settings.unmarked | self.unzeroed)


def _of_before(leaf: torch.Tensor, grad: torch.Tensor, keep: bool) -> torch.Tensor:
    """The gradient to leave for a leaf whose `.grad` is a tensor from before the trace: one without a value, which a read refuses.

    Raises:
        TraceError: the value is asked for (`keep_grads`).
    """
    if keep:
        raise TraceError(
            message(
                f"a tensor of shape {list(grad.shape)} from before the call became the gradient of one of shape {list(leaf.shape)}",
                "with keep_grads=True each call leaves new gradients",
                fix="p.grad = tensor.clone()",
            )
        )
    return _empty(leaf)


def _empty(leaf: torch.Tensor) -> torch.Tensor:
    """A tensor like a gradient of a leaf, of zeros without memory."""
    with torch.inference_mode(False):  # an inference tensor has no version counter
        zeros = np.broadcast_to(np.zeros((), to_numpy_dtype(leaf.dtype)), leaf.shape)
        return wrap_strided(zeros, tuple(leaf.shape), leaf.stride()) if is_permuted(leaf) else wrap(zeros)


class Gradients:
    """Context that restores the gradients of the given leaf tensors after a trace.

    Attributes:
        left: (leaf, gradient made in the trace, or None) for each gradient that the function replaced.
    """

    def __init__(self, leaves: Iterable[torch.Tensor], unmarked: frozenset[int]) -> None:
        by_id = {id(p): p for p in leaves if p.is_leaf and p.device.type == "jax"}
        self._leaves = [p for p in by_id.values() if p.requires_grad or p.grad is not None]
        self._frozen = [p for p in by_id.values() if not p.requires_grad and p.grad is None]
        self._unmarked = unmarked
        self._kept = [p.grad for p in self._leaves]
        self._found: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self._accumulated: set[int] = set()
        self._at_start: dict[int, torch.Tensor | None] = {}  # by id of a leaf
        self._missing: dict[int, torch.Tensor] = {}  # markers, by id of a leaf that has no gradient
        self._read: dict[int, torch.Tensor] = {}  # leaves whose existing gradient Python read
        self._accumulators = AccumulatorHooks(self._leaves)
        self.left: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The leaf tensors, including those that require no gradient."""
        return [*self._leaves, *self._frozen]

    @property
    def kept(self) -> list[torch.Tensor]:
        """The gradients from before the trace."""
        return [g for g in self._kept if g is not None]

    def __enter__(self) -> Gradients:
        return self

    def __exit__(self, *error: object) -> None:
        for p, grad in zip(self._leaves, self._kept, strict=True):
            p.grad = grad
        for p in self._frozen:
            p.grad = None
        for p in self._leaves:
            _remove_hook(p, self)

    def mark(self) -> None:
        """Put a marker in place of every gradient that is missing or that an earlier call dropped."""
        for p in self._leaves:
            dropped = p.grad is not None and buffer_of(p.grad).dropped is not None
            if dropped or (p.grad is None and id(p) not in self._unmarked):
                marker = _empty(p)
                buffer_of(marker).drop(STALE_GRADIENT)
                if p.grad is None:
                    self._missing[id(p)] = marker
                p.grad = marker
            if p.requires_grad:
                _add_hook(p, self, self._note_accumulated)
        self._found = [p.grad for p in self._leaves]
        self._at_start = dict(zip(map(id, self._leaves), self._found, strict=True))
        self._versions = [-1 if p.grad is None or p.grad.is_inference() else p.grad._version for p in self._leaves]

    def _note_accumulated(self, leaf: torch.Tensor) -> None:
        self._accumulated.add(id(leaf))

    def note_read(self, leaf: torch.Tensor) -> None:
        """Note that Python code reads `leaf.grad`, and may test it for None.

        Reads by torch itself are not noted: torch replaces a marker, or computes with it, which raises.

        Raises:
            StaleGradients: the gradient is missing and a marker stands in for it. The function is traced again without the marker.
        """
        grad = leaf.grad
        if grad is None or grad is not self._at_start.get(id(leaf)) or _is_read_by_torch():
            return
        if grad is self._missing.get(id(leaf)):
            raise StaleGradients(frozenset(id(p) for p in self._leaves if p.grad is not None and p.grad is self._missing.get(id(p))))
        self._read[id(leaf)] = leaf

    def stale(self) -> StaleGradients:
        """The error for a read of a marker, with the leaves that still have one."""
        found = zip(self._leaves, self._found, strict=True)
        unzeroed = frozenset(id(p) for p, marker in found if marker is not None and p.grad is marker and buffer_of(marker).value is None)
        return StaleGradients(unzeroed)

    def values(self) -> list[Any]:
        """The traced values of the gradients in `left`, as outputs of the program; in memory order if `is_permuted`."""
        return [load(permuted(g)) if is_permuted(g) else stored_like(p, g) for p, g in self.left if g is not None]

    def collect(self, is_newborn: Callable[[Buffer], bool], keep: bool) -> None:
        """Fill `left` with the gradients that the function replaced.

        Args:
            is_newborn: whether the trace created a buffer.
            keep: gradients are outputs of the program.

        Raises:
            StaleGradients: the function added to a gradient of an earlier call, and `keep` asks for the sum; or it zeroed the marker of
                a missing gradient (`set_to_none=False`), which PyTorch would have left missing.
        """
        added: set[int] = set()
        zeroed: set[int] = set()
        for p, kept, found, version in zip(self._leaves, self._kept, self._found, self._versions, strict=True):
            grad = p.grad
            if grad is not found:
                self.left.append((p, grad if grad is None or is_newborn(buffer_of(grad)) else _of_before(p, grad, keep)))
            elif grad is not None and is_newborn(buffer_of(grad)) and grad._version != version:  # a marker that was written
                if buffer_of(grad).value is None:
                    added.add(id(p))
                elif kept is None and id(p) not in self._accumulated:
                    zeroed.add(id(p))
                self.left.append((p, grad))
        for p in self._frozen:
            if p.grad is not None:  # the function set requires_grad
                self.left.append((p, p.grad if is_newborn(buffer_of(p.grad)) else _of_before(p, p.grad, keep)))
        if (added and keep) or zeroed:
            raise StaleGradients(frozenset(added | zeroed))

    def drop(self) -> None:
        """Drop the values of the new gradients: they have none until the program runs."""
        for _, grad in self.left:
            if grad is not None:
                buffer_of(grad).drop(DROPPED_GRADIENT)

    def slots(self, is_touched: Callable[[Buffer], bool], fixed: Collection[Buffer]) -> dict[Buffer, torch.Tensor]:
        """The gradients from before the trace that the function read or wrote: their leaf, by the buffer of the gradient.

        Every call takes the gradient that the leaf has at that time.

        Args:
            is_touched: whether the trace read or wrote a buffer.
            fixed: buffers that the function also reaches in another way. They are left out.
        """
        kept = [(p, buffer_of(g)) for p, g in zip(self._leaves, self._kept, strict=True) if g is not None]
        times = Counter(b for _, b in kept)
        return {b: p for p, b in kept if is_touched(b) and b not in fixed and times[b] == 1}

    def guard(
        self, guards: Guards, is_touched: Callable[[Buffer], bool], slots: dict[Buffer, torch.Tensor], given: Collection[int]
    ) -> None:
        """Guard that gradients still exist, or are still missing, as the trace assumed.

        Args:
            is_touched: whether the trace read or wrote a buffer.
            slots: gradients in whose place a call takes any tensor of the same kind.
            given: ids of the leaves that are arguments. Their gradients are part of the signature.
        """
        relied: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        alike: list[tuple[torch.Tensor, Any]] = []
        for p, kept in zip(self._leaves, self._kept, strict=True):
            if kept is not None and buffer_of(kept) in slots:
                if id(p) not in given:
                    alike.append((p, gradient_kind(kept)))
            elif (kept is None and id(p) in self._unmarked and id(p) not in given) or (kept is not None and is_touched(buffer_of(kept))):
                relied.append((p, kept))

        read = [p for p in self._read.values() if id(p) not in given]

        def check() -> str | None:
            for p, kept in relied:
                if p.grad is not kept:
                    then, now = ("missing" if g is None else "present" for g in (kept, p.grad))
                    return _changed(p, f"was {then} and is {now}" if then != now else "is another tensor")
            for p, kind in alike:
                now = p.grad
                if now is None:
                    return _changed(p, "was present and is missing")
                if gradient_kind(now) != kind:
                    return _changed(p, "has another shape, dtype or layout")
            gone = next((p for p in read if p.grad is None), None)
            if gone is not None:
                return _changed(gone, "was present and is missing")
            if len({id(buffer_of(p.grad)) for p, _ in alike if p.grad is not None}) != len(alike):
                return "two parameters share one gradient"
            return None

        if relied or alike or read:
            guards.add(check)
        self._accumulators.guard(guards, given)
        frozen = [p for p in self._frozen if id(p) not in given]

        def check_frozen() -> str | None:
            found = next((p for p in frozen if p.grad is not None), None)
            return None if found is None else _changed(found, "was missing and is present, and the parameter is frozen")

        if frozen:
            guards.add(check_frozen, values=[(_grad, frozen)])


_grad = attrgetter("grad")


def _add_hook(leaf: torch.Tensor, key: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Register a hook without a number of `RemovableHandle`: those of the program's hooks are as without a trace."""
    hooks: OrderedDict[Any, Any] | None = leaf._post_accumulate_grad_hooks  # type: ignore[assignment]
    if hooks is None:
        leaf._post_accumulate_grad_hooks = hooks = OrderedDict()
    hooks[key] = hook


def _remove_hook(leaf: torch.Tensor, key: Any) -> None:
    (leaf._post_accumulate_grad_hooks or {}).pop(key, None)


def _is_read_by_torch() -> bool:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and _module_of(frame).startswith("spmd."):
        frame = frame.f_back
    return frame is not None and _module_of(frame).startswith("torch.")


def _module_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def gradient_kind(grad: torch.Tensor) -> Any:
    """A key that is equal for two gradients that the same program can read and write."""
    buffer = buffer_of(grad)
    window = tuple(grad.shape), grad.stride(), grad.storage_offset(), grad.dtype, grad.is_conj(), grad.is_neg()
    return window, buffer.shape, buffer.annotation, buffer.dropped is not None


def _changed(leaf: torch.Tensor, what: str) -> str:
    return f"the gradient of a parameter of shape {list(leaf.shape)}, to which the function adds, {what}"

"""Gradients of a call: it may read `.grad` of leaves as state, and it stores new gradients and `requires_grad` there."""

from __future__ import annotations

from operator import attrgetter, is_
from typing import Any

import torch

from spmd.device._layout import state_sharding_of
from spmd.device._left_values import LeftValues
from spmd.device._storage import buffer_of, wrap, wrap_stored, wrap_strided
from spmd.program.find._objects import flatten
from spmd.program.run._program_call import ProgramCall
from spmd.program.run._state_arrays import StateArrays
from spmd.program.trace._captured import Captured
from spmd.program.trace._gradients import DROPPED_GRADIENT
from spmd.program.trace._memory_order import is_permuted

_grad = attrgetter("grad")
Owner = torch.Tensor | int  # a parameter, or the position of an argument


class CallGradients:
    """Reads gradients before a call, and stores gradients and new optimizer state after it.

    Args:
        keep: whether gradients are results of the program (`keep_grads`). Otherwise `.grad` becomes a tensor without a value.
        written, read: state that the program updates, and state that it only reads. Gradients that it takes are part of it.

    Attributes:
        has_inputs: whether the program takes gradients that exist before the call.
        has_results: whether the function leaves gradients, or optimizer state that it created.
        flags: (leaf, new value) for each `requires_grad` that the function changes.
    """

    def __init__(self, captured: Captured, keep: bool, written: StateArrays, read: StateArrays) -> None:
        self._captured, self._keep = captured, keep
        slots = captured.state.slots
        self._slots = [(slots[b], state, i) for state in (written, read) for i, b in enumerate(state.buffers) if b in slots]
        self._found = found = list(captured.outputs.gradients)
        # Without values, every call stores the same gradient tensors, until one of them is written.
        self._is_constant = not keep and all(isinstance(owner, torch.Tensor) for owner, _ in found)
        self._is_stored = False
        self._note_gradients()
        self.flags = captured.outputs.flags
        self.has_inputs, self.has_results = bool(self._slots), bool(found or captured.state.born)

    def _note_gradients(self) -> None:
        """Note the tensors without values that calls store. A write to one clears its entry. See Note [Values that are left]."""
        found = [(p, grad) for p, grad in self._found if grad is not None] if self._is_constant else []
        self._left = LeftValues(buffer_of(grad) for _, grad in found)
        missing = [p for p, grad in self._found if grad is None]
        self._parameters = [*(p for p, _ in found), *missing]
        self._left.values = [*(grad for _, grad in found), *(None for _ in missing)]

    def bind(self, call: ProgramCall) -> None:
        """Put the buffers of the current gradients into the state of the call."""
        leaves = self._leaves_of(call) if any(isinstance(owner, int) for owner, _, _ in self._slots) else []
        for owner, state, i in self._slots:
            grad = (owner if isinstance(owner, torch.Tensor) else leaves[owner]).grad
            assert grad is not None, "a guard or the signature has checked that it exists"
            state.buffers[i] = buffer_of(grad)

    def release(self, _: Any = None) -> None:
        """Drop the references to the gradients' buffers. The next call may have other gradients."""
        for _owner, state, i in self._slots:
            state.release(i)

    def compare(self, _: ProgramCall) -> None:
        """Check whether every `.grad` already is the tensor that the call would store, so that storing can be skipped.

        This runs before the call, right after the guards have read the same attributes.
        """
        self._is_stored = self._is_constant and all(map(is_, map(_grad, self._parameters), self._left.values))

    def store(self, call: ProgramCall) -> None:
        """Store the gradients in `.grad` of their leaves, and the values of new optimizer state in its tensors."""
        if self._is_stored and not self._captured.state.born:
            return
        values = iter(call.gradients)
        if not self._is_stored:
            self._store_gradients(call, values)
        for (parameter, state), value in zip(self._captured.state.born, values, strict=True):
            buffer = buffer_of(state)
            buffer.value, buffer.dropped = value, None
            buffer.annotation = state_sharding_of(parameter) if parameter.shape == state.shape else None

    def store_flags(self, call: ProgramCall) -> None:
        """Set `requires_grad` of the leaves for which the function changes it."""
        leaves = self._leaves_of(call) if any(isinstance(owner, int) for owner, _ in self.flags) else []
        for owner, flag in self.flags:
            (owner if isinstance(owner, torch.Tensor) else leaves[owner]).requires_grad = flag

    def _store_gradients(self, call: ProgramCall, values: Any) -> None:
        made: dict[int, torch.Tensor] = {}  # one tensor may be the gradient of several leaves
        is_written = False
        for i, (owner, grad) in enumerate(self._found):
            leaf = owner if isinstance(owner, torch.Tensor) else self._leaves_of(call)[owner]
            new = grad
            if grad is not None and self._keep:
                value, shape, spec = next(values), tuple(grad.shape), state_sharding_of(leaf)
                if is_permuted(grad):
                    new = wrap_strided(value, shape, grad.stride())
                else:
                    new = wrap(value) if value.shape == shape or spec is None else wrap_stored(value, shape, spec)
                new = made.setdefault(id(grad), new)
            elif grad is not None and buffer_of(grad).dropped is None:  # written since: it stays what a reference to it expects
                new = made.get(id(grad))
                if new is None:
                    new = made[id(grad)] = torch.empty_like(grad)
                    buffer_of(new).drop(DROPPED_GRADIENT)
                self._found[i], is_written = (owner, new), True
            if leaf.grad is not new:
                leaf.grad = new
        if is_written:
            self._note_gradients()

    def _leaves_of(self, call: ProgramCall) -> list[Any]:
        return flatten(call.given, classes=self._captured.inputs.holders).leaves


__all__ = ["CallGradients"]

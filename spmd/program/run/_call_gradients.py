"""Gradients in a call: those that it takes from their leaves, and those that it leaves there; which leaves require one afterwards."""

from __future__ import annotations

from operator import attrgetter, is_
from typing import Any

import torch

from spmd.device._layout import state_sharding_of
from spmd.device._storage import buffer_of, wrap, wrap_stored
from spmd.program.find._objects import flatten
from spmd.program.run._program_call import ProgramCall
from spmd.program.run._state_arrays import StateArrays
from spmd.program.trace._captured import Captured

_grad = attrgetter("grad")
Owner = torch.Tensor | int  # a parameter, or the position of an argument


class CallGradients:
    """Attributes:
    takes: whether a call takes gradients that are there.
    leaves: whether it leaves any, or state that an optimizer made.
    flags: what it leaves of `requires_grad`.
    """

    def __init__(self, captured: Captured, keep: bool, written: StateArrays, read: StateArrays) -> None:
        self._captured, self._keep = captured, keep
        slots = captured.state.slots
        self._slots = [(slots[b], state, i) for state in (written, read) for i, b in enumerate(state.buffers) if b in slots]
        found = captured.outputs.gradients
        self._is_dropped = not keep and all(isinstance(owner, torch.Tensor) for owner, _ in found)  # each call leaves the same empty ones
        self._are_there = False
        self._parameters, self._left = [p for p, _ in found], [grad for _, grad in found]
        self.flags = captured.outputs.flags
        self.takes, self.leaves = bool(self._slots), bool(found or captured.state.born)

    def take(self, call: ProgramCall) -> None:
        """Put the buffers of today's gradients in their places among the state."""
        leaves = self._leaves_of(call) if any(isinstance(owner, int) for owner, _, _ in self._slots) else []
        for owner, state, i in self._slots:
            grad = (owner if isinstance(owner, torch.Tensor) else leaves[owner]).grad
            assert grad is not None, "a guard or the signature said that it is there"
            state.buffers[i] = buffer_of(grad)

    def forget(self, _: Any = None) -> None:
        """Hold none of them until the next call, which may have others."""
        for _owner, state, i in self._slots:
            state.let_go(i)

    def look(self, _: ProgramCall) -> None:
        """See whether the leaves have what a call leaves there: then none has to be put. Now, since guards have just looked at them."""
        self._are_there = self._is_dropped and all(map(is_, map(_grad, self._parameters), self._left))

    def leave(self, call: ProgramCall) -> None:
        """Put the gradients that the function leaves on its leaves, and the state that an optimizer made in its place."""
        if self._are_there and not self._captured.state.born:
            return
        values = iter(call.gradients)
        if not self._are_there:
            self._put(call, values)
        for (parameter, state), value in zip(self._captured.state.born, values, strict=True):
            buffer = buffer_of(state)
            buffer.value, buffer.dropped = value, None
            buffer.annotation = state_sharding_of(parameter) if parameter.shape == state.shape else None

    def leave_flags(self, call: ProgramCall) -> None:
        """Let leaves require a gradient, or not, as the function leaves them."""
        leaves = self._leaves_of(call) if any(isinstance(owner, int) for owner, _ in self.flags) else []
        for owner, flag in self.flags:
            (owner if isinstance(owner, torch.Tensor) else leaves[owner]).requires_grad = flag

    def _put(self, call: ProgramCall, values: Any) -> None:
        for owner, grad in self._captured.outputs.gradients:
            leaf = owner if isinstance(owner, torch.Tensor) else self._leaves_of(call)[owner]
            left = grad
            if grad is not None and self._keep:
                value, shape, spec = next(values), tuple(grad.shape), state_sharding_of(leaf)
                left = wrap(value) if value.shape == shape or spec is None else wrap_stored(value, shape, spec)
            if leaf.grad is not left:
                leaf.grad = left

    def _leaves_of(self, call: ProgramCall) -> list[Any]:
        return flatten(call.given, classes=self._captured.inputs.holders).leaves


__all__ = ["CallGradients"]

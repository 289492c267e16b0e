"""What places hold to which the function assigns anew: each call takes what lies there when it begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from spmd.base._errors import TraceError, message
from spmd.device._storage import buffer_of
from spmd.program.reads import ReplacedState, touched_by
from spmd.program.run._program_call import ProgramCall
from spmd.program.run._state_arrays import StateArrays


class HeldState:
    """Its tensors take the places, among the state, of those that the trace found. `written_args`: positions of arguments."""

    def __init__(self, held: Sequence[ReplacedState], written: StateArrays, read: StateArrays, written_args: Sequence[int]) -> None:
        self._held, self._written, self._read, self._written_args = held, written, read, written_args
        self._rebound = [(i, state, k) for state in (written, read) for i, k in touched_by(held, state.buffers)]

    def find(self, call: ProgramCall) -> None:
        """Look what is there.

        Raises:
            TraceError: a tensor that is written to is an argument or other state too.
        """
        call.held = [place.read() for place in self._held]
        for position, state, index in self._rebound:
            state.buffers[index] = buffer_of(call.held[position])
        if self._rebound:
            self._refuse_aliases(call)

    def _refuse_aliases(self, call: ProgramCall) -> None:
        count = Counter(map(id, (*self._written.buffers, *self._read.buffers, *call.arguments)))
        writes = {id(b) for b in (*self._written.buffers, *(call.arguments[i] for i in self._written_args))}
        for _, state, index in self._rebound:
            buffer = state.buffers[index]
            if count[id(buffer)] > 1 and id(buffer) in writes:
                raise TraceError(
                    message(
                        "a tensor that is read under a name is an argument or other state too, and the function writes to one of them",
                        f"the tensor has shape {buffer.shape}; when the function was traced they were two tensors",
                        fix="give the name a clone: holder.name = tensor.clone()",
                    )
                )


__all__ = ["HeldState"]

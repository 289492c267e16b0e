"""State in attributes or containers that the function assigns to (hidden states, caches). Each call takes the tensors that are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from spmd.base._errors import TraceError, message
from spmd.device._storage import buffer_of
from spmd.program.reads import ReplacedState, is_data, objects_in, touched_by
from spmd.program.run._program_call import ProgramCall
from spmd.program.run._state_arrays import StateArrays


class HeldState:
    """Reads the current tensors of assigned places, which replace those of the trace in the program's state.

    Args:
        held: the places, and the values that the trace found there.
        written, read: state that the program updates, and state that it only reads.
        written_args: positions of the arguments that the program updates.
        writes: whether the function writes to objects among the arguments, or to objects in these places.
    """

    def __init__(
        self, held: Sequence[ReplacedState], written: StateArrays, read: StateArrays, written_args: Sequence[int], writes: bool
    ) -> None:
        self._held, self._written, self._read, self._written_args = held, written, read, written_args
        self._may_share = writes and any(is_data(place.value) for place in held)
        self._rebound = [(i, state, k) for state in (written, read) for i, k in touched_by(held, state.buffers)]

    def read(self, call: ProgramCall) -> None:
        """Read the places into `call.held`, and put their buffers into the state of the call.

        Raises:
            TraceError: a tensor is also an argument or other state, or an object is also an argument, and the function writes to it.
        """
        call.held = [place.read() for place in self._held]
        if self._may_share:
            self._refuse_arguments(call)
        for position, state, index in self._rebound:
            state.buffers[index] = buffer_of(call.held[position])
        if self._rebound:
            self._refuse_aliases(call)

    def _refuse_arguments(self, call: ProgramCall) -> None:
        given = {id(value) for value in objects_in(call.given, with_attributes=True)}
        for value in call.held:
            if id(value) in given:
                raise TraceError(
                    message(
                        f"a {type(value).__name__} in an attribute or container is also an argument, and the function writes to one",
                        "a trace copies its arguments, so a write to one would not be visible in the other",
                        fix="use it in one way only: as an argument, or by name",
                    )
                )

    def _refuse_aliases(self, call: ProgramCall) -> None:
        count = Counter(map(id, (*self._written.buffers, *self._read.buffers, *call.arguments)))
        writes = {id(b) for b in (*self._written.buffers, *(call.arguments[i] for i in self._written_args))}
        for _, state, index in self._rebound:
            buffer = state.buffers[index]
            if count[id(buffer)] > 1 and id(buffer) in writes:
                raise TraceError(
                    message(
                        "a tensor in an attribute or container is also an argument or other state, and the function writes to one of them",
                        f"the tensor has shape {buffer.shape}; these were two tensors when the function was traced",
                        fix="store a clone there: holder.name = tensor.clone()",
                    )
                )


__all__ = ["HeldState"]

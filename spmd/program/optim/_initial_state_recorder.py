"""The recorder of the trace of an optimizer's first step, from which its state gets its first values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mesh import Mesh, ShardingSpec
from spmd.base._errors import TraceAgain, TraceError
from spmd.device._storage import Buffer
from spmd.program.xla._target import only_mesh


class StateComplete(Exception):
    """Ends the trace of a first step as soon as every parameter has its state."""


class InitialStateRecorder:
    """Recorder of the trace of an optimizer's first step. It records the first value of each new buffer.

    torch's own optimizers create the state of a group before they use it. So their trace ends at the first write after all parameters
    have state.

    Attributes:
        first: for each buffer that the step created, its first value; None while it was created on the host and not read.
        before: value and host value of each older buffer that was written.
        existing, seen: ids of the arrays that were read from older buffers, and these buffers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, waiting_for: list[torch.Tensor]) -> None:
        """`waiting_for`: parameters after whose states the first write ends the trace; none, and it does not end early."""
        self.first: dict[Buffer, Any] = {}
        self.before: dict[Buffer, tuple[Any, Any]] = {}
        self.existing, self.seen = set[int](), set[Buffer]()
        self.words: Any = None
        self.scalars: dict[Any, Any] = {}
        self.finite: list[tuple[str, Any]] = []
        self.platform = self.reduce_dtype = self.axes = None
        self.takes_checks = True
        self._state = optimizer.state
        self._waiting_for = waiting_for

    def born(self, buffer: Buffer) -> None:
        self.first[buffer] = buffer.value

    def read(self, buffer: Buffer) -> None:
        buffer.reads.clear()
        if buffer not in self.first:
            self.seen.add(buffer)
            self.existing.add(id(buffer.value))
        elif self.first[buffer] is None:  # created on the host
            self.first[buffer] = buffer.value

    def will_write(self, buffer: Buffer) -> None:
        if self._waiting_for and all(self._state.get(p) for p in self._waiting_for):
            raise StateComplete
        if buffer not in self.first:
            self.before.setdefault(buffer, (buffer.value, buffer.host))

    def put_back(self) -> None:
        """Restore the values of all older buffers, and forget what was read of them: windows and values without padding are tracers."""
        for buffer, (value, host) in self.before.items():
            buffer.value, buffer.host = value, host
        for buffer in (*self.before, *self.seen):
            buffer.reads.clear()

    def is_copy_of(self, base: Buffer, copy: Buffer, why: type[TraceAgain]) -> None:
        raise why()

    def is_current(self, copy: Buffer) -> None:
        """Nothing: there is none."""

    def laid_out(self, spec: ShardingSpec) -> None:
        """Nothing: the trace of the whole function records it."""

    def only_mesh(self) -> Mesh | None:
        return only_mesh((buffer.annotation for buffer in self.seen), ())

    def ran_layers(self, results: Sequence[Any], trained: Sequence[frozenset[str]]) -> None:
        """Nothing: the trace of the whole function records it."""

    def reduce_in(self, dtype: Any) -> None:
        """Nothing: the gradients are inputs of this trace."""

    def is_state(self, array: Any) -> bool:
        """True: the gradients are placeholders, so no value in this trace is known."""
        return True

    def is_counter(self, array: Any) -> bool:
        return False

    def known_value(self, value: Any) -> None:
        return None

    known_number = known_count = side_of = known_value

    def each_call(self, tensor: torch.Tensor, look: Any) -> bool:
        return False  # this trace has no arguments

    def makes_host_copy(self) -> bool:
        return False

    def host_read(self, tensor: torch.Tensor) -> None:
        return None

    def expect(self, flag: Any, check: Any) -> bool:
        """True, without a check: values are not known in this trace."""
        return True

    def random_state(self) -> tuple[Any, int]:
        raise TraceError("the optimizer draws random numbers while it creates its state")


__all__ = ["InitialStateRecorder", "StateComplete"]

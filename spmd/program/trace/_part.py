"""The recorder of a part of a trace (a branch, a loop body, a manual region), inside the recorder of the whole trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mesh import Mesh, ShardingSpec
from spmd.base._errors import TraceAgain
from spmd.device._checks import Check
from spmd.device._indices import BeforeCall
from spmd.device._storage import Buffer, recording
from spmd.device._trace_recorder import Recorder
from spmd.program.trace._buffer_use import TraceRecorder


class Part:
    """Recorder of a part. It delegates to the enclosing recorder whatever a subclass does not override.

    Attributes:
        outer: the enclosing recorder; without an enclosing trace, one whose records are discarded.
        words, start_draws: the random state at the start of the part.
    """

    def __init__(self, words: Any, start_draws: int) -> None:
        self.words = words
        self.start_draws = start_draws
        self.outer: Recorder = recording.get() or TraceRecorder(words, start_draws, {})

    @property
    def scalars(self) -> dict[Any, Any]:
        return self.outer.scalars

    @property
    def finite(self) -> list[tuple[str, Any]]:
        return self.outer.finite

    @property
    def platform(self) -> str | None:
        return self.outer.platform

    @property
    def reduce_dtype(self) -> Any:
        return self.outer.reduce_dtype

    @property
    def axes(self) -> tuple[str, ...] | None:
        return self.outer.axes

    def born(self, buffer: Buffer) -> None:
        self.outer.born(buffer)

    def read(self, buffer: Buffer) -> None:
        self.outer.read(buffer)

    def will_write(self, buffer: Buffer) -> None:
        self.outer.will_write(buffer)

    def is_copy_of(self, base: Buffer, copy: Buffer, why: type[TraceAgain]) -> None:
        self.outer.is_copy_of(base, copy, why)

    def is_current(self, copy: Buffer) -> None:
        self.outer.is_current(copy)

    def is_state(self, array: Any) -> bool:
        return self.outer.is_state(array)

    def is_counter(self, array: Any) -> bool:
        return self.outer.is_counter(array)

    def known_value(self, value: Any) -> Any:
        return self.outer.known_value(value)

    def known_number(self, value: Any) -> Any:
        return self.outer.known_number(value)

    def known_count(self, value: Any) -> int | None:
        return self.outer.known_count(value)

    def each_call(self, tensor: torch.Tensor, look: BeforeCall) -> bool:
        """False: a call need not run the part, and no flag can leave it."""
        return False

    def makes_host_copy(self) -> bool:
        """False: it could leave the part by a way that is not its result."""
        return False

    def host_read(self, tensor: torch.Tensor) -> None:
        self.outer.host_read(tensor)

    @property
    def takes_checks(self) -> bool:
        """False: a flag that is computed in a part cannot leave it."""
        return False

    def expect(self, flag: Any, check: Check) -> bool:
        return False

    def side_of(self, value: Any) -> bool | None:
        """None: the device runs the part, perhaps several times."""
        return None

    def random_state(self) -> tuple[Any, int]:
        return self.words, self.start_draws

    def laid_out(self, spec: ShardingSpec) -> None:
        self.outer.laid_out(spec)

    def only_mesh(self) -> Mesh | None:
        return self.outer.only_mesh()

    def ran_layers(self, results: Sequence[Any], trained: Sequence[frozenset[str]]) -> None:
        """No record: a part is traced once for all its iterations, and loops in it stay as they are."""

    def reduce_in(self, dtype: Any) -> None:
        self.outer.reduce_in(dtype)


__all__ = ["Part"]

"""The interface of what records a program while it is traced. `_storage.recording` holds the recorder of the current trace.

Its implementations are in the floor above: `program/trace/_buffer_use` records a whole trace, `program/trace/_part` a part of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

import mesh
from spmd.base._errors import TraceAgain
from spmd.device._checks import Check

if TYPE_CHECKING:
    from spmd.device._indices import BeforeCall
    from spmd.device._storage import Buffer


class Recorder(Protocol):
    """Records the reads and writes of a program that is traced, and provides its inputs from the host.

    Attributes:
        words: random state at the start of the program, or of a recomputation.
        scalars: results of `once`.
        finite: (name of a module, 0-dim flag) for each result that is checked for NaN and infinity after the call.
        platform, reduce_dtype: see `trace_setting`.
        axes: mesh axes of a manual region; None outside one.
    """

    words: Any

    @property
    def scalars(self) -> dict[Any, Any]: ...

    @property
    def finite(self) -> list[tuple[str, Any]]: ...

    @property
    def platform(self) -> str | None: ...

    @property
    def reduce_dtype(self) -> Any: ...

    @property
    def axes(self) -> tuple[str, ...] | None: ...

    @property
    def takes_checks(self) -> bool: ...  # whether `expect` adds checks

    def born(self, buffer: Buffer) -> None: ...

    def read(self, buffer: Buffer) -> None: ...

    def will_write(self, buffer: Buffer) -> None: ...

    def is_copy_of(self, base: Buffer, copy: Buffer, why: type[TraceAgain]) -> None:
        """Raise `why` on any operation that would reveal that `copy` is not a view of `base`."""

    def is_current(self, copy: Buffer) -> None:
        """Let a copy be read and written again."""

    def is_state(self, array: Any) -> bool: ...  # a buffer's value, which the program reads again in every call

    def is_counter(self, array: Any) -> bool: ...  # the value of an optimizer's step counter

    def known_value(self, value: Any) -> Any:
        """A traced value, computed on the host from inputs that it knows, or None. The program gets a guard on the value."""

    def known_number(self, value: Any) -> Any: ...  # a 0-dim value as a number that varies, if it does; else None

    def known_count(self, value: Any) -> int | None:
        """The same for an integer, if this trace treats integers as Python ints."""

    def each_call(self, tensor: torch.Tensor, look: BeforeCall) -> bool:
        """Call `look` with the values of (a view of) an argument, now and before each call, if the host knows them.

        Returns:
            Whether the program has to look instead: in a loop, where the tensor may be a part of an argument.
        """
        ...

    def makes_host_copy(self) -> bool | None:
        """Whether a copy to the host is a `HostCopy` now. None: only if the host does not know its values."""

    def host_read(self, tensor: torch.Tensor) -> None:
        """Record that the values of a CPU tensor become a constant of the program."""

    def expect(self, flag: Any, check: Check) -> bool:
        """Add a check to the program that the 0-dim `flag` is not set. Returns False if no check can be added here."""
        ...

    def side_of(self, value: Any) -> bool | None: ...  # that a branch on a bool[] takes that only the device knows; None: it takes none

    def random_state(self) -> tuple[Any, int]: ...  # its words, and the default stream's number of draws at that state

    def laid_out(self, spec: mesh.ShardingSpec) -> None:
        """Record that a value was constrained to the layout `spec`."""

    def only_mesh(self) -> mesh.Mesh | None: ...  # that of all tensors used so far; None if there is none, or several

    def ran_layers(self, results: Sequence[Any], trained: Sequence[frozenset[str]]) -> None:
        """Record that layers ran that must become one loop: the result of each, and the names of its parameters that need a gradient."""

    def reduce_in(self, dtype: Any) -> None:
        """Sum gradients of weights in `dtype` from here on (in the widest dtype requested so far)."""


__all__ = ["Recorder"]

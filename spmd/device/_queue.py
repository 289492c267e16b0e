"""The interface of a queue of deferred operations, as buffers with pending values use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

import mesh

if TYPE_CHECKING:
    from typing import Any

    from spmd.device._storage import Buffer


class Queue(Protocol):
    """A queue of deferred operations (see `_deferred`). A buffer whose value they will compute refers to it."""

    def run(self) -> None:
        """Run the operations. Afterwards every buffer that was pending on this queue has its value."""
        ...

    def dtype_of(self, buffer: Buffer) -> np.dtype[Any]:
        """The element type of a pending buffer."""
        ...

    def annotate(self, buffer: Buffer, spec: mesh.ShardingSpec) -> None:
        """Set the layout of a pending buffer's future value."""
        ...

    def leave(self, buffer: Buffer) -> None:
        """Called when a buffer of this queue gets another value."""
        ...


__all__ = ["Queue"]

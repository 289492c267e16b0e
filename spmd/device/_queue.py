"""What holds operations that run later, as the buffers see it that wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

import mesh

if TYPE_CHECKING:
    from typing import Any

    from spmd.device._storage import Buffer


class Queue(Protocol):
    """Holds operations that run later (see `_deferred`); a buffer that is to get its value from them knows it."""

    def run(self) -> None:
        """Run them: every buffer that waits for this queue has its value then."""
        ...

    def dtype_of(self, buffer: Buffer) -> np.dtype[Any]:
        """The element type that a waiting buffer will have."""
        ...

    def annotate(self, buffer: Buffer, spec: mesh.ShardingSpec) -> None:
        """Lay out the value that a waiting buffer will have."""
        ...

    def leave(self, buffer: Buffer) -> None:
        """A buffer that waited was given a value by somebody else."""
        ...


__all__ = ["Queue"]

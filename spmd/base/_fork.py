"""A process forked from one that uses its devices: it has none of jax's threads, so device work in it crashes or never ends.

`DataLoader(num_workers=...)` forks by default. What reaches a device in such a process is refused, as CUDA tensors are.
"""

from __future__ import annotations

import os

from mesh.platform._jax_runtime import backends_are_initialized
from spmd.base._errors import called_at, message


class _Fork:
    """Whether this process is a fork of one that had started its devices.

    Attributes:
        is_bad: read before every use of a device, so it is a plain attribute.
    """

    __slots__ = ("is_bad",)

    def __init__(self) -> None:
        self.is_bad = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._note)

    def _note(self) -> None:
        self.is_bad = backends_are_initialized is not None and backends_are_initialized()

    def error(self) -> RuntimeError:
        """For a use of the device in this process: of the class that CUDA raises."""
        return RuntimeError(
            message(
                "device 'jax' cannot be used in a forked process: it has none of the threads that run the devices",
                *called_at(),
                fix='keep the dataset on the CPU, or DataLoader(..., multiprocessing_context="forkserver") to give each worker devices',
            )
        )


fork = _Fork()

__all__ = ["fork"]

"""Refuses the devices in a process forked from one that uses them, as CUDA does.

A fork has none of jax's threads, so work in it never ends, or the process crashes.
`DataLoader(num_workers=...)` forks by default. In such a fork every read or write of an attribute that holds a device's value raises.
Operators and compiled calls that read no such value ask `fork.is_bad` first.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from mesh.platform._jax_runtime import backends_are_initialized
from spmd.base._errors import called_at, message


class _Fork:
    """Whether this process is a fork of one that had started its devices.

    Attributes:
        is_bad: a plain attribute, because every operator reads it.
    """

    __slots__ = ("_values", "is_bad")

    def __init__(self) -> None:
        self.is_bad = False
        self._values: list[tuple[type, str]] = []
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin)

    def refuse(self, owner: type, attribute: str) -> None:
        """Let an attribute of all instances of a class raise in such a fork. It costs the other processes nothing."""
        self._values.append((owner, attribute))

    def _begin(self) -> None:
        self.is_bad = backends_are_initialized is not None and backends_are_initialized()
        for owner, attribute in self._values if self.is_bad else ():
            setattr(owner, attribute, property(self._raise, self._raise))

    def _raise(self, *_: Any) -> NoReturn:
        raise self.error()

    def error(self) -> RuntimeError:
        """The error for a use of the device in this process, of the class that CUDA raises."""
        return RuntimeError(
            message(
                "device 'jax' cannot be used in a forked process: it has none of the threads that run the devices",
                *called_at(),
                fix="keep the dataset on the CPU, and move each batch in the training process: x = x.to('jax')",
            )
        )


fork = _Fork()

__all__ = ["fork"]

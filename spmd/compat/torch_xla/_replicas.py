"""`torch_xla.distributed.xla_multiprocessing` without replicas: one process drives all devices, so a function runs once.

A program that reduces over its replicas has a single one, and computes what torch_xla computes on one device. `xs.mark_sharding` spreads
it over the other devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.base._errors import SpmdError, message


class ReplicaCountError(SpmdError, ValueError):
    """More than one replica was requested."""


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """Call `fn(0, *args)` once, in this process.

    Args:
        fn: its first argument is the ordinal of the replica.
        args: its other arguments.
        nprocs: 1 or None.
        join: accepted for compatibility, like `daemon` and `start_method`: there is no other process.

    Raises:
        ReplicaCountError: more than one process was requested (a ValueError).
    """
    if nprocs not in (None, 1):
        what = f"xmp.spawn cannot start {nprocs} processes"
        raise ReplicaCountError(message(what, "one process drives all devices", fix="leave nprocs out, and mark the tensors to split"))
    fn(0, *args)


class MpModelWrapper:
    """A model that is created before `spawn` and moved to the device inside."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def to(self, device: Any) -> torch.nn.Module:
        """The model itself, moved to `device`."""
        return self._model.to(device)


class MpSerialExecutor:
    """Runs a function in one replica at a time; here there is only one."""

    def run(self, fn: Callable[[], Any]) -> Any:
        return fn()

"""`torch_xla.distributed.xla_multiprocessing`, where there are no replicas: one process drives all devices, so a function runs once.

A program that reduces over its replicas has one, and computes what torch_xla computes on one device; `xs.mark_sharding` is what
spreads it over the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.base._errors import SpmdError, message


class ReplicaCountError(SpmdError, ValueError):
    """Another number of replicas than one was asked for."""


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """`fn(0, *args)`, once, in this process.

    Args:
        fn: takes the ordinal of its replica first.
        args: its other arguments.
        nprocs: 1 or None.
        join: taken for torch_xla's sake, as `daemon` and `start_method`: there is no other process.

    Raises:
        ReplicaCountError: another number of processes was asked for (a ValueError).
    """
    if nprocs not in (None, 1):
        what = f"xmp.spawn cannot start {nprocs} processes"
        raise ReplicaCountError(message(what, "one process drives all devices", fix="leave nprocs out, and mark what is to be split"))
    fn(0, *args)


class MpModelWrapper:
    """A model made before `spawn` and moved to the device in it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def to(self, device: Any) -> torch.nn.Module:
        """The model itself, on `device`."""
        return self._model.to(device)


class MpSerialExecutor:
    """Runs a function of one replica at a time; here there is one."""

    def run(self, fn: Callable[[], Any]) -> Any:
        return fn()

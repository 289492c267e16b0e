"""`torch_xla._XLAC`'s preemption manager: SIGTERM asks the training loop to save and stop at its next step.

`mesh.should_stop(step)` is the form for jobs of several processes, which agree on one step.
"""

from __future__ import annotations

import signal
from typing import Any

import jax

from spmd.base._errors import SpmdError, message

_handler_before: list[Any] = []
_asked: list[bool] = []


def activate() -> None:
    """SIGTERM no longer ends the process: `sync_point_reached` says that it came.

    Raises:
        SpmdError: the job has several processes.
    """
    if jax.process_count() > 1:
        what = "CheckpointManager's preemption manager watches one process, this job has several"
        raise SpmdError(message(what, fix="chkpt_on_preemption=False, and ask mesh.should_stop(step) before each step"))
    if not _handler_before:
        _handler_before.append(signal.signal(signal.SIGTERM, lambda number, frame: _asked.append(True)))


def deactivate() -> None:
    """SIGTERM means what it meant."""
    _asked.clear()
    if _handler_before:
        signal.signal(signal.SIGTERM, _handler_before.pop())


def sync_point_reached(step: int) -> bool:
    """Whether the process was asked to stop.

    Raises:
        SpmdError: nobody has called `activate`.
    """
    if not _handler_before:
        raise SpmdError(message("no preemption manager is active", fix="torch_xla._XLAC._activate_preemption_sync_manager()"))
    return bool(_asked)

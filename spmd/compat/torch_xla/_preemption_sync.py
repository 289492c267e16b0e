"""`torch_xla._XLAC`'s preemption manager: on SIGTERM the training loop is asked to save and stop at its next step.

In jobs of several processes, use `mesh.should_stop(step)`, which makes all processes agree on one step.
"""

from __future__ import annotations

import signal
from typing import Any

import jax

from spmd.base._errors import SpmdError, message

_handler_before: list[Any] = []
_asked: list[bool] = []


def activate() -> None:
    """Make SIGTERM set a flag for `sync_point_reached` instead of ending the process.

    Raises:
        SpmdError: the job has several processes.
    """
    if jax.process_count() > 1:
        what = "CheckpointManager's preemption manager supports one process, but this job has several"
        raise SpmdError(message(what, fix="chkpt_on_preemption=False, and call mesh.should_stop(step) before each step"))
    if not _handler_before:
        _handler_before.append(signal.signal(signal.SIGTERM, lambda number, frame: _asked.append(True)))


def deactivate() -> None:
    """Restore the previous handler of SIGTERM."""
    _asked.clear()
    if _handler_before:
        signal.signal(signal.SIGTERM, _handler_before.pop())


def sync_point_reached(step: int) -> bool:
    """Whether the process was asked to stop.

    Raises:
        SpmdError: `activate` was not called.
    """
    if not _handler_before:
        raise SpmdError(message("no preemption manager is active", fix="torch_xla._XLAC._activate_preemption_sync_manager()"))
    return bool(_asked)

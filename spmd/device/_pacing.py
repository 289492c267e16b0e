"""Bounds how far Python may run ahead of CPU devices. This is the only place where a call waits for an earlier one.

Note [Pacing]
Every call returns before the devices have finished, so a loop that reads nothing runs ahead of them. On a mesh of CPU devices this
module bounds the number of programs in flight, for two reasons: XLA:CPU may run out of threads (Note [Threads of XLA:CPU]), and
programs in flight hold memory. It counts the programs that run on several CPU devices, both eager operations and compiled functions.
It keeps a result of every 12th program and waits for the result kept before. At most 24 programs are therefore in flight, and one
result is kept alive. A kept result must not be donated to the next call, so if the 12th program is a compiled function that returns
only its state, the call waits for it immediately. If jax was started with too few threads before this package was imported, a result
of every program is kept, and at most 2 are in flight. Other platforms limit the number of programs in flight themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from mesh import _devices
from spmd.base._jax import ArrayImpl

_INTERVAL = 12  # a result of every 12th program is kept


@dataclass
class _Pace:
    """Attributes:
    interval: a result of every `interval`-th program is kept; 0: of none; None: not known until the devices are.
    count: number of programs so far.
    last: the result that is kept.
    """

    interval: int | None = None
    count: int = 0
    last: Any = None


_pace = _Pace()


def note_operation(out: Any) -> None:
    """Count an eager operation that was dispatched with result `out`. Arrays on one device and tracers are not counted."""
    value = out[0] if type(out) in (tuple, list) and out else out
    if type(value) is ArrayImpl and type(value.sharding) is not SingleDeviceSharding and _is_due():
        _keep(value)


def note_call(kept: Sequence[jax.Array], state: Sequence[jax.Array]) -> None:
    """Count a compiled function that was dispatched on several devices.

    Args:
        kept: results that no later call donates.
        state: the new state, which the next call may donate.
    """
    if not _is_due():
        return
    if kept:
        _keep(min(kept, key=lambda array: array.nbytes))
    else:
        _wait(state)


def _is_due() -> bool:
    if _pace.interval is None:
        on_cpu = _devices.platform() == "cpu"
        _pace.interval = (_INTERVAL if _devices.started_with_threads() else 1) if on_cpu else 0
    _pace.count += 1
    return _pace.interval != 0 and _pace.count % _pace.interval == 0


def _keep(value: Any) -> None:
    last, _pace.last = _pace.last, value
    _wait(last)


def _wait(values: Any) -> None:
    with suppress(RuntimeError):  # the value was donated in the meantime, or the program failed, which reading its result reports
        jax.block_until_ready(values)


__all__ = ["note_call", "note_operation"]

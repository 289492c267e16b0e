"""How far Python may be ahead of CPU devices: the one place where a call waits for an earlier one.

Note [Pacing]
Every call returns before the devices are done, so a loop that reads nothing gets ahead of them. On a mesh of CPU devices that is
bounded here, for two reasons. XLA:CPU may run out of threads (Note [Threads of XLA:CPU]), and what is in flight holds memory.
So of the programs that run on several CPU devices, eager operations and compiled functions alike, every 12th is remembered by a
result, and the one remembered before is waited for: at most 24 are on their way, and one result is held. What is waited for must
not be donated to the next call, so a compiled function that returns nothing but its state is waited for at once when it is the 12th.
Where jax had started with too few threads before this package was imported, every program is remembered, and at most 2 are on
their way. Other platforms order what they are given by themselves.
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

_APART = 12  # programs between two that are remembered


@dataclass
class _Pace:
    """Attributes:
    apart: programs between two that are remembered; 0: none is; None: not known before the devices are.
    count: programs so far.
    last: a result of the one that is remembered.
    """

    apart: int | None = None
    count: int = 0
    last: Any = None


_pace = _Pace()


def note_operation(out: Any) -> None:
    """An eager operation was dispatched that gives `out`; arrays on one device and tracers are nothing to wait for."""
    value = out[0] if type(out) in (tuple, list) and out else out
    if type(value) is ArrayImpl and type(value.sharding) is not SingleDeviceSharding and _is_due():
        _remember(value)


def note_call(kept: Sequence[jax.Array], state: Sequence[jax.Array]) -> None:
    """A compiled function was dispatched on several devices: results that nobody donates, and its state."""
    if not _is_due():
        return
    if kept:
        _remember(min(kept, key=lambda array: array.nbytes))
    else:
        _wait(state)


def _is_due() -> bool:
    if _pace.apart is None:
        on_cpu = _devices.platform() == "cpu"
        _pace.apart = (_APART if _devices.started_with_threads() else 1) if on_cpu else 0
    _pace.count += 1
    return _pace.apart != 0 and _pace.count % _pace.apart == 0


def _remember(value: Any) -> None:
    last, _pace.last = _pace.last, value
    _wait(last)


def _wait(values: Any) -> None:
    with suppress(RuntimeError):  # donated meanwhile; or the program failed, which reading its result says
        jax.block_until_ready(values)


__all__ = ["note_call", "note_operation"]

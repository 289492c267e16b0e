"""Counts transfers between host and devices, to find an unintended copy.

    spmd.metrics.reset()
    train_step(x, y)
    spmd.metrics.counters()      # {"uploads": 2, "upload_bytes": 524288, ...}

Counters: `uploads` and `upload_bytes` (the copy on each device counts), `host_reads` and `download_bytes`. Under `spmd.lazy()` also
`step_programs_made`, `step_programs_found` (steps that reused an earlier program), `programs` (runs) and `aliased_buffers`.
"""

from __future__ import annotations

from spmd.base import _counters


def counters() -> dict[str, int]:
    """All counters by name, since the process started or since the last `reset`."""
    return _counters.snapshot()


def reset() -> None:
    """Set every counter to zero."""
    _counters.reset()


__all__ = ["counters", "reset"]

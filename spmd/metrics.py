"""Counts of what crosses between host and devices, for finding a copy that nobody meant to make.

    spmd.metrics.reset()
    train_step(x, y)
    spmd.metrics.counters()      # {"uploads": 2, "upload_bytes": 524288, ...}

Counters: `uploads` and `upload_bytes` (every device's copy counted), `host_reads` and `download_bytes`; under `spmd.lazy()` also
`step_programs_made`, `step_programs_found` (a step that ran a program of an earlier one), `programs` (runs) and `aliased_buffers`.
"""

from __future__ import annotations

from spmd.base import _counters


def counters() -> dict[str, int]:
    """All counters by name since the start of the process or the last `reset`."""
    return _counters.snapshot()


def reset() -> None:
    """Set every counter to zero."""
    _counters.reset()


__all__ = ["counters", "reset"]

"""Counters of transfers between host and devices. `spmd.metrics` shows them.

They are on the lowest floor because the lowest-level copy functions increment them. A counter is a name and an integer, which only
grows until `reset`.
"""

from __future__ import annotations

import threading
from collections import Counter

_counts: Counter[str] = Counter()
_lock = threading.Lock()


def count(name: str, amount: int = 1) -> None:
    """Add `amount` to counter `name`, in the counter's unit (bytes or calls)."""
    with _lock:
        _counts[name] += amount


def snapshot() -> dict[str, int]:
    """A copy of all counters, by name."""
    with _lock:
        return dict(_counts)


def reset() -> None:
    """Set every counter to zero."""
    with _lock:
        _counts.clear()

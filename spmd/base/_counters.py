"""Counts of what crosses between host and devices. Lowest floor, because the copies below every API keep them.

It knows nothing of tensors: a counter is a name and a number that only grows until `reset`. `spmd.metrics` shows them.
"""

from __future__ import annotations

import threading
from collections import Counter

_counts: Counter[str] = Counter()
_lock = threading.Lock()


def count(name: str, amount: int = 1) -> None:
    """Add `amount` to counter `name` (bytes, calls; the name says which)."""
    with _lock:
        _counts[name] += amount


def snapshot() -> dict[str, int]:
    """All counters by name, as a copy."""
    with _lock:
        return dict(_counts)


def reset() -> None:
    """Set every counter to zero."""
    with _lock:
        _counts.clear()

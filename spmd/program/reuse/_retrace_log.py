"""Every retrace through `logging`: logger "spmd.compile", level INFO, and WARNING the time that is one too many.

That time has a Python warning too, so without handlers, where logging writes warnings to stderr by itself, it is not said twice.
"""

from __future__ import annotations

import logging

_log = logging.getLogger("spmd.compile")


def log_retrace(name: str, reason: str, times: int, limit: int) -> None:
    """Log that `name` was traced again, for the n-th time, where `limit` is the number of times at which it warns."""
    is_warning = times == limit and _log.hasHandlers()
    _log.log(logging.WARNING if is_warning else logging.INFO, "%s is traced again (%d): %s", name, times, reason)


__all__ = ["log_retrace"]

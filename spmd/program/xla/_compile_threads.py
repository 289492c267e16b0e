"""Threads that compile programs or load cached executables while Python continues."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

_NUM_THREADS = 4  # programs compiled at the same time; XLA uses further threads for each


@lru_cache(maxsize=1)
def compile_threads() -> ThreadPoolExecutor:
    """The thread pool, created by the first call."""
    return ThreadPoolExecutor(_NUM_THREADS, "compiling")


__all__ = ["compile_threads"]

"""The threads that compile programs, or read kept ones, while Python goes on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

_NUM_THREADS = 4  # of programs at a time: XLA's compilers use threads of their own for each


@lru_cache(maxsize=1)
def compile_threads() -> ThreadPoolExecutor:
    """Started by the first that needs them."""
    return ThreadPoolExecutor(_NUM_THREADS, "compiling")


__all__ = ["compile_threads"]

"""The C library's allocator: memory that one step frees stays in the process for the next step.

Note [Memory that is given back]
XLA:CPU allocates a step's temporaries when the step starts and frees them when it ends. glibc gives blocks of 32 MiB and more
straight back to the kernel, and in the next step the kernel must zero every page again: 40 % of the time of a Megatron step whose
8 virtual devices need 34 MB each. With `mallopt`'s two settings below the blocks come from the heap, which keeps them; the
process's resident memory stays near its peak (there: 1.5 GB for 1.2 GB). Blocks below 32 MiB are kept in either case.
Memory of a checkpoint restore is given back: its reader threads have heaps of their own, which no step uses. What is read is mapped
and not in a heap, so it is given back array by array, while the state is placed on the devices.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_NEVER = -1


def keep_freed_memory() -> None:
    """Make glibc keep freed memory. Does nothing on other C libraries, or if environment variables configure the allocator."""
    # See Note [Memory that is given back].
    is_set = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    if is_set or platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)


def mapped_memory(num_bytes: int) -> memoryview:
    """New memory outside the heap. It goes back to the kernel as soon as nothing refers to it. Empty if `num_bytes` is 0."""
    return memoryview(mmap.mmap(-1, num_bytes) if num_bytes else b"")


def give_back_freed_memory() -> None:
    """Make glibc return the free memory of all its heaps to the kernel. Does nothing on other C libraries."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)

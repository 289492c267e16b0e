"""Direct I/O (`O_DIRECT`): bytes between memory and disk without the page cache, where the file system supports it.

The page cache allocates fresh memory for every byte, which on a virtual machine costs more than the disk does. A read after a
write would also come from the cache and not from the disk. Bytes pass through one aligned block per thread, and their checksum
is computed while they are in the processor's cache.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

BLOCK = 2**20  # bytes per read or write
_ALIGNMENT = 4096  # of memory, offsets and sizes; no disk requires more
_thread = threading.local()


def write(descriptor: int, parts: Sequence[memoryview]) -> list[int]:
    """Append all parts to a file, in order.

    Returns:
        The CRC-32 of each part.

    Raises:
        OSError: not all bytes could be written.
    """
    block, checksums, filled = _block(), list[int](), 0
    _set_direct(descriptor, True)
    for part in parts:
        data, crc32, at = np.asarray(part), 0, 0
        while at < len(data):
            moved = block[filled : filled + min(len(block) - filled, len(data) - at)]
            np.copyto(moved, data[at : at + len(moved)])
            crc32 = zlib.crc32(moved.data, crc32)
            at, filled = at + len(moved), filled + len(moved)
            if filled == len(block):
                _write_all(descriptor, block)
                filled = 0
        checksums.append(crc32)
    whole = filled // _ALIGNMENT * _ALIGNMENT
    _write_all(descriptor, block[:whole])
    _set_direct(descriptor, False)
    _write_all(descriptor, block[whole:filled])
    return checksums


def read_checksums(descriptor: int, sizes: Sequence[int]) -> list[int]:
    """Read consecutive parts from the beginning of a file, and return the CRC-32 of each.

    Args:
        sizes: bytes of each part.

    Raises:
        OSError: the file is shorter than the sum of `sizes`.
    """
    block, checksums, offset = _block(), list[int](), 0
    got = block[:0]
    _set_direct(descriptor, True)
    for size in sizes:
        crc32, left = 0, size
        while left:
            if not len(got):
                got = block[: _retried(os.preadv, descriptor, [block.data], offset)]
                if not len(got):
                    raise OSError(f"it ends at byte {offset}")
                offset += len(got)
            part, got = got[:left], got[left:]
            crc32 = zlib.crc32(part.data, crc32)
            left -= len(part)
        checksums.append(crc32)
    return checksums


def _write_all(descriptor: int, data: np.ndarray[Any, Any]) -> None:
    left = data.data
    while left:
        count = _retried(os.write, descriptor, left)
        left = left[count:]


def _retried(action: Callable[..., int], descriptor: int, *args: Any) -> int:
    """Call `action`; if the file system rejects direct I/O, at all or at this offset, call it again with the page cache."""
    try:
        return action(descriptor, *args)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    _set_direct(descriptor, False)
    return action(descriptor, *args)


def _set_direct(descriptor: int, direct: bool) -> None:
    flag = getattr(os, "O_DIRECT", 0)  # Linux
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if direct else flags & ~flag)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the file system has no direct I/O
            raise


def _block() -> np.ndarray[Any, Any]:
    """This thread's page-aligned block of `BLOCK` bytes."""
    if not hasattr(_thread, "block"):
        _thread.block = np.frombuffer(mmap.mmap(-1, BLOCK), np.uint8)
    return _thread.block


__all__ = ["BLOCK", "read_checksums", "write"]

"""Bytes between memory and a disk, past the system's cache where the file system allows it.

The cache takes fresh memory for every byte, which on a virtual machine costs more than the disk does; and what is read back
after a write would come out of it, not off the disk. Bytes pass through one aligned block for each thread, where their
checksum is computed while the processor still holds them.
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

BLOCK = 2**20  # bytes moved at a time
_ALIGNMENT = 4096  # of memory, offsets and sizes; no disk asks for more
_own = threading.local()


def write(descriptor: int, parts: Sequence[memoryview]) -> list[int]:
    """Append all bytes of all parts, in order; the CRC-32 of each part. OSError if not all could be written."""
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
    """The CRC-32 of each of the parts, of these sizes, that a file begins with. OSError if it is shorter."""
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
    """What `action` returns, through the cache where the file system does not go past it, or not from where the file stands."""
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
        if error.errno != errno.EINVAL:  # a file system that knows no other way than its cache
            raise


def _block() -> np.ndarray[Any, Any]:
    """This thread's block of memory, aligned to pages."""
    if not hasattr(_own, "block"):
        _own.block = np.frombuffer(mmap.mmap(-1, BLOCK), np.uint8)
    return _own.block


__all__ = ["BLOCK", "read_checksums", "write"]

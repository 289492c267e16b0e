"""Writing and reading past the system's cache: any sizes, any file system, and what a disk refuses."""

import errno
import fcntl
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spmd
from spmd.checkpoint import _direct, _files

SIZES = [[], [0], [1], [4096], [4097, 0, 5], [_direct.BLOCK], [_direct.BLOCK - 1, 2], [3 * _direct.BLOCK + 4096 + 17, 1, 100_000]]


def parts_of(sizes: list[int]) -> list[memoryview]:
    rng = np.random.default_rng(0)
    return [memoryview(rng.integers(0, 256, size, np.uint8)) for size in sizes]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("how", ["disk", "memory", "refused at the write"])
def test_what_is_written_is_read_back(sizes: list[int], how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("/dev/shm") / tmp_path.name if how == "memory" else tmp_path
    folder.mkdir(exist_ok=True)
    if how == "refused at the write":
        monkeypatch.setattr(os, "write", only_through_the_cache(os.write))
        monkeypatch.setattr(os, "preadv", only_through_the_cache(os.preadv))
    parts = parts_of(sizes)
    try:
        checksums = _files.Store(folder).write("data", parts)
        assert (folder / "data").read_bytes() == b"".join(parts)
    finally:
        if how == "memory":
            _files.remove(folder)
    assert checksums == [zlib.crc32(part) for part in parts]


def only_through_the_cache(action: Any) -> Any:
    def refusing(descriptor: int, *args: Any) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not this way")
        return action(descriptor, *args)

    return refusing


def test_two_writes_to_one_file_append(tmp_path: Path) -> None:
    parts = parts_of([5000, 7, 9000])
    descriptor = os.open(tmp_path / "data", os.O_WRONLY | os.O_CREAT)
    checksums = _direct.write(descriptor, parts[:1]) + _direct.write(descriptor, parts[1:])
    os.close(descriptor)
    assert (tmp_path / "data").read_bytes() == b"".join(parts)
    assert checksums == [zlib.crc32(part) for part in parts]


def test_disk_that_changes_a_bit_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def spoiled(descriptor: int) -> None:
        fsync(descriptor)
        with (tmp_path / "data").open("r+b") as file:
            file.seek(5000)
            byte = file.read(1)
            file.seek(5000)
            file.write(bytes([byte[0] ^ 1]))

    monkeypatch.setattr(os, "fsync", spoiled)
    with pytest.raises(spmd.CheckpointError, match="reads back differently"):
        _files.Store(tmp_path).write("data", parts_of([4096, 5000]))


def test_file_that_is_too_short_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(10))
    descriptor = os.open(tmp_path / "data", os.O_RDONLY)
    with pytest.raises(OSError, match="it ends at byte 10"):
        _direct.read_checksums(descriptor, [11])
    os.close(descriptor)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk_is_an_error() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="No space left"):
        _direct.write(descriptor, parts_of([5000]))
    os.close(descriptor)

"""Token files: every window once, in every form, and what does not fit is told."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spmd.train import RecipeError
from spmd.train._token_files import TokenFiles


def write(path: Path, count: int, dtype: str, start: int = 0) -> None:
    np.arange(start, start + count).astype(dtype).tofile(path)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "uint8"])
def test_windows_cover_each_file_once(dtype: str, tmp_path: Path) -> None:
    write(tmp_path / "a.bin", 21, dtype)
    write(tmp_path / "b.bin", 12, dtype, start=100)
    found = TokenFiles([str(tmp_path)], 5, dtype)
    starts = [int(found[i][0][0]) for i in range(len(found))]
    assert starts == [0, 5, 10, 15, 100, 105]
    for x, y in (found[i] for i in range(len(found))):
        assert x.dtype == torch.int64 and torch.equal(y, x + 1) and len(x) == 5


def test_megatrons_index_names_the_dtype(tmp_path: Path) -> None:
    write(tmp_path / "a.bin", 11, "int32")
    (tmp_path / "a.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, 4) + bytes(16))
    assert len(TokenFiles([str(tmp_path / "*.bin")], 5)) == 2
    (tmp_path / "a.idx").write_bytes(b"something else")
    with pytest.raises(RecipeError, match="is not a Megatron index"):
        TokenFiles([str(tmp_path / "a.bin")], 5)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"paths": ["no*.bin"]}, "'no*.bin' names no file"),
        ({"seq": 100}, "fewer than 101 tokens"),
        ({"dtype": "uint32"}, "has 42 bytes, not a multiple of the size of uint32"),
    ],
)
def test_files_that_do_not_fit_are_told(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    write(tmp_path / "a.bin", 21, "uint16")
    with pytest.raises(RecipeError) as error:
        TokenFiles(**{"paths": [str(tmp_path / "a.bin")], "seq": 5, **changes})
    assert told in str(error.value)


def test_a_token_beyond_the_vocabulary_is_told(tmp_path: Path) -> None:
    write(tmp_path / "a.bin", 21, "uint16")
    with pytest.raises(RecipeError, match="token 20 near position 15, the model's vocabulary is 18"):
        list(TokenFiles([str(tmp_path / "a.bin")], 5, vocabulary=18)[i] for i in range(4))

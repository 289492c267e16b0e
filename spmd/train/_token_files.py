"""Memory-mapped token files as windows: nanoGPT's .bin files, and the .bin of Megatron's .bin/.idx pairs.

    dataset = TokenFiles(["data/train.bin"], seq=1024)
    x_T, y_T = dataset[0]                # int64[1024] each; y is x one token later

A file contains only numbers of one dtype. Of Megatron's .idx file only the dtype is read: documents are concatenated, and windows
cross document boundaries.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from spmd.base._errors import message
from spmd.train._recipe import RecipeError

_MEGATRON = b"MMIDIDX\x00\x00"  # then a uint64 version and a uint8 dtype code
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


class TokenFiles(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `seq` tokens, each with the same window one token later. A short last window of a file is dropped.

    Args:
        paths: files, glob patterns, or folders, whose .bin files are read in sorted order.
        seq: length of a window, in tokens.
        dtype: dtype of the files; empty: see `dtype_of`.
        vocabulary: a token >= this is an error when it is read. 0: no check.

    Raises:
        RecipeError: a path names no file, a file's size is not a multiple of the dtype's, or all files are shorter than a window.
    """

    def __init__(self, paths: Sequence[str], seq: int, dtype: str = "", vocabulary: int = 0) -> None:
        self.seq, self.vocabulary = seq, vocabulary
        self.files = files_of(paths, ".bin")
        self.dtypes = [np.dtype(dtype or dtype_of(file)) for file in self.files]
        self.counts = [self._windows(file, kind) for file, kind in zip(self.files, self.dtypes, strict=True)]
        self.ends = np.cumsum(self.counts)
        if not self.ends[-1]:
            what = f"{', '.join(map(str, self.files))}: fewer than {seq + 1} tokens"
            raise RecipeError(message(what, fix="a smaller [data] seq, or more tokens"))
        self._maps: dict[int, Any] = {}

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number = int(np.searchsorted(self.ends, index, side="right"))
        start = (index - int(self.ends[number] - self.counts[number])) * self.seq
        window = torch.from_numpy(self._map(number)[start : start + self.seq + 1].astype(np.int64))
        if self.vocabulary and int(window.max()) >= self.vocabulary:
            what = f"{self.files[number]}: token {int(window.max())} near position {start}, the model's vocabulary is {self.vocabulary}"
            raise RecipeError(message(what, fix="[data] dtype = the dtype of the file, or a model with a larger vocabulary"))
        return window[:-1], window[1:]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_maps": {}}  # a worker maps the files itself

    def _map(self, number: int) -> Any:
        if number not in self._maps:
            self._maps[number] = np.memmap(self.files[number], self.dtypes[number], "r")
        return self._maps[number]

    def _windows(self, file: Path, dtype: np.dtype[Any]) -> int:
        num_bytes = file.stat().st_size
        if num_bytes % dtype.itemsize:
            what = f"{file} has {num_bytes} bytes, not a multiple of the size of {dtype}"
            raise RecipeError(message(what, fix="[data] dtype = the dtype of the file"))
        return max(0, num_bytes // dtype.itemsize - 1) // self.seq


def dtype_of(file: Path) -> str:
    """The dtype in the .idx file next to `file`. Without one uint16, enough for vocabularies of up to 65,536 tokens.

    Raises:
        RecipeError: the .idx file is not a Megatron index.
    """
    index = file.with_suffix(".idx")
    if not index.is_file():
        return "uint16"
    with index.open("rb") as stream:
        head = stream.read(len(_MEGATRON) + 9)
    code = head[-1] if head.startswith(_MEGATRON) and len(head) == len(_MEGATRON) + 9 else None
    if code not in _MEGATRON_DTYPES:
        raise RecipeError(message(f"{index} is not a Megatron index", f"first bytes: {head!r}", fix="[data] dtype = ..."))
    return _MEGATRON_DTYPES[code]


def files_of(paths: Sequence[str], *suffixes: str) -> list[Path]:
    """The files that paths and glob patterns name. From a folder, all files below it with one of the suffixes.

    Raises:
        RecipeError: one of the paths names no file.
    """
    found: list[Path] = []
    for path in paths:
        here = sorted(Path(name) for name in glob.glob(path, recursive=True))
        files = [file for file in here if file.is_file()]
        files += [file for folder in here if folder.is_dir() for file in sorted(folder.rglob("*")) if file.suffix in suffixes]
        if not files:
            raise RecipeError(message(f"[data] paths: {path!r} names no file", fix="paths are relative to the recipe's folder"))
        found += files
    return found


__all__ = ["TokenFiles", "dtype_of", "files_of"]

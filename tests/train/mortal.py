"""Datasets of a user's own that end their process once, for tests of runs that go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import mesh
from spmd.train._image_folder import ImageFolder


class Tokens(Dataset[Any]):
    """Windows of a token file."""

    def __init__(self, path: str, seq: int) -> None:
        self.tokens, self.seq = torch.from_numpy(np.fromfile(path, np.uint16).astype(np.int64)), seq

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq

    def __getitem__(self, index: int) -> Any:
        window = self.tokens[index * self.seq : (index + 1) * self.seq + 1]
        return window[:-1], window[1:]


class Mortal(Dataset[Any]):
    """Samples of another dataset. Process 1 sends itself a signal when it has loaded `after` of them, the first time in `folder`."""

    def __init__(self, path: str, size: int, folder: str, sends: str, after: int) -> None:
        self.inner: Any = Tokens(path, size) if path.endswith(".bin") else ImageFolder([path], size)
        self.marker, self.sends, self.left = Path(folder) / "was-here", sends, after

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        self.left -= 1
        if self.left == 0 and self.sends and mesh.init().index == 1 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.Signals[self.sends])
        return self.inner[index]

"""Parts of a recipe that fail as a user's own do: in a library, below a dozen frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset


class Pairs(Dataset[Any]):
    """Features and a label, of which the model may take the wrong number."""

    def __init__(self, path: str = "", fails_at: int = -1) -> None:
        self.text = Path(path).read_text(encoding="utf-8") if path else ""
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.fails_at:
            raise ValueError("sample 9 is damaged\nand more lines of it")
        return torch.zeros(8), index % 2


def model(features: int = 8, name: str = "") -> nn.Module:
    if name:
        from transformers import AutoConfig, AutoModel

        return AutoModel.from_config(AutoConfig.from_pretrained(name))
    return nn.Sequential(nn.Linear(features, 4), nn.Linear(4, 2))

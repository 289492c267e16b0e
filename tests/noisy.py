"""A dataset with noise from every global random stream; imports little, because a loader's worker processes import it."""

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class Noisy(Dataset[dict[str, Any]]):
    """Numbers, and three draws with each."""

    def __init__(self, size: int = 40) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([float(index), random.random(), np.random.rand(), torch.rand(()).item()]), "name": str(index)}

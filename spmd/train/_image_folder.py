"""Folders of images, one folder to a class: pixels as models of images take them.

    dataset = ImageFolder(["data/train"], size=224, augment=True)
    pixels_CHW, number = dataset[0]      # float32[3, 224, 224], and the class's number in the order of the names

Crops and flips are drawn from the seed, the pass and the sample's number: neither workers nor a restart change them.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from spmd.base._errors import message
from spmd.train._recipe import RecipeError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"})
_LEAST_AREA = 0.25  # of an image that a crop shows


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images and the numbers of their classes.

    Attributes:
        classes: names of the classes, in the order of their numbers.

    Args:
        paths: folders that hold a folder for each class.
        size: height and width.
        augment: a random part of the image, mirrored or not; otherwise the middle.
        mean, std: of the three channels, taken off and divided by.
        seed: of crops and mirrors.
        classes: names to number by; those in the folders, sorted, by default.

    Raises:
        RecipeError: pillow is not installed, there is no image, or a class that `classes` has not.
    """

    def __init__(
        self,
        paths: Sequence[str],
        size: int,
        *,
        augment: bool = False,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        seed: int = 0,
        classes: Sequence[str] | None = None,
    ) -> None:
        if importlib.util.find_spec("PIL") is None:
            raise RecipeError(message("[data] kind = 'images' needs pillow", fix="pip install pillow"))
        found = [file for path in paths for file in sorted(Path(path).glob("*/*")) if file.suffix.lower() in SUFFIXES]
        if not found:
            raise RecipeError(
                message(f"[data] paths: {', '.join(paths)} contain no images", fix="a folder with one subfolder of images for each class")
            )
        names = sorted({file.parent.name for file in found})
        self.classes = names if classes is None else list(classes)
        unknown = sorted(set(names) - set(self.classes))
        if unknown:
            what = f"{', '.join(paths)} has the class {unknown[0]!r}, which the training data does not have"
            raise RecipeError(message(what, fix=f"one of {', '.join(self.classes)}"))
        self.samples = [(file, self.classes.index(file.parent.name)) for file in found]
        self.size, self.augment, self.seed, self.epoch = size, augment, seed, 0
        self.mean, self.std = np.asarray(mean, np.float32), np.asarray(std, np.float32)

    def __len__(self) -> int:
        return len(self.samples)

    def set_epoch(self, epoch: int) -> None:
        """The number of the next pass."""
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        file, number = self.samples[index]
        with Image.open(file) as opened:
            image = opened.convert("RGB")
        rng = random.Random(f"{self.seed} {self.epoch} {index}") if self.augment else None
        pixels = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=_box(image.size, rng))
        values = np.asarray(pixels, np.float32) / 255
        if rng is not None and rng.random() < 0.5:
            values = values[:, ::-1]
        return torch.from_numpy(np.ascontiguousarray(((values - self.mean) / self.std).transpose(2, 0, 1))), number


def _box(size: tuple[int, int], rng: random.Random | None) -> Any:
    """A square of an image of (width, height): the middle, or one of random area and place."""
    side = float(min(size))
    if rng is not None:
        side *= rng.uniform(_LEAST_AREA, 1) ** 0.5
    left, top = ((length - side) * (0.5 if rng is None else rng.random()) for length in size)
    return left, top, left + side, top + side


__all__ = ["ImageFolder"]

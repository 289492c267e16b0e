"""Dataset of images in folders, one folder per class, as normalized pixels.

    dataset = ImageFolder(["data/train"], size=224, augment=True)
    pixels_CHW, number = dataset[0]      # float32[3, 224, 224], and the index of the class in the sorted names

Crops and flips are drawn from the seed, the epoch and the sample's index, so they do not depend on workers or restarts.
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
_MIN_CROP_AREA = 0.25  # as a fraction of the image's largest square


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Pairs of pixels, float32[3, size, size], and class index.

    Attributes:
        classes: names of the classes, by index.

    Args:
        paths: folders that contain one subfolder per class.
        size: height and width of the result, in pixels.
        augment: take a random square crop and flip it at random. Otherwise the centre crop is taken.
        mean, std: per channel; pixels become (value - mean) / std, with values between 0 and 1.
        seed: seed of the crops and flips.
        classes: class names by index. By default the sorted names of the subfolders.

    Raises:
        RecipeError: pillow is not installed, the folders contain no image, or a subfolder is not in `classes`.
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
        """Set the number of the next epoch."""
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
    """A square of an image of size (width, height): the centre square, or one of random area and position."""
    side = float(min(size))
    if rng is not None:
        side *= rng.uniform(_MIN_CROP_AREA, 1) ** 0.5
    left, top = ((length - side) * (0.5 if rng is None else rng.random()) for length in size)
    return left, top, left + side, top + side


__all__ = ["ImageFolder"]

"""ResNet-50 v1.5 on ImageNet shapes. Batches are split over devices; images are split too if the mesh has an axis `spatial`.

    python benchmarks/resnet50.py                                    # a small ResNet on data 8
    python benchmarks/resnet50.py --mesh data=4,spatial=2            # rows of the images split over two devices
    python benchmarks/resnet50.py --preset full --real-data folder   # one folder of images per class

This file is the PyTorch script and imports only torch (and Pillow to read images). `resnet50_jax.py` is the same step hand-written
in JAX. BatchNorm computes its statistics over the global batch, however it is sharded. Without a folder the data are random, as in
the PyTorch/XLA report.

    N images   C channels   H rows   W columns
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

UNIT = "images"
VARIANTS = ("v1.5",)
MESH = "data=8"


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a batch. `blocks`: number of blocks in each stage; `width`: channels of the first stage."""

    variant: str = "v1.5"
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000
    size: int = 224
    batch: int = 256


PRESETS = {
    "tiny": Config(blocks=(1, 1), width=16, classes=16, size=32, batch=16),
    "small": Config(blocks=(1, 1, 1, 1), width=32, classes=64, size=64, batch=32),
    "full": Config(),
}
NUM_PARAMETERS = 25_557_032  # parameters of the full preset, equal to torchvision's
SHARDINGS: dict[str, tuple[str | None, ...]] = {}  # all parameters are replicated
BATCH_SPECS = (("data", None, "spatial", None), ("data",))


class Bottleneck(nn.Module):
    """Convolutions 1x1, 3x3, 1x1. In v1.5 the 3x3 convolution has the stride."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x_NCHW)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x_NCHW if self.downsample is None else self.downsample(x_NCHW)
        return self.relu(out)


class ResNet(nn.Module):
    """ResNet with torchvision's parameter names, so that its weights can be loaded."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, config.width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(config.width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inputs = config.width
        for stage, count in enumerate(config.blocks):
            width, layers = config.width * 2**stage, list[nn.Module]()
            for block in range(count):
                layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
                inputs = 4 * width
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))
        self.stages = len(config.blocks)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inputs, config.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x_NCHW: Tensor) -> Tensor:
        x_NCHW = self.maxpool(self.relu(self.bn1(self.conv1(x_NCHW))))
        for stage in range(self.stages):
            x_NCHW = self.get_submodule(f"layer{stage + 1}")(x_NCHW)
        return self.fc(torch.flatten(self.avgpool(x_NCHW), 1))


def build(config: Config) -> nn.Module:
    """The model on torch's current default device, initialized from torch's current seed."""
    return ResNet(config)


def loss(model: nn.Module, x_NCHW: Tensor, y_N: Tensor) -> Tensor:
    """Mean cross entropy with label smoothing."""
    return F.cross_entropy(model(x_NCHW), y_N, label_smoothing=0.1)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)


def shardings(config: Config) -> dict[str, tuple[str | None, ...]]:
    """No partition specs: all parameters are replicated."""
    return SHARDINGS


def num_items(config: Config) -> int:
    """Number of images in a batch."""
    return config.batch


def example(config: Config) -> tuple[Tensor, Tensor]:
    """A batch of meta tensors."""
    images_NCHW = torch.empty(config.batch, 3, config.size, config.size, device="meta")
    return images_NCHW, torch.empty(config.batch, dtype=torch.int64, device="meta")


def batches(config: Config, count: int, real_data: Path | None = None) -> list[tuple[Tensor, Tensor]]:
    """`count` batches of (images float32[N, 3, H, W], classes int64[N]), identical in every process.

    Random images are noise around one picture per class, so that the model can learn.
    """
    rng = torch.Generator().manual_seed(0)
    if real_data is not None:
        files, names = images(real_data)
        chosen = [torch.randint(len(files), (config.batch,), generator=rng).tolist() for _ in range(count)]
        return [(torch.stack([picture(files[i], config.size) for i in rows]), torch.tensor([names[i] for i in rows])) for rows in chosen]
    pictures = torch.randn(min(config.classes, 16), 3, config.size, config.size, generator=rng)
    drawn: list[tuple[Tensor, Tensor]] = []
    for _ in range(count):
        y_N = torch.randint(len(pictures), (config.batch,), generator=rng)
        drawn.append((pictures[y_N] + torch.randn(config.batch, 3, config.size, config.size, generator=rng), y_N))
    return drawn


def images(folder: Path) -> tuple[list[Path], list[int]]:
    """The files in a folder of folders, and the class of each: the index of its folder in alphabetical order."""
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    found = [(file, number) for number, inner in enumerate(folders) for file in sorted(inner.iterdir())]
    if not found:
        raise SystemExit(f"{folder} contains no folders of images\n  fix: create one folder of images per class")
    return [file for file, _ in found], [number for _, number in found]


def picture(file: Path, size: int) -> Tensor:
    """The centre square as float32[3, size, size], normalized by ImageNet's mean and standard deviation."""
    from PIL import Image

    with Image.open(file) as opened:
        side = min(opened.size)
        left, top = (opened.width - side) // 2, (opened.height - side) // 2
        square = opened.convert("RGB").resize((size, size), box=(left, top, left + side, top + side))
    bytes_HWC = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8).view(size, size, 3)
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((bytes_HWC / 255 - mean) / deviation).permute(2, 0, 1).contiguous()


if __name__ == "__main__":
    from spmd.bench import script

    script("resnet50")

"""Small models of the kinds that people train, as they write them: ResNet-18, an LSTM language model, a U-Net; GPT-2 is the demo's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        changes = stride != 1 or inner != outer
        self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(h)) + self.shortcut(x))


class ResNet18(nn.Module):
    """Images [B, 3, H, W] to logits [B, classes]: four stages of two blocks; `width` is 64 in the paper."""

    def __init__(self, width: int = 4, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        sizes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2), (4 * width, 8 * width, 2)]
        self.stages = nn.Sequential(*(nn.Sequential(Residual(i, o, s), Residual(o, o, 1)) for i, o, s in sizes))
        self.head = nn.Linear(8 * width, classes)
        for module in self.modules():  # else so small a network is chaotic: in float32 CPU torch parts from itself in float64
            if isinstance(module, Residual):
                nn.init.zeros_(module.bn2.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.adaptive_avg_pool2d(self.stages(self.stem(x)), 1).flatten(1))


class LSTMLanguageModel(nn.Module):
    """Ids [B, T] to logits [B, T, vocab]."""

    def __init__(self, vocab: int = 24, dim: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, num_layers=2, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.tokens(ids))[0])


class UNet(nn.Module):
    """Images [B, 1, ...] to images of that shape, in 2 or 3 spatial dims: two levels down, two up, with skips."""

    def __init__(self, dims: int, width: int = 4) -> None:
        super().__init__()
        conv, up = (nn.Conv2d, nn.ConvTranspose2d) if dims == 2 else (nn.Conv3d, nn.ConvTranspose3d)

        def double(inner: int, outer: int) -> nn.Module:
            return nn.Sequential(
                *(conv(inner, outer, 3, padding=1), nn.GroupNorm(2, outer), nn.SiLU()),
                *(conv(outer, outer, 3, padding=1), nn.GroupNorm(2, outer), nn.SiLU()),
            )

        self.pool = F.max_pool2d if dims == 2 else F.max_pool3d
        self.down1, self.down2, self.middle = double(1, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.up2, self.join2 = up(4 * width, 2 * width, 2, stride=2), double(4 * width, 2 * width)
        self.up1, self.join1 = up(2 * width, width, 2, stride=2), double(2 * width, width)
        self.out = conv(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(self.pool(a, 2))
        c = self.middle(self.pool(b, 2))
        b = self.join2(torch.cat([self.up2(c), b], 1))
        return self.out(self.join1(torch.cat([self.up1(b), a], 1)))

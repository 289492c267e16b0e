"""The training steps for trials with random layouts: several kinds of small models with data and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.layout_ops import Draw


@dataclass
class Job:
    """A model, one batch, and `loss(model, *batch)`."""

    model: nn.Module
    batch: list[torch.Tensor]
    loss: Callable[..., torch.Tensor]


class _Images(nn.Module):
    """Convolutions, batch norm, pooling, a residual connection and a classifier."""

    def __init__(self, channels: int, hidden: int, kernel: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, hidden, kernel, padding=kernel // 2)
        self.norm = nn.BatchNorm2d(hidden)
        self.second = nn.Conv2d(hidden, hidden, 3, padding=1, stride=2)
        self.short = nn.Conv2d(hidden, hidden, 1, stride=2)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.relu(self.second(x) + self.short(x))
        return self.head(x.mean((2, 3)))


class _Upward(nn.Module):
    """A strided convolution, group norm, a transposed convolution and interpolation."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(channels, hidden, 4, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, hidden)
        self.up = nn.ConvTranspose2d(hidden, channels, 4, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(F.silu(self.norm(self.down(x))))
        return F.avg_pool2d(F.interpolate(x, scale_factor=2, mode="bilinear"), 2)


class _Language(nn.Module):
    """A transformer layer with causal attention and a tied embedding."""

    def __init__(self, words: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed, self.heads = nn.Embedding(words, width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        b, t, w = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(w, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w))
        x = x + self.narrow(F.gelu(self.wide(self.norm2(x))))
        return x @ self.embed.weight.T


class _Spectrum(nn.Module):
    """A filter in the frequency domain, a cumulative sum over time and a linear layer."""

    def __init__(self, time: int, width: int) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(time // 2 + 1, width) / 4)
        self.mix = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.filter, n=x.shape[1], dim=1)
        return self.mix(torch.cumsum(y, 1) / x.shape[1]) + x


class _Recurrent(nn.Module):
    """A bidirectional recurrent layer and a linear layer."""

    def __init__(self, kind: str, width: int, hidden: int) -> None:
        super().__init__()
        self.core = getattr(nn, kind)(width, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.core(x)[0])


class _Experts(nn.Module):
    """Mixture of experts with top-2 routing."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) / 4)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = torch.topk(self.gate(x), 2, -1)
        weights = torch.zeros_like(self.gate(x)).scatter(-1, chosen, F.softmax(scores, -1))
        y = torch.einsum("neh,ehw->new", F.relu(torch.einsum("nw,ewh->neh", x, self.up)), self.down)
        return torch.einsum("new,ne->nw", y, weights)


class _Sequence(nn.Module):
    """A convolution over time, batch norm and `nn.MultiheadAttention`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(width, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.conv(x))).transpose(1, 2)
        return self.attend(y, y, y, need_weights=False)[0]


def _mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 0.1).square().mean()


def _classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def _next_word(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def _images(d: Draw) -> Job:
    classes, n, channels = d.one(3, 8, 10), d.one(2, 4, 7, 8), d.one(1, 3, 4, 8)
    model = _Images(channels, d.one(4, 6, 8), d.one(3, 4, 5), classes)
    return Job(model, [d.normal(n, channels, d.one(8, 12, 16), d.one(8, 16)), d.indices(classes, n)], _classify)


def _upward(d: Draw) -> Job:
    channels = d.one(1, 3, 4, 8)
    return Job(_Upward(channels, d.one(2, 4, 8)), [d.normal(d.one(1, 2, 4, 8), channels, d.one(8, 16), d.one(8, 12, 16))], _mean_square)


def _language(d: Draw) -> Job:
    words, heads = d.one(11, 16, 24), d.one(1, 2, 4)
    return Job(_Language(words, 8 * heads, heads), [d.indices(words, d.one(1, 2, 4, 6, 8), d.one(5, 9, 17))], _next_word)


def _spectrum(d: Draw) -> Job:
    time, width = d.one(6, 8, 12, 16), d.one(3, 4, 8)
    return Job(_Spectrum(time, width), [d.normal(d.one(1, 2, 4, 7, 8), time, width)], _mean_square)


def _recurrent(d: Draw) -> Job:
    width = d.one(3, 4, 8)
    return Job(_Recurrent(d.one("LSTM", "GRU", "RNN"), width, d.one(4, 5, 8)), [d.normal(d.size(2), d.one(3, 4, 8), width)], _mean_square)


def _experts(d: Draw) -> Job:
    width = d.one(4, 6, 8)
    return Job(_Experts(width, d.one(3, 4, 8)), [d.normal(d.size(2), width)], _mean_square)


def _sequence(d: Draw) -> Job:
    width = d.one(3, 4, 8)
    return Job(_Sequence(width), [d.normal(d.one(2, 4, 7, 8), width, d.one(5, 8, 12))], _mean_square)


JOBS: dict[str, Callable[[Draw], Job]] = {
    "images": _images,
    "upward": _upward,
    "language": _language,
    "spectrum": _spectrum,
    "recurrent": _recurrent,
    "experts": _experts,
    "sequence": _sequence,
}


def optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """An optimizer whose update does not reduce to the sign of a gradient, where a rounding error could flip a whole step."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3)


__all__ = ["JOBS", "Job", "optimizer"]

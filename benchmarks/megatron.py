"""A stack of Megatron MLPs: the first linear of each pair is split by outputs, the second by inputs.

    python benchmarks/megatron.py                                        # 1024 -> 4096 -> 1024 on data 4 x model 2
    python benchmarks/megatron.py --mesh model=8                         # one mesh axis
    python benchmarks/megatron.py --variant sequence --mesh data=2,model=4

Variant "plain" is a stack of MLPs. Variant "sequence" adds a norm and a residual to each MLP, with activations split by sequence over
the same axis that splits the weights. The all-reduce after each pair then becomes a reduce-scatter, and an all-gather before the next.

This file is the PyTorch script and imports only torch. `megatron_jax.py` is the same step hand-written in JAX.

    B batch   T sequence   D width   H hidden
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

UNIT = "rows"
VARIANTS = ("plain", "sequence")
MESH = "data=4,model=2"


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a batch. `variant` is "plain" or "sequence"."""

    variant: str = "plain"
    width: int = 8192
    hidden: int = 32768
    batch: int = 16
    seq: int = 1024
    layers: int = 4


PRESETS = {
    "tiny": Config(width=64, hidden=256, batch=8, seq=8, layers=2),
    "small": Config(width=1024, hidden=4096, batch=8, seq=32, layers=1),
    "dispatch": Config(width=8, hidden=16, batch=8, seq=4, layers=75),  # 300 parameters: measures the host time of a call
    "full": Config(),
}
SHARDINGS: dict[str, tuple[str | None, ...]] = {
    "*.up.weight": ("model", None),
    "*.up.bias": ("model",),
    "*.down.weight": (None, "model"),
}
BATCH_SPECS = (("data", None, None), ("data", None, None))
SEQUENCE_SPEC = ("data", "model", None)  # input and output of each block in variant "sequence"


class MLP(nn.Module):
    """Two linears with a GELU between them. torch's Linear.weight is [out, in]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.hidden)
        self.down = nn.Linear(config.hidden, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


class SequenceMLP(MLP):
    """An MLP with a norm before it and a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.norm = nn.LayerNorm(config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + super().forward(self.norm(x_BTD))


def build(config: Config) -> nn.Module:
    """The model on torch's current default device, initialized from torch's current seed."""
    block = MLP if config.variant == "plain" else SequenceMLP
    return nn.Sequential(*(block(config) for _ in range(config.layers)))


def loss(model: nn.Module, x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
    return F.mse_loss(model(x_BTD), y_BTD)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)


def shardings(config: Config) -> dict[str, tuple[str | None, ...]]:
    """Partition specs of the parameters: pattern of the name -> spec."""
    return SHARDINGS


def activations(config: Config) -> dict[str, tuple[str | None, ...]]:
    """Sharding constraints on the outputs of modules: pattern of the name -> spec."""
    return {} if config.variant == "plain" else {"?": SEQUENCE_SPEC, "??": SEQUENCE_SPEC}


def num_items(config: Config) -> int:
    """Number of rows (positions of all sequences) in a batch."""
    return config.batch * config.seq


def example(config: Config) -> tuple[Tensor, Tensor]:
    """A batch of meta tensors."""
    return (torch.empty(config.batch, config.seq, config.width, device="meta"),) * 2


def batches(config: Config, count: int, real_data: Path | None = None) -> list[tuple[Tensor, Tensor]]:
    """`count` batches of (x, y), float32[B, T, D] each, identical in every process. y is a fixed linear function of x."""
    rng = torch.Generator().manual_seed(0)
    weight_DD = torch.randn(config.width, config.width, generator=rng) / config.width**0.5
    drawn = [torch.randn(config.batch, config.seq, config.width, generator=rng) for _ in range(count)]
    return [(x_BTD, x_BTD @ weight_DD) for x_BTD in drawn]


if __name__ == "__main__":
    from spmd.bench import script

    script("megatron")

"""GPT-2: an ordinary `nn.Module` in plain PyTorch, and the table that says how the demo splits its parameters.

The one model of this name: the demo, the benchmark `gpt2` and the tests train it. It knows no device and no mesh; the file imports
only torch, so that a process without `spmd` can run it by its path: the demo's checkpoint is read back so, and torchax takes part.

Shapes are named by suffixes:

    B  sequences in a batch        T  tokens in a sequence            V  vocabulary
    D  width of the model          H  heads                           K  width of one head, D = H * K
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Megatron tensor parallelism: the first linear of each pair is split by outputs, the second by inputs, so that each pair
# needs one all-reduce over "model" forward and one backward. Parameters that no pattern names are replicated: the
# embedding is, because a hundred characters are too few to be worth an all-reduce per look-up and one per softmax.
SHARDINGS: dict[str, tuple[str | None, ...]] = {
    "blocks.*.attention.qkv.weight": ("model", None),
    "blocks.*.attention.qkv.bias": ("model",),
    "blocks.*.attention.out.weight": (None, "model"),
    "blocks.*.mlp.up.weight": ("model", None),
    "blocks.*.mlp.up.bias": ("model",),
    "blocks.*.mlp.down.weight": (None, "model"),
}


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model."""

    vocabulary: int
    seq: int
    width: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.1


def _dropout(config: GPTConfig) -> nn.Module:
    """None at all where nothing is dropped, so that no random number is drawn."""
    return nn.Dropout(config.dropout) if config.dropout else nn.Identity()


class Attention(nn.Module):
    """Causal self-attention.

    The rows of `qkv` are ordered [H, 3, K], heads outermost as in Megatron: splitting them over devices splits heads, and
    no device needs the query, key or value of another one's heads. In GPT-2's own order, [3, H, K], it would.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv_BTH3K = self.qkv(x_BTD).unflatten(-1, (self.heads, 3, -1))
        q_BHTK, k_BHTK, v_BHTK = qkv_BTH3K.transpose(1, 2).unbind(3)
        dropout = self.dropout if self.training else 0.0
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, dropout_p=dropout, is_causal=True)
        return self.out(y_BHTK.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linears around a GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD), approximate="tanh"))


class Block(nn.Module):
    """One layer, norms first."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = _dropout(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class GPT(nn.Module):
    """Tokens in, the next token's logits out; the head is the token embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.seq, config.width)
        self.dropout = _dropout(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.initialise()

    def initialise(self) -> None:
        """Draw the parameters; a subclass may have a way of its own."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2's 0.02 at its width of 768, for any width. Embeddings larger: at 0.05 and these few steps the held-out
                # loss ends at 2.2 instead of 1.8, because attention to positions starts too weak to be learned.
                nn.init.normal_(parameter, std=0.1 if name in ("tokens.weight", "positions.weight") else 0.5 / parameter.shape[1] ** 0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.dropout(self.tokens(tokens_BT) + self.positions(positions_T))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))  # logits_BTV

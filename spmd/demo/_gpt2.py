"""GPT-2 as an ordinary `nn.Module` in plain PyTorch, and the partition specs of its parameters in the demo.

The demo, the benchmark `gpt2` and the tests all train this model. It does not depend on a device or a mesh. The file imports only
torch, so that a process without `spmd` can load it by its path: the demo's `_reader` does so, and the benchmark with torchax.

Suffixes name the dims of a tensor:

    B  sequences in a batch        T  tokens in a sequence            V  vocabulary
    D  width of the model          H  heads                           K  width of one head, D = H * K
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Megatron tensor parallelism: the first linear of each pair is split by outputs and the second by inputs, so each pair needs one
# all-reduce over "model" in forward and one in backward. Parameters without a pattern are replicated. So is the embedding, because
# a vocabulary of a hundred characters is not worth one all-reduce per lookup and one per softmax.
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
    """Sizes of the model. `seq` is the longest sequence; `width` is divisible by `heads`."""

    vocabulary: int
    seq: int
    width: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.1


def _dropout(config: GPTConfig) -> nn.Module:
    """Dropout, or the identity for probability 0, so that no random number is drawn."""
    return nn.Dropout(config.dropout) if config.dropout else nn.Identity()


class Attention(nn.Module):
    """Causal self-attention.

    The rows of `qkv` are ordered [H, 3, K], heads outermost as in Megatron. Splitting the rows over devices therefore splits heads, and
    no device needs the queries, keys or values of another device's heads. With GPT-2's own order, [3, H, K], it would.
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
    """Two linears with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD), approximate="tanh"))


class Block(nn.Module):
    """One pre-norm transformer layer."""

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
    """Language model: tokens int64[B, T] -> logits of the next token [B, T, V]. The head shares the weight of the token embedding."""

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
        """Initialize the parameters. Subclasses may override it."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Scales GPT-2's 0.02 at width 768 to other widths. Embeddings get a larger value: with 0.05 and these few steps the
                # held-out loss ends at 2.2 instead of 1.8, because attention to positions is too weak at first to be learned.
                nn.init.normal_(parameter, std=0.1 if name in ("tokens.weight", "positions.weight") else 0.5 / parameter.shape[1] ** 0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.dropout(self.tokens(tokens_BT) + self.positions(positions_T))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))  # logits_BTV

"""The models of `depth.py`: Hugging Face's unmodified GPT-2 and Llama, their partition specs, and the names of their submodules."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any

import gpt2

LLAMA_SHARDINGS: dict[str, tuple[str | None, ...]] = {
    **{f"model.layers.*.self_attn.{name}_proj.weight": ("model", "fsdp") for name in "qkv"},
    "model.layers.*.self_attn.o_proj.weight": ("fsdp", "model"),
    **{f"model.layers.*.mlp.{name}_proj.weight": ("model", "fsdp") for name in ("gate", "up")},
    "model.layers.*.mlp.down_proj.weight": ("fsdp", "model"),
    "model.embed_tokens.weight": (None, "fsdp"),
    "lm_head.weight": (None, "fsdp"),
}


@dataclass(frozen=True)
class Names:
    """Names of a model's submodules: token embedding, list of layers, last norm, and the head whose weight gives the logits."""

    embedding: str
    blocks: str
    norm: str
    head: str


NAMES = {
    "gpt2": Names("transformer.wte", "transformer.h", "transformer.ln_f", "transformer.wte"),
    "llama": Names("model.embed_tokens", "model.layers", "model.norm", "lm_head"),
}
HEADS, VOCABULARY, BATCH = 8, 512, 16


def build(model: str, layers: int, width: int, seq: int) -> Any:
    """The model on torch's current default device, initialized from torch's current seed."""
    if model == "gpt2":
        return gpt2.build(gpt2.Config("hf", vocabulary=VOCABULARY, seq=seq, width=width, layers=layers, heads=HEADS, batch=BATCH))
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "num_attention_heads": HEADS}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=seq, use_cache=False)).train()


def spec_of(model: str, name: str, ndim: int, axes: tuple[str, ...]) -> tuple[str | None, ...]:
    """Partition spec of a parameter, without axes that the mesh does not have."""
    shardings = gpt2.HF_SHARDINGS if model == "gpt2" else LLAMA_SHARDINGS
    spec = next((spec for pattern, spec in shardings.items() if fnmatch.fnmatchcase(name, pattern)), (None,) * ndim)
    return tuple(axis if axis in axes else None for axis in spec)


def rows_of(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that split the batch."""
    return tuple(axis for axis in axes if axis in ("data", "fsdp"))

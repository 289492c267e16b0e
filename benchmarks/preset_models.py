"""Small models for benchmarks/presets.py with hand-written partition specs, taken from the papers' layouts and not from presets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, BATCH, POSITIONS, WIDTH, HEADS, LAYERS = 256, 16, 64, 64, 4, 2
COLUMN, ROW, WHOLE = ("model", None), (None, "model"), None


class NanoAttention(nn.Module):
    """nanoGPT's attention: query, key and value in one Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        heads = (a.view(rows, length, self.n_head, -1).transpose(1, 2) for a in self.c_attn(x).split(width, 2))
        return self.c_proj(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(rows, length, width))


class NanoMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(WIDTH), NanoAttention(), nn.LayerNorm(WIDTH), NanoMLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """nanoGPT: GPT-2's names with torch's Linear. Embedding and head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleList(NanoBlock() for _ in range(LAYERS))
        tables = dict(wte=nn.Embedding(VOCABULARY, WIDTH), wpe=nn.Embedding(POSITIONS, WIDTH))
        self.transformer = nn.ModuleDict(dict(**tables, h=blocks, ln_f=nn.LayerNorm(WIDTH)))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        parts: Any = self.transformer
        x = parts.wte(input_ids) + parts.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in parts.h:
            x = block(x)
        logits = self.lm_head(parts.ln_f(x))
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))


class Sample(NamedTuple):
    """A model, its batch and its hand-written rules.

    Attributes:
        make: creates the model on the CPU.
        batch: creates a batch of keyword arguments.
        rules: hand-written rules for tensor parallelism over axis "model".
        blocks: attribute paths of the lists whose blocks are FSDP units.
        adapters: names of the linears that LoRA adapts.
        adapter_rules: hand-written rules for the adapters.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, torch.Tensor]]
    rules: list[tuple[str, Any]]
    blocks: tuple[str, ...]
    adapters: tuple[str, ...]
    adapter_rules: list[tuple[str, Any]]


def _tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (BATCH, POSITIONS))
    return {"input_ids": ids, "labels": ids}


def _images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.arange(BATCH) % 2}


def _audio() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(BATCH, 80, POSITIONS), "labels": torch.randint(3, VOCABULARY, (BATCH, 32))}


def _of(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """A function that creates a model of transformers from a configuration, without a download."""

    def make() -> nn.Module:
        import transformers

        base = name.removesuffix("LMHeadModel").removesuffix("ForCausalLM").removesuffix("ForMaskedLM")
        base = base.removesuffix("ForConditionalGeneration").removesuffix("ForImageClassification")
        return getattr(transformers, name)(getattr(transformers, f"{base}Config")(**settings))

    return make


_SIZES: dict[str, Any] = dict(
    hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, vocab_size=VOCABULARY
)
_ENDS: dict[str, Any] = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
_NO_DROPOUT: dict[str, Any] = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
_IMAGE_SIZES: dict[str, Any] = {**{k: v for k, v in _SIZES.items() if k != "vocab_size"}, "image_size": 16, "patch_size": 4}
_AUDIO_SIZES: dict[str, Any] = dict(
    d_model=WIDTH,
    encoder_layers=LAYERS,
    decoder_layers=LAYERS,
    vocab_size=VOCABULARY,
    max_source_positions=POSITIONS // 2,
    max_target_positions=POSITIONS,
    decoder_start_token_id=2,
    dropout=0.0,
)
_WIDTHS: dict[str, Any] = dict(
    encoder_ffn_dim=4 * WIDTH, decoder_ffn_dim=4 * WIDTH, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS
)


def _linears(columns: str, rows: str, bias: bool = True) -> list[tuple[str, Any]]:
    lines: list[tuple[str, Any]] = [(f"{{{columns}}}.weight", COLUMN), (f"{{{rows}}}.weight", ROW)]
    return [*lines, (f"{{{columns}}}.bias", ("model",))] if bias else lines


def _lora(columns: str, rows: str) -> list[tuple[str, Any]]:
    return [(f"{{{columns}}}.lora_B.default.weight", COLUMN), (f"{{{rows}}}.lora_A.default.weight", ROW)]


_LLAMA = _linears("q_proj,k_proj,v_proj,gate_proj,up_proj,lm_head", "o_proj,down_proj", bias=False)
_WHISPER = _linears("q_proj,k_proj,v_proj,fc1,proj_out", "out_proj,fc2", bias=False)
SAMPLES: dict[str, Sample] = {
    "nanoGPT": Sample(
        NanoGPT,
        _tokens,
        [*_linears("c_attn,c_fc", "c_proj"), ("wte.weight", COLUMN)],
        ("transformer.h",),
        ("c_attn", "c_proj"),
        _lora("c_attn", "c_proj"),
    ),
    "GPT-2": Sample(
        _of(
            "GPT2LMHeadModel",
            n_layer=LAYERS,
            n_embd=WIDTH,
            n_head=HEADS,
            vocab_size=VOCABULARY,
            n_positions=POSITIONS,
            bos_token_id=1,
            eos_token_id=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        _tokens,
        [("{c_attn,c_fc}.weight", ROW), ("{c_attn,c_fc}.bias", ("model",)), ("c_proj.weight", COLUMN), ("wte.weight", COLUMN)],
        ("transformer.h",),
        ("c_attn", "c_proj"),
        _lora("c_attn", "c_proj"),
    ),
    "Llama": Sample(
        _of("LlamaForCausalLM", **_SIZES, num_key_value_heads=HEADS),
        _tokens,
        [*_LLAMA, ("embed_tokens.weight", COLUMN)],
        ("model.layers",),
        ("q_proj", "o_proj", "up_proj", "down_proj"),
        _lora("q_proj,up_proj", "o_proj,down_proj"),
    ),
    "Mixtral": Sample(
        _of("MixtralForCausalLM", **_SIZES, num_key_value_heads=HEADS, num_local_experts=4),
        _tokens,
        [
            *_linears("q_proj,k_proj,v_proj,lm_head", "o_proj", bias=False),
            ("embed_tokens.weight", COLUMN),
            ("experts.gate_up_proj", (None, "model", None)),
            ("experts.down_proj", (None, None, "model")),
        ],
        ("model.layers",),
        ("q_proj", "o_proj"),
        _lora("q_proj", "o_proj"),
    ),
    "BERT": Sample(
        _of("BertForMaskedLM", **_SIZES, **_NO_DROPOUT),
        _tokens,
        [
            *_linears("query,key,value,intermediate.dense,predictions.decoder", "attention.output.dense,layer.*.output.dense"),
            ("word_embeddings.weight", COLUMN),
            ("cls.predictions.bias", ("model",)),
        ],
        ("bert.encoder.layer",),
        ("query", "attention.output.dense"),
        _lora("query", "attention.output.dense"),
    ),
    "T5": Sample(
        _of(
            "T5ForConditionalGeneration",
            d_model=WIDTH,
            d_ff=4 * WIDTH,
            num_layers=LAYERS,
            num_heads=HEADS,
            d_kv=WIDTH // HEADS,
            vocab_size=VOCABULARY,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        ),
        _tokens,
        [*_linears("q,k,v,wi", "o,wo", bias=False), ("{shared,lm_head}.weight", COLUMN), ("relative_attention_bias.weight", ROW)],
        ("encoder.block", "decoder.block"),
        ("q", "o"),
        _lora("q", "o"),
    ),
    "ViT": Sample(
        _of("ViTForImageClassification", **_IMAGE_SIZES, **_NO_DROPOUT),
        _images,
        _linears("q_proj,k_proj,v_proj,fc1", "o_proj,fc2"),
        ("vit.layers",),
        ("q_proj", "o_proj"),
        _lora("q_proj", "o_proj"),
    ),
    "Whisper": Sample(
        _of("WhisperForConditionalGeneration", **_AUDIO_SIZES, **_WIDTHS, **_ENDS),
        _audio,
        [
            *_WHISPER,
            ("layers.*.{q_proj,v_proj,fc1}.bias", ("model",)),
            ("layers.*.*.{q_proj,v_proj}.bias", ("model",)),
            ("decoder.embed_tokens.weight", COLUMN),
            ("encoder.conv1.weight", ("model", None, None)),
            ("encoder.conv1.bias", ("model",)),
            ("encoder.conv2.weight", (None, "model", None)),
        ],
        ("model.encoder.layers", "model.decoder.layers"),
        ("q_proj", "out_proj"),
        _lora("q_proj", "out_proj"),
    ),
}


__all__ = ["SAMPLES", "Sample"]

"""GPT-2, trained as a language model: `GPT` of `spmd/demo/_gpt2.py`, and Hugging Face's `GPT2LMHeadModel` unmodified.

    python benchmarks/gpt2.py                                     # 4 layers of width 256 on data 2 x model 4
    python benchmarks/gpt2.py --variant hf --mesh data=8
    python benchmarks/gpt2.py --preset full --real-data book.txt  # the 124M shape

This file is the PyTorch script: loss, optimizer, data, and the table that says how parameters are split. It and the model's file
import torch alone, so every contender that is torch runs them; `gpt2_jax.py` is the same step written by hand in JAX.

    B sequences   T tokens in one   V vocabulary   D width   H heads   K width of a head, D = H * K
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _model() -> ModuleType:
    """`spmd/demo/_gpt2.py` by its path, in a checkout or an installed package: `import spmd` would take the device slot of torchax."""
    here = Path(__file__).resolve().parent
    packages = here.parent / "spmd", here.parents[1]
    path = next(package / "demo" / "_gpt2.py" for package in packages if (package / "demo").exists())
    spec = importlib.util.spec_from_file_location("gpt2_model", path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODEL = _model()
UNIT = "tokens"
VARIANTS = ("own", "hf")
MESH = "data=2,model=4"


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a batch. `variant`: "own" or "hf"."""

    variant: str = "own"
    vocabulary: int = 50304  # GPT-2's 50257, padded to a multiple of 128: dims must divide by their mesh axes
    seq: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12
    dropout: float = 0.0
    batch: int = 16


PRESETS = {
    "tiny": Config(vocabulary=256, seq=32, width=64, layers=2, heads=4, batch=8),
    "small": Config(vocabulary=512, seq=128, width=256, layers=4, heads=8, batch=8),
    "full": Config(),
}

# Megatron: the first linear of each pair is split by outputs, the second by inputs; the vocabulary is split too. "fsdp" splits
# the other dim of each weight. Axes that the mesh lacks are left out; what no pattern names is replicated.
SHARDINGS: dict[str, tuple[str | None, ...]] = {
    "tokens.weight": ("model", "fsdp"),
    "positions.weight": (None, "fsdp"),
    "blocks.*.attention.qkv.weight": ("model", "fsdp"),
    "blocks.*.attention.qkv.bias": ("model",),
    "blocks.*.attention.out.weight": ("fsdp", "model"),
    "blocks.*.mlp.up.weight": ("model", "fsdp"),
    "blocks.*.mlp.up.bias": ("model",),
    "blocks.*.mlp.down.weight": ("fsdp", "model"),
}
# Hugging Face's linears are Conv1D, weights [in, out]. Its 50257 tokens divide by nothing, so the embedding is split by width.
HF_SHARDINGS: dict[str, tuple[str | None, ...]] = {
    "transformer.wte.weight": (None, "fsdp"),
    "transformer.wpe.weight": (None, "fsdp"),
    "transformer.h.*.attn.c_attn.weight": ("fsdp", "model"),
    "transformer.h.*.attn.c_attn.bias": ("model",),
    "transformer.h.*.attn.c_proj.weight": ("model", "fsdp"),
    "transformer.h.*.mlp.c_fc.weight": ("fsdp", "model"),
    "transformer.h.*.mlp.c_fc.bias": ("model",),
    "transformer.h.*.mlp.c_proj.weight": ("model", "fsdp"),
}
BATCH_SPECS = ((("data", "fsdp"), None), (("data", "fsdp"), None))
# Results of modules that are split by sequences alone. Without this, weights split over "fsdp" make GSPMD split activations by width.
ACTIVATIONS = {"own": ("tokens", "blocks.?", "blocks.??"), "hf": ("transformer.wte", "transformer.h.?", "transformer.h.??")}


class GPT(MODEL.GPT):
    """With GPT-2's parameters at first: weights from a normal of 0.02, biases zero, norms one."""

    def initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def build(config: Config) -> nn.Module:
    """The model on the CPU (or wherever torch makes tensors now), from torch's seed."""
    if config.variant == "own":
        return GPT(config)
    from transformers import GPT2Config, GPT2LMHeadModel

    last = min(config.vocabulary, HF_TOKENS) - 1  # the token that ends a text
    sizes = {"n_positions": config.seq, "n_embd": config.width, "n_layer": config.layers, "n_head": config.heads}
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=last + 1,
            bos_token_id=last,
            eos_token_id=last,
            **sizes,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )
    return model.train()


def loss(model: nn.Module, x_BT: Tensor, y_BT: Tensor) -> Tensor:
    """Mean cross entropy of the next token."""
    if isinstance(model, GPT):
        return F.cross_entropy(model(x_BT).flatten(0, 1), y_BT.flatten())
    return model(input_ids=x_BT, labels=x_BT).loss  # Hugging Face shifts the labels itself


LINEARS = {"attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
HF_TOKENS = 50257


def to_hugging_face(state: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Our block's parameters in Hugging Face's names and layouts: linears [in, out], rows of qkv as [3, H, K], no padded tokens."""
    vocabulary = min(config.vocabulary, HF_TOKENS)
    out = {"wte.weight": state["tokens.weight"][:vocabulary], "wpe.weight": state["positions.weight"]}
    out |= {f"ln_f.{kind}": state[f"norm.{kind}"] for kind in ("weight", "bias")}
    for layer in range(config.layers):
        for kind in ("weight", "bias"):
            for ours, theirs in (LINEARS | NORMS).items():
                value = state[f"blocks.{layer}.{ours}.{kind}"]
                if ours == "attention.qkv":
                    value = value.unflatten(0, (config.heads, 3, -1)).transpose(0, 1).flatten(0, 2)
                out[f"h.{layer}.{theirs}.{kind}"] = value.T if ours in LINEARS and kind == "weight" else value
    return {f"transformer.{name}": value.contiguous() for name, value in out.items()}


def from_hugging_face(state: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The other way; tokens beyond Hugging Face's get zeros. Its files may leave the prefix `transformer.` out."""
    state = {name.removeprefix("transformer."): value for name, value in state.items()}
    table_VD = state["wte.weight"]
    padded_VD = torch.cat([table_VD, table_VD.new_zeros(config.vocabulary - len(table_VD), config.width)])
    out = {"tokens.weight": padded_VD, "head.weight": padded_VD, "positions.weight": state["wpe.weight"]}
    out |= {f"norm.{kind}": state[f"ln_f.{kind}"] for kind in ("weight", "bias")}
    for layer in range(config.layers):
        for kind in ("weight", "bias"):
            for ours, theirs in (LINEARS | NORMS).items():
                value = state[f"h.{layer}.{theirs}.{kind}"]
                value = value.T if ours in LINEARS and kind == "weight" else value
                if ours == "attention.qkv":
                    value = value.unflatten(0, (3, config.heads, -1)).transpose(0, 1).flatten(0, 2)
                out[f"blocks.{layer}.{ours}.{kind}"] = value
    return out


def load_weights(model: nn.Module, config: Config, file: Path) -> None:
    """From Hugging Face's `model.safetensors`."""
    from safetensors.torch import load_file

    state = load_file(file)
    if config.variant == "own":
        model.load_state_dict(from_hugging_face(state, config))
        return
    state = {name if name.startswith("transformer.") else f"transformer.{name}": value for name, value in state.items()}
    model.load_state_dict(state | {"lm_head.weight": state["transformer.wte.weight"]})


def save_weights(state: dict[str, Tensor], config: Config, file: Path) -> None:
    """CPU tensors of either variant as Hugging Face's `model.safetensors`; the head is the embedding, as there."""
    from safetensors.torch import save_file

    state = {name: value for name, value in state.items() if name not in ("head.weight", "lm_head.weight")}
    save_file(to_hugging_face(state, config) if config.variant == "own" else state, file, metadata={"format": "pt"})


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def shardings(config: Config) -> dict[str, tuple[str | None, ...]]:
    """Parameters by pattern, and how each is split."""
    return SHARDINGS if config.variant == "own" else HF_SHARDINGS


def activations(config: Config) -> dict[str, tuple[str | tuple[str, ...] | None, ...]]:
    """Modules whose result is held to a sharding."""
    return {pattern: (("data", "fsdp"), None, None) for pattern in ACTIVATIONS[config.variant]}


def num_items(config: Config) -> int:
    """Tokens in a batch."""
    return config.batch * config.seq


def tokens(config: Config, real_data: Path | None) -> Tensor:
    """int64 tokens: bytes of a text, by default of Python's own modules; a `.bin` file holds uint16 tokens, as nanoGPT writes them."""
    if real_data is not None and real_data.suffix == ".bin":
        return torch.from_file(str(real_data), size=real_data.stat().st_size // 2, dtype=torch.uint16).long() % config.vocabulary
    files = [real_data] if real_data is not None else sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:100]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def example(config: Config) -> tuple[Tensor, Tensor]:
    """A batch without values."""
    return (torch.empty(config.batch, config.seq, dtype=torch.int64, device="meta"),) * 2


def batches(config: Config, count: int, real_data: Path | None = None) -> list[tuple[Tensor, Tensor]]:
    """`count` batches of (tokens, the token after each), int64[B, T], the same in every process."""
    text_N, rng = tokens(config, real_data), torch.Generator().manual_seed(0)
    drawn: list[tuple[Tensor, Tensor]] = []
    for _ in range(count):
        starts_B = torch.randint(len(text_N) - config.seq, (config.batch,), generator=rng)
        windows_BT = text_N[starts_B[:, None] + torch.arange(config.seq + 1)]
        drawn.append((windows_BT[:, :-1].contiguous(), windows_BT[:, 1:].contiguous()))
    return drawn


if __name__ == "__main__":
    from spmd.bench import script

    script("gpt2")

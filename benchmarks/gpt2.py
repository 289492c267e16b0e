"""GPT-2 language model training: `GPT` of `spmd/demo/_gpt2.py`, or Hugging Face's unmodified `GPT2LMHeadModel`.

    python benchmarks/gpt2.py                                     # 4 layers of width 256 on data 2 x model 4
    python benchmarks/gpt2.py --variant hf --mesh data=8
    python benchmarks/gpt2.py --preset full --real-data book.txt  # the 124M shape

This file is the PyTorch script: loss, optimizer, data, and the partition specs of the parameters. It and the model's file import
only torch, so all torch contenders run them. `gpt2_jax.py` is the same step hand-written in JAX.

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
    """Load `spmd/demo/_gpt2.py` by its path, from a checkout or an installed package: `import spmd` would occupy torchax's device slot."""
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
    """Sizes of the model and of a batch. `variant` is "own" or "hf"."""

    variant: str = "own"
    vocabulary: int = 50304  # GPT-2's 50257 padded to a multiple of 128, because mesh axes must divide the dims that they split
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

# Megatron: the first linear of each pair is split by outputs and the second by inputs. The vocabulary is split too. "fsdp" splits
# the other dim of each weight. Axes that the mesh does not have are dropped. Parameters without a pattern are replicated.
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
# Hugging Face's linears are Conv1D with weights [in, out]. No mesh axis divides its 50257 tokens, so the embedding is split by width.
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
# Modules whose outputs are split by sequences only. Without this constraint, weights that are split over "fsdp" make the partitioner
# split activations by width.
ACTIVATIONS = {"own": ("tokens", "blocks.?", "blocks.??"), "hf": ("transformer.wte", "transformer.h.?", "transformer.h.??")}


class GPT(MODEL.GPT):
    """The model with GPT-2's initialization: weights from a normal distribution with std 0.02, biases 0, norm weights 1."""

    def initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def build(config: Config) -> nn.Module:
    """The model on torch's current default device, initialized from torch's current seed."""
    if config.variant == "own":
        return GPT(config)
    from transformers import GPT2Config, GPT2LMHeadModel

    last = min(config.vocabulary, HF_TOKENS) - 1  # the end-of-text token
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
    """Our parameters with Hugging Face's names and layouts: linears [in, out], qkv ordered [3, H, K], no padded tokens."""
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
    """Inverse of `to_hugging_face`. Padded tokens get zeros. Names may lack the prefix `transformer.`, as in Hugging Face's files."""
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
    """Load Hugging Face's `model.safetensors` into the model, in place."""
    from safetensors.torch import load_file

    state = load_file(file)
    if config.variant == "own":
        model.load_state_dict(from_hugging_face(state, config))
        return
    state = {name if name.startswith("transformer.") else f"transformer.{name}": value for name, value in state.items()}
    model.load_state_dict(state | {"lm_head.weight": state["transformer.wte.weight"]})


def save_weights(state: dict[str, Tensor], config: Config, file: Path) -> None:
    """Write the CPU tensors of either variant as Hugging Face's `model.safetensors`, without the head, which shares the embedding."""
    from safetensors.torch import save_file

    state = {name: value for name, value in state.items() if name not in ("head.weight", "lm_head.weight")}
    save_file(to_hugging_face(state, config) if config.variant == "own" else state, file, metadata={"format": "pt"})


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def shardings(config: Config) -> dict[str, tuple[str | None, ...]]:
    """Partition specs of the parameters: pattern of the name -> spec."""
    return SHARDINGS if config.variant == "own" else HF_SHARDINGS


def activations(config: Config) -> dict[str, tuple[str | tuple[str, ...] | None, ...]]:
    """Sharding constraints on the outputs of modules: pattern of the name -> spec."""
    return {pattern: (("data", "fsdp"), None, None) for pattern in ACTIVATIONS[config.variant]}


def num_items(config: Config) -> int:
    """Number of tokens in a batch."""
    return config.batch * config.seq


def tokens(config: Config, real_data: Path | None) -> Tensor:
    """int64 tokens: the bytes of a text, by default Python's standard library; a `.bin` file contains uint16 tokens in nanoGPT's format."""
    if real_data is not None and real_data.suffix == ".bin":
        return torch.from_file(str(real_data), size=real_data.stat().st_size // 2, dtype=torch.uint16).long() % config.vocabulary
    files = [real_data] if real_data is not None else sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:100]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def example(config: Config) -> tuple[Tensor, Tensor]:
    """A batch of meta tensors."""
    return (torch.empty(config.batch, config.seq, dtype=torch.int64, device="meta"),) * 2


def batches(config: Config, count: int, real_data: Path | None = None) -> list[tuple[Tensor, Tensor]]:
    """`count` batches of (tokens, next tokens), int64[B, T] each, identical in every process."""
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

"""Models of Hugging Face as they are, with their layers as loops: losses of 50 steps are those of the program without."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from tests.later import transformers as hf

LAYERS, STEPS = 6, 50
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": 128, "use_cache": False}
MODELS: dict[str, Callable[[], Any]] = {
    "BERT": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES, vocab_size=128)),
    "GPT-2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(n_layer=LAYERS, n_embd=32, n_head=4, vocab_size=128, use_cache=False, bos_token_id=None, eos_token_id=None)
    ),
    "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, num_key_value_heads=2)),
    "Mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4)),
    "T5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=LAYERS, num_heads=4, vocab_size=128, decoder_start_token_id=0, use_cache=False)
    ),
    "ViT": lambda: hf.ViTForImageClassification(hf.ViTConfig(**SIZES, image_size=16, patch_size=4, num_labels=5)),
}


def batch(name: str) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    if name == "ViT":
        return {"pixel_values": torch.randn(4, 3, 16, 16, generator=draw), "labels": torch.randint(0, 5, (4,), generator=draw)}
    ids = torch.randint(0, 128, (4, 16), generator=draw)
    return {"input_ids": ids, "labels": ids}


def losses_of(name: str, steps: int, roll: bool) -> tuple[list[float], spmd.Step[Any, Any]]:
    torch.manual_seed(0)
    model = MODELS[name]().to("jax").train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    given = {k: v.to("jax") for k, v in batch(name).items()}

    @spmd.compile(roll=roll)
    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**given).loss
        loss.backward()
        optimizer.step()
        return loss

    losses = [step() for _ in range(steps)]
    return [loss.item() for loss in losses], step


@pytest.mark.parametrize(
    ("name", "steps"), [("GPT-2", 4), *(pytest.param(name, STEPS, marks=pytest.mark.slow) for name in MODELS)], ids=lambda v: str(v)
)
def test_losses_are_those_of_the_program_without_loops(name: str, steps: int) -> None:
    losses, step = losses_of(name, steps, roll=True)
    expected, plain = losses_of(name, steps, roll=False)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert max(loss.passes for loss in step.rolled) >= LAYERS - 1
    assert [loss.why_not for loss in step.rolled if loss.why_not is not None and loss.equations > 50] == []
    assert step.hlo().count(" = ") < plain.hlo().count(" = ")

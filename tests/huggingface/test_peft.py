"""LoRA over a mesh: only adapters are trained, what is saved is theirs, and merged weights are CPU torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.huggingface.scripts import fit, history, llama, on_cpu, texts, training_on
from tests.later import peft, transformers
from tests.oracle import assert_same

pytestmark = [
    pytest.mark.multidevice(num=8),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft asks transformers so
]


def adapted() -> Any:
    return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


@pytest.mark.parametrize("layout", ["data parallel", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "megatron"))])
def test_adapters_train_and_merge_as_on_cpu_torch(layout: str, tmp_path: Path) -> None:
    with on_cpu():
        wanted = fit(adapted, texts(), tmp_path / "cpu")
    with training_on(layout):
        got = fit(adapted, texts(), tmp_path / "mesh", save_strategy="steps", save_steps=4)
        assert {n for n, p in got.model.named_parameters() if p.requires_grad} == {
            n for n, p in wanted.model.named_parameters() if p.requires_grad
        }
        merged = {n: p.detach().cpu() for n, p in got.model.merge_and_unload().named_parameters()}
    assert [entry[2] for entry in history(got)] == pytest.approx([entry[2] for entry in history(wanted)], rel=1e-5)
    assert_same(merged, dict(wanted.model.merge_and_unload().named_parameters()))
    saved = tmp_path / "mesh/checkpoint-4"
    assert (saved / "adapter_model.safetensors").is_file() and not (saved / "model.safetensors").exists()
    loaded: Any = peft.PeftModel.from_pretrained(untrained(), saved)
    assert_same(dict(loaded.merge_and_unload().named_parameters()), merged)


def untrained() -> transformers.LlamaForCausalLM:
    """The model that `fit` makes."""
    transformers.set_seed(0)
    return llama()

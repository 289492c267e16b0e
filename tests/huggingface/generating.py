"""Small random models that generate, on CPU torch and on device "jax", and prompts for them.

Weights are spread widely, so that the likeliest token is far ahead of the next one and no rounding decides.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax
import torch

from tests.later import transformers

VOCABULARY, PAD, EOS = 96, 0, 2
_TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS}
_SIZES: dict[str, Any] = {
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 96,
    "initializer_range": 0.6,
}
_GPT2: dict[str, Any] = {**_TOKENS, "n_layer": 2, "n_embd": 32, "n_head": 8, "n_positions": 48, "initializer_range": 0.6}
_T5: dict[str, Any] = {**_TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 8, "decoder_start_token_id": 0}
_BART: dict[str, Any] = {
    **_TOKENS,
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 8, "decoder_attention_heads": 8},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 96, "decoder_start_token_id": 1, "init_std": 0.6},
}
_MAKERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2)),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**_SIZES, num_local_experts=4)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SIZES)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_SIZES, head_dim=8)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**_SIZES, sliding_window=8)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**_SIZES, head_dim=8, sliding_window=8)),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**_T5, initializer_factor=4.0)),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**_BART)),
}
FAMILIES = list(_MAKERS)


@functools.cache
def host_model(family: str) -> Any:
    """On the CPU. The caller's random stream goes on as if the model had been there already."""
    transformers.logging.set_verbosity_error()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _MAKERS[family]().eval()


@functools.cache
def device_model(family: str) -> Any:
    """The same on device "jax", with the programs that tests before have made."""
    return fresh_model(family)


def fresh_model(family: str) -> Any:
    """The same, without programs."""
    return copy.deepcopy(host_model(family)).to("jax")


def prompt(length: int, rows: int = 2, seed: int = 0) -> torch.Tensor:
    """Ids [rows, length] without special ones."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded_prompt(*lengths: int, on: str = "left") -> dict[str, torch.Tensor]:
    """Prompts of several lengths as a tokenizer pads them."""
    longest = max(lengths)
    ids, mask = torch.full((len(lengths), longest), PAD), torch.zeros(len(lengths), longest, dtype=torch.int64)
    for row, length in enumerate(lengths):
        places = slice(longest - length, None) if on == "left" else slice(length)
        ids[row, places] = prompt(length, 1, seed=row)[0]
        mask[row, places] = 1
    return {"input_ids": ids, "attention_mask": mask}


def programs(model: Any) -> Any:
    from spmd.huggingface._generation_programs import programs_of  # which imports transformers: see tests/later.py

    return programs_of(model)


@contextmanager
def compilations() -> Generator[list[str]]:
    """What jax compiles in the block, one entry each."""
    found: list[str] = []

    def note(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)

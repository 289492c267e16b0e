"""Scripts as users of Hugging Face write them, with small random models; run on CPU torch and over a mesh."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import mesh
import spmd.huggingface
from tests.huggingface.conftest import forget
from tests.later import transformers

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[str, ...], Any]] = {
    "fsdp": ((8,), ("fsdp",), "fsdp"),
    "megatron": ((2, 4), ("data", "model"), "megatron"),
    "data parallel": ((8,), ("data",), [("**", None)]),
}


def training_on(layout: str) -> spmd.huggingface.Training:
    """The line that a script gets."""
    shape, axes, rules = LAYOUTS[layout]
    return spmd.huggingface.train_on(mesh.Mesh(range(8), shape, axes), rules)


def gpt2(dropout: float = 0.0) -> transformers.GPT2LMHeadModel:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 8, "vocab_size": 64, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, loss_type="ForCausalLM")
    )


def llama() -> transformers.LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=32, bos_token_id=1, eos_token_id=2)
    )


def bert() -> transformers.BertForSequenceClassification:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 64}
    config = transformers.BertConfig(**sizes, max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForSequenceClassification(config)


def texts(num: int = 32, length: int = 8) -> list[dict[str, torch.Tensor]]:
    """Token ids [T] that are their own labels."""
    rng = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 64, (length,), generator=rng) for _ in range(num)]
    return [{"input_ids": x, "labels": x} for x in ids]


def labelled(num: int = 32, length: int = 8) -> list[dict[str, Any]]:
    """Token ids [T] with a class of two."""
    return [{"input_ids": text["input_ids"], "labels": int(text["input_ids"][0] > 32)} for text in texts(num, length)]


def fit(
    make: Callable[[], Any],
    data: Any,
    folder: Path,
    resume: Path | None = None,
    data_collator: Any = None,
    before: Callable[[transformers.Trainer], None] = lambda trainer: None,
    **options: Any,
) -> transformers.Trainer:
    """Train as a script does; what it would print is dropped."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    transformers.set_seed(0)
    usual = {"per_device_train_batch_size": 8, "max_steps": 4, "logging_steps": 1, "learning_rate": 1e-3, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(str(folder), **{**usual, "report_to": [], "dataloader_pin_memory": False, **options})
    trainer = transformers.Trainer(make(), arguments, train_dataset=data, eval_dataset=data[:12], data_collator=data_collator)
    before(trainer)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def history(trainer: transformers.Trainer) -> list[tuple[str, int, float]]:
    """What was logged: (name, step, value), without times."""
    kept = ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch")
    return [(name, log["step"], log[name]) for log in trainer.state.log_history for name in kept if name in log]


@contextmanager
def on_cpu() -> Iterator[None]:
    """For what follows Accelerate has the CPU as its device."""
    forget()
    yield
    forget()

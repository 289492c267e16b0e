"""Trainer scripts over a mesh beside CPU torch: what they log, save and load is the same, and a step is one program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import spmd.huggingface
from spmd.device._storage import buffer_of
from tests.huggingface.scripts import bert, fit, gpt2, history, labelled, llama, on_cpu, texts, training_on
from tests.later import transformers
from tests.oracle import TOLERANCE, assert_same

pytestmark = pytest.mark.multidevice(num=8)
SLOW = pytest.mark.slow


def both(layout: str, *script: Any, folder: Path, **options: Any) -> tuple[Any, Any, spmd.huggingface.Training]:
    """The script on the CPU and over a mesh."""
    with on_cpu():
        wanted = fit(*script, folder / "cpu", **options)
    with training_on(layout) as training:
        return wanted, fit(*script, folder / "mesh", **options), training


CASES = [
    pytest.param("megatron", llama, texts(), {}, id="llama, megatron"),
    pytest.param("fsdp", gpt2, texts(), {}, id="gpt2, fsdp", marks=SLOW),
    pytest.param("data parallel", bert, labelled(), {}, id="bert, data parallel", marks=SLOW),
    pytest.param("fsdp", gpt2, texts(), {"gradient_accumulation_steps": 3}, id="accumulation", marks=SLOW),
    pytest.param("fsdp", gpt2, texts(), {"max_grad_norm": 0.0}, id="no clipping", marks=SLOW),
    pytest.param("fsdp", gpt2, texts(), {"gradient_checkpointing": True}, id="checkpointing", marks=SLOW),
    pytest.param("megatron", llama, texts(), {"gradient_checkpointing": True}, id="checkpointing, megatron", marks=SLOW),
    pytest.param("fsdp", gpt2, texts(), {"eval_strategy": "steps", "eval_steps": 2}, id="evaluation", marks=SLOW),
    pytest.param("fsdp", gpt2, texts(), {"label_smoothing_factor": 0.1}, id="label smoothing", marks=SLOW),
    pytest.param("fsdp", gpt2, texts(), {"optim": "adafactor"}, id="adafactor", marks=SLOW),
    pytest.param("fsdp", gpt2, texts(), {"logging_steps": 3, "lr_scheduler_type": "cosine"}, id="logged every third", marks=SLOW),
    pytest.param("fsdp", gpt2, texts(20), {"max_steps": -1, "num_train_epochs": 2}, id="a last batch of 4", marks=SLOW),
]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # scripts have it
@pytest.mark.parametrize(("layout", "make", "data", "options"), CASES)
def test_what_is_logged_is_what_cpu_torch_logs(layout: str, make: Any, data: Any, options: dict[str, Any], tmp_path: Path) -> None:
    wanted, got, _ = both(layout, make, data, folder=tmp_path, **options)
    assert got.state.global_step == wanted.state.global_step
    assert [entry[:2] for entry in history(got)] == [entry[:2] for entry in history(wanted)]
    assert [entry[2] for entry in history(got)] == pytest.approx([entry[2] for entry in history(wanted)], rel=1e-5)


@pytest.mark.slow
def test_bf16_losses_are_those_of_cpu_torch(tmp_path: Path) -> None:
    with on_cpu():
        wanted = fit(gpt2, texts(), tmp_path / "cpu", bf16=True, use_cpu=True)
    with training_on("fsdp"):
        got = fit(gpt2, texts(), tmp_path / "mesh", bf16=True)
    assert [entry[2] for entry in history(got)] == pytest.approx([entry[2] for entry in history(wanted)], rel=TOLERANCE[torch.bfloat16][0])
    assert {p.dtype for p in got.model.parameters()} == {torch.float32}


def test_resumed_losses_are_those_of_the_run_that_went_on(tmp_path: Path) -> None:
    with training_on("fsdp") as training:
        whole = fit(lambda: gpt2(dropout=0.1), texts(), tmp_path, save_strategy="steps", save_steps=2)
        num_programs = training.lazy.num_executables
        rest = fit(lambda: gpt2(dropout=0.1), texts(), tmp_path, resume=tmp_path / "checkpoint-2")
        assert history(rest) == history(whole)
        assert training.lazy.num_executables == num_programs
        table = rest.model.transformer.wte.weight
        assert buffer_of(rest.optimizer.state[table]["exp_avg"]).get().sharding == buffer_of(table).get().sharding
        assert buffer_of(table).annotation is not None


@pytest.mark.slow
def test_a_checkpoint_has_the_files_and_tensors_of_cpu_torchs(tmp_path: Path) -> None:
    both("fsdp", llama, texts(), folder=tmp_path, save_strategy="steps", save_steps=2)
    here, there = tmp_path / "mesh/checkpoint-4", tmp_path / "cpu/checkpoint-4"
    assert sorted(f.name for f in here.iterdir()) == sorted(f.name for f in there.iterdir())
    assert_same(load_file(here / "model.safetensors"), load_file(there / "model.safetensors"))
    saved = [torch.load(folder / "optimizer.pt", map_location="cpu")["state"] for folder in (here, there)]
    assert_same(*saved)


@pytest.mark.slow
def test_more_steps_make_no_more_programs(tmp_path: Path) -> None:
    counts = []
    for steps in (4, 12):
        with training_on("fsdp") as training:
            fit(gpt2, texts(), tmp_path, max_steps=steps, logging_steps=2)
            counts.append(training.lazy.num_executables)
    assert counts[0] == counts[1] <= 5, training.lazy.retraces


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "megatron"])
def test_a_trained_model_generates_what_it_does_on_the_cpu(layout: str, tmp_path: Path) -> None:
    prompt = torch.stack([text["input_ids"] for text in texts(2, 4)])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with training_on(layout) as training:
        model = fit(llama, texts(), tmp_path).model
        got = model.generate(prompt.to("jax"), **options).cpu()
        num_programs = training.lazy.num_executables
        model.generate(prompt.to("jax"), **options)
        assert training.lazy.num_executables == num_programs
        model.save_pretrained(tmp_path / "last")
    assert torch.equal(got, transformers.LlamaForCausalLM.from_pretrained(tmp_path / "last").generate(prompt, **options))


def test_fp16_is_refused(tmp_path: Path) -> None:
    with training_on("fsdp"), pytest.raises(ValueError, match="fp16 mixed precision requires"):
        fit(llama, texts(), tmp_path, fp16=True)


def padded(features: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch whose length is a multiple of 8."""
    size = -(-max(len(f["input_ids"]) for f in features) // 8) * 8
    ids = torch.stack([torch.nn.functional.pad(f["input_ids"], (0, size - len(f["input_ids"]))) for f in features])
    return {"input_ids": ids, "labels": torch.where(ids > 0, ids, -100)}


@pytest.mark.slow
def test_each_length_makes_its_programs_once(tmp_path: Path) -> None:
    lengths = torch.randint(5, 17, (16,), generator=torch.Generator().manual_seed(1)).tolist()
    data = [{"input_ids": text["input_ids"][:length]} for text, length in zip(texts(16, 16), lengths, strict=True)]
    counts = []
    for steps in (8, 24):
        with training_on("fsdp") as training, pytest.warns(UserWarning, match="a batch of 2 is split over 8 devices"):
            fit(gpt2, data, tmp_path, max_steps=steps, data_collator=padded, per_device_train_batch_size=2)
            counts.append(training.lazy.num_executables)
    assert counts[0] == counts[1] <= 7, training.lazy.retraces


class Diverging(torch.nn.Module):
    """A linear model, whose loss is finite where its labels are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (x * self.weight).sum(1).sub(labels).square().mean()}


@pytest.mark.parametrize("is_on", [True, pytest.param(False, marks=SLOW)])
def test_losses_that_are_not_finite_are_logged_as_on_the_cpu_and_read_by_nobody(is_on: bool, tmp_path: Path) -> None:
    data = [{"x": torch.full((4,), i / 8), "labels": torch.tensor(float("inf") if i == 20 else 1.0)} for i in range(32)]
    options: dict[str, Any] = {"logging_steps": 2, "logging_nan_inf_filter": is_on, "max_grad_norm": 0.0, "optim": "sgd"}
    wanted, got, _ = both("data parallel", Diverging, data, folder=tmp_path, learning_rate=0.0, **options)
    assert history(got) == history(wanted)
    assert got.args.logging_nan_inf_filter == is_on

"""Runs of recipes beside the loops that they stand for, written by hand on CPU torch; on 8 devices, stopped and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spmd.train import RecipeError, Run, recipe_of
from tests.later import transformers
from tests.oracle import TOLERANCE
from tests.train.recipes import GPT2, LLAMA, NO_DROPOUT, SEQ, STEPS, by_hand, records, tables, token_batches, write_tokens

pytestmark = pytest.mark.multidevice(num=8)

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped micro-batches under a cosine": {
        "optimizer": {"accumulate": 2, "clip_norm": 0.5},
        "schedule": {"name": "cosine", "warm_up": 2, "final": 0.1},
    },
    "a falling line, SGD, data parallel": {
        "optimizer": {"name": "SGD", "arguments": {"momentum": 0.9}},
        "schedule": {"name": "linear", "steps": 4},
        "mesh": {"axes": ""},
        "model": {"rules": "replicated"},
    },
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if "micro" in name else pytest.mark.slow) for name in CHANGES])
def test_losses_are_those_of_a_loop_by_hand(name: str, tmp_path: Path) -> None:
    found = tables(tmp_path, **CHANGES[name])
    run = Run(recipe_of(found))
    assert run.train() == 0
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **NO_DROPOUT))
    expected = by_hand(found, model, token_batches(found["data"]["paths"][0]))
    rtol, atol = TOLERANCE[torch.float32]
    assert list(records(tmp_path / "run")) == list(range(1, STEPS + 1))
    torch.testing.assert_close(list(records(tmp_path / "run").values()), expected, rtol=rtol, atol=atol)
    assert run.update.step.num_traces == 1


def test_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """With dropout, an average, a schedule and a pass over the data that ends in between."""
    changes: dict[str, Any] = {
        "model": {"arguments": GPT2},
        "schedule": {"name": "cosine", "warm_up": 2, "steps": STEPS},
        "ema": {"decay": 0.9},
        "optimizer": {"clip_norm": 1.0},
    }
    unbroken = Run(recipe_of(tables(tmp_path, **changes, out=str(tmp_path / "unbroken"))))
    unbroken.train()
    found = tables(tmp_path, **changes, checkpoint={"every": 2, "export": True})
    first = Run(recipe_of(found), steps=4)
    assert first.train() == 0
    second = Run(recipe_of(found))
    assert second.train() == 0
    assert records(tmp_path / "run") == records(tmp_path / "unbroken")
    for mine, other in zip(second.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(mine.cpu(), other.cpu())
    assert second.update.ema is not None and unbroken.update.ema is not None
    for mine, other in zip(second.update.ema.parameters(), unbroken.update.ema.parameters(), strict=True):
        assert torch.equal(mine.cpu(), other.cpu())
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "run" / f"model-{STEPS}")
    assert torch.equal(read.lm_head.weight, second.model.lm_head.weight.cpu())
    assert records(tmp_path / "run", "event") == {4: "resumed"}


def test_metrics_say_where_the_time_went(tmp_path: Path) -> None:
    run = Run(recipe_of(tables(tmp_path, metrics={"every": 3, "peak_flops": 1e9}, checkpoint={"every": 2})))
    run.train()
    assert list(records(tmp_path / "run")) == [3, 6]
    seconds = records(tmp_path / "run", "seconds")[6]
    assert seconds["compile"] > seconds["step"] > 0 and seconds["checkpoint"] > 0 and seconds["restart"] == 0
    times = records(tmp_path / "run", "step_s")[6]
    assert 0 < times["min"] <= times["median"] <= times["max"]
    tokens, flops = records(tmp_path / "run", "tokens_per_s")[6], run.update.step.flops()
    assert tokens == pytest.approx(16 * 8 / times["mean"])
    assert records(tmp_path / "run", "mfu")[6] == pytest.approx(flops / times["mean"] / 1e9)
    assert records(tmp_path / "run", "memory_bytes")[6] == run.update.step.memory().peak_bytes


@pytest.mark.parametrize("compute", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_llama_split_over_both_axes_is_that_of_a_loop_by_hand(compute: str, tmp_path: Path) -> None:
    held_out = write_tokens(tmp_path, 20 * SEQ + 1, seed=1)
    found = tables(
        tmp_path,
        model={"config": "LlamaConfig", "arguments": LLAMA, "rules": "fsdp+megatron"},
        optimizer={"clip_norm": 1.0},
        precision={"compute": compute, "reduce": "float32"},
        evaluation={"every": 3, "paths": [str(held_out)]},
    )
    Run(recipe_of(found)).train()
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    expected = by_hand(found, model, token_batches(found["data"]["paths"][0]))
    rtol, atol = TOLERANCE[getattr(torch, compute)]
    torch.testing.assert_close(list(records(tmp_path / "run").values()), expected, rtol=rtol, atol=atol)
    tokens = torch.from_numpy(np.fromfile(held_out, np.uint16).astype(np.int64))
    logits = model(tokens[:-1].view(-1, SEQ)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:])
    torch.testing.assert_close(records(tmp_path / "run", "evaluation_loss")[STEPS], loss.item(), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"data": {"paths": ["no.bin"]}, "model": {"config": "NoConfig"}}, "[data] paths: 'no.bin' names no file"),  # before the model
        ({"model": {"config": "GPT2Confg"}}, "[model] config = 'GPT2Confg': transformers has no such class\n  fix: 'GPT2Config'"),
        ({"optimizer": {"name": "AdamV"}}, "[optimizer] name = 'AdamV': torch.optim has no such class\n  fix: 'Adam"),
        ({"optimizer": {"arguments": {"betta": 1}}}, "[optimizer] arguments do not match AdamW"),
        ({"model": {"loss": "mse"}}, "[model] loss = 'mse' is not known"),
        ({"model": {"arguments": {**GPT2, "vocab_size": 16}}}, "the model's vocabulary is 16"),
        ({"data": {"batch": 18}}, "[data] batch = 18 in 1 micro-batches does not divide over the 4 devices along"),
        ({"data": {"batch": 160}}, "[data] has 56 samples, fewer than a batch of 160"),
    ],
)
def test_what_no_run_can_follow_is_told(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        Run(recipe_of(tables(tmp_path, **changes))).train()
    assert told in str(error.value)

"""Samples: what the model would say, without a change to its training; a trace with the names of its modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mesh
from spmd.train import RecipeError, Run, recipe_of
from spmd.train._tokenizers import Bytes, tokenizer_of
from tests.later import transformers
from tests.train.recipes import GPT2, SEQ, records, tables

SAMPLES: dict[str, Any] = {"every": 2, "prompts": ["ab", "a b"], "tokens": 4, "temperature": 0.0, "tokenizer": "bytes"}


@pytest.mark.multidevice(num=8)
def test_samples_are_those_of_the_cpu_and_change_no_loss(tmp_path: Path) -> None:
    """The run that samples is traced too: the names of modules are in its profile."""
    model = {"arguments": {**GPT2, "vocab_size": 257}}
    plain = Run(recipe_of(tables(tmp_path, steps=3, model=model, out=str(tmp_path / "plain"))))
    plain.train()
    is_traced = not mesh.has_topology()  # which other tests have compiled for in this process: then no trace can be taken in it
    checkpoint, profile = {"every": 0, "export": True}, {"first": 2 * is_traced, "steps": 1}
    Run(recipe_of(tables(tmp_path, steps=3, model=model, samples=SAMPLES, checkpoint=checkpoint, profile=profile))).train()
    assert records(tmp_path / "run") == records(tmp_path / "plain")
    drawn = records(tmp_path / "run", "samples")
    assert list(drawn) == [2, 3]
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "run" / "model-3")
    for prompt, text in zip(SAMPLES["prompts"], drawn[3], strict=True):
        tokens = Bytes().encode(prompt)
        for _ in range(SAMPLES["tokens"]):
            tokens.append(int(read(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert text == Bytes().decode(tokens)
    if is_traced:
        (trace,) = (tmp_path / "run" / "profile" / "process-0").rglob("*.xplane.pb")
        assert b"transformer/h/1/attn/c_proj" in trace.read_bytes()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.multidevice(num=8)
@pytest.mark.slow
def test_samples_are_the_same_again(temperature: float, tmp_path: Path) -> None:
    found = tables(tmp_path, model={"arguments": {**GPT2, "vocab_size": 257}}, samples={**SAMPLES, "temperature": temperature})
    run = Run(recipe_of(found))
    assert run.sample() == run.sample()


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokens": SEQ}, "[samples] prompts of up to 3 tokens and 8 new tokens need 11 positions"),
        ({"prompts": []}, "[samples] prompts contain no prompt"),
        ({"tokenizer": ""}, "[samples] tokenizer is not given"),
    ],
)
def test_samples_that_cannot_be_drawn_are_told_before_the_first_step(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    found = tables(tmp_path, model={"arguments": {**GPT2, "n_layer": 1}}, samples={**SAMPLES, **changes})
    with pytest.raises(RecipeError) as error:
        Run(recipe_of(found))
    assert told in str(error.value)


def test_a_tokenizer_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="[samples] tokenizer = ".replace("[", r"\[").replace("]", r"\]")):
        tokenizer_of(str(tmp_path), "[samples] tokenizer")

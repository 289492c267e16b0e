"""Parts of a recipe that are a user's own, and a model that another run has written, beside the loop by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spmd.train import Run, recipe_of
from tests.later import transformers
from tests.oracle import TOLERANCE
from tests.train.own_parts import Named, squared
from tests.train.recipes import BATCH, GPT2, NO_DROPOUT, SEQ, by_hand, records, tables, token_batches

pytestmark = [pytest.mark.multidevice(num=8), pytest.mark.slow]
RTOL, ATOL = TOLERANCE[torch.float32]


def of_model(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch).loss


@pytest.mark.parametrize("loss", ["model", "tests.train.own_parts:squared"])
def test_a_loss_and_named_samples_of_ones_own(loss: str, tmp_path: Path) -> None:
    """Over micro-batches, evaluated too; two batches make a pass."""
    arguments = {"count": 2 * BATCH + 3, "seq": SEQ}
    run = Run(
        recipe_of(
            tables(
                tmp_path,
                steps=3,
                model={"loss": loss, "arguments": {**GPT2, **NO_DROPOUT, "loss_type": "ForCausalLM"}},
                data={"kind": "dataset", "own": "tests.train.own_parts:Named", "arguments": arguments, "batch": BATCH, "shuffle": False},
                optimizer={"accumulate": 2, "name": "SGD"},
                evaluation={"every": 3, "own": "tests.train.own_parts:Named", "arguments": {**arguments, "seed": 1}},
            )
        )
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(run.model.config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=0.0)
    optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.dim() > 1]
    optimizer.param_groups[0]["weight_decay"] = 0.1
    optimizer.add_param_group({"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0})
    assert run.train() == 0
    by_name = {"model": of_model, "tests.train.own_parts:squared": squared}[loss]

    def named(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"input_ids": tokens, "labels": tokens}

    expected: list[float] = []
    for number in range(3):
        optimizer.zero_grad()
        parts = Named(**arguments).tokens[: 2 * BATCH].chunk(2)[number % 2].chunk(2)
        loss_value = torch.stack([by_name(model, named(part)) / 2 for part in parts]).sum()
        loss_value.backward()
        optimizer.step()
        expected.append(loss_value.item())
    torch.testing.assert_close(list(records(tmp_path / "run").values()), expected, rtol=RTOL, atol=ATOL)
    held_out = Named(**arguments, seed=1).tokens[: 4 * (BATCH // 2)].chunk(4)
    mean = sum(by_name(model.eval(), named(part)).item() for part in held_out) / 4
    torch.testing.assert_close(records(tmp_path / "run", "evaluation_loss")[3], mean, rtol=RTOL, atol=ATOL)


def test_a_model_that_a_run_has_written_is_trained_further(tmp_path: Path) -> None:
    found = tables(tmp_path, model={"arguments": {**GPT2, **NO_DROPOUT}}, checkpoint={"every": 0, "export": True})
    Run(recipe_of(found), steps=2, out=str(tmp_path / "first")).train()
    folder = str(tmp_path / "first" / "model-2")
    model: dict[str, Any] = {"pretrained": folder, "rules": "megatron"}
    run = Run(recipe_of({**found, "model": model}), steps=3)
    run.train()
    read = transformers.GPT2LMHeadModel.from_pretrained(folder).train()
    expected = by_hand({**found, "steps": 3}, read, token_batches(found["data"]["paths"][0]))
    torch.testing.assert_close(list(records(tmp_path / "run").values()), expected, rtol=RTOL, atol=ATOL)

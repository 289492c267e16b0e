"""Small recipes, and the loop that each of them stands for, written by hand on CPU torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from spmd.train import recipe_of

SEQ, BATCH, STEPS = 8, 16, 6
GPT2: dict[str, Any] = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": SEQ, "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2}
LLAMA: dict[str, Any] = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2},
}
RESNET: dict[str, Any] = {"depths": [1, 1], "hidden_sizes": [8, 16], "embedding_size": 8, "layer_type": "basic", "num_labels": 3}
NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def write_tokens(folder: Path, count: int = 3 * BATCH * SEQ + 70, seed: int = 0) -> Path:
    """A file of three batches and a bit."""
    path = folder / f"tokens-{seed}.bin"
    np.random.default_rng(seed).integers(0, 32, count).astype(np.uint16).tofile(path)
    return path


def tables(folder: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    """A recipe of GPT-2 as TOML has it; `changes` go into its tables."""
    found: dict[str, Any] = {
        "out": str(folder / "run"),
        "steps": STEPS,
        "model": {"config": "GPT2Config", "arguments": {**GPT2, **NO_DROPOUT}, "rules": "megatron"},
        "mesh": {"axes": "data=4,model=2", "devices": 8},
        "data": {"paths": [str(write_tokens(folder))], "seq": SEQ, "batch": BATCH},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
        "checkpoint": {"every": 0, "export": False},
        "metrics": {"every": 1, "writers": ["json"]},
    }
    for table, keys in changes.items():
        if isinstance(keys, dict) and "kind" in keys:  # other data, with keys of its own
            del found[table]
        found[table] = {**found[table], **keys} if table in found and isinstance(keys, dict) else keys
    return found


def records(out: Path, name: str = "loss") -> dict[int, Any]:
    """A metric by step, as the last record of each step has it."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line[name] for line in lines if name in line}


def token_batches(path: str, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of a recipe without end, by nothing but a permutation."""
    tokens = torch.from_numpy(np.fromfile(path, np.uint16).astype(np.int64))
    num_windows, epoch = (len(tokens) - 1) // SEQ, 0
    while True:
        order = torch.randperm(num_windows, generator=torch.Generator().manual_seed(seed + epoch))
        for start in range(0, num_windows - BATCH + 1, BATCH):
            rows = [tokens[i * SEQ : i * SEQ + SEQ + 1] for i in order[start : start + BATCH].tolist()]
            yield torch.stack([row[:-1] for row in rows]), torch.stack([row[1:] for row in rows])
        epoch += 1


def sample_batches(dataset: Any, size: int, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of a recipe over samples by number without end."""
    epoch = 0
    while True:
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        for start in range(0, len(dataset) - size + 1, size):
            samples = [dataset[i] for i in order[start : start + size]]
            yield torch.stack([x for x, _ in samples]), torch.stack([torch.as_tensor(y) for _, y in samples])
        epoch += 1


def by_hand(found: dict[str, Any], model: torch.nn.Module, batches: Iterator[Any], after: Callable[[], Any] = list) -> list[float]:
    """The losses of an ordinary loop on the CPU with the recipe's numbers; `after` is called after every step."""
    recipe = recipe_of(found)
    table, schedule = recipe.optimizer, recipe.schedule
    wide, narrow = ([p for p in model.parameters() if (p.dim() > 1) == is_wide] for is_wide in (True, False))
    groups = [{"params": wide, "weight_decay": table.weight_decay}, {"params": narrow, "weight_decay": 0.0}]
    optimizer = getattr(torch.optim, table.name)(groups, lr=table.lr, **table.arguments)
    total = schedule.steps or recipe.steps
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / schedule.warm_up if step < schedule.warm_up else 1.0)
    losses: list[float] = []
    for step in range(recipe.steps):
        inputs, classes = next(batches)
        optimizer.zero_grad()
        parts: list[torch.Tensor] = []
        for x, y in zip(inputs.chunk(table.accumulate), classes.chunk(table.accumulate), strict=True):
            loss = F.cross_entropy(model(x).logits.flatten(0, -2), y.flatten()) / table.accumulate
            loss.backward()
            parts.append(loss.detach())
        if table.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), table.clip_norm)
        optimizer.step()
        losses.append(float(sum(parts)))
        after()
        if step + 1 < schedule.warm_up or schedule.name == "constant":
            warm.step()
        else:
            part = min(1.0, (step + 1 - schedule.warm_up) / (total - schedule.warm_up))
            left = 1 - part if schedule.name == "linear" else 0.5 * (1 + np.cos(np.pi * part))
            for group in optimizer.param_groups:
                group["lr"] = table.lr * (schedule.final + (1 - schedule.final) * left)
    return losses

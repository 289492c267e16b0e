"""Overhead of a recipe's run with all metrics, compared with the same hand-written loop: GPT-2 on 8 virtual devices.

    python -m benchmarks.recipe              # writes benchmarks/results/recipe.json
    python -m benchmarks.recipe --pairs 4 --json None

Both train in one process, alternating after a few steps, on the same batches from the same file. The hand-written loop uses
`spmd.compile` and `spmd.shard_loader` and reads no metric. The recipe writes a record at every step. The figures are medians of the
ratios of wall time and of CPU time; CPU time depends less on other load on the machine.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import spmd
from mesh import Mesh
from spmd.bench._machine import machine
from spmd.device._storage import load
from spmd.train import Run, recipe_of
from spmd.train._token_files import TokenFiles

RESULTS = Path(__file__).resolve().parent / "results" / "recipe.json"
RATE, CLIP = 1e-3, 1.0


@dataclass(frozen=True)
class Options:
    """Attributes:
    pairs: number of turns of each loop; the first two compile and are not counted.
    steps: number of steps in a turn.
    rows, positions: sequences in a batch, and tokens in a sequence.
    json: file for the result; None only prints it.
    """

    pairs: int = 24
    steps: int = 4
    rows: int = 16
    positions: int = 128
    layers: int = 4
    width: int = 256
    json: Path | None = RESULTS

    @property
    def model(self) -> dict[str, Any]:
        sizes = {"n_layer": self.layers, "n_embd": self.width, "n_head": 8, "n_positions": self.positions, "vocab_size": 1024}
        return {**sizes, "bos_token_id": 0, "eos_token_id": 0}


class ByRecipe:
    """The loop of a recipe's run, a few steps at a time."""

    def __init__(self, options: Options, tokens: Path, out: Path) -> None:
        tables = {
            "out": str(out),
            "steps": options.pairs * options.steps,
            "model": {"config": "GPT2Config", "arguments": options.model, "rules": "megatron"},
            "mesh": {"axes": "data=2,model=4", "devices": 8},
            "data": {"paths": [str(tokens)], "seq": options.positions, "batch": options.rows},
            "optimizer": {"lr": RATE, "clip_norm": CLIP},
            "checkpoint": {"every": 0, "export": False},
            "metrics": {"every": 1, "peak_flops": 1e12},
        }
        self.run = Run(recipe_of(tables))
        self.model = self.run.model
        self.batches = self._endless()
        self.run.clock.to("step")

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.run._timed_batches()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.run._one_step(next(self.batches))
            self.run._after_step()


class ByHand:
    """The equivalent hand-written loop."""

    def __init__(self, options: Options, mesh: Mesh, tokens: Path) -> None:
        torch.manual_seed(0)
        self.model = GPT2LMHeadModel(GPT2Config(**options.model)).to("jax")
        spmd.shard_module(self.model, mesh, "megatron")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        data = TokenFiles([str(tokens)], options.positions)
        self.loader = spmd.shard_loader(DataLoader(data, options.rows, shuffle=True, drop_last=True), mesh, ("data",))
        self.batches = self._endless()
        self.step = spmd.compile(self._step)
        self.losses: list[torch.Tensor] = []

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x).logits.flatten(0, -2), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return loss.detach()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.losses.append(self.step(*next(self.batches)))
            self.schedule.step()


def seconds_of(side: ByRecipe | ByHand, count: int) -> tuple[float, float]:
    """Seconds per step until all parameters are computed: wall time, and CPU time of all threads of this process."""
    start, start_cpu = time.perf_counter(), time.process_time()
    side.steps(count)
    jax.block_until_ready([load(parameter) for parameter in side.model.parameters()])
    return (time.perf_counter() - start) / count, (time.process_time() - start_cpu) / count


def _compared(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = sorted(recipe / hand for recipe, hand in pairs)
    medians = {name: statistics.median(pair[number] for pair in pairs) for number, name in enumerate(("recipe_s", "by_hand_s"))}
    return {**medians, "ratio": statistics.median(ratios), "ratios": [round(ratio, 3) for ratio in ratios]}


def run(options: Options) -> None:
    """Run both loops in turn, with alternating order, and write the result."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        tokens = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(0, 1024, 400 * options.positions).astype(np.uint16).tofile(tokens)
        recipe = ByRecipe(options, tokens, Path(folder) / "run")
        hand = ByHand(options, recipe.run.mesh, tokens)
        pairs: list[tuple[tuple[float, float], tuple[float, float]]] = []
        for number in range(options.pairs):
            order = (recipe, hand) if number % 2 else (hand, recipe)
            seconds = {id(side): seconds_of(side, options.steps) for side in order}
            pairs.append((seconds[id(recipe)], seconds[id(hand)]))
    counted = [tuple(zip(*pair, strict=True)) for pair in pairs[2:]]  # ((recipe's seconds, by hand), (recipe's CPU seconds, by hand))
    result = {
        "what": "median seconds per step of the recipe's run with a record at every step, and of the hand-written loop, in turn",
        "machine": machine(),
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        **{name: _compared([pair[number] for pair in counted]) for number, name in enumerate(("clock", "cpu"))},
    }
    seconds = recipe.run.clock.count()
    result["load"] = os.getloadavg()  # of the machine, in the last 1, 5 and 15 minutes
    result["data"] = {
        "what": "fraction of the recipe's time that its loop spent loading batches",
        "part": seconds["data"] / (seconds["data"] + seconds["step"]),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(tyro.cli(Options))

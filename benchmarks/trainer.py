"""Step time of Hugging Face's Trainer over a mesh, compared with the same step under `spmd.compile`: GPT-2 on 8 virtual devices.

    python -m benchmarks.trainer             # writes benchmarks/results/trainer.json
    python -m benchmarks.trainer --steps 12 --json None

Both train in one process, one step of each in turn. The Trainer's time includes its data loader, schedule, clipping and logging. The
compiled function also clips, but takes batches that are already on the devices. The figure is the median of the ratios.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import torch
import tyro
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import spmd
import spmd.huggingface
from mesh import Mesh, virtual_devices
from spmd.device._storage import load

RESULTS = Path(__file__).resolve().parent / "results" / "trainer.json"
RATE = 1e-3


@dataclass(frozen=True)
class Options:
    """Attributes:
    steps: number of steps of each; the first eight compile and are not counted.
    rows, positions: sequences in a batch, and tokens in a sequence.
    json: file for the result; None only prints it.
    """

    steps: int = 48
    rows: int = 16
    positions: int = 128
    layers: int = 4
    width: int = 256
    json: Path | None = RESULTS


def model_of(options: Options) -> GPT2LMHeadModel:
    """The model, with the same weights for both contenders."""
    torch.manual_seed(0)
    sizes = {"n_layer": options.layers, "n_embd": options.width, "n_head": 8, "n_positions": options.positions, "vocab_size": 1024}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))


def wait(model: torch.nn.Module) -> None:
    """Block until all parameters are computed."""
    jax.block_until_ready([load(parameter) for parameter in model.parameters()])


class Compiled:
    """The same model and step under `spmd.compile`."""

    def __init__(self, options: Options, mesh: Mesh, data: torch.Tensor) -> None:
        self.model = model_of(options).to("jax")
        spmd.shard_module(self.model, mesh, "megatron")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        self.batches = [spmd.mark_sharding(part.to("jax"), mesh, ("data", None)) for part in data.split(options.rows)]
        self.step = spmd.compile(self._step)
        self.losses: list[torch.Tensor] = []

    def _step(self, ids: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: Any = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()


class InTurn(TrainerCallback):
    """Runs one compiled step after each step of the Trainer, and measures the seconds of both."""

    def __init__(self, compiled: Compiled) -> None:
        self.compiled, self.seconds = compiled, list[tuple[float, float]]()
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        spmd.sync()
        wait(kwargs["model"])
        middle = time.perf_counter()
        batches = self.compiled.batches
        self.compiled.losses.append(self.compiled.step(batches[len(self.seconds) % len(batches)]))
        wait(self.compiled.model)
        end = time.perf_counter()
        self.seconds.append((middle - self.start, end - middle))
        self.start = time.perf_counter()


def run(options: Options) -> None:
    """Run both in turn, and write the result."""
    virtual_devices(8)
    mesh = Mesh(range(8), (2, 4), ("data", "model"))
    data = torch.randint(0, 1024, (4 * options.rows, options.positions), generator=torch.Generator().manual_seed(0))
    compiled = Compiled(options, mesh, data)
    with spmd.huggingface.train_on(mesh, rules="megatron") as training, tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=options.rows,
            max_steps=options.steps,
            learning_rate=RATE,
            weight_decay=0.01,
            lr_scheduler_type="constant",
            optim="adamw_torch",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        rows = [{"input_ids": ids, "labels": ids} for ids in data]
        in_turn = InTurn(compiled)
        trainer = Trainer(model_of(options), arguments, train_dataset=rows, callbacks=[in_turn])  # pyright: ignore[reportArgumentType]
        trainer.train()
        programs = training.lazy.num_executables
    counted = in_turn.seconds[8:]
    result = {
        "ratio": round(statistics.median(a / b for a, b in counted), 3),
        "trainer_ms": round(1e3 * statistics.median(a for a, _ in counted), 1),
        "compiled_ms": round(1e3 * statistics.median(b for _, b in counted), 1),
        "programs": programs,
        "steps": len(counted),
        "losses": [[line["loss"] for line in trainer.state.log_history if "loss" in line][i] for i in (0, -1)],
        "compiled_losses": [round(compiled.losses[i].item(), 4) for i in (0, -1)],
    }
    print(json.dumps(result), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(tyro.cli(Options))

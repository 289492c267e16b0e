"""GPT-2 on the characters of Python's own sources, as a job that may be stopped and goes on: data, checkpoints, logs.

    python examples/train_gpt2.py                                             # 8 virtual devices
    python examples/train_gpt2.py                                             # again: goes on where it was
    spmd launch -n 4 --devices-per-process 2 --restarts 3 examples/train_gpt2.py
    python examples/train_gpt2.py --devices 2 --mesh data=2 --steps 60        # the same run on another mesh

The model and its step are the demo's (`spmd.demo.Training`); this file is what a job needs around them.
Everything a run needs to go on bit for bit is in its checkpoints: model, optimizer, schedule, random streams, place in the
data. `--out` holds them, beside `log.jsonl` (one line per step or evaluation) and, where tensorboard is installed, its files.
"""

from __future__ import annotations

import importlib.util
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import spmd
from mesh import PREEMPTED, Host, Mesh, extended_timeout, init, should_stop, virtual_devices
from spmd.demo import GPTConfig, Training, standard_library

WARM_UP_STEPS = 10
EVALUATION_BATCHES = 4
SAMPLE_START = "    def "


@dataclass(frozen=True)
class Args:
    """Train a small GPT-2; see the top of the file."""

    out: Path = Path("runs/gpt2")
    """Folder of the run."""
    steps: int = 30
    """Steps in all, those before a restart included."""
    mesh: str = "data=4,model=2"
    """Axes and sizes; "data" splits batches, "model" the model, either may be left out."""
    devices: int = 8
    """Virtual CPU devices of the whole job; 0 takes the machine's own."""
    batch: int = 16
    """Sequences per step, over all devices."""
    seq: int = 32
    """Characters per sequence."""
    width: int = 64
    """Width of the model."""
    layers: int = 2
    """Blocks."""
    heads: int = 4
    """Attention heads."""
    dropout: float = 0.1
    """Probability that dropout drops a value."""
    learning_rate: float = 4e-3
    """Peak of the schedule."""
    schedule_steps: int = 100
    """Steps from the peak to the end of the schedule."""
    save_every: int = 10
    """Steps between checkpoints; the two newest stay."""
    evaluate_every: int = 15
    """Steps between evaluations on held-out text."""
    sample: int = 80
    """Characters to generate at the end."""
    seed: int = 0
    """Seed of parameters, dropout, data order and sample."""


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text and the same windows one character later."""

    def __init__(self, text_N: Tensor, seq: int) -> None:
        self.text_N, self.seq = text_N, seq

    def __len__(self) -> int:
        return (len(self.text_N) - 1) // self.seq

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.seq
        return self.text_N[start : start + self.seq], self.text_N[start + 1 : start + self.seq + 1]


class Log:
    """Numbers of a run: JSON lines, and TensorBoard where it is installed. Only process 0 writes."""

    def __init__(self, folder: Path, writes: bool) -> None:
        self.file, self.board = None, None
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = (folder / "log.jsonl").open("a", encoding="utf-8", buffering=1)
            if importlib.util.find_spec("tensorboard") is not None:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(folder / "tensorboard")

    def __call__(self, step: int, **values: float | str) -> None:
        if self.file is not None:
            self.file.write(json.dumps({"step": step, **values}) + "\n")
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, str):
                    self.board.add_text(name, value, step)
                else:
                    self.board.add_scalar(name, value, step)


class Run:
    """Model, optimizer, data and logs of a run."""

    def __init__(self, args: Args, host: Host) -> None:
        self.args, self.is_first = args, host.index == 0
        self.mesh = Mesh.from_string(args.mesh)
        self.text = standard_library()
        torch.manual_seed(args.seed)
        config = GPTConfig(len(self.text.characters), args.seq, args.width, args.layers, args.heads, args.dropout)
        self.training = Training(config, self.mesh, args.learning_rate, WARM_UP_STEPS, args.schedule_steps)
        self.batches = self.loader(self.text.train, shuffle=True)
        self.log = Log(args.out, self.is_first)
        self.step = 0

    def loader(self, text_N: Tensor, shuffle: bool) -> Any:
        """Batches for the devices. Every process draws the same ones and sends its devices their part, so that the run is
        the same on any number of processes; a loader of heavy data would yield slices, with a DistributedSampler."""
        loader = DataLoader(Windows(text_N, self.args.seq), self.args.batch, shuffle, drop_last=True)
        return spmd.shard_loader(loader, self.mesh, self.training.known(("data", None)), feeds="batch")

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        trained = {"model": self.training.model, "optimizer": self.training.optimizer, "schedule": self.training.schedule}
        return {**trained, "batches": self.batches}

    def save(self) -> None:
        """In the background; an error of it comes with the next save."""
        spmd.checkpoint.save(self.args.out / "checkpoints", self.step, self.state, keep=2)

    def resume(self) -> None:
        """Go on from the latest step that is whole, if there is one."""
        if spmd.checkpoint.has_step(self.args.out / "checkpoints"):
            self.step = spmd.checkpoint.restore(self.args.out / "checkpoints", self.state).step
            self.log(self.step, event="resumed")

    def train(self) -> int:
        """Steps until there are enough; the exit code."""
        seconds = time.perf_counter()
        while self.step < self.args.steps:
            for x_BT, y_BT in self.batches:
                rate = self.training.schedule.get_last_lr()[0]
                loss = self.training.train_step(x_BT, y_BT)
                self.training.schedule.step()
                self.step += 1
                value, now = loss.item(), time.perf_counter()
                self.log(self.step, loss=value, learning_rate=rate, tokens_per_s=x_BT.numel() / (now - seconds))
                seconds = now
                if self.step % self.args.evaluate_every == 0 or self.step == self.args.steps:
                    self.evaluate()
                if self.step % self.args.save_every == 0 or self.step == self.args.steps:
                    self.save()
                if self.step == self.args.steps:
                    break
                if should_stop(self.step):  # SIGTERM somewhere in the job; asked here, where no batch is taken and not used
                    self.save()
                    spmd.checkpoint.join()
                    return PREEMPTED
        spmd.checkpoint.join()
        return 0

    def evaluate(self) -> None:
        """Mean loss of held-out batches, without dropout."""
        with extended_timeout("evaluating"):
            batches = self.loader(self.text.held_out, False)
            mean = self.training.mean_loss(batch for batch, _ in zip(batches, range(EVALUATION_BATCHES), strict=False))
        self.log(self.step, held_out_loss=mean)
        self.show(f"step {self.step}: held-out loss {mean:.4f}")

    def sample(self) -> None:
        """Characters after a piece of held-out text, drawn on the host from the logits of a moving window."""
        past = self.text.decode(self.text.held_out)
        end = past.index(SAMPLE_START, self.args.seq) + len(SAMPLE_START)
        window_T = self.text.held_out[end - self.args.seq : end]
        self.training.model.eval()
        drawn_T = self.training.sample(window_T, self.args.sample, 0.7, torch.Generator().manual_seed(self.args.seed))
        text = self.text.decode(drawn_T)
        self.log(self.step, sample=text)
        self.show(SAMPLE_START + text)

    def show(self, text: str) -> None:
        """Print it once in the job."""
        if self.is_first:
            print(text, flush=True)


def main(args: Args) -> int:
    host = init()
    if args.devices:
        virtual_devices(args.devices)
    run = Run(args, host)
    run.resume()
    code = run.train()
    if code == 0:
        run.sample()
    return code


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Args, config=(tyro.conf.OmitArgPrefixes,))))

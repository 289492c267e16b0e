"""GPT-2 on the characters of Python's own sources, as a job that may be stopped and goes on: data, checkpoints, logs.

    python examples/train_gpt2.py                                             # 8 virtual devices
    python examples/train_gpt2.py                                             # again: goes on where it was
    spmd launch -n 4 --devices-per-process 2 --restarts 3 examples/train_gpt2.py
    python examples/train_gpt2.py --devices 2 --mesh data=2 --steps 60        # the same run on another mesh

Everything a run needs to go on bit for bit is in its checkpoints: model, optimizer, schedule, random streams, place in the
data. `--out` holds them, beside `log.jsonl` (one line per step or evaluation) and, where tensorboard is installed, its files.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import spmd
from mesh import PREEMPTED, Host, Mesh, extended_timeout, init, should_stop, virtual_devices
from spmd.demo import GPT, SHARDINGS, GPTConfig, standard_library

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


def programs(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh) -> tuple[Any, Any, Any]:
    """The three functions that become programs. They know of nothing that changes from step to step but tensors."""

    def loss(x_BT: Tensor, y_BT: Tensor) -> Tensor:
        return F.cross_entropy(model(x_BT).flatten(0, 1), y_BT.flatten())

    def train_step(x_BT: Tensor, y_BT: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = loss(x_BT, y_BT)
        value.backward()
        optimizer.step()
        return value

    def logits(tokens_BT: Tensor) -> Tensor:
        return spmd.mark_sharding(model(tokens_BT)[0, -1], mesh, (None,))  # whole on every host

    return spmd.compile(train_step), spmd.compile(torch.no_grad()(loss)), spmd.compile(torch.no_grad()(logits))


class Run:
    """Model, optimizer, data and logs of a run."""

    def __init__(self, args: Args, host: Host) -> None:
        self.args, self.is_first = args, host.index == 0
        self.mesh = Mesh.from_string(args.mesh)
        self.text = standard_library()
        torch.manual_seed(args.seed)
        self.model = GPT(GPTConfig(len(self.text.characters), args.seq, args.width, args.layers, args.heads, args.dropout)).to("jax")
        for name, parameter in self.model.named_parameters():
            for pattern, spec in SHARDINGS.items():
                if fnmatch.fnmatchcase(name, pattern):
                    spmd.mark_sharding(parameter, self.mesh, self.known(spec))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), args.learning_rate, betas=(0.9, 0.99), weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.factor)
        self.batches = self.loader(self.text.train, shuffle=True)
        self.log = Log(args.out, self.is_first)
        self.train_step, self.loss, self.logits = programs(self.model, self.optimizer, self.mesh)
        self.step = 0

    def known(self, spec: tuple[str | None, ...]) -> tuple[str | None, ...]:
        """The spec without the axes that this mesh has not."""
        return tuple(axis if axis in self.mesh.axis_names else None for axis in spec)

    def factor(self, step: int) -> float:
        """Of the learning rate: a warm-up, then half a cosine to a twentieth."""
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / self.args.schedule_steps))
        return min((step + 1) / WARM_UP_STEPS, 0.05 + 0.95 * cosine)

    def loader(self, text_N: Tensor, shuffle: bool) -> Any:
        """Batches for the devices. Every process draws the same ones and sends its devices their part, so that the run is
        the same on any number of processes; a loader of heavy data would yield slices, with a DistributedSampler."""
        loader = DataLoader(Windows(text_N, self.args.seq), self.args.batch, shuffle, drop_last=True)
        return spmd.shard_loader(loader, self.mesh, self.known(("data", None)), feeds="batch")

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "batches": self.batches}

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
                rate = self.schedule.get_last_lr()[0]
                loss = self.train_step(x_BT, y_BT)
                self.schedule.step()
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
        self.model.eval()
        with extended_timeout("evaluating"):
            losses = [
                self.loss(*batch) for batch, _ in zip(self.loader(self.text.held_out, False), range(EVALUATION_BATCHES), strict=False)
            ]
            mean = sum(loss.item() for loss in losses) / len(losses)
        self.model.train()
        self.log(self.step, held_out_loss=mean)
        self.show(f"step {self.step}: held-out loss {mean:.4f}")

    def sample(self) -> None:
        """Characters after a piece of held-out text, drawn on the host from the logits of a moving window."""
        past = self.text.decode(self.text.held_out)
        end = past.index(SAMPLE_START, self.args.seq) + len(SAMPLE_START)
        window_T = self.text.held_out[end - self.args.seq : end]
        generator, drawn = torch.Generator().manual_seed(self.args.seed), list[Tensor]()
        self.model.eval()
        for _ in range(self.args.sample):
            logits_V = self.logits(window_T[None].to("jax")).cpu().as_subclass(Tensor)
            drawn.append(torch.multinomial(torch.softmax(logits_V / 0.7, 0), 1, generator=generator))
            window_T = torch.cat([window_T[1:], drawn[-1]])
        text = self.text.decode(torch.cat(drawn)) if drawn else ""
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

"""The demo's program: an ordinary PyTorch training loop and its output."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import jax
import rich.box
import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.syntax import Syntax
from torch import Tensor

import mesh
import spmd
from mesh import Mesh, MeshError, size_text, virtual_devices
from spmd._wrong_input import mesh_axes, require_least, require_writable
from spmd.base._errors import UsageError
from spmd.demo import _reader, _screens, _text
from spmd.demo._gpt2 import GPTConfig
from spmd.demo._training import Training

LEARNING_RATE = 4e-3
WARM_UP_STEPS = 30
EVALUATIONS = 8  # number of evaluations on held-out text in one run
EVALUATION_BATCHES = 8
TEMPERATURE = 0.6
SAMPLE_START = "\n    def "
TOLERANCE = 1e-4  # absolute, between the logits of the sharded model and of the checkpoint loaded on the CPU


@dataclass(frozen=True)
class DemoArgs:
    """Train a character-level GPT-2 on Python's standard library, sharded over a mesh."""

    steps: int = 1000
    """Number of training steps."""
    mesh: str = "data=4,model=2"
    """Mesh axes and their sizes; "data" splits batches, "model" splits the model; either may be left out."""
    devices: int = 8
    """Number of virtual CPU devices; 0 uses the machine's own devices."""
    batch: int = 16
    """Sequences per step, over all devices."""
    seq: int = 64
    """Characters per sequence."""
    width: int = 128
    """Width of the model."""
    layers: int = 3
    """Number of blocks."""
    heads: int = 4
    """Number of attention heads; must divide the width."""
    dropout: float = 0.05
    """Dropout probability."""
    sample: int = 400
    """Number of characters to generate."""
    seed: int = 0
    """Seed of the parameters, the batches, dropout and the sample."""
    out: Path = Path("checkpoints/demo.pt")
    """File for the model's state dict."""


def main(args: DemoArgs) -> int:
    """Train a character-level GPT-2 on Python's standard library, sharded over a mesh, and save it for plain PyTorch.

    The exit code is 0 if the held-out loss fell and a process without this package loaded the model with the same logits.
    """
    require_valid(args)
    console = Console(highlight=False)
    try:
        return Demo(args, console).run()
    except (MeshError, spmd.SpmdError) as error:
        console.print(f"{error}", style="red", markup=False)
        return 2


def require_valid(args: DemoArgs) -> None:
    """Check the arguments, and that the output file can be written.

    Raises:
        UsageError: an argument is invalid. The message is one line.
    """
    minima = {
        "--steps": 1,
        "--devices": 0,
        "--batch": 1,
        "--seq": 1,
        "--width": 1,
        "--layers": 1,
        "--heads": 1,
        "--sample": 0,
        "--dropout": 0,
    }
    require_least(vars(args), minima)
    if args.dropout >= 1:
        raise UsageError(f"--dropout is a probability below 1, not {args.dropout:g}")
    if args.width % args.heads:
        fitting = [n for n in range(1, 65) if args.width % n == 0]
        raise UsageError(f"--heads {args.heads} does not divide --width {args.width}; {', '.join(map(str, fitting))} do")
    axes = mesh_axes("--mesh", args.mesh, ("data", "model"))
    if args.devices and math.prod(axes.values()) > args.devices:
        raise UsageError(f"--mesh {args.mesh!r} has {math.prod(axes.values())} devices, but --devices is {args.devices}")
    require_writable("--out", args.out)


@dataclass
class _Losses:
    """Training loss of every step, and held-out loss by number of steps."""

    train: list[Tensor] = field(default_factory=list[Tensor])
    held_out: dict[int, float] = field(default_factory=dict[int, float])


class Demo:
    """The variables of the training script, which an ordinary script would have as globals."""

    def __init__(self, args: DemoArgs, console: Console) -> None:
        self.start = time.perf_counter()
        self.args, self.console = args, console
        if args.devices:
            virtual_devices(args.devices)
        self.mesh = Mesh.from_string(args.mesh)
        self.text = _text.standard_library()
        self.host_rng = torch.Generator().manual_seed(args.seed)
        torch.manual_seed(args.seed)
        self.config = GPTConfig(len(self.text.characters), args.seq, args.width, args.layers, args.heads, args.dropout)
        self.training = Training(self.config, self.mesh, LEARNING_RATE, WARM_UP_STEPS, args.steps)
        self.model = self.training.model

    def batch(self, text_N: Tensor) -> tuple[Tensor, Tensor]:
        """A batch drawn on the host and sharded over the devices: (tokens, next tokens), int64[batch, seq] each."""
        x_BT, y_BT = _text.batch(text_N, self.args.batch, self.args.seq, self.host_rng)
        spec = self.training.drop_missing_axes(("data", None))
        return spmd.mark_sharding(x_BT.to("jax"), self.mesh, spec), spmd.mark_sharding(y_BT.to("jax"), self.mesh, spec)

    def run(self) -> int:
        """Run the whole demo, and return the exit code."""
        self.show_setting()
        losses = self.train()
        self.show_collectives()
        self.show_curve(losses)
        self.model.eval()
        self.show_sample()
        difference = self.save_and_read()
        seconds = time.perf_counter() - self.start
        first, last = losses.held_out[0], losses.held_out[self.args.steps]
        is_good = last < first and difference <= TOLERANCE
        self.console.print(f"\n[bold {'green' if is_good else 'red'}]held-out loss {first:.2f} → {last:.2f} in {seconds:.0f} s[/]")
        return 0 if is_good else 1

    def show_setting(self) -> None:
        """Print versions, devices, text and model, and the sharding of the parameters."""
        devices, text = mesh.devices(), self.text
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        rows = [
            ("versions", f"torch {torch.__version__}, jax {jax.__version__}, Python {platform.python_version()}"),
            ("devices", f"{len(devices)} × {devices[0].device_kind}{' (virtual)' if self.args.devices else ''}"),
            ("mesh", " × ".join(f"[cyan]{name}[/] {axis_size}" for name, axis_size in self.mesh.shape().items())),
            ("text", f"{text.num_files} files of Python's standard library, {len(text.train) + len(text.held_out):,} characters"),
            ("model", f"GPT-2, {self.args.layers} layers, width {self.args.width}, {parameters:,} parameters"),
            ("batch", f"{self.args.batch} × {self.args.seq} characters of {len(text.characters)} kinds"),
        ]
        self.console.print(Panel(_screens.facts(rows), title="[bold]spmd demo[/]", box=rich.box.ROUNDED, expand=False))
        self.console.print(_screens.sharding_table(self.model, self.mesh))

    def train(self) -> _Losses:
        """The training loop, with a progress bar."""
        losses = _Losses()
        self.evaluate(losses)
        self.advance(losses)
        timings = self.training.train_step.timings
        self.console.print(
            "\n[bold]compiled the step[/]: forward, backward and AdamW are one program\n"
            f"trace {timings.trace_s:.1f} s, lower {timings.lower_s:.1f} s, compile {timings.compile_s:.1f} s"
        )
        columns = ("training", BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("", total=self.args.steps, completed=1)
            clock = _Clock(self.args.batch * self.args.seq)
            for step in range(1, self.args.steps):
                self.advance(losses)
                if step % 10 == 0 or step == self.args.steps - 1:
                    loss = losses.train[-1].item()  # waits for the devices
                    progress.update(task, completed=step + 1, description=f"loss {loss:.3f}, {clock.tokens_per_s(step):,.0f} tokens/s")
                if (step + 1) % math.ceil(self.args.steps / EVALUATIONS) == 0:
                    self.evaluate(losses)
        self.evaluate(losses)
        train_step = self.training.train_step
        executables, retraces = train_step.num_executables, train_step.retraces
        memory = size_text(train_step.memory().peak_bytes)
        self.console.print(f"{executables} executable, {len(retraces)} retraces, {memory} of memory on each device", *retraces)
        return losses

    def advance(self, losses: _Losses) -> None:
        """Run one training step."""
        losses.train.append(self.training.train_step(*self.batch(self.text.train)))
        self.training.schedule.step()

    def evaluate(self, losses: _Losses) -> None:
        """Record the mean loss of a few held-out batches, without dropout."""
        batches = [self.batch(self.text.held_out) for _ in range(EVALUATION_BATCHES)]
        losses.held_out[len(losses.train)] = self.training.mean_loss(batches)

    def show_collectives(self) -> None:
        """Print the collectives of one step, read from the compiled program."""
        report = self.training.train_step.collectives()
        others = report.counts().keys() - {"all-reduce"}
        self.console.print("\n[bold]collectives of one step[/]")
        self.console.print(report)
        self.console.print("no all-gather and no all-to-all: no device needs another device's part of the model" if not others else "")

    def show_curve(self, losses: _Losses) -> None:
        """Print a plot of both losses over the steps."""
        values = [loss.item() for loss in losses.train]
        train = _screens.Series("training", range(1, len(values) + 1), values, "blue")
        held_out = _screens.Series("held out, without dropout", list(losses.held_out), list(losses.held_out.values()), "bold yellow")
        self.console.print("\n[bold]loss[/]")
        self.console.print(_screens.Curve([train, held_out], "step"))

    def show_sample(self) -> None:
        """Print a continuation of held-out text that ends in `def`. Characters are drawn on the host from the logits of a fixed window."""
        past = self.text.decode(self.text.held_out)
        end = past.index(SAMPLE_START, self.args.seq) + len(SAMPLE_START)
        window_T = self.text.held_out[end - self.args.seq : end]
        with self.console.status("generating"):
            drawn_T = self.training.sample(window_T, self.args.sample, TEMPERATURE, self.host_rng)
        sample = (SAMPLE_START.lstrip("\n") + self.text.decode(drawn_T)).rstrip()
        self.console.print("\n", Panel(Syntax(sample, "python", word_wrap=True, background_color="default"), title="sample"), sep="")

    def save_and_read(self) -> float:
        """Save the state dict, load it in a process with torch alone, and return the largest difference between the logits."""
        path = self.args.out
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), path)
        tokens_BT = self.text.held_out[: self.args.seq][None]
        ours_BTV = self.training.logits(tokens_BT.to("jax")).cpu().as_subclass(Tensor)
        difference = (_read_without_spmd(self.config, path, tokens_BT) - ours_BTV).abs().max().item()
        self.console.print(
            f"saved [bold]{path}[/], {size_text(path.stat().st_size)}\n"
            f"loaded on the CPU by a process with torch alone: logits differ by {difference:.1e} (allowed: {TOLERANCE:g})",
            soft_wrap=True,
        )
        return difference


@dataclass
class _Clock:
    """Measures tokens per second since the previous call."""

    tokens_per_step: int
    step: int = 0
    seconds: float = field(default_factory=time.perf_counter)

    def tokens_per_s(self, step: int) -> float:
        now = time.perf_counter()
        rate = (step - self.step) * self.tokens_per_step / (now - self.seconds)
        self.step, self.seconds = step, now
        return rate


def _read_without_spmd(config: GPTConfig, checkpoint: Path, tokens_BT: Tensor) -> Tensor:
    """Logits of the checkpoint, computed in a process that never imports `spmd` (see `_reader`)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)), encoding="utf-8")
        torch.save(tokens_BT, folder / "tokens.pt")
        files = (folder / "config.json", checkpoint, folder / "tokens.pt", folder / "logits.pt")
        subprocess.run([sys.executable, _reader.__file__, *map(str, files)], check=True)
        return torch.load(folder / "logits.pt")

"""The job for fault injection by benchmarks/faults.py and the tests: trains a small sharded model, saves checkpoints and resumes.

    spmd launch -n 2 --devices-per-process 2 --restarts 3 benchmarks/faulty_job.py --steps 40 --out DIR

It saves parameters, optimizer state, random state and step in one numpy file, which is written under another name and then renamed.
Every step is logged with its time, so that the time to recover can be measured. SIGUSR1 raises an exception in the process that
receives it; SIGUSR2 allocates more memory than the machine has. With `--spoil ITEM --rank R` process R differs from the others in one
way.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import spmd
from mesh import PREEMPTED, Host, Mesh, device_count, extended_timeout, init, report_saved, should_stop

SPOILS = (
    "op",
    "shape",
    "dtype",
    "spec",
    "mesh",
    "seed",
    "constant",
    "order",
    "skip",
    "double",
    "data",
    "lr",
    "raise",
    "exit",
    "hang",
    "stop",
)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--evaluate-every", type=int, default=1000)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    parser.add_argument("--spoil", choices=SPOILS)
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--at", type=int, default=5)
    return parser.parse_args()


def raise_on_signals() -> None:
    def fail(number: int, frame: object) -> None:
        if number == signal.SIGUSR2:
            np.ones(2**48, np.float64)  # MemoryError
        raise RuntimeError("injected failure")

    signal.signal(signal.SIGUSR1, fail)
    signal.signal(signal.SIGUSR2, fail)


class Run:
    """Model, optimizer and data of one process."""

    def __init__(self, args: argparse.Namespace, host: Host) -> None:
        self.args, self.host = args, host
        self.spoil = args.spoil if args.rank == host.index else None
        self.is_first = host.index == 0
        torch.manual_seed(1 if self.spoil == "seed" else 0)
        count = device_count()
        ids = [*range(count)][::-1] if self.spoil in ("mesh", "order") else [*range(count)]
        self.mesh = Mesh(ids, (count // 2, 2), ("data", "model"))
        width = 48 if self.spoil == "shape" else 32
        activation = torch.nn.ReLU() if self.spoil == "op" else torch.nn.GELU()
        self.model = torch.nn.Sequential(torch.nn.Linear(16, width), activation, torch.nn.Dropout(0.1), torch.nn.Linear(width, 16)).to(
            "jax"
        )
        if self.spoil == "dtype":
            self.model = self.model.double()
        self.marks = {"0.weight": (None, "model") if self.spoil == "spec" else ("model", None), "3.weight": (None, "model")}
        for name, spec in self.marks.items():
            spmd.mark_sharding(self.model.get_parameter(name), self.mesh, spec)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1 + step))
        self.scale = 2.0 if self.spoil == "constant" else 1.0
        self.train_step = spmd.compile(self._train_step)
        self.test_loss = spmd.compile(torch.no_grad()(lambda x: F.mse_loss(self.model(x), x)))

    def _train_step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), x) * self.scale
        loss.backward()
        self.optimizer.step()
        return loss

    def batch(self, step: int) -> torch.Tensor:
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(step % 2**32))
        x = x + 1 if self.spoil == "data" and step == self.args.at else x
        x = x.double() if self.spoil == "dtype" else x
        return spmd.mark_sharding(x.to("jax"), self.mesh, ("data", None))

    def step(self, step: int) -> None:
        if step == self.args.at:
            self.misbehave(step)
        if self.spoil == "skip" and step == self.args.at:
            return
        loss = self.train_step(self.batch(step))
        self.schedule.step()
        if self.spoil == "lr" and step == self.args.at:
            self.schedule.step()
        if self.is_first:
            self.note(step, loss.item())

    def evaluate(self) -> None:
        """Compute the loss of some batches without dropout. It does not affect the run."""
        self.model.eval()
        with extended_timeout("evaluating"):
            for number in range(5):
                self.test_loss(self.batch(-1 - number)).item()
                time.sleep(self.args.pause)
        self.model.train()

    def misbehave(self, step: int) -> None:
        if self.spoil in ("raise", "exit", "hang", "stop"):
            self.note(step, 0.0)
        if self.spoil == "raise":
            raise ValueError("injected failure")
        if self.spoil == "exit":
            sys.exit(3)
        if self.spoil == "hang":
            time.sleep(1000)
        if self.spoil == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.spoil == "double":
            self.train_step(self.batch(step))

    def note(self, step: int, loss: float) -> None:
        with (self.args.out / f"steps-{self.host.index}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "loss": loss, "time": time.time(), "attempt": self.host.attempt}) + "\n")

    def tensors(self) -> dict[str, torch.Tensor]:
        state = {f"model.{name}": p for name, p in self.model.state_dict().items()}
        for index, (name, _) in enumerate(self.model.named_parameters()):
            own = self.optimizer.state_dict()["state"].get(index, {})
            state.update({f"optimizer.{name}.{key}": value for key, value in own.items()})
        return state

    def values(self) -> dict[str, np.ndarray[Any, Any]]:
        """All tensors as numpy arrays, replicated on every host."""
        return {name: self.whole(tensor) for name, tensor in self.tensors().items()}

    def whole(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        copy = spmd.mark_sharding(tensor.detach().clone(), self.mesh, (None,) * tensor.dim())
        return copy.cpu().numpy()

    def save(self, step: int) -> None:
        with extended_timeout("saving"):
            values = self.values()
            if self.is_first:
                stream = torch.jax.get_rng_state().numpy()
                schedule = np.frombuffer(json.dumps({"last_epoch": self.schedule.last_epoch}).encode(), np.uint8)
                np.savez(self.args.out / "draft.npz", **values, step=np.array(step), stream=stream, schedule=schedule)
                (self.args.out / "draft.npz").replace(self.args.out / "checkpoint.npz")
            report_saved(step)

    def resume(self) -> int:
        path = self.args.out / "checkpoint.npz"
        if not path.exists():
            return 0
        saved = np.load(path)
        self.model.load_state_dict({k.removeprefix("model."): torch.from_numpy(saved[k]) for k in saved if k.startswith("model.")})
        state: dict[int, dict[str, torch.Tensor]] = {}
        for index, (name, parameter) in enumerate(self.model.named_parameters()):
            prefix = f"optimizer.{name}."
            state[index] = {k.removeprefix(prefix): torch.from_numpy(saved[k]).to("jax") for k in saved if k.startswith(prefix)}
            for value in state[index].values():
                if name in self.marks and value.shape == parameter.shape:
                    spmd.mark_sharding(value, self.mesh, self.marks[name])
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})
        step = int(saved["step"])
        for _ in range(step):
            self.schedule.step()
        torch.jax.set_rng_state(torch.from_numpy(saved["stream"]))
        return step


def main() -> None:
    args = parsed()
    host = init()
    raise_on_signals()
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args, host)
    for step in range(run.resume(), args.steps):
        if should_stop(step):
            run.save(step)
            sys.exit(PREEMPTED)
        run.step(step)
        if (step + 1) % args.evaluate_every == 0:
            run.evaluate()
        if (step + 1) % args.save_every == 0:
            run.save(step + 1)
        time.sleep(args.pause)
    run.save(args.steps)


main()

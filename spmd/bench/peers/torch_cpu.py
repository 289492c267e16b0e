"""Eager torch on one device, unsharded. `torch_compiled.py` runs the same step through `torch.compile`."""

from __future__ import annotations

from typing import Any

import torch


class Contender:
    """The unchanged PyTorch script on one device. See `spmd.bench._peer` for the methods."""

    def __init__(self, job: Any) -> None:
        self.job, self.device = job, "cpu" if job.platform == "cpu" else "cuda"
        self.device_kind = "cpu" if self.device == "cpu" else torch.cuda.get_device_name()
        self.model = job.model().to(self.device)
        self.optimizer = job.script.optimizer(self.model.parameters())
        self.batches = [[t.to(self.device) for t in batch] for batch in job.batches()]
        self.run = job.train_step(self.model, self.optimizer)
        self.count, self.last = 0, torch.zeros(())

    def step(self) -> None:
        self.last = self.run(*self.batches[self.count % len(self.batches)])
        self.count += 1

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def loss(self) -> float:
        return self.last.item()

    def stages(self, cold: bool) -> dict[str, float]:
        return {}

    def program(self) -> dict[str, Any]:
        return {}


class Compiled(Contender):
    """Compiles forward with backward, and the optimizer's step, with `torch.compile`."""

    def __init__(self, job: Any) -> None:
        super().__init__(job)
        loss_of = torch.compile(lambda *batch: job.script.loss(self.model, *batch))
        update = torch.compile(self.optimizer.step)

        def run(*batch: Any) -> Any:
            self.optimizer.zero_grad()
            loss = loss_of(*batch)
            loss.backward()
            update()
            return loss.detach()

        self.run = run


def prepare(job: Any) -> None:
    """Do nothing: torch needs no device setup."""

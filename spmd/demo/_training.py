"""The model, its optimizer and the functions that become programs: what the demo trains."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import spmd
from mesh import Mesh
from spmd.demo._gpt2 import GPT, SHARDINGS, GPTConfig


class Training:
    """A GPT-2 whose parameters are marked, under AdamW with a warm-up and half a cosine.

    Attributes:
        model, optimizer, schedule: what a checkpoint holds.
        train_step, loss, logits: compiled.

    Args:
        config: sizes of the model.
        mesh: with axes "data" and "model"; either may be missing.
        learning_rate: peak of the schedule.
        warm_up_steps, steps: until that peak, and until a twentieth of it.
    """

    def __init__(self, config: GPTConfig, mesh: Mesh, learning_rate: float, warm_up_steps: int, steps: int) -> None:
        self.mesh, self.warm_up_steps, self.steps = mesh, warm_up_steps, steps
        self.model = GPT(config).to("jax")
        for name, parameter in self.model.named_parameters():
            for pattern, spec in SHARDINGS.items():
                if fnmatch.fnmatchcase(name, pattern):
                    spmd.mark_sharding(parameter, mesh, self.known(spec))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), learning_rate, betas=(0.9, 0.99), weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.factor)
        self.train_step = spmd.compile(self._train_step)
        self.loss = spmd.compile(torch.no_grad()(self._loss))
        self.logits = spmd.compile(self._logits)

    # The three functions that become programs. They know of nothing that changes from step to step but tensors.

    def _loss(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x_BT).flatten(0, 1), y_BT.flatten())

    def _train_step(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self._loss(x_BT, y_BT)
        loss.backward()
        self.optimizer.step()
        return loss

    @torch.no_grad()
    def _logits(self, tokens_BT: Tensor) -> Tensor:
        return spmd.mark_sharding(self.model(tokens_BT), self.mesh, (None, None, None))  # whole on every host

    def known(self, spec: tuple[str | None, ...]) -> tuple[str | None, ...]:
        """The spec without the axes that this mesh has not."""
        return tuple(axis if axis in self.mesh.axis_names else None for axis in spec)

    def factor(self, step: int) -> float:
        """Of the learning rate: linear warm-up, then half a cosine to a twentieth."""
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / self.steps))
        return min((step + 1) / self.warm_up_steps, 0.05 + 0.95 * cosine)

    def mean_loss(self, batches: Iterable[Any]) -> float:
        """Of batches of (tokens, next tokens), without dropout."""
        self.model.eval()
        losses = [self.loss(*batch) for batch in batches]
        self.model.train()
        return sum(loss.item() for loss in losses) / len(losses)

    def sample(self, window_T: Tensor, count: int, temperature: float, generator: torch.Generator) -> Tensor:
        """`count` tokens, int64[count], each drawn on the host from the logits of the `window_T` before it; the model must be in `eval`."""
        drawn: list[Tensor] = []
        for _ in range(count):
            logits_V = self.logits(window_T[None].to("jax")).cpu().as_subclass(Tensor)[0, -1]
            drawn.append(torch.multinomial(torch.softmax(logits_V / temperature, 0), 1, generator=generator))
            window_T = torch.cat([window_T[1:], drawn[-1]])
        return torch.cat(drawn) if drawn else window_T[:0]

"""The demo's sharded model, its optimizer and schedule, and the functions that are compiled."""

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
    """A GPT-2 with marked parameters, trained by AdamW with warm-up and cosine decay.

    Attributes:
        model, optimizer, schedule: ordinary torch objects.
        train_step, loss: compiled functions (tokens, next tokens) -> 0-dim mean loss, with and without an optimizer step.
        logits: compiled function int64[B, T] -> replicated logits [B, T, V].

    Args:
        config: sizes of the model.
        mesh: a mesh with axes "data" and "model"; either may be missing.
        learning_rate: peak learning rate.
        warm_up_steps: number of steps until the peak.
        steps: number of steps until the end of the decay, at a twentieth of the peak.
    """

    def __init__(self, config: GPTConfig, mesh: Mesh, learning_rate: float, warm_up_steps: int, steps: int) -> None:
        self.mesh, self.warm_up_steps, self.steps = mesh, warm_up_steps, steps
        self.model = GPT(config).to("jax")
        for name, parameter in self.model.named_parameters():
            for pattern, spec in SHARDINGS.items():
                if fnmatch.fnmatchcase(name, pattern):
                    spmd.mark_sharding(parameter, mesh, self.drop_missing_axes(spec))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), learning_rate, betas=(0.9, 0.99), weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.factor)
        self.train_step = spmd.compile(self._train_step)
        self.loss = spmd.compile(torch.no_grad()(self._loss))
        self.logits = spmd.compile(self._logits)

    # The three compiled functions. Between steps only tensors change, so each is traced once.

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
        return spmd.mark_sharding(self.model(tokens_BT), self.mesh, (None, None, None))  # replicated: every host reads it

    def drop_missing_axes(self, spec: tuple[str | None, ...]) -> tuple[str | None, ...]:
        """The spec without axes that the mesh does not have."""
        return tuple(axis if axis in self.mesh.axis_names else None for axis in spec)

    def factor(self, step: int) -> float:
        """The learning rate as a fraction of its peak: linear warm-up, then cosine decay to a twentieth."""
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / self.steps))
        return min((step + 1) / self.warm_up_steps, 0.05 + 0.95 * cosine)

    def mean_loss(self, batches: Iterable[Any]) -> float:
        """Mean loss over batches of (tokens, next tokens), without dropout."""
        self.model.eval()
        losses = [self.loss(*batch) for batch in batches]
        self.model.train()
        return sum(loss.item() for loss in losses) / len(losses)

    def sample(self, window_T: Tensor, count: int, temperature: float, generator: torch.Generator) -> Tensor:
        """Draw `count` tokens, int64[count], that continue `window_T`. Each is drawn on the host from the logits of the window before it.

        The model must be in eval mode.
        """
        drawn: list[Tensor] = []
        for _ in range(count):
            logits_V = self.logits(window_T[None].to("jax")).cpu().as_subclass(Tensor)[0, -1]
            drawn.append(torch.multinomial(torch.softmax(logits_V / temperature, 0), 1, generator=generator))
            window_T = torch.cat([window_T[1:], drawn[-1]])
        return torch.cat(drawn) if drawn else window_T[:0]

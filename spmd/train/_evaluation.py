"""The loss of held-out data, and how often the likeliest class was right: sums that stay on the devices until they are there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spmd
from spmd.train._clock import Clock
from spmd.train._update import Loss, cross_entropy, logits_of


class Evaluation:
    """Evaluates a model, without dropout and gradients.

    Attributes:
        is_masked: batches come as (batch, mask), the last one padded; otherwise as they are, all of one size.

    Args:
        model: in training mode between calls, if it is when one begins.
        loss: the run's.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model, self.loss = model, loss
        self.is_masked = loss is cross_entropy
        self.sums = spmd.compile(torch.no_grad()(self._sums if self.is_masked else self._mean))

    def _sums(self, batch: Any, mask_B: Tensor) -> dict[str, Tensor]:
        """Of a batch's rows that are there: summed loss, right answers, and the number of both."""
        inputs, classes = batch
        logits = logits_of(self.model(inputs)).flatten(0, -2)
        losses = F.cross_entropy(logits, classes.flatten(), reduction="none").view(classes.shape)
        is_right = logits.argmax(-1).view(classes.shape) == classes
        counted = mask_B.view(-1, *[1] * (classes.dim() - 1)).logical_and(classes != -100)
        return {"loss": losses.where(counted, 0.0).sum(), "accuracy": is_right.logical_and(counted).sum(), "count": counted.sum()}

    def _mean(self, batch: Any) -> dict[str, Tensor]:
        loss = self.loss(self.model, batch)
        return {"loss": loss, "count": torch.ones_like(loss)}

    def run(self, batches: Iterable[Any], clock: Clock) -> dict[str, Tensor]:
        """The means over batches, as 0-dim device tensors that may not be there yet: "evaluation_loss", and "evaluation_accuracy"."""
        was_training = self.model.training
        self.model.eval()
        totals: dict[str, Tensor] = {}
        for batch in batches:
            sums = clock.calling(self.sums, *(batch if self.is_masked else (batch,)))[0]
            totals = {name: totals[name] + value for name, value in sums.items()} if totals else sums
        self.model.train(was_training)
        count = totals.pop("count", None)
        return {f"evaluation_{name}": total / count for name, total in totals.items()} if count is not None else {}


__all__ = ["Evaluation"]

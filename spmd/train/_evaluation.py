"""Loss and accuracy on held-out data, summed on the devices; the host does not wait for them."""

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
    """Evaluates a model in eval mode and without gradients.

    Attributes:
        is_masked: whether `run` takes (batch, mask) pairs of which the last may be padded. Otherwise it takes batches of one size.

    Args:
        model: the model to evaluate. Its training mode is restored after each call.
        loss: the loss function of the run.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model, self.loss = model, loss
        self.is_masked = loss is cross_entropy
        self.sums = spmd.compile(torch.no_grad()(self._sums if self.is_masked else self._mean))

    def _sums(self, batch: Any, mask_B: Tensor) -> dict[str, Tensor]:
        """Sums over the rows that are not padding: loss, number of correct predictions, number of predictions."""
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
        """Means over all batches: "evaluation_loss" and, with the loss cross_entropy, "evaluation_accuracy".

        Returns:
            0-dim device tensors, which may still be computing. The dict is empty if there is no batch.
        """
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

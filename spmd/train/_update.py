"""The compiled optimizer step of a run, and its loss functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import spmd
from spmd.base._errors import message
from spmd.base._torch import pytree
from spmd.train import _recipe
from spmd.train._import_path import imported
from spmd.train._recipe import RecipeError

Loss = Callable[[nn.Module, Any], Tensor]


class Update:
    """One optimizer step: forward, loss and backward of each micro-batch, then clipping, optimizer and weight average.

    Attributes:
        step: the compiled step. It takes a batch, with tensors [micro-batches, rows, ...] if the recipe accumulates gradients. It returns
            0-dim tensors: "loss", the mean loss, and with clipping "grad_norm", the gradients' norm before clipping.
        ema: the averaged model, or None.
    """

    def __init__(self, recipe: _recipe.Recipe, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.loss = loss_of(recipe.model.loss)
        self.accumulate, self.clip_norm = recipe.optimizer.accumulate, recipe.optimizer.clip_norm
        decay = recipe.ema.decay
        self.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True) if decay else None
        self.step = spmd.compile(self._train_step)

    def _train_step(self, batch: Any) -> dict[str, Tensor]:
        self.optimizer.zero_grad()
        numbers = {"loss": self._backward(batch)}
        if self.clip_norm:
            numbers["grad_norm"] = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        return numbers

    def _backward(self, batch: Any) -> Tensor:
        """Accumulate the gradients of a batch and return its mean loss."""
        if self.accumulate == 1:
            loss = self.loss(self.model, batch)
            loss.backward()
            return loss.detach()
        leaves, structure = pytree.tree_flatten(batch)

        def micro_step(*tensors: Tensor) -> Tensor:
            loss = self.loss(self.model, pytree.tree_unflatten(tensors, structure)) / self.accumulate
            loss.backward()
            return loss.detach()

        return spmd.accumulate(self.accumulate)(micro_step)(*leaves).sum()


def loss_of(name: str) -> Loss:
    """The loss function (model, batch) -> 0-dim tensor that a recipe names.

    Raises:
        RecipeError: `name` is neither a known loss nor package.module:name of an object.
    """
    known: dict[str, Loss] = {"cross_entropy": cross_entropy, "model": own_loss}
    if ":" in name:
        return imported(name, "[model] loss")
    if name not in known:
        raise RecipeError(
            message(f"[model] loss = {name!r} is not known", f"known: {', '.join(known)}", fix='loss = "package.module:name"')
        )
    return known[name]


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Mean cross entropy of a batch (inputs, classes): classes int64[B, ...] and the model's logits [B, ..., C]."""
    inputs, classes = batch
    logits = logits_of(model(inputs))
    return F.cross_entropy(logits.flatten(0, -2), classes.flatten())


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a Hugging Face model computes itself from a batch of keyword arguments."""
    return model(**batch).loss


def logits_of(output: Any) -> Tensor:
    """The logits in a model's output. Narrower dtypes are converted to float32."""
    logits = output if isinstance(output, Tensor) else output.logits
    return logits.float() if logits.dtype.itemsize < 4 else logits


__all__ = ["Loss", "Update", "cross_entropy", "logits_of", "loss_of", "own_loss"]

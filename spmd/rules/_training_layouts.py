"""Places models and batches for a training loop: each model once, by rules; batches split along dim 0."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from mesh import Mesh
from spmd.base._errors import SpmdError, message
from spmd.base._torch import pytree
from spmd.rules._shard_module import RulesLike, shard_module
from spmd.sharding._annotate import mark_sharding
from spmd.sharding._axes import batch_axes


class Layouts:
    """The layouts of one training run.

    Attributes:
        mesh: mesh of all devices.
        batch: axes that split a batch.
    """

    def __init__(self, mesh: Mesh, rules: RulesLike, batch: str | Sequence[str] | None, strict: bool) -> None:
        self.mesh = mesh
        self.batch = batch_axes(mesh) if batch is None else _axes(mesh, batch)
        self._rules = rules
        self._strict = strict
        self._models: WeakSet[nn.Module] = WeakSet()
        self._has_seen_batch = False

    def lay_out_model(self, model: nn.Module) -> None:
        """Lay out a model by the rules, unless it, or a model that contains it, is already laid out.

        Raises:
            SpmdError: from `spmd.shard_module`.
        """
        if any(model is module for whole in self._models for module in whole.modules()):
            return
        shard_module(model, self.mesh, self._rules, strict=self._strict)
        self._models.add(model)

    def placed(self, batch: Any) -> Any:
        """A batch with its tensors on the devices, split along dim 0. Tensors that are already there are left alone."""
        if isinstance(batch, Mapping) and type(batch) not in pytree.SUPPORTED_NODES:  # a leaf to torch: Hugging Face's BatchEncoding
            return type(batch)({key: self.placed(value) for key, value in batch.items()})  # pyright: ignore[reportCallIssue]
        return pytree.tree_map_only(torch.Tensor, self._placed, batch)

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "jax":
            return tensor
        if tensor.dim() == 0 or tensor.shape[0] <= 1:
            return tensor.to("jax")
        self._warn_small(tensor.shape[0])
        return mark_sharding(tensor.contiguous().to("jax"), self.mesh, (self.batch, *[None] * (tensor.dim() - 1)))

    def _warn_small(self, size: int) -> None:
        """Warn if the first batch has fewer rows than there are devices to split it over."""
        num_parts = math.prod(self.mesh.size(axis) for axis in self.batch)
        is_first, self._has_seen_batch = not self._has_seen_batch, True
        if size >= num_parts or not is_first:  # the last batch may be small
            return
        warnings.warn(
            message(
                f"a batch of {size} is split over {num_parts} devices, so some devices get no rows",
                "a loader's batch size and per_device_train_batch_size count rows for all devices of this process",
                fix=f"use a batch size of {num_parts} or a multiple",
            ),
            stacklevel=2,
        )


def _axes(mesh: Mesh, batch: str | Sequence[str]) -> tuple[str, ...]:
    axes = (batch,) if isinstance(batch, str) else tuple(batch)
    for name in axes:
        if name not in mesh.axis_names:
            shown = ", ".join(map(repr, mesh.axis_names))
            raise SpmdError(message(f"{mesh} has no axis {name!r}", f"axes of the mesh: {shown}", fix=f"batch={mesh.axis_names[0]!r}"))
    return axes


__all__ = ["Layouts"]

"""Splits a batch without a layout along its first dim."""

from __future__ import annotations

import math
from typing import Any

import torch

from mesh import Mesh, PartitionSpec, ShardingSpec
from spmd.base._torch import pytree
from spmd.device._layout import annotation_of
from spmd.sharding._constraint import constrain


def split_batch(values: Any, mesh: Mesh, axes: tuple[str, ...]) -> Any:
    """The same containers. Device tensors without a layout are split along dim 0 over `axes`, if these divide it."""
    num_parts = math.prod(map(mesh.axis_size, axes))

    def split(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "jax" or not tensor.dim() or annotation_of(tensor) is not None:
            return tensor
        if not tensor.shape[0] or tensor.shape[0] % num_parts:
            return tensor
        spec = ShardingSpec(mesh, PartitionSpec(axes, *(None,) * (tensor.dim() - 1)))
        return constrain(tensor, spec, spec if tensor.is_floating_point() else None)

    return pytree.tree_map_only(torch.Tensor, split, values) if num_parts > 1 else values


__all__ = ["split_batch"]

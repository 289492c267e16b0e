"""Shards a batch that has no sharding along its first dim."""

from __future__ import annotations

import math
from typing import Any

import torch

from mesh import Mesh, PartitionSpec, ShardingSpec
from spmd.base._torch import pytree
from spmd.device._layout import annotation_of
from spmd.sharding._constraint import constrain


def split_batch(values: Any, mesh: Mesh, axes: tuple[str, ...], *, moves: bool) -> Any:
    """The same containers. Device tensors without a sharding are sharded along dim 0 over `axes`, if these divide it.

    Args:
        moves: CPU tensors are moved to the device first.
    """
    num_parts = math.prod(map(mesh.axis_size, axes))

    def split(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to("jax") if moves and tensor.device.type == "cpu" else tensor
        if num_parts == 1 or tensor.device.type != "jax" or not tensor.dim() or annotation_of(tensor) is not None:
            return tensor
        if not tensor.shape[0] or tensor.shape[0] % num_parts:
            return tensor
        spec = ShardingSpec(mesh, PartitionSpec(axes, *(None,) * (tensor.dim() - 1)))
        return constrain(tensor, spec, spec if tensor.is_floating_point() else None)

    return pytree.tree_map_only(torch.Tensor, split, values)


__all__ = ["split_batch"]

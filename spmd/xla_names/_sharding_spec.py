"""`ShardingSpec` for torch_xla's users: a `mesh.ShardingSpec` that can also be applied to a tensor."""

from __future__ import annotations

import torch

from mesh import ShardingSpec as ShardingOnMesh
from spmd.sharding._annotate import mark_sharding


class ShardingSpec(ShardingOnMesh):
    """The layout of tensors of one rank over a mesh, for `MpDeviceLoader(input_sharding=)` and for existing tensors; equal by value.

    Args:
        mesh: the mesh.
        partition_spec: one entry per dim.
        minibatch: each host supplies its own part of the batch instead of all of it.
    """

    def can_apply(self, t: torch.Tensor) -> bool:
        """Whether `t` has as many dims as the spec."""
        return t.dim() == len(self.partition_spec)

    def apply(self, t: torch.Tensor) -> None:
        """Call `mark_sharding` on `t` with this spec, in place."""
        mark_sharding(t, self.mesh, self.partition_spec)

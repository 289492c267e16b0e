"""`ShardingSpec` as torch_xla's users have it: `mesh.ShardingSpec` that can also be applied to a tensor."""

from __future__ import annotations

import torch

from mesh import ShardingSpec as ShardingOnMesh
from spmd.sharding._annotate import mark_sharding


class ShardingSpec(ShardingOnMesh):
    """How tensors of a rank lie on a mesh, for `MpDeviceLoader(input_sharding=)` and for tensors at hand; compared by value.

    Args:
        mesh: the devices.
        partition_spec: one entry per dim.
        minibatch: each host brings its own part of the batch instead of the whole.
    """

    def can_apply(self, t: torch.Tensor) -> bool:
        """Whether `t` has as many dims as the spec."""
        return t.dim() == len(self.partition_spec)

    def apply(self, t: torch.Tensor) -> None:
        """`mark_sharding` of `t` by this spec, in place."""
        mark_sharding(t, self.mesh, self.partition_spec)

"""torch's DTensor placements as a PartitionSpec: one placement per mesh axis there, one entry per dim here.

spec_of_placements([Shard(0), Replicate()], rank=2, axis_names=("data", "model"))      # ('data', None)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

import mesh as mesh_
from spmd._errors import SpmdError, message


def is_placements(value: Any) -> TypeGuard[Sequence[Placement]]:
    """Whether `value` is a non-empty list of placements."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Placement) for item in value)


def spec_of_placements(placements: Sequence[Placement], rank: int, axis_names: Sequence[str]) -> mesh_.PartitionSpec:
    """The spec that lays a tensor of `rank` dims out as the placements do.

    Several axes on one dim split it in mesh order, the first slowest, as DTensor does.

    Raises:
        SpmdError: another number of placements than axes, a partial value, or a placement that has no spec.
    """
    if len(placements) != len(axis_names):
        raise SpmdError(
            message(
                f"{list(placements)} does not fit the mesh",
                f"{len(placements)} placements, {len(axis_names)} axes: {', '.join(map(repr, axis_names))}",
                fix="give one placement per mesh axis, in the mesh's order",
            )
        )
    axes: list[list[str]] = [[] for _ in range(rank)]
    for placement, axis in zip(placements, axis_names, strict=True):
        if type(placement) is Shard and -rank <= placement.dim < rank:
            axes[placement.dim].append(axis)
        elif not isinstance(placement, Replicate):
            hint = (
                "a layout has no unreduced values: reduce the tensor first"
                if isinstance(placement, Partial)
                else "use Shard(dim) or Replicate()"
            )
            raise SpmdError(message(f"{placement} on axis {axis!r} is no layout for a tensor of rank {rank}", fix=hint))
    return mesh_.PartitionSpec(*(tuple(names) if len(names) > 1 else names[0] if names else None for names in axes))


__all__ = ["is_placements", "spec_of_placements"]

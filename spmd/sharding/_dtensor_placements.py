"""Converts torch's DTensor placements (one per mesh axis) to a PartitionSpec (one entry per dim) and back.

spec_of_placements([Shard(0), Replicate()], rank=2, axis_names=("data", "model"))      # ('data', None)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from mesh import PartitionSpec, ShardingSpec, SpecError, entry_axes
from spmd.base._errors import message


class PlacementError(SpecError):
    """Placements that cannot lay out a tensor of this rank over this mesh."""


class NoSuchDimError(PlacementError, IndexError):
    """A placement names a dim that the tensor does not have."""


class UnreducedError(PlacementError, NotImplementedError):
    """A placement asks for a partial (unreduced) tensor. A global tensor is never partial."""


def is_placements(value: Any) -> TypeGuard[Sequence[Placement]]:
    """Whether `value` is a non-empty list of placements."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Placement) for item in value)


def spec_of_placements(
    placements: Sequence[Placement], rank: int, axis_names: Sequence[str], name: Callable[[], str] = lambda: "the tensor"
) -> PartitionSpec:
    """The spec with the same meaning as `placements` for a tensor of `rank` dims.

    Several axes on one dim split it in mesh order, the first axis slowest, as in DTensor.

    Args:
        name: returns the tensor's name for messages; called only when an error is raised, because finding a name takes time.

    Raises:
        PlacementError: the number of placements differs from the number of axes, or a placement has no equivalent spec.
        NoSuchDimError: a dim that the tensor does not have.
        UnreducedError: a Partial placement.
    """
    if len(placements) != len(axis_names):
        raise PlacementError(
            message(
                f"{len(placements)} placements do not fit the mesh: {list(placements)}",
                f"{len(placements)} placements, {len(axis_names)} axes: {', '.join(map(repr, axis_names))}",
                fix="give one placement per mesh axis, in the mesh's order",
            )
        )
    axes: list[list[str]] = [[] for _ in range(rank)]
    for placement, axis in zip(placements, axis_names, strict=True):
        if isinstance(placement, Partial):
            fix = "reduce the tensor first, then Shard or Replicate"
            raise UnreducedError(message(f"{placement} on axis {axis!r} asks for an unreduced tensor", fix=fix))
        if type(placement) is Shard:
            if not -rank <= placement.dim < rank:
                what = f"{placement} on axis {axis!r} does not fit {name()}: it is invalid for a tensor of rank {rank}"
                fix = f"shard a dim from 0 to {rank - 1}" if rank else "use Replicate()"
                raise NoSuchDimError(message(what, f"it has {rank} dims", fix=fix))
            axes[placement.dim].append(axis)
        elif not isinstance(placement, Replicate):
            raise PlacementError(message(f"{placement} on axis {axis!r} has no equivalent spec", fix="use Shard(dim) or Replicate()"))
    return PartitionSpec(*(tuple(names) if len(names) > 1 else names[0] if names else None for names in axes))


def placements_of(spec: ShardingSpec) -> tuple[Placement, ...]:
    """The placements with the same meaning as `spec`, one per mesh axis."""
    dim_of = {axis: dim for dim, entry in enumerate(spec.partition_spec) for axis in entry_axes(entry)}
    return tuple(Shard(dim_of[axis]) if axis in dim_of else Replicate() for axis in spec.mesh.axis_names)


__all__ = ["NoSuchDimError", "PlacementError", "UnreducedError", "is_placements", "placements_of", "spec_of_placements"]

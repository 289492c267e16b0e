"""The mesh of a lowered program, and Shardy layouts over it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

Split = tuple[tuple[str, ...], ...]  # for each dim the axes that split it


@dataclass(frozen=True)
class ModuleMesh:
    """A mesh that an MLIR module declares.

    Attributes:
        name: symbol name of the mesh in the module.
        axes: size of each axis, by name.
    """

    name: str
    axes: dict[str, int]

    @property
    def num_devices(self) -> int:
        return math.prod(self.axes.values())

    @property
    def num_axes(self) -> int:
        """Number of axes with more than one device."""
        return sum(size > 1 for size in self.axes.values())

    def num_parts(self, axes: Sequence[str]) -> int:
        """Number of parts into which `axes` split a dim."""
        return math.prod(self.axes[axis] for axis in axes)

    def whole(self, value: Any, dims: Iterable[int]) -> Any:
        """The layout that does not split `dims` and leaves the other dims open."""
        return self.partly(value, dict.fromkeys(dims, ()))

    def split(self, value: Any, axes: Mapping[int, Sequence[str]]) -> Any:
        """The layout that splits each dim of `axes` by its axes and does not split the others."""
        entries = [", ".join(f'"{axis}"' for axis in axes.get(dim, ())) for dim in range(ir.RankedTensorType(value.type).rank)]
        return self._layout(f"{{{entry}}}" for entry in entries)

    def partly(self, value: Any, axes: Mapping[int, Sequence[str]]) -> Any:
        """The layout that splits each dim of `axes` by its axes and leaves the other dims open."""
        entries = [", ".join(f'"{axis}"' for axis in axes[d]) if d in axes else "?" for d in range(ir.RankedTensorType(value.type).rank)]
        return self._layout(f"{{{entry}}}" for entry in entries)

    def is_used_up(self, axes: Iterable[Sequence[str]]) -> bool:
        """Whether `axes` together split a value over all devices."""
        return math.prod(map(self.num_parts, axes)) == self.num_devices

    def divides(self, value: Any, axes: Mapping[int, Sequence[str]], dims: Iterable[int]) -> bool:
        """Whether `axes` split these dims into equal parts."""
        shape = ir.RankedTensorType(value.type).shape
        return all(shape[dim] % self.num_parts(axes[dim]) == 0 for dim in dims)

    def has_three_axes(self, splits: Iterable[Sequence[str]]) -> bool:
        """Whether more than two axes with several devices occur in `splits`."""
        return len({axis for split in splits for axis in split if self.axes[axis] > 1}) > 2

    def split_by(self, sharding: Any) -> Split:
        """The axes of each dim in a layout; none for a dim that is split by a part of an axis, or if the layout is over another mesh."""
        dims = [[sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(dim).axes] for dim in sharding.dimension_shardings]
        if ir.FlatSymbolRefAttr(sharding.mesh_or_ref).value != self.name:
            return ((),) * len(dims)
        return tuple(() if any(axis.sub_axis_info is not None for axis in axes) else tuple(axis.name for axis in axes) for axes in dims)

    def _layout(self, entries: Iterable[str]) -> Any:
        return ir.Attribute.parse(f'#sdy.sharding<@"{self.name}", [{", ".join(entries)}]>')


def largest_mesh(module: Any) -> ModuleMesh | None:
    """The mesh with the most devices; None if no mesh of the program has several devices."""
    found = [ModuleMesh(op.attributes["sym_name"].value, _axes(op)) for op in module.body.operations if op.operation.name == "sdy.mesh"]
    largest = max(found, key=lambda mesh: mesh.num_devices, default=None)
    return largest if largest is not None and largest.num_devices > 1 else None


def _axes(operation: Any) -> dict[str, int]:
    """Size by axis name, from an operation that declares a mesh."""
    return {axis.name: axis.size for axis in map(sdy.MeshAxisAttr, sdy.MeshAttr(operation.attributes["mesh"]).axes)}


def operations_of(module: Any, *names: str) -> list[Any]:
    """The operations with these names in a module, in the order of its text."""
    found: list[Any] = []

    def visit(operation: Any) -> Any:
        if operation.name in names:
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def constrain(operation: Any, position: int, sharding: Any) -> None:
    """Constrain one operand to `sharding`."""
    with ir.InsertionPoint(operation):
        operation.operands[position] = sdy.ShardingConstraintOp(operation.operands[position], sharding).result


__all__ = ["ModuleMesh", "Split", "constrain", "largest_mesh", "operations_of"]

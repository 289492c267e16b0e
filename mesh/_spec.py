"""PartitionSpec: the mesh axes over which each dim of a tensor is sharded. Immutable.

    PartitionSpec("data", None)                       # dim 0 over axis 'data', dim 1 not sharded
    PartitionSpec(("data", "model"), None)            # dim 0 over both axes, 'data' varies slowest

An *axis* is always a mesh axis, a *dim* always a tensor dimension. A spec contains axis names; it is independent of meshes and shapes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import jax
import numpy as np

from mesh._mesh_errors import SpecError, message

Axis: TypeAlias = str | int
Entry: TypeAlias = Axis | tuple[Axis, ...] | None


@dataclass(frozen=True, init=False, repr=False, slots=True)
class PartitionSpec:
    """The mesh axes over which each dim of a tensor is sharded: a sequence with one entry per dim.

    A spec is compared by value, also with tuples: `PartitionSpec("data", None) == ("data", None)`, with equal hashes.

    Args:
        entries: for each dim an axis name, an axis index (may be negative), None (not sharded), or a tuple
            of names and indices (sharded over all of them; the first one varies slowest).

    Raises:
        SpecError: an entry is something else, or an axis is used twice.
    """

    _entries: tuple[Entry, ...]

    def __init__(self, *entries: Entry) -> None:
        checked = tuple(_checked_entry(entry, entries) for entry in entries)
        _require_distinct(checked)
        object.__setattr__(self, "_entries", checked)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PartitionSpec):
            return self._entries == other._entries
        return self._entries == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._entries)  # a spec equals the tuple of its entries, so the hashes must be equal

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, dim: int) -> Entry:
        return self._entries[dim]

    def __repr__(self) -> str:
        return f"PartitionSpec({', '.join(map(repr, self._entries))})"

    def __str__(self) -> str:
        return str(self._entries)

    def resolved(self, axis_names: Sequence[str]) -> PartitionSpec:
        """The spec in normal form for a mesh, in which equal shardings have equal specs.

        Args:
            axis_names: the mesh's axis names, in order.

        Returns:
            The spec with names in place of indices, a name in place of a tuple of one name, and None in place of an empty tuple.

        Raises:
            SpecError: the mesh lacks an axis, or an axis is used twice (perhaps by name and by index).
        """
        names = tuple(axis_names)
        entries: list[Entry] = []
        for entry in self._entries:
            axes = tuple(self._resolved_axis(axis, names) for axis in entry_axes(entry))
            entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
        return PartitionSpec(*entries)

    def _resolved_axis(self, axis: Axis, names: tuple[str, ...]) -> str:
        if isinstance(axis, str) and axis in names:
            return axis
        if isinstance(axis, int) and -len(names) <= axis < len(names):
            return names[axis]
        raise SpecError(
            message(
                f"{self!r} names axis {axis!r}, which the mesh does not have",
                f"axes of the mesh: {', '.join(map(repr, names))}",
                fix="use one of these names, an index into them, or None for a dim that is not sharded",
            )
        )

    def to_jax(self) -> jax.sharding.PartitionSpec:
        """The same spec as a `jax.sharding.PartitionSpec`, which has axis names only.

        Raises:
            SpecError: an axis is given by index.
        """
        if any(isinstance(axis, int) for entry in self for axis in entry_axes(entry)):
            fix = "spec.resolved(mesh.axis_names).to_jax()"
            raise SpecError(message(f"{self!r} has axis indices, which jax does not support", fix=fix))
        return jax.sharding.PartitionSpec(*self._entries)

    @classmethod
    def from_jax(cls, spec: jax.sharding.PartitionSpec) -> PartitionSpec:
        """Convert a jax spec.

        Raises:
            SpecError: a dim is UNCONSTRAINED, or the spec has unreduced or reduced axes.
        """
        if spec.unreduced or spec.reduced:
            raise SpecError(message(f"jax's {spec} has unreduced or reduced axes", fix="reduce the array first"))
        return cls(*cast("tuple[Entry, ...]", tuple(spec)))

    def to_dict(self) -> dict[str, object]:
        """The spec as a JSON-serializable dict, which `from_dict` reads."""
        return {"entries": [list(entry) if isinstance(entry, tuple) else entry for entry in self._entries]}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> PartitionSpec:
        """Create a spec from the result of `to_dict`.

        Raises:
            SpecError: the entries are missing or malformed.
        """
        if not isinstance(data.get("entries"), list | tuple):
            raise SpecError(message("this dict is not a partition spec", "missing: entries", fix="write it with PartitionSpec.to_dict()"))
        return as_spec(cast("list[Entry]", data["entries"]))

    @classmethod
    def from_string(cls, text: str) -> PartitionSpec:
        """Create a spec from the result of `str`, e.g. "('data', None)".

        Raises:
            SpecError: the text is not a tuple of entries.
        """
        try:
            entries: object = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError) as error:
            raise SpecError(_not_a_tuple(text)) from error
        if not isinstance(entries, tuple):
            raise SpecError(_not_a_tuple(text))
        return cls(*cast("tuple[Entry, ...]", entries))


SpecLike: TypeAlias = PartitionSpec | jax.sharding.PartitionSpec | Sequence[Entry | list[Axis]]


def as_spec(spec: SpecLike) -> PartitionSpec:
    """Convert a tuple, a list or a jax spec to a PartitionSpec. A PartitionSpec is returned as it is.

    Raises:
        SpecError: `spec` is none of these. None is refused too, since it could mean "replicated" or "forgotten".
    """
    if isinstance(spec, PartitionSpec):
        return spec
    if isinstance(spec, jax.sharding.PartitionSpec):
        return PartitionSpec.from_jax(spec)
    if isinstance(spec, tuple | list):
        return PartitionSpec(*(tuple(entry) if isinstance(entry, list) else entry for entry in spec))
    raise SpecError(
        message(
            f"{spec!r} is not a partition spec",
            "a spec has one entry per dim: an axis name, an axis index, a tuple of these, or None",
            fix="PartitionSpec('data', None), or (None, None) to replicate a tensor of two dims",
        )
    )


def entry_axes(entry: Entry) -> tuple[Axis, ...]:
    """The axes of one entry of a spec, as a tuple; empty for None."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _checked_entry(entry: object, entries: tuple[object, ...]) -> Entry:
    if entry is None:
        return None
    if isinstance(entry, tuple):
        return tuple(_checked_axis(axis, entries) for axis in cast("tuple[object, ...]", entry))
    return _checked_axis(entry, entries)


def _checked_axis(axis: object, entries: tuple[object, ...]) -> Axis:
    if isinstance(axis, str) and axis:
        return axis
    if isinstance(axis, int | np.integer) and not isinstance(axis, bool):
        return int(axis)
    raise SpecError(
        message(
            f"PartitionSpec({', '.join(map(repr, entries))}) has an entry that is not a mesh axis",
            f"{axis!r} is of type {type(axis).__name__}",
            fix="for each dim write an axis name, an axis index, a tuple of these, or None",
        )
    )


def _require_distinct(entries: tuple[Entry, ...]) -> None:
    axes = [axis for entry in entries for axis in entry_axes(entry)]
    repeated = [axis for position, axis in enumerate(axes) if axis in axes[:position]]
    if repeated:
        raise SpecError(
            message(
                f"PartitionSpec({', '.join(map(repr, entries))}) uses axis {repeated[0]!r} more than once",
                "an axis can shard only one dim of a tensor",
                fix="replace all but one use with None or another axis",
            )
        )


def _not_a_tuple(text: str) -> str:
    return message(
        f"{text!r} is not a partition spec", fix="write a tuple with one entry per dim, e.g. \"('data', None)\" or \"('data',)\""
    )

"""ShardingSpec: the sharding of a tensor over the devices of a mesh. Immutable.

    sharding = ShardingSpec(mesh, PartitionSpec("data", None))
    sharding.shard_shape((64, 16))                    # (16, 16) on a mesh with data=4
    sharding.to_jax()                                 # a jax.sharding.NamedSharding

Works on shapes, never on tensors or their values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, NamedTuple, cast

import jax
import numpy as np
import numpy.typing as npt

from mesh._devices import Device
from mesh._mesh import Mesh
from mesh._mesh_errors import SpecError, message
from mesh._spec import PartitionSpec, SpecLike, as_spec, entry_axes


class ShardingType(IntEnum):
    """Kind of a sharding, with torch_xla's enum values. TILED is an alias of OTHER."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    OTHER = 3
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


class ShardSlice(NamedTuple):
    """The shard of one device: a slice per dim, and the index among the replicas of this shard (0, 1, ... in device order)."""

    device: Device
    slices: tuple[slice, ...]
    replica_id: int


@dataclass(frozen=True, init=False)
class ShardingSpec:
    """A mesh and a partition spec: the sharding of tensors of the spec's rank.

    Args:
        mesh: the devices.
        partition_spec: one entry per dim of the tensor; stored in the normal form of `PartitionSpec.resolved`.
        minibatch: for input batches: each host provides only its own part of the batch. Not compared by `==`.

    Raises:
        SpecError: the spec does not fit the mesh, or `mesh` is none.
    """

    mesh: Mesh
    partition_spec: PartitionSpec
    minibatch: bool = field(default=False, compare=False, repr=False)

    def __init__(self, mesh: Mesh, partition_spec: SpecLike, minibatch: bool = False) -> None:
        if not isinstance(mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance]  (a user's value)
            fix = (
                "mesh.Mesh.from_jax(jax_mesh)" if isinstance(mesh, jax.sharding.Mesh) else 'mesh.Mesh(range(8), (4, 2), ("data", "model"))'
            )
            raise SpecError(message(f"a ShardingSpec needs a mesh.Mesh, got {mesh!r}", fix=fix))
        object.__setattr__(self, "minibatch", minibatch)
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "partition_spec", as_spec(partition_spec).resolved(mesh.axis_names))

    def __eq__(self, other: object) -> bool:
        # By value, whatever the class: `spmd.ShardingSpec` is a subclass that can be applied to tensors.
        if not isinstance(other, ShardingSpec):
            return NotImplemented
        return (self.mesh, self.partition_spec) == (other.mesh, other.partition_spec)

    def __hash__(self) -> int:
        return hash((self.mesh, self.partition_spec))

    @property
    def num_shards(self) -> int:
        """Number of distinct shards. If the mesh has more devices, shards are replicated."""
        return math.prod(self._shards_per_dim)

    @property
    def is_replicated(self) -> bool:
        """Whether every device has the whole tensor."""
        return self.num_shards == 1

    @property
    def sharding_type(self) -> ShardingType:
        """Kind of the sharding, from the number of distinct shards, so axes of size 1 have no effect."""
        if self.mesh.size() == 1:
            return ShardingType.MAXIMAL
        if self.is_replicated:
            return ShardingType.REPLICATED
        return ShardingType.OTHER if self.num_shards == self.mesh.size() else ShardingType.PARTIAL

    def validate(self, shape: Sequence[int], name: str | None = None, uneven: Literal["pad", "error"] = "pad") -> None:
        """Check that a tensor can have this sharding.

        Args:
            shape: the tensor's global shape.
            name: the tensor's name in the message, e.g. "parameter 'up.weight'".
            uneven: "error" refuses a dim whose size its axes do not divide; "pad" allows it, see `padded_shape`.

        Raises:
            SpecError: the spec and `shape` differ in rank, or `uneven="error"` refuses a dim.
        """
        title = f"{name or 'a tensor'} of shape {tuple(shape)}"
        _require_rank(self, shape, title)
        if uneven == "error":
            _require_even(self, shape, title)
        elif uneven != "pad":
            raise SpecError(message(f"uneven must be 'pad' or 'error', got {uneven!r}", fix='uneven="pad" or uneven="error"'))

    def padded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Global shape with padding: a dim whose size its axes do not divide is padded at its end, so that all shards are equal.

        Raises:
            SpecError: the spec and `shape` differ in rank.
        """
        self.validate(shape)
        return tuple(-(-size // shards) * shards for size, shards in zip(shape, self._shards_per_dim, strict=True))

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of one device's shard, including the padding of uneven dims.

        Args:
            shape: global shape, in elements.

        Returns:
            Per-device shape of the same rank. A dim without an axis keeps its size.

        Raises:
            SpecError: the spec and `shape` differ in rank.
        """
        padded = self.padded_shape(shape)
        return tuple(size // shards for size, shards in zip(padded, self._shards_per_dim, strict=True))

    def shard_slices(self, shape: Sequence[int]) -> list[ShardSlice]:
        """The shard of every device, without padding, in the mesh's device order. Equal to jax's `devices_indices_map`.

        Raises:
            SpecError: the spec and `shape` differ in rank.
        """
        shard_shape = self.shard_shape(shape)
        starts_by_dim = [index * length for index, length in zip(self._shard_index_per_dim, shard_shape, strict=True)]
        num_replicas: dict[tuple[int, ...], int] = {}
        shards: list[ShardSlice] = []
        for position, device in enumerate(cast("list[Device]", self.mesh.devices.ravel().tolist())):
            starts = tuple(int(starts[position]) for starts in starts_by_dim)
            slices = tuple(
                slice(min(start, size), min(start + length, size)) if count > 1 else slice(None)
                for start, length, count, size in zip(starts, shard_shape, self._shards_per_dim, shape, strict=True)
            )
            replica_id = num_replicas.get(starts, 0)
            num_replicas[starts] = replica_id + 1
            shards.append(ShardSlice(device, slices, replica_id))
        return shards

    def to_jax(self) -> jax.sharding.NamedSharding:
        """The same sharding as a `jax.sharding.NamedSharding`."""
        return self._named_sharding

    @classmethod
    def from_jax(cls, sharding: jax.sharding.NamedSharding, ndim: int) -> ShardingSpec:
        """Convert a jax sharding. Its memory kind is ignored.

        Args:
            sharding: a sharding over a concrete mesh.
            ndim: rank of the tensor. jax's spec may have fewer entries.

        Raises:
            SpecError: the sharding has no devices, has an UNCONSTRAINED dim, or has more than `ndim` entries.
        """
        if not isinstance(sharding.mesh, jax.sharding.Mesh):
            raise SpecError(
                message(f"{sharding} has no devices", fix="build the NamedSharding on a jax.sharding.Mesh, not an AbstractMesh")
            )
        spec = PartitionSpec.from_jax(sharding.spec)
        if len(spec) > ndim:
            raise SpecError(
                message(f"{sharding.spec} does not fit {ndim} dims", f"it has {len(spec)} entries", fix=f"pass ndim={len(spec)}")
            )
        return cls(Mesh.from_jax(sharding.mesh), PartitionSpec(*spec, *[None] * (ndim - len(spec))))

    def to_xla(self) -> str:
        """The sharding as XLA and torch_xla print it: "{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}" or "{replicated}".

        Devices with replicas of the same shard are listed in ascending order, as in XLA's normal form.
        """
        if self.is_replicated:
            return "{replicated}"
        tiled = [axis for axes in self._axes_per_dim for axis in axes]
        rest = [axis for axis in range(len(self.mesh.mesh_shape)) if axis not in tiled]
        num_replicas = self.mesh.size() // self.num_shards
        ids = np.sort(self.mesh.get_logical_mesh().transpose(tiled + rest).reshape(-1, num_replicas), axis=1)
        dims = [*self._shards_per_dim, *([num_replicas] if num_replicas > 1 else [])]
        suffix = " last_tile_dim_replicate" if num_replicas > 1 else ""
        return f"{{devices=[{','.join(map(str, dims))}]{','.join(map(str, ids.ravel().tolist()))}{suffix}}}"

    def to_dict(self) -> dict[str, object]:
        """The sharding as a JSON-serializable dict, which `from_dict` reads."""
        return {"mesh": self.mesh.to_dict(), "partition_spec": self.partition_spec.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> ShardingSpec:
        """Create a sharding from the result of `to_dict`.

        Raises:
            MeshError: an entry is missing or malformed.
        """
        missing = {"mesh", "partition_spec"} - data.keys()
        if missing:
            details = [f"missing: {', '.join(sorted(missing))}"]
            raise SpecError(message("this dict is not a sharding spec", *details, fix="write it with ShardingSpec.to_dict()"))
        mesh = Mesh.from_dict(cast("Mapping[str, object]", data["mesh"]))
        return cls(mesh, PartitionSpec.from_dict(cast("Mapping[str, object]", data["partition_spec"])))

    def __str__(self) -> str:
        return f"{self.mesh.to_string()} {self.partition_spec}"

    @classmethod
    def from_string(cls, text: str) -> ShardingSpec:
        """Create a sharding from the result of `str`, e.g. "data=4,model=2 ('data', None)".

        Raises:
            MeshError: the text is malformed.
        """
        mesh_text, parenthesis, spec_text = text.partition("(")
        return cls(Mesh.from_string(mesh_text), PartitionSpec.from_string(parenthesis + spec_text))

    def __reduce__(self) -> tuple[type[ShardingSpec], tuple[Mesh, PartitionSpec, bool]]:
        return type(self), (self.mesh, self.partition_spec, self.minibatch)

    @functools.cached_property
    def _named_sharding(self) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(self.mesh.to_jax(), self.partition_spec.to_jax())

    @functools.cached_property
    def _axes_per_dim(self) -> tuple[tuple[int, ...], ...]:
        names = self.mesh.axis_names
        return tuple(tuple(names.index(cast("str", axis)) for axis in entry_axes(entry)) for entry in self.partition_spec)

    @functools.cached_property
    def _shards_per_dim(self) -> tuple[int, ...]:
        return tuple(math.prod(self.mesh.mesh_shape[axis] for axis in axes) for axes in self._axes_per_dim)

    @functools.cached_property
    def _shard_index_per_dim(self) -> tuple[npt.NDArray[np.int64], ...]:
        # For each dim, the index of the shard along it, per device position. The first axis of an entry varies slowest.
        coordinates = np.unravel_index(np.arange(self.mesh.size()), self.mesh.mesh_shape)
        indices: list[npt.NDArray[np.int64]] = []
        for axes in self._axes_per_dim:
            index = np.zeros(self.mesh.size(), dtype=np.int64)
            for axis in axes:
                index = index * self.mesh.mesh_shape[axis] + coordinates[axis]
            indices.append(index)
        return tuple(indices)


def _require_rank(sharding: ShardingSpec, shape: Sequence[int], title: str) -> None:
    spec = sharding.partition_spec
    if len(spec) == len(shape):
        return
    fix = f"drop {len(spec) - len(shape)} of the entries"
    if len(spec) < len(shape):
        fix = f"pad the spec with None to the rank: {PartitionSpec(*spec, *[None] * (len(shape) - len(spec)))!r}"
    raise SpecError(
        message(
            f"{title} cannot be sharded by {spec}",
            f"the tensor has rank {len(shape)}, the spec has {len(spec)} {'entry' if len(spec) == 1 else 'entries'}",
            fix=fix,
        )
    )


def _require_even(sharding: ShardingSpec, shape: Sequence[int], title: str) -> None:
    spec, mesh = sharding.partition_spec, sharding.mesh
    details: list[str] = []
    fixes: list[str] = []
    padded = sharding.padded_shape(shape)
    for dim, (size, entry) in enumerate(zip(shape, spec, strict=True)):
        axes = entry_axes(entry)
        sizes = [mesh.axis_size(axis) for axis in axes]
        shards = math.prod(sizes)
        if size % shards == 0:
            continue
        named = " and ".join(f"axis {axis!r} has size {axis_size}" for axis, axis_size in zip(axes, sizes, strict=True))
        details.append(
            f"dim {dim} has {size} elements, {named}"
            + (f", together {shards}" if len(axes) > 1 else "")
            + ', and uneven="error" was asked for'
        )
        fixes += [f"shard dim {i} ({n})" for i, n in enumerate(shape) if spec[i] is None and n and n % shards == 0]
    if details:
        drop = f'drop uneven="error" to pad to {padded}'
        raise SpecError(message(f"{title} cannot be sharded by {spec}", *details, fix=", or ".join([drop, *fixes])))

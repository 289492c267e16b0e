import copy
import json
import math
import pickle
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mesh
from mesh import Mesh, ShardingSpec, ShardingType
from mesh import PartitionSpec as P

multidevice = pytest.mark.multidevice(num=8)


@st.composite
def legal_shardings(draw: st.DrawFn) -> tuple[ShardingSpec, tuple[int, ...]]:
    """A sharding over some of the existing devices, in any order, and a shape that it can lay out."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= mesh.device_count()))
    ids = draw(st.permutations(range(mesh.device_count())))[: math.prod(sizes)]
    grid = Mesh(ids, sizes, [f"axis{i}" for i in range(len(sizes))])
    rank = draw(st.integers(0, 3))
    axes_per_dim: list[list[str]] = [[] for _ in range(rank)]
    for axis in draw(st.permutations(grid.axis_names)):
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            axes_per_dim[dim].append(axis)
    shape = tuple(math.prod(grid.axis_size(axis) for axis in axes) * draw(st.integers(0, 3)) for axes in axes_per_dim)
    return ShardingSpec(grid, P(*map(tuple, axes_per_dim))), shape


@given(legal_shardings())
def test_shards_agree_with_jax(case: tuple[ShardingSpec, tuple[int, ...]]) -> None:
    sharding, shape = case
    theirs = sharding.to_jax().devices_indices_map(shape)
    ours = sharding.shard_slices(shape)
    assert [shard.device for shard in ours] == sharding.mesh.devices.ravel().tolist()
    assert {shard.device: shard.slices for shard in ours} == dict(theirs)
    assert sharding.shard_shape(shape) == sharding.to_jax().shard_shape(shape)
    assert sharding.is_replicated == sharding.to_jax().is_fully_replicated
    placed = jax.device_put(np.zeros(shape, np.int8), sharding.to_jax())
    assert {shard.device: shard.replica_id for shard in ours} == {shard.device: shard.replica_id for shard in placed.addressable_shards}
    assert ShardingSpec.from_jax(placed.sharding, len(shape)).to_jax() == sharding.to_jax()
    assert ShardingSpec.from_string(str(sharding)) == sharding


@multidevice
@pytest.mark.parametrize("spec", [P(), P("data", None), P(1, (0,)), P(("model", "data"), ())])
def test_sharding_survives_every_form(mesh_4x2: Mesh, spec: P) -> None:
    sharding = ShardingSpec(mesh_4x2, spec)
    for other in (
        ShardingSpec(mesh_4x2, spec.resolved(mesh_4x2.axis_names)),
        ShardingSpec.from_string(str(sharding)),
        ShardingSpec.from_dict(json.loads(json.dumps(sharding.to_dict()))),
        ShardingSpec.from_jax(sharding.to_jax(), len(spec)),
        pickle.loads(pickle.dumps(sharding)),
        copy.deepcopy(sharding),
    ):
        assert other == sharding
        assert hash(other) == hash(sharding)
    with pytest.raises(AttributeError):
        sharding.partition_spec = P()  # type: ignore[misc]


@multidevice
def test_string_names_mesh_and_spec(mesh_4x2: Mesh) -> None:
    assert str(ShardingSpec(mesh_4x2, ("data", None))) == "data=4,model=2 ('data', None)"


@multidevice
def test_spec_is_kept_resolved_and_unknown_axis_refused(mesh_4x2: Mesh) -> None:
    assert ShardingSpec(mesh_4x2, (0, [-1], ())).partition_spec == P("data", "model", None)
    with pytest.raises(mesh.SpecError, match="axes of the mesh: 'data', 'model'"):
        ShardingSpec(mesh_4x2, ("tensor",))


@multidevice
@pytest.mark.parametrize(
    ("spec", "kind", "num_shards"),
    [
        (("data", "model"), ShardingType.OTHER, 8),
        ((("model", "data"), None), ShardingType.TILED, 8),
        (("data", None), ShardingType.PARTIAL, 4),
        ((None, None), ShardingType.REPLICATED, 1),
        ((), ShardingType.REPLICATED, 1),
    ],
)
def test_sharding_type_counts_distinct_pieces(mesh_4x2: Mesh, spec: Any, kind: ShardingType, num_shards: int) -> None:
    sharding = ShardingSpec(mesh_4x2, spec)
    assert (sharding.sharding_type, sharding.num_shards, sharding.is_replicated) == (kind, num_shards, num_shards == 1)


@multidevice
def test_axis_of_size_one_splits_nothing() -> None:
    grid = Mesh(range(8), (8, 1), ("data", "model"))
    assert ShardingSpec(grid, ("data",)).sharding_type is ShardingType.OTHER
    assert ShardingSpec(grid, ("model",)).sharding_type is ShardingType.REPLICATED


def test_one_device_is_maximal_as_in_torch_xla() -> None:
    assert ShardingSpec(Mesh([0], (1,), ("data",)), ("data",)).sharding_type is ShardingType.MAXIMAL


def test_sharding_types_have_the_numbers_of_torch_xla() -> None:
    names = ["REPLICATED", "MAXIMAL", "TUPLE", "OTHER", "MANUAL", "PARTIAL", "UNKNOWN"]
    assert [ShardingType[name] for name in names] == list(range(7))
    assert ShardingType.TILED == 3


@multidevice
@pytest.mark.parametrize(
    ("spec", "shape", "text"),
    [
        (("data",), (8, 4), r"rank 2, the spec has 1 entry\n  fix: pad the spec with None to the rank: PartitionSpec\('data', None\)"),
        (("data", None, None), (8,), "rank 1, the spec has 3 entries\n  fix: drop 2 of the entries"),
    ],
)
def test_tensor_that_cannot_lie_so_is_refused_by_name(mesh_4x2: Mesh, spec: Any, shape: tuple[int, ...], text: str) -> None:
    sharding = ShardingSpec(mesh_4x2, spec)
    with pytest.raises(mesh.SpecError, match=text) as caught:
        sharding.validate(shape, "layers.0.weight")
    assert str(caught.value).startswith(f"layers.0.weight of shape {shape} cannot be sharded by {sharding.partition_spec}\n")
    for lay_out in (sharding.validate, sharding.shard_shape, sharding.shard_slices):
        with pytest.raises(mesh.SpecError, match=r"^a tensor of shape "):
            lay_out(shape)


@multidevice
@pytest.mark.parametrize(
    ("spec", "shape", "text"),
    [
        (
            (None, "data"),
            (16, 10),
            "dim 1 has 10 elements, axis 'data' has size 4, and uneven=\"error\" was asked for\n"
            '  fix: drop uneven="error" to pad to (16, 12), or shard dim 0 (16)',
        ),
        (
            (("data", "model"), None),
            (12, 3),
            "dim 0 has 12 elements, axis 'data' has size 4 and axis 'model' has size 2, together 8, and uneven=\"error\" was asked for\n"
            '  fix: drop uneven="error" to pad to (16, 3)',
        ),
    ],
)
def test_uneven_dims_are_refused_when_asked(mesh_4x2: Mesh, spec: Any, shape: tuple[int, ...], text: str) -> None:
    sharding = ShardingSpec(mesh_4x2, spec)
    sharding.validate(shape)
    with pytest.raises(mesh.SpecError) as caught:
        sharding.validate(shape, "layers.0.weight", uneven="error")
    assert str(caught.value).endswith(text)
    with pytest.raises(mesh.SpecError, match="uneven must be 'pad' or 'error', got 'ignore'"):
        sharding.validate(shape, uneven="ignore")  # type: ignore[arg-type]


@multidevice
def test_uneven_dims_are_padded_to_equal_pieces(mesh_4x2: Mesh) -> None:
    sharding = ShardingSpec(mesh_4x2, ("data", "model"))
    assert sharding.padded_shape((5, 3)) == (8, 4)
    assert sharding.shard_shape((5, 3)) == (2, 2)
    held = [piece.slices for piece in sharding.shard_slices((5, 3))]
    assert held[0] == (slice(0, 2), slice(0, 2))
    assert held[5] == (slice(4, 5), slice(2, 3))
    assert held[7] == (slice(5, 5), slice(2, 3))  # all of its first dim is padding


@multidevice
def test_slices_name_each_copy(mesh_4x2: Mesh) -> None:
    shards = ShardingSpec(mesh_4x2, (None, "model")).shard_slices((3, 4))
    assert [shard.slices[1] for shard in shards[:2]] == [slice(0, 2), slice(2, 4)]
    assert [shard.replica_id for shard in shards] == [0, 0, 1, 1, 2, 2, 3, 3]


@multidevice
def test_jax_sharding_is_built_once(mesh_4x2: Mesh) -> None:
    sharding = ShardingSpec(mesh_4x2, ("data", None))
    assert sharding.to_jax() is sharding.to_jax()
    assert sharding.to_jax() == jax.sharding.NamedSharding(mesh_4x2.to_jax(), jax.sharding.PartitionSpec("data", None))


@multidevice
def test_short_jax_spec_is_padded_and_long_one_refused(mesh_4x2: Mesh) -> None:
    theirs = jax.sharding.NamedSharding(mesh_4x2.to_jax(), jax.sharding.PartitionSpec("data"))
    assert ShardingSpec.from_jax(theirs, 3).partition_spec == P("data", None, None)
    with pytest.raises(mesh.SpecError, match="fix: pass ndim=1"):
        ShardingSpec.from_jax(theirs, 0)


@multidevice
def test_jax_sharding_without_devices_is_refused(mesh_4x2: Mesh) -> None:
    theirs = jax.sharding.NamedSharding(mesh_4x2.to_jax().abstract_mesh, jax.sharding.PartitionSpec("data"))
    with pytest.raises(mesh.SpecError, match="has no devices"):
        ShardingSpec.from_jax(theirs, 1)


def test_malformed_forms_are_refused() -> None:
    with pytest.raises(mesh.SpecError, match="missing: mesh, partition_spec"):
        ShardingSpec.from_dict({})
    for text in ("", "data=1", "('data',)"):
        with pytest.raises(mesh.MeshError):
            ShardingSpec.from_string(text)

"""HybridMesh: where its devices go, on given and on simulated slices, and the text form of shardings."""

from typing import Any

import numpy as np
import pytest
from jaxlib import xla_client

import mesh
from mesh import HybridMesh, Mesh, ShardingSpec

on_eight = pytest.mark.multidevice(num=8)
# Two slices of 2 x 2 chips whose numbers do not follow their places.
SCATTERED = [
    {"name": f"TPU:{number}", "coords": list(coords), "core_on_chip": 0, "slice_index": index}
    for index, numbers in enumerate([(2, 1, 0, 3), (4, 7, 6, 5)])
    for number, coords in zip(numbers, [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)], strict=True)
]


@on_eight
def test_axes_inside_a_slice_follow_its_chips() -> None:
    grid = HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1), device_attributes=SCATTERED)
    assert grid.get_logical_mesh().tolist() == [[2, 1], [0, 3], [4, 7], [6, 5]]
    assert (grid.mesh_shape, grid.ici_mesh_shape, grid.dcn_mesh_shape) == ((4, 2), (2, 2), (2, 1))
    assert [a["name"] for a in grid.device_attributes] == [f"TPU:{i}" for i in range(8)]


@on_eight
@pytest.mark.parametrize(
    ("ici", "dcn", "order"),
    [((1, 4, 1), (2, 1, 1), range(8)), ((4,), (2,), range(8)), ((2, 2), (1, 2), [0, 1, 4, 5, 2, 3, 6, 7]), ((2, 4), None, range(8))],
)
def test_slices_are_simulated_on_cpu(ici: Any, dcn: Any, order: Any) -> None:
    names = ("data", "fsdp", "tensor")[: len(ici)]
    grid = HybridMesh(ici, dcn, names)
    assert list(grid.shape().items()) == [(n, i * d) for n, i, d in zip(names, ici, dcn or (1,) * len(ici), strict=True)]
    assert grid.device_ids.tolist() == list(order)
    assert grid == Mesh(list(order), grid.mesh_shape, names) and hash(grid) == hash(Mesh(list(order), grid.mesh_shape, names))


@on_eight
def test_neighbours_on_an_axis_inside_a_slice_never_cross_slices() -> None:
    attributes = mesh.simulated_slices(2, (2, 2))
    grid = HybridMesh((1, 4), (2, 1), ("data", "model"), device_attributes=attributes)
    for row in grid.get_logical_mesh():
        assert len({attributes[device]["slice_index"] for device in row}) == 1
    assert HybridMesh((8,), device_attributes=mesh.simulated_slices(1, (2, 2, 2))).size() == 8


@on_eight
def test_an_axis_may_take_part_of_a_physical_one() -> None:
    grid = HybridMesh((2, 4), device_attributes=mesh.simulated_slices(1, (8,)))
    assert sorted(grid.device_ids.tolist()) == list(range(8))


@on_eight
@pytest.mark.parametrize(
    ("ici", "dcn", "attributes", "message"),
    [
        ((2, 2), (2,), None, "differ in length"),
        ((2, 2), (2, 2), SCATTERED, r"is for 4 slices(?s:.*)the devices are in 2"),
        ((2, 4), None, SCATTERED, r"is for 1 slices(?s:.*)the devices are in 2"),
        ((2, 4), (2, 1), SCATTERED, r"slices of 8 devices(?s:.*)there are 8 devices in 2 slices"),
        ((8,), None, [{"name": "TPU:0"}], "lacks the location of the device"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(ici: Any, dcn: Any, attributes: Any, message: str) -> None:
    with pytest.raises(mesh.MeshError, match=message):
        HybridMesh(ici, dcn, device_attributes=attributes)


def test_devices_say_where_they_lie() -> None:
    found = mesh.device_attributes()
    assert [a["name"] for a in found] == [f"CPU:{i}" for i in range(mesh.device_count())]
    assert mesh.simulated_slices(1, (2, 1))[1] == {"name": "TPU:1", "coords": [1, 0, 0], "core_on_chip": 0}


SHARDINGS = [
    ((8,), ("x",), ("x",)),
    ((8,), ("x",), (None, "x")),
    ((4, 2), ("x", "y"), ("x", "y")),
    ((4, 2), ("x", "y"), ("y", "x")),
    ((4, 2), ("x", "y"), ("x", None)),
    ((4, 2), ("x", "y"), (None, "y")),
    ((4, 2), ("x", "y"), (("x", "y"), None)),
    ((4, 2), ("x", "y"), (("y", "x"),)),
    ((1, 2, 4), ("r", "b", "m"), (None, ("r", "m"))),
    ((1, 2, 4), ("r", "b", "m"), (None, ("m", "b"))),
    ((2, 2, 2), ("a", "b", "c"), ("c", None, "a")),
    ((2, 2, 2), ("a", "b", "c"), (None, ("c", "b"), None, None, None, None)),
    ((4, 2), ("x", "y"), (None, None)),
    ((8, 1), ("x", "y"), ("y",)),
]


@on_eight
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("shape", "names", "spec"), SHARDINGS, ids=[str(s[2]) for s in SHARDINGS])
def test_a_sharding_is_written_as_xla_writes_it(shape: Any, names: Any, spec: Any, reverse: bool) -> None:
    ids = np.arange(8)[::-1] if reverse else np.arange(8)
    sharding = ShardingSpec(Mesh(ids, shape, names), spec)
    text = sharding.to_xla()
    if sharding.is_replicated:
        assert text == "{replicated}"
        return
    proto = xla_client.OpSharding()
    proto.type = xla_client.OpSharding.Type.OTHER
    dims, _, rest = text.removeprefix("{devices=[").partition("]")
    proto.tile_assignment_dimensions = [int(d) for d in dims.split(",")]
    proto.tile_assignment_devices = [int(d) for d in rest.split("}")[0].split(" ")[0].split(",")]
    proto.replicate_on_last_tile_dim = "last_tile_dim_replicate" in rest
    assert str(xla_client.HloSharding.from_proto(proto)).replace("<=[8]", "0,1,2,3,4,5,6,7") == text
    ndim = len(spec)
    ours = xla_client.HloSharding.from_proto(proto)
    theirs = sharding.to_jax()._to_xla_hlo_sharding(ndim)
    # jax numbers the devices of a sharding by their place in its mesh, XLA's text by id
    assert theirs.tile_assignment_dimensions() == ours.tile_assignment_dimensions()
    placed = sharding.mesh.device_ids[np.array(theirs.tile_assignment_devices())]
    copies = proto.tile_assignment_dimensions[-1] if proto.replicate_on_last_tile_dim else 1
    want = np.sort(placed.reshape(-1, copies), axis=1).ravel().tolist()
    assert ours.tile_assignment_devices() == want


def test_minibatch_is_no_part_of_equality() -> None:
    line = Mesh([0], (1,), ("data",))
    one, two = ShardingSpec(line, ("data",), minibatch=True), ShardingSpec(line, ("data",))
    assert one.minibatch and not two.minibatch and one == two and hash(one) == hash(two)

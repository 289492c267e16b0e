import copy
import json
import pickle
from collections import OrderedDict
from typing import Any

import jax
import numpy as np
import pytest

import mesh
from mesh import Mesh

pytestmark = pytest.mark.multidevice(num=8)

MESHES = [
    lambda: Mesh(range(8), (4, 2), ("data", "model")),
    lambda: Mesh([3, 2, 1, 0], (4,), ("data",)),
    lambda: Mesh([7, 5], (2, 1)),
    lambda: Mesh(np.arange(8).reshape(2, 2, 2), [2, 2, 2], ["replica", "fsdp", "tensor"]),
]


@pytest.mark.parametrize("make", MESHES)
def test_mesh_survives_every_form(make: Any) -> None:
    grid = make()
    for other in (
        make(),
        Mesh.from_string(grid.to_string()),
        Mesh.from_dict(json.loads(json.dumps(grid.to_dict()))),
        Mesh.from_jax(grid.to_jax()),
        pickle.loads(pickle.dumps(grid)),
        copy.copy(grid),
        copy.deepcopy(grid),
        eval(repr(grid), {"Mesh": Mesh}),
    ):
        assert other == grid
        assert hash(other) == hash(grid)


def test_meshes_differ_in_ids_shape_or_names() -> None:
    grid = Mesh(range(8), (4, 2), ("data", "model"))
    others = [
        Mesh(range(8), (2, 4), ("data", "model")),
        Mesh(range(8), (4, 2), ("data", "tensor")),
        Mesh(range(7, -1, -1), (4, 2), ("data", "model")),
    ]
    assert all(grid != other for other in others)
    assert len({grid, *others, Mesh.from_string("data=4,model=2")}) == 4


def test_queries_of_a_mesh() -> None:
    grid = Mesh([7, 6, 5, 4, 3, 2, 1, 0], (4, 2), ("data", "model"))
    assert grid.device_ids.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert grid.get_logical_mesh().tolist() == [[7, 6], [5, 4], [3, 2], [1, 0]]
    assert (grid.mesh_shape, grid.axis_names) == ((4, 2), ("data", "model"))
    assert (grid.size(), grid.size("data"), grid.size(1), grid.axis_size("model")) == (8, 4, 2, 2)
    assert grid.shape() == OrderedDict(data=4, model=2)
    assert (grid.get_axis_name_idx("model"), grid.get_axis_name_idx("pipe")) == (1, None)
    assert [[device.id for device in row] for row in grid.devices] == grid.get_logical_mesh().tolist()
    assert str(grid) == "Mesh(data=4, model=2)"
    assert repr(grid) == "Mesh([7, 6, 5, 4, 3, 2, 1, 0], (4, 2), ('data', 'model'))"
    assert grid.to_string() == "data=4,model=2@7,6,5,4,3,2,1,0"


def test_unnamed_axes_are_called_by_their_index() -> None:
    grid = Mesh(range(8), (4, 2))
    assert grid.axis_names == ("0", "1")
    assert mesh.PartitionSpec(1, 0).resolved(grid.axis_names) == mesh.PartitionSpec("1", "0")


def test_mesh_is_immutable() -> None:
    grid = Mesh(range(8), (4, 2))
    with pytest.raises(AttributeError):
        grid.mesh_shape = (8,)  # type: ignore[misc]
    for array in (grid.device_ids, grid.devices, grid.get_logical_mesh()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        ("data", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("model", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (-1, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (("data", "model"), [(0, 1, 2, 3, 4, 5, 6, 7)]),
        (("model", "data"), [(0, 2, 4, 6, 1, 3, 5, 7)]),
        ((), [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]),
    ],
)
def test_axis_groups_are_positions_that_reduce_together(names: Any, groups: list[tuple[int, ...]]) -> None:
    assert Mesh(range(7, -1, -1), (4, 2), ("data", "model")).axis_groups(names) == groups


@pytest.mark.parametrize("axis", ["modle", 2, -3])
def test_unknown_axis_is_refused_with_the_axes(axis: str | int) -> None:
    grid = Mesh(range(8), (4, 2), ("data", "model"))
    for ask in (grid.size, grid.axis_size, grid.axis_groups):
        with pytest.raises(mesh.MeshError, match=rf"Mesh\(data=4, model=2\) has no axis {axis!r}\n  axes: data, model"):
            ask(axis)


def test_axis_grouped_twice_is_refused() -> None:
    with pytest.raises(mesh.MeshError, match="an axis is named twice"):
        Mesh(range(8), (4, 2), ("data", "model")).axis_groups(("data", 0))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((range(8), (4, 3)), "needs 12 device ids, got 8"),
        ((range(8), ()), "is not a mesh shape"),
        (((4, 2), ("data", "model")), r"is not a mesh shape\n  fix: pass device ids, then"),
        ((range(8), 8), "is not a mesh shape"),
        ((range(8), (8.0,)), "is not a mesh shape"),
        ((range(0), (0,)), "is not a mesh shape"),
        ((range(8), (-4, -2)), "is not a mesh shape"),
        (([0, 0], (2,)), r"names a device more than once\n  repeated ids: \[0\]"),
        (([0, -1], (2,)), "invalid device ids"),
        (([0.0, 1.0], (2,)), "invalid device ids"),
        ((range(8), (4, 2), ("data",)), "1 names, 2 sizes"),
        ((range(8), (4, 2), ("data", "data")), "repeats a name"),
        ((range(8), (8,), "data"), r"fix: axis_names=\('data',\)"),
        *[((range(8), (8,), (name,)), "is not an axis name") for name in ("", "a b", "a=b", "a,b", "a@b", 0)],
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(mesh.MeshError, match=text):
        Mesh(*arguments)


def test_a_topology_that_is_no_text_is_refused() -> None:
    with pytest.raises(mesh.MeshError, match=r"topology of Mesh\(a=8\) must be the name of a TPU slice, got 5"):
        mesh.Mesh(range(8), (8,), ("a",), topology=5)  # pyright: ignore[reportArgumentType]


def test_mesh_of_more_devices_than_exist_is_refused_with_the_fix() -> None:
    count = mesh.device_count()
    text = (
        rf"Mesh\(data={count}, model=2\) names devices that do not exist\n"
        rf"  the mesh names {2 * count} devices, {count} exist on platform 'cpu'\n"
        rf"  fix: mesh.virtual_devices\({2 * count}\) at the top of the program, or a mesh of at most {count} devices"
    )
    with pytest.raises(mesh.DeviceError, match=text):
        Mesh(range(2 * count), (count, 2), ("data", "model"))


def test_mesh_of_a_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(mesh.DeviceError, match="names 2 devices up to id 1000, "):
        Mesh([0, 1000], (2,))


def test_absurdly_large_mesh_is_refused_before_its_ids_are_listed() -> None:
    with pytest.raises(mesh.DeviceError, match="names 1000000000000 devices"):
        Mesh.from_string("data=1000000000000")


def test_virtual_devices_are_not_suggested_on_real_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh._devices.platform", lambda: "tpu")
    with pytest.raises(mesh.DeviceError, match="exist on platform 'tpu'\n  fix: a mesh of at most"):
        Mesh.from_string("data=4096")


@pytest.mark.parametrize(
    "text", ["data=4,model=2", " data = 4 , model=2 ", "data=4,model=2@0,1,2,3,4,5,6,7", "data=4,model=2 @ 0, 1,2,3,4,5,6,7"]
)
def test_mesh_from_command_line_text(text: str) -> None:
    assert Mesh.from_string(text) == Mesh(range(8), (4, 2), ("data", "model"))
    assert Mesh.from_string(text).to_string() == "data=4,model=2"


@pytest.mark.parametrize("text", ["", "8", "data=", "data=x", "data=4,", "data=4;b=2", "data=2@", "data=2@a,b", "data=2@0,,1", "data=-2"])
def test_malformed_text_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(mesh.MeshError, match=r"is not a mesh\n  fix: write axis=size pairs, e\.g\. 'data=4,model=2'"):
        Mesh.from_string(text)


def test_incomplete_dict_is_refused() -> None:
    with pytest.raises(mesh.MeshError, match="missing: axis_names, mesh_shape"):
        Mesh.from_dict({"device_ids": [0]})


def test_jax_mesh_has_the_same_devices_and_auto_axes() -> None:
    grid = Mesh([3, 1, 2, 0], (2, 2), ("data", "model"))
    jax_mesh = grid.to_jax()
    assert jax_mesh is grid.to_jax()
    assert jax_mesh == copy.copy(Mesh([3, 1, 2, 0], (2, 2), ("data", "model"))).to_jax()
    assert jax_mesh.devices.tolist() == grid.devices.tolist()
    assert set(jax_mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_explicit_axes_of_a_jax_mesh_are_retyped() -> None:
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    grid = Mesh.from_jax(explicit)
    assert set(grid.to_jax().axis_types) == {jax.sharding.AxisType.Auto}
    assert grid.devices.tolist() == explicit.devices.tolist()


def test_jax_mesh_of_other_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    jax_mesh = Mesh(range(8), (8,), ("data",)).to_jax()
    monkeypatch.setattr("mesh._devices.devices", lambda: tuple(jax.devices()[:4]))
    with pytest.raises(mesh.DeviceError, match="which is not in use\n  in use: 4 devices on platform 'cpu'"):
        Mesh.from_jax(jax_mesh)


@pytest.mark.parametrize("device_type", ["jax", "cpu"])
def test_init_device_mesh_takes_the_first_devices(device_type: str) -> None:
    assert mesh.init_device_mesh(device_type, (2, 2), mesh_dim_names=("data", "model")) == Mesh(range(4), (2, 2), ("data", "model"))


@pytest.mark.parametrize("device_type", ["cuda", "gpu", "tpu", "xla"])
def test_init_device_mesh_refuses_a_platform_that_is_not_in_use(device_type: str) -> None:
    with pytest.raises(mesh.DeviceError, match=r"in use: \d+ devices on platform 'cpu'\n  fix: init_device_mesh\('jax', \(8,\)\)"):
        mesh.init_device_mesh(device_type, (8,))


def test_cuda_means_jax_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh._devices.platform", lambda: "gpu")
    assert mesh.init_device_mesh("cuda", (8,)) == Mesh(range(8), (8,))

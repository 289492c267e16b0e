"""`init_device_mesh("jax", ...)` in one process: sizes, names, parts and groups as torch says them, and the Mesh that they mean."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mesh
import spmd
from spmd.compat.torch_distributed._group_of_one import GroupOfOne
from spmd.sharding._annotate import as_mesh
from spmd.sharding._device_mesh import mesh_axes

pytestmark = pytest.mark.multidevice(num=8)


def grid() -> DeviceMesh:
    return init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))


def test_a_mesh_needs_no_process_group_and_says_what_torchs_says() -> None:
    made = grid()
    assert (made.ndim, made.shape, made.mesh_dim_names, made.size(), made.size(1)) == (2, (2, 4), ("dp", "tp"), 8, 4)
    assert (made.device_type, made.get_coordinate(), made.get_local_rank("tp"), made.get_rank()) == ("jax", (0, 0), 0, 0)
    assert made.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (made["tp"].shape, made["dp"].mesh.tolist(), made["dp", "tp"]) == ((4,), [0, 4], made)
    assert made["dp"].get_local_rank() == 0
    assert grid() == made and hash(grid()) == hash(made)
    assert pickle.loads(pickle.dumps(made)) == made == copy.deepcopy(made)


def test_every_part_of_a_mesh_means_axes_of_one_mesh() -> None:
    made, whole = grid(), mesh.Mesh(range(8), (2, 4), ("dp", "tp"))
    assert mesh_axes(made).mesh == mesh_axes(made["dp"]).mesh == as_mesh(made["tp"]) == whole
    assert mesh_axes(made).axes == (("dp",), ("tp",))
    assert mesh_axes(made["tp"]).names == ("tp",)
    assert mesh_axes(made["dp", "tp"]._flatten("all")).axes == (("dp", "tp"),)
    marked = spmd.mark_sharding(torch.zeros(8, 8).to("jax"), made["tp"], ("tp", None))
    assert marked.sharding_spec == mesh.ShardingSpec(whole, ("tp", None))


def test_a_dim_that_was_divided_means_the_axes_that_all_parts_are_made_of() -> None:
    world = init_device_mesh("jax", (8,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (1, 2, 4), ("pp", "fsdp", "tp"))
    sparse = world._unflatten(0, (1, 4, 2), ("pp", "efsdp", "ep"))
    assert mesh_axes(dense["fsdp"]).mesh == mesh_axes(sparse).mesh == mesh_axes(world).mesh
    assert mesh_axes(dense["fsdp"]).mesh.mesh_shape == (1, 2, 2, 2)
    assert mesh_axes(dense).axes == (("pp",), ("fsdp",), ("stride2", "ep"))
    assert mesh_axes(sparse).axes == (("pp",), ("fsdp", "stride2"), ("ep",))
    assert mesh_axes(world).names == ("fsdp", "stride2", "ep")


def test_devices_in_another_order_are_that_mesh() -> None:
    made = DeviceMesh("jax", [[7, 6], [5, 4]], mesh_dim_names=("a", "b"))
    assert as_mesh(made) == mesh.Mesh([7, 6, 5, 4], (2, 2), ("a", "b"))
    assert made.get_coordinate() == (0, 0)


def test_more_devices_than_there_are_are_refused() -> None:
    with pytest.raises(mesh.DeviceError, match="names devices that do not exist"):
        init_device_mesh("jax", (4, 4), mesh_dim_names=("dp", "tp"))


def test_a_group_is_the_program_alone_and_its_collectives_give_back_what_they_get() -> None:
    made = grid()
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "spmd")
    assert dist.get_world_size(made.get_group("dp")) == 1
    x = torch.arange(3.0).to("jax")
    dist.all_reduce(x, group=made.get_group("tp"))
    assert torch.equal(x.cpu(), torch.arange(3.0))
    held: Any = [torch.zeros(3).to("jax")]
    dist.all_gather(held, x)
    assert torch.equal(held[0].cpu(), x.cpu())
    out = torch.zeros(3).to("jax")
    dist.reduce_scatter(out, [x])
    assert torch.equal(out.cpu(), x.cpu())
    assert torch.equal(funcol.all_reduce(x, "sum", made["dp"]).cpu(), x.cpu())
    objects: list[Any] = [None]
    dist.all_gather_object(objects, {"a": 1})
    assert objects == [{"a": 1}]
    dist.barrier()


def test_a_group_can_be_asked_for_first() -> None:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    assert isinstance(dist.group.WORLD, GroupOfOne)  # the accelerator's
    assert grid().get_group("tp") is not None
    assert dist.get_world_size() == 1


def test_what_one_program_cannot_be_is_refused() -> None:
    with pytest.raises(spmd.SpmdError, match=r"device 'jax' has one rank, but the process group has 8(?s:.*)fix: start the program once"):
        dist.init_process_group("spmd", store=dist.HashStore(), rank=0, world_size=8)  # pyright: ignore[reportPrivateImportUsage]
    made = grid()
    with pytest.raises(spmd.SpmdError, match="a collective of one rank was given 2 input and 1 output tensors"):
        dist.scatter(torch.zeros(1).to("jax"), [torch.zeros(1).to("jax")] * 2, group=made.get_group("dp"))
    with pytest.raises(spmd.SpmdError, match="a single program has no other rank to send to"):
        dist.group.WORLD.send([torch.zeros(1)], 1, 0)  # pyright: ignore[reportOptionalMemberAccess]


def test_meshes_of_other_devices_are_torchs() -> None:
    fake = DeviceMesh("cpu", torch.arange(8).reshape(4, 2), mesh_dim_names=("data", "model"), _init_backend=False, _rank=3)
    assert fake.get_coordinate() == (1, 1)
    assert not dist.is_initialized()

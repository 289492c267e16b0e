"""Which of torch's functions answer for meshes of device type "jax": what they are given decides, so all other meshes are torch's.

`register` lets `init_device_mesh("jax", ...)` work; the first such mesh brings the rest (`install`), as nothing else asks for it. Of
functions the code is replaced, not the name: programs import them before this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.compat.torch_distributed import _data_parallel, _group_of_one
from spmd.patches._table import current, replace, replace_code
from spmd.sharding._device_mesh import is_of_devices, mesh_axes, note_axes

_PARALLEL = "torch.distributed.tensor.parallel"
_STYLES = (
    "ColwiseParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "PrepareModuleInput",
    "PrepareModuleOutput",
    "PrepareModuleInputOutput",
)
before: dict[str, Callable[..., Any]] = {}  # what torch's functions did, by target


def register() -> None:
    """Let torch make meshes of the device; does nothing the second time."""
    target = "torch.distributed.device_mesh.DeviceMesh.__init__"
    if target not in before:
        _group_of_one.register()
        _group_of_one.when_made.append(install)
        before[target] = replace(target, _make_mesh)
        replace("torch.nn.parallel.DistributedDataParallel.__new__", staticmethod(_data_parallel.made))


def install() -> None:
    """Let torch's other words answer for such meshes; does nothing the second time."""
    tensors = "torch.distributed.tensor"
    if f"{tensors}.distribute_tensor" in before:
        return
    for target, code in (
        (f"{tensors}.distribute_tensor", _distribute_tensor),
        (f"{tensors}.distribute_module", _distribute_module),
        (f"{tensors}._api._dtensor_init_helper", _made_on_mesh),
    ):
        before[target] = replace_code(target, code)
    from spmd.compat.torch_distributed import _composable_fsdp  # torch.distributed.fsdp is imported late

    before[_composable_fsdp.TARGET] = replace_code(_composable_fsdp.TARGET, _fully_shard)
    before[_composable_fsdp.WRAPPER] = replace(_composable_fsdp.WRAPPER, _composable_fsdp.refused_wrapper)
    target = f"{tensors}.DTensor.from_local"
    before[target] = current(target)
    replace(target, staticmethod(_from_local))
    for name in _STYLES:
        target = f"{_PARALLEL}.{name}._apply"
        before[target] = replace(target, _applying(current(target)))


def _make_mesh(self: Any, device_type: str, mesh: Any = None, **options: Any) -> None:
    """`DeviceMesh(...)`; on device 'jax' its ranks are devices of this process, which has the place of the first of them.

    Raises:
        DeviceError: there are too few devices.
        GroupError: a process group of several ranks was made already.
    """
    make = before["torch.distributed.device_mesh.DeviceMesh.__init__"]
    if device_type != "jax":
        make(self, device_type, mesh, **options)
        return
    install()
    has_groups = options.pop("_init_backend", True)
    rank = options.pop("_rank", None)
    first = options.get("_rank_map")
    if rank is None:
        rank = int(torch.as_tensor(mesh).flatten()[0] if first is None else first[0])
    make(self, device_type, mesh, **options, _init_backend=False, _rank=rank)
    note_axes(self)
    mesh_axes(self)  # the devices are there
    vars(self)["_init_process_groups"] = _groups_of_dims  # `_unflatten` asks the mesh itself
    if has_groups:
        self._dim_group_names = _groups_of_dims(self._layout)
        group = _group_of_one.require_group()
        self._get_root_mesh()._pg_registry[group.group_name] = group


def _groups_of_dims(layout: Any, *_: Any) -> list[str]:
    """The name of the process group of each dim of a mesh: the one group that there is."""
    return [_group_of_one.require_group().group_name] * len(layout)


# The next four are run with the names of torch's modules (see `replace_code`).
def _distribute_tensor(*args: Any, **kwargs: Any) -> Any:
    from spmd.compat.torch_distributed._whole_tensors import distribute_tensor

    return distribute_tensor(*args, **kwargs)


def _distribute_module(*args: Any, **kwargs: Any) -> Any:
    from spmd.compat.torch_distributed._whole_tensors import distribute_module

    return distribute_module(*args, **kwargs)


def _made_on_mesh(*args: Any, **kwargs: Any) -> Any:
    from spmd.compat.torch_distributed._whole_tensors import made_on_mesh

    return made_on_mesh(*args, **kwargs)


def _fully_shard(*args: Any, **kwargs: Any) -> Any:
    from spmd.compat.torch_distributed._composable_fsdp import fully_shard

    return fully_shard(*args, **kwargs)


def _from_local(local_tensor: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
    from spmd.compat.torch_distributed._whole_tensors import from_local

    return from_local(local_tensor, device_mesh, placements, **options)


def _applying(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A style's `_apply`: on the device the layout that it says, by torch's own code what has no meaning as one."""

    def _apply(self: Any, module: Any, device_mesh: Any) -> Any:
        from spmd.compat.torch_distributed._whole_tensors import apply_style

        if is_of_devices(device_mesh) and apply_style(self, module, device_mesh):
            return module
        return theirs(self, module, device_mesh)

    return _apply


__all__ = ["before", "install", "register"]

"""Makes torch's functions handle meshes of device type "jax". Their arguments decide; for all other meshes torch's code runs.

`register` makes `init_device_mesh("jax", ...)` work. The first such mesh installs the rest (`install`), which nothing else needs. The code
of functions is replaced, not their name, because programs import them before this package.
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
before: dict[str, Callable[..., Any]] = {}  # torch's original functions, by target


def register() -> None:
    """Make torch accept meshes of the device; a second call does nothing."""
    target = "torch.distributed.device_mesh.DeviceMesh.__init__"
    if target not in before:
        _group_of_one.register()
        _group_of_one.when_made.append(install)
        before[target] = replace(target, _make_mesh)
        replace("torch.nn.parallel.DistributedDataParallel.__new__", staticmethod(_data_parallel.made))


def install() -> None:
    """Make torch's other functions handle such meshes; a second call does nothing."""
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
    """`DeviceMesh(...)`. On device 'jax' its ranks are devices of this process, whose own rank is that of the first device.

    Raises:
        DeviceError: there are too few devices.
        GroupError: a process group with several ranks already exists.
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
    mesh_axes(self)  # raises if devices do not exist
    vars(self)["_init_process_groups"] = _groups_of_dims  # `_unflatten` calls it on the mesh
    if has_groups:
        self._dim_group_names = _groups_of_dims(self._layout)
        group = _group_of_one.require_group()
        self._get_root_mesh()._pg_registry[group.group_name] = group


def _groups_of_dims(layout: Any, *_: Any) -> list[str]:
    """The process group's name for each dim of a mesh: always that of the only group."""
    return [_group_of_one.require_group().group_name] * len(layout)


# The next four functions run with the globals of torch's modules (see `replace_code`).
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
    """Wrap a style's `_apply`: on the device it lays out the module; styles that describe no layout run torch's code."""

    def _apply(self: Any, module: Any, device_mesh: Any) -> Any:
        from spmd.compat.torch_distributed._whole_tensors import apply_style

        if is_of_devices(device_mesh) and apply_style(self, module, device_mesh):
            return module
        return theirs(self, module, device_mesh)

    return _apply


__all__ = ["before", "install", "register"]

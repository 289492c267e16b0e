"""`distribute_tensor`, `distribute_module`, `DTensor.from_local`, `zeros(..., device_mesh=)` and plans: whole tensors, marked.

On a mesh of device type "jax" they give an `XLAShardedTensor`, which is the whole tensor and no `DTensor`: `to_local()` is the tensor
itself, and what plans do to keep ranks consistent is the compiler's business. On other meshes they are torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from spmd.base._errors import SpmdError, message
from spmd.base._torch import current_device_mesh
from spmd.compat.torch_distributed._words import before
from spmd.device._layout import annotation_of
from spmd.device._storage import recording
from spmd.rules import parallelize
from spmd.sharding._device_mesh import is_of_devices, mesh_axes
from spmd.xla_names._distribute import redistribute, xla_distribute_module, xla_distribute_tensor

_TENSORS = "torch.distributed.tensor"


def distribute_tensor(
    tensor: torch.Tensor, device_mesh: Any = None, placements: Sequence[Any] | None = None, *, src_data_rank: int | None = 0
) -> Any:
    """torch's `distribute_tensor`; on the device `xla_distribute_tensor`, in place if the tensor is there already, and in a compiled
    function a new tensor, since a call must leave its arguments as they are."""
    mesh = device_mesh if device_mesh is not None else current_device_mesh()
    if not is_of_devices(mesh):
        return before[f"{_TENSORS}.distribute_tensor"](tensor, mesh, placements, src_data_rank=src_data_rank)
    if not tensor.is_leaf:
        what = "`distribute_tensor` should be used to distribute leaf tensors! but found non-leaf tensor!"
        raise SpmdError(message(what, fix="spmd.mark_sharding(t, mesh, spec), or t.redistribute(mesh, placements) of a marked tensor"))
    if recording.get() is not None and tensor.device.type == "jax":
        return redistribute(tensor, mesh, placements)
    return xla_distribute_tensor(tensor, mesh, placements)


def distribute_module(
    module: nn.Module, device_mesh: Any = None, partition_fn: Any = None, input_fn: Any = None, output_fn: Any = None
) -> Any:
    """torch's `distribute_module`; on the device what `partition_fn` leaves unmarked is replicated."""
    mesh = device_mesh if device_mesh is not None else current_device_mesh()
    if not is_of_devices(mesh):
        return before[f"{_TENSORS}.distribute_module"](module, mesh, partition_fn, input_fn, output_fn)
    xla_distribute_module(module, mesh, partition_fn, input_fn, output_fn)
    for tensor in (*module.parameters(), *module.buffers()):
        if annotation_of(tensor) is None:
            xla_distribute_tensor(tensor, mesh)
    return module


def from_local(local_tensor: torch.Tensor, device_mesh: Any = None, placements: Sequence[Any] | None = None, **options: Any) -> Any:
    """torch's `DTensor.from_local`; on the device the tensor is the whole one already, as `to_local` gives it, and is laid out so."""
    mesh = device_mesh if device_mesh is not None else current_device_mesh()
    if not is_of_devices(mesh):
        return before[f"{_TENSORS}.DTensor.from_local"](local_tensor, mesh, placements, **options)
    shape = options.get("shape")
    if shape is not None and tuple(shape) != tuple(local_tensor.shape):
        raise SpmdError(
            message(
                f"DTensor.from_local was given a piece {tuple(local_tensor.shape)} of a tensor {tuple(shape)}",
                "one program has whole tensors, and no rank with a piece",
                fix="distribute_tensor(whole, device_mesh, placements)",
            )
        )
    moved = local_tensor if local_tensor.device.type == "jax" else local_tensor.to("jax")
    return redistribute(moved, mesh, placements)


def made_on_mesh(init_op: Any, size: Any, device_mesh: Any = None, placements: Sequence[Any] | None = None, **options: Any) -> Any:
    """What `torch.distributed.tensor.zeros`, `randn` and so on make; on the device the values of `torch.zeros` and so on."""
    mesh = device_mesh if device_mesh is not None else current_device_mesh()
    if not is_of_devices(mesh):
        return before[f"{_TENSORS}._api._dtensor_init_helper"](init_op, size, mesh, placements, **options)
    args = (options.pop("fill_value", 0),) if init_op is torch.full else ()
    return xla_distribute_tensor(init_op(tuple(size), *args, **{**options, "device": "jax"}), mesh, placements)


def apply_style(style: Any, module: nn.Module, device_mesh: Any) -> bool:
    """Lay a module out as one style of `parallelize_module` says; False for a style that has no meaning as a layout.

    Raises:
        SpmdError: the mesh has several dims.
    """
    found = mesh_axes(device_mesh)
    if len(found.axes) != 1:
        fix = f"parallelize_module(module, device_mesh[{(device_mesh.mesh_dim_names or ('tp',))[-1]!r}], plan)"
        raise SpmdError(message(f"a plan is for one axis of a mesh, {device_mesh} has {len(found.axes)}", fix=fix))
    if any(parameter.device.type == "cpu" for parameter in module.parameters()):
        module.to("jax")
    return parallelize(style, module, found.mesh, found.names)


__all__ = ["apply_style", "distribute_module", "distribute_tensor", "from_local", "made_on_mesh"]

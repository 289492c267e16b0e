"""`distribute_tensor`, `distribute_module`, `DTensor.from_local`, `zeros(..., device_mesh=)` and plans: marked global tensors.

On a mesh of device type "jax" they return an `XLAShardedTensor`, which is the global tensor and not a `DTensor`: `to_local()` is the tensor
itself, and the compiler does what plans do to keep ranks consistent. On other meshes torch's functions run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from spmd.base._errors import SpmdError, message
from spmd.base._torch import current_device_mesh
from spmd.compat.torch_distributed._dispatch import before
from spmd.compat.torch_distributed._state_dicts import register_sharded_state_dict
from spmd.device._layout import annotation_of
from spmd.device._storage import recording
from spmd.rules import parallelize
from spmd.sharding._device_mesh import is_of_devices, mesh_axes
from spmd.xla_names._distribute import redistribute, xla_distribute_module, xla_distribute_tensor

_TENSORS = "torch.distributed.tensor"


def distribute_tensor(
    tensor: torch.Tensor, device_mesh: Any = None, placements: Sequence[Any] | None = None, *, src_data_rank: int | None = 0
) -> Any:
    """torch's `distribute_tensor`; on the device it is `xla_distribute_tensor`, in place if the tensor is already there.

    In a compiled function it returns a new tensor, because a call must not change its arguments.

    Raises:
        SpmdError: the tensor is not a leaf.
    """
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
    """torch's `distribute_module`; on the device parameters and buffers that `partition_fn` leaves unmarked are replicated."""
    mesh = device_mesh if device_mesh is not None else current_device_mesh()
    if not is_of_devices(mesh):
        return before[f"{_TENSORS}.distribute_module"](module, mesh, partition_fn, input_fn, output_fn)
    xla_distribute_module(module, mesh, partition_fn, input_fn, output_fn)
    for tensor in (*module.parameters(), *module.buffers()):
        if annotation_of(tensor) is None:
            xla_distribute_tensor(tensor, mesh)
    register_sharded_state_dict(module)
    return module


def from_local(local_tensor: torch.Tensor, device_mesh: Any = None, placements: Sequence[Any] | None = None, **options: Any) -> Any:
    """torch's `DTensor.from_local`; on the device the local tensor is already the global one (as in `to_local`), and is laid out."""
    mesh = device_mesh if device_mesh is not None else current_device_mesh()
    if not is_of_devices(mesh):
        return before[f"{_TENSORS}.DTensor.from_local"](local_tensor, mesh, placements, **options)
    shape = options.get("shape")
    if shape is not None and tuple(shape) != tuple(local_tensor.shape):
        raise SpmdError(
            message(
                f"DTensor.from_local was given a shard {tuple(local_tensor.shape)} of a tensor {tuple(shape)}",
                "a single program has global tensors, and no rank with a shard",
                fix="distribute_tensor(whole, device_mesh, placements)",
            )
        )
    moved = local_tensor if local_tensor.device.type == "jax" else local_tensor.to("jax")
    return redistribute(moved, mesh, placements)


def made_on_mesh(init_op: Any, size: Any, device_mesh: Any = None, placements: Sequence[Any] | None = None, **options: Any) -> Any:
    """Implements `torch.distributed.tensor.zeros`, `randn` etc.; on the device with the values of `torch.zeros` etc."""
    mesh = device_mesh if device_mesh is not None else current_device_mesh()
    if not is_of_devices(mesh):
        return before[f"{_TENSORS}._api._dtensor_init_helper"](init_op, size, mesh, placements, **options)
    args = (options.pop("fill_value", 0),) if init_op is torch.full else ()
    return xla_distribute_tensor(init_op(tuple(size), *args, **{**options, "device": "jax"}), mesh, placements)


def apply_style(style: Any, module: nn.Module, device_mesh: Any) -> bool:
    """Lay out a module as a style of `parallelize_module` says. False if the style does not describe a layout.

    Raises:
        SpmdError: the mesh has several dims.
    """
    found = mesh_axes(device_mesh)
    if len(found.axes) != 1:
        fix = f"parallelize_module(module, device_mesh[{(device_mesh.mesh_dim_names or ('tp',))[-1]!r}], plan)"
        raise SpmdError(message(f"a plan needs a mesh of one axis, but {device_mesh} has {len(found.axes)}", fix=fix))
    if any(parameter.device.type == "cpu" for parameter in module.parameters()):
        module.to("jax")
    register_sharded_state_dict(module)
    return parallelize(style, module, found.mesh, found.names)


__all__ = ["apply_style", "distribute_module", "distribute_tensor", "from_local", "made_on_mesh"]

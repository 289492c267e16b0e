"""Layouts as DTensor placements, one per mesh axis, instead of a spec with one entry per dim.

    spmd.xla_distribute_tensor(w, device_mesh, [Shard(0), Replicate()])
    w.redistribute(device_mesh, [Replicate(), Shard(1)]).full_tensor()

`torch.distributed.tensor.distribute_tensor` and `distribute_module` call these two on a mesh of device type "xla" (see
`spmd.compat.torch_xla`). One process drives all devices, so a tensor is always the global one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.placement_types import Replicate

from mesh import Mesh, PartitionSpec, ShardingSpec, SpecError, entry_axes, split_largest_dim, without_axes
from spmd.base._errors import SpmdError, called_at, message
from spmd.base._wrong_arguments import require_module, require_options, require_parameters
from spmd.device._layout import annotation_of
from spmd.device._storage import buffer_of, load, recording
from spmd.rules import batch_over_other_axes
from spmd.sharding._annotate import as_mesh, checked_spec, mark_sharding, require_tensor
from spmd.sharding._device_mesh import is_of_devices, mesh_axes, root_of
from spmd.sharding._dtensor_placements import placements_of, spec_of_placements
from spmd.sharding._names import name_of
from spmd.sharding._tensor import XLAShardedTensor
from spmd.xla_names._functional import mark_sharding_with_gradients
from spmd.xla_names._global_mesh import mesh_or_global

_GIVEN = "_spmd_device_mesh"  # attribute of a tensor: the DeviceMesh that it was distributed over


def spec_from_placements(t: torch.Tensor, mesh: Any, placements: Sequence[Any] | None) -> ShardingSpec:
    """The ShardingSpec with the same meaning as DTensor placements, one per mesh axis; None: replicated.

    Raises:
        SpecError, SpmdError: from `spec_of_placements`.
    """
    if is_of_devices(mesh):
        return _spec_on_axes(t, mesh, placements)
    mesh = as_mesh(mesh)
    given = [Replicate()] * len(mesh.axis_names) if placements is None else placements
    return checked_spec(t, mesh, spec_of_placements(given, t.dim(), mesh.axis_names, lambda: name_of(t)))


def _spec_on_axes(t: torch.Tensor, device_mesh: Any, placements: Sequence[Any] | None) -> ShardingSpec:
    """The spec along the axes of a DeviceMesh, which may be part of a larger mesh.

    Along other axes `t` keeps its annotation. A computed value without one keeps its first dim, the batch, split over those axes that
    divide it.
    """
    found = mesh_axes(device_mesh)
    given = [Replicate()] * len(found.axes) if placements is None else placements
    names = tuple(map(str, device_mesh.mesh_dim_names or range(len(found.axes))))
    wanted = spec_of_placements(given, t.dim(), names, lambda: name_of(t))
    before = annotation_of(t)
    if before is not None and before.mesh == found.mesh:
        kept = without_axes(before.partition_spec, found.names)
    elif t.is_leaf:
        kept = PartitionSpec(*(None,) * t.dim())
    else:
        kept = batch_over_other_axes(tuple(t.shape), found.mesh, found.names)
    axes_by_name = dict(zip(names, found.axes, strict=True))
    new = ((axis for name in entry_axes(entry) for axis in axes_by_name[str(name)]) for entry in wanted)
    entries = (tuple((*entry_axes(old), *axes)) or None for old, axes in zip(kept, new, strict=True))
    return checked_spec(t, found.mesh, PartitionSpec(*entries))


def xla_distribute_tensor(tensor: torch.Tensor, device_mesh: Any, placements: Sequence[Any] | None = None) -> XLAShardedTensor:
    """Lay `tensor` out over `device_mesh` by DTensor placements, in place if it is on device 'jax', else as a new tensor there.

    Args:
        tensor: the global tensor; a leaf that requires a gradient stays one.
        device_mesh: a torch `DeviceMesh`, a `mesh.Mesh` or a `jax.sharding.Mesh`.
        placements: one `Shard` or `Replicate` per mesh axis; None: replicated.

    Raises:
        SpecError, SpmdError: from `spec_from_placements` and `mark_sharding`; SpmdError if `tensor` is no tensor, or a DTensor.
    """
    require_tensor(tensor, "xla_distribute_tensor", "spmd.xla_distribute_tensor(torch.as_tensor(value), mesh, placements)")
    if type(tensor).__name__ == "DTensor":
        raise SpmdError(message("a DTensor has one device's shard, not the global tensor", fix="pass tensor.full_tensor()"))
    if tensor.device.type != "jax":
        moved = tensor.detach().to("jax").requires_grad_(tensor.requires_grad)
        tensor = nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
    spec = spec_from_placements(tensor, device_mesh, placements)
    marked = mark_sharding(tensor, spec.mesh, spec.partition_spec)
    if is_of_devices(device_mesh):
        note_device_mesh(marked, device_mesh)
    return marked


def note_device_mesh(t: torch.Tensor, device_mesh: Any) -> None:
    """Make a marked tensor report its `placements` along this DeviceMesh, which is a part of its mesh."""
    vars(t)[_GIVEN] = device_mesh


def copy_device_mesh(source: torch.Tensor, target: torch.Tensor) -> None:
    """Make `target` report its `placements` along the DeviceMesh of `source`, if that was given one."""
    if _GIVEN in vars(source):
        note_device_mesh(target, vars(source)[_GIVEN])


Partition = Callable[[str, nn.Module, Any], None]


def xla_distribute_module(
    module: nn.Module,
    device_mesh: Any = None,
    partition_fn: Partition | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Lay out a module's parameters, inputs and outputs by three functions, like DTensor's `distribute_module`.

    Args:
        module: moved to device 'jax' if it is elsewhere.
        device_mesh: passed to the functions; None: the global mesh.
        partition_fn: called with (name, submodule, mesh) for every submodule; `auto_policy` chooses specs itself. None: nothing is
            marked, which replicates the parameters.
        input_fn: called with (module, inputs, mesh) before `forward`; its result replaces the inputs.
        output_fn: called with (module, outputs, mesh) after `forward`; its result replaces the outputs.

    Returns:
        The same module.

    Raises:
        SpmdError: `module` is no module, an argument is no function, or `input_fn` or `output_fn` takes neither three arguments nor
            two (without the module).
    """
    require_module(module, "xla_distribute_module", "spmd.xla_distribute_module(model, mesh, partition_fn)")
    functions = [("partition_fn", partition_fn), ("input_fn", input_fn), ("output_fn", output_fn)]
    require_options(functions, "spmd.xla_distribute_module")
    if partition_fn is not None:
        require_parameters(partition_fn, ("name", "module", "mesh"), "partition_fn of xla_distribute_module")
    mesh = mesh_or_global(device_mesh, "xla_distribute_module")
    before, after = (None if fn is None else _with_module(fn, name) for name, fn in functions[1:])
    module.to("jax")
    if partition_fn is not None:
        for name, submodule in module.named_modules():
            partition_fn(name, submodule, mesh)
    if before is not None:
        module.register_forward_pre_hook(lambda owner, inputs: before(owner, inputs, mesh))
    if after is not None:
        module.register_forward_hook(lambda owner, inputs, outputs: after(owner, outputs, mesh))
    return module


def auto_policy(mod_name: str, mod: nn.Module, mesh: Any) -> None:
    """A `partition_fn` that splits each parameter over all devices, along its largest dim that they divide.

    torch_xla's function of this name enabled a pass of XLA that existed only for a single TPU host.
    """
    mesh = as_mesh(mesh)
    for parameter in mod.parameters(recurse=False):
        if buffer_of(parameter).annotation is None:
            whole = (None,) * parameter.dim()
            mark_sharding(parameter, mesh, split_largest_dim(whole, parameter.shape, mesh, mesh.axis_names))


def _with_module(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    count = len(inspect.signature(fn).parameters)
    if count == 3:
        return fn
    if count == 2:
        return lambda owner, values, mesh: fn(values, mesh)
    raise SpmdError(message(f"{name} takes {count} arguments", fix=f"def {name}(module, {name[:-3]}s, device_mesh): ..."))


def redistribute(t: torch.Tensor, device_mesh: Any = None, placements: Sequence[Any] | None = None) -> XLAShardedTensor:
    """`XLAShardedTensor.redistribute`: a new tensor with the same values and another layout, which its gradient gets too."""
    mesh = device_mesh if device_mesh is not None else device_mesh_of(t)
    spec = spec_from_placements(t, mesh, placements)
    return mark_sharding_with_gradients(t, spec.mesh, spec.partition_spec)


def device_mesh_of(t: torch.Tensor) -> Any:
    """A torch `DeviceMesh` of the tensor's mesh: the one it was distributed over, else all of the mesh. It cannot communicate."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = _mesh_of(t)
    given = vars(t).get(_GIVEN)
    if given is not None and mesh_axes(given).mesh == mesh:
        return given
    known = root_of(mesh)
    if known is not None and mesh_axes(known).axes == tuple((name,) for name in mesh.axis_names):
        return known
    ids = torch.tensor(mesh.get_logical_mesh().tolist())
    return DeviceMesh("jax", ids, mesh_dim_names=mesh.axis_names, _init_backend=False, _rank=int(mesh.device_ids[0]))


def placements_of_tensor(t: torch.Tensor) -> tuple[Any, ...]:
    """`XLAShardedTensor.placements`: one placement per dim of its `device_mesh`."""
    spec, given = _spec_of(t), vars(t).get(_GIVEN)
    if given is None or mesh_axes(given).mesh != spec.mesh:
        return placements_of(spec)
    of_axis = dict(zip(spec.mesh.axis_names, placements_of(spec), strict=True))
    return tuple(of_axis[axes[0]] if axes else Replicate() for axes in mesh_axes(given).axes)


def _spec_of(t: torch.Tensor) -> ShardingSpec:
    is_traced = recording.get() is not None  # the value of another call may have another layout, so that of this one does not count
    spec = t.sharding_spec if isinstance(t, XLAShardedTensor) and not (is_traced and annotation_of(t) is None) else None
    if spec is not None:
        return spec
    if not is_traced:
        raise SpecError(message(f"{name_of(t)} has no sharding and so no placements", fix="mark it first, or pass device_mesh="))
    why = "it is not marked, and the compiler of a function chooses its layout"
    fix = "choose them, and keep them in a variable: t = t.redistribute(device_mesh, placements)"
    raise SpecError(message(f"the placements of {name_of(t)} are not known", why, *called_at(), fix=fix))


def _mesh_of(t: torch.Tensor) -> Mesh:
    """The mesh of the tensor's layout. An unmarked value in a compiled function has that of the function's tensors."""
    recorder = recording.get()
    if recorder is None or annotation_of(t) is not None:
        return _spec_of(t).mesh
    load(t)  # it is one of them
    mesh = recorder.only_mesh()
    if mesh is None:
        why, fix = (
            "the function's tensors are over no mesh, or over several",
            "t.redistribute(device_mesh, [Replicate()] * device_mesh.ndim)",
        )
        raise SpecError(message(f"the mesh of {name_of(t)} is not known", why, *called_at(), fix=fix))
    return mesh


def full_tensor(t: torch.Tensor) -> torch.Tensor:
    """`XLAShardedTensor.full_tensor`: a plain, replicated tensor."""
    return redistribute(t, _mesh_of(t)).as_subclass(torch.Tensor)


def _laid_out(t: torch.Tensor, mesh: Any, layout: Any) -> XLAShardedTensor:
    """Implements `XLAShardedTensor(t, mesh, layout)`: `mesh` is a mesh or a shape, `layout` a spec or placements."""
    if isinstance(mesh, tuple | list | torch.Size):
        shape = [int(size) for size in mesh]
        mesh = Mesh(range(math.prod(shape)), shape)
    if layout is None or any(hasattr(entry, "is_shard") for entry in layout):
        spec = spec_from_placements(t, mesh, layout)
        return mark_sharding(t, spec.mesh, spec.partition_spec)
    return mark_sharding(t, mesh, layout)


# Methods of DTensor that make sense for a global tensor. They are set here because the class is a floor below `mark_sharding`.
XLAShardedTensor.redistribute = lambda self, device_mesh=None, placements=None, *, async_op=False: redistribute(
    self, device_mesh, placements
)
XLAShardedTensor.full_tensor = lambda self, *, grad_placements=None: full_tensor(self)
XLAShardedTensor.to_local = lambda self, *, grad_placements=None: self  # one process drives all devices: the local tensor is the global one
XLAShardedTensor.placements = property(placements_of_tensor)
XLAShardedTensor.device_mesh = property(device_mesh_of)
XLAShardedTensor._lay_out = staticmethod(_laid_out)

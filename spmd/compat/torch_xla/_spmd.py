"""`torch_xla.distributed.spmd`: this package's names, with torch_xla's errors where programs rely on them."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from mesh import ShardingSpec as ShardingOnMesh
from mesh import ShardingType as ShardingType
from spmd.base._errors import SpmdError, message
from spmd.compat.torch_xla._dtensor_specs import wrap_as_sharded_tensor as wrap_as_sharded_tensor
from spmd.compat.torch_xla._meshes import HybridMesh as HybridMesh
from spmd.compat.torch_xla._meshes import Mesh as Mesh
from spmd.compat.torch_xla._meshes import get_1d_mesh as get_1d_mesh
from spmd.compat.torch_xla._meshes import op_sharding
from spmd.device._storage import Buffer, buffer_of, recording
from spmd.sharding import _annotate
from spmd.sharding._annotate import wrap_if_sharded as wrap_if_sharded
from spmd.sharding._shard import XLAShard as XLAShard
from spmd.sharding._tensor import XLAShardedTensor as XLAShardedTensor
from spmd.xla_names import _distribute
from spmd.xla_names._barrier import apply_backward_optimization_barrier as apply_backward_optimization_barrier
from spmd.xla_names._distribute import auto_policy as auto_policy
from spmd.xla_names._distribute import xla_distribute_module as xla_distribute_module
from spmd.xla_names._distribute import xla_distribute_tensor as xla_distribute_tensor
from spmd.xla_names._functional import annotate_custom_sharding as annotate_custom_sharding
from spmd.xla_names._functional import mark_sharding_with_gradients as mark_sharding_with_gradients
from spmd.xla_names._functional import shard_as as shard_as
from spmd.xla_names._global_mesh import get_global_mesh as get_global_mesh
from spmd.xla_names._global_mesh import set_global_mesh as set_global_mesh
from spmd.xla_names._linear import XLAPatchedLinear as XLAPatchedLinear
from spmd.xla_names._linear import xla_patched_nn_linear_forward as xla_patched_nn_linear_forward
from spmd.xla_names._manual import ManualTensor
from spmd.xla_names._manual import disable_manual_sharding as disable_manual_sharding
from spmd.xla_names._manual import enable_manual_sharding as enable_manual_sharding
from spmd.xla_names._sharding_spec import ShardingSpec as ShardingSpec

PartitionSpec = tuple  # torch_xla's name for a type; specs are written as tuples

# Buffers that were uploaded by their first mark: torch_xla's device data, whose annotation must be cleared before another one.
_device_data: weakref.WeakSet[Buffer] = weakref.WeakSet()


class AnnotationError(SpmdError, RuntimeError):
    """A tensor with one sharding was marked with another."""


def mark_sharding(t: torch.Tensor, mesh: Any, partition_spec: Any) -> XLAShardedTensor:
    """`spmd.mark_sharding`, except that the sharding of data must be cleared before it gets another, as in torch_xla.

    Raises:
        AnnotationError: it was not cleared (a RuntimeError).
        SpecError: the spec does not fit (an AssertionError too while the modules are installed).
    """
    if torch.compiler.is_dynamo_compiling() or t.device.type != "jax" or recording.get() is not None:
        return _annotate.mark_sharding(t, mesh, partition_spec)
    buffer = buffer_of(t)
    mesh = _annotate.as_mesh(mesh)
    spec = _annotate.checked_spec(t, mesh, partition_spec)
    op_sharding(mesh, partition_spec)  # counts new ones
    old = buffer.annotation
    if old is not None and old != spec and not old.is_replicated and buffer in _device_data:
        raise AnnotationError(
            message(
                "Existing annotation must be cleared first.",
                f"the old one is {old.to_xla()}, the new one {spec.to_xla()}",
                fix="xs.clear_sharding(t) first; spmd.mark_sharding moves the tensor without that",
            )
        )
    if buffer.host is not None:
        _device_data.add(buffer)
    return _annotate.mark_sharding(t, mesh, partition_spec)


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """`spmd.clear_sharding`."""
    if t.device.type == "jax":
        _device_data.discard(buffer_of(t))
    return _annotate.clear_sharding(t)


def unwrap_sharded_tensor(t: torch.Tensor) -> torch.Tensor:
    """The same tensor with the plain class; wrapping changes only the class."""
    return t.global_tensor if isinstance(t, XLAShardedTensor) else t


def manual_only(t: torch.Tensor) -> ManualTensor:
    """torch_xla's `_mark_manual_sharding`: returns `t` if it is manual, else raises."""
    if isinstance(t, ManualTensor):
        return t
    raise AnnotationError(message("a global tensor cannot be marked as manual", fix="xs.enable_manual_sharding(t, partition_spec)"))


def convert_to_xla_mesh(dt_mesh: Any) -> Mesh:
    """Convert a torch `DeviceMesh`."""
    return Mesh(dt_mesh.mesh.flatten().tolist(), tuple(dt_mesh.mesh.shape), dt_mesh.mesh_dim_names)


def convert_to_xla_partition_spec(tensor: torch.Tensor, placements: Any) -> tuple[Any, ...]:
    """Convert placements to a tuple of axis indices, one per dim."""
    count = max(1, len(placements))
    mesh = Mesh([0], (1,) * count)
    spec = _distribute.spec_from_placements(tensor.to("jax") if tensor.device.type != "jax" else tensor, mesh, placements)
    return tuple(tuple(map(int, e)) if isinstance(e, tuple) else None if e is None else int(e) for e in spec.partition_spec)


def apply_xla_patch_to_nn_linear(module: torch.nn.Module) -> torch.nn.Module:
    """The module, unchanged: `nn.Linear` is already lowered as the patch would do."""
    return module


def full_to_shard_shape(t: torch.Tensor) -> ManualTensor:
    """`torch_xla._XLAC._spmd_full_to_shard_shape`."""
    spec = buffer_of(t).annotation
    if spec is None:
        raise AnnotationError(message("a tensor without sharding has no shard shape", fix="mark it first: xs.mark_sharding(t, mesh, spec)"))
    return enable_manual_sharding(t, spec.partition_spec, mesh=spec.mesh)


def shard_to_full_shape(t: torch.Tensor, op_sharding: ShardingOnMesh, full_shape: Any, dtype: Any) -> XLAShardedTensor:
    """`torch_xla._XLAC._spmd_shard_to_full_shape`; `op_sharding` is the result of `mesh.get_op_sharding(spec)`."""
    if not isinstance(t, ManualTensor):
        raise AnnotationError(message("the tensor is not manual", fix="t = xs.enable_manual_sharding(t, partition_spec)"))
    return disable_manual_sharding(t, op_sharding.partition_spec, full_shape, mesh=op_sharding.mesh)


__all__ = [
    "HybridMesh",
    "Mesh",
    "PartitionSpec",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "XLAShard",
    "XLAShardedTensor",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "auto_policy",
    "clear_sharding",
    "convert_to_xla_mesh",
    "convert_to_xla_partition_spec",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "shard_as",
    "unwrap_sharded_tensor",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "xla_distribute_module",
    "xla_distribute_tensor",
    "xla_patched_nn_linear_forward",
]

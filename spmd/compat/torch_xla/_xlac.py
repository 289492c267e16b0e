"""`torch_xla._XLAC`: the queries of the C++ extension that torch_xla's documentation uses. Every other name is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mesh import ShardingSpec as ShardingOnMesh
from mesh import device_count
from spmd.compat.torch_xla import _spmd, _tensor_views
from spmd.xla_names._sharding_spec import ShardingSpec


def mark_by_op_sharding(t: Any, op_sharding: ShardingOnMesh) -> None:
    """`mark_sharding` by what `mesh.get_op_sharding(spec)` gave."""
    _spmd.mark_sharding(t, op_sharding.mesh, op_sharding.partition_spec)


QUERIES: dict[str, Callable[..., Any]] = {
    "OpSharding": ShardingSpec,
    "_get_xla_op_sharding": _tensor_views.layout,
    "_get_xla_sharding_spec": _tensor_views.sharding_text,
    "_get_xla_sharding_type": _tensor_views.sharding_type,
    "_get_xla_tensor_debug_info": _tensor_views.debug_info,
    "_mark_manual_sharding": _spmd.manual_only,
    "_spmd_full_to_shard_shape": _spmd.full_to_shard_shape,
    "_spmd_shard_to_full_shape": _spmd.shard_to_full_shape,
    "_xla_clear_sharding": _spmd.clear_sharding,
    "_xla_get_auto_sharding": lambda: False,
    "_xla_mark_sharding": mark_by_op_sharding,
    "_xla_num_runtime_devices": device_count,
}

"""`torch_xla._XLAC`: the queries of the C++ extension that torch_xla's documentation uses. Every other name is refused."""

from __future__ import annotations

from typing import Any

import mesh as mesh_
from spmd.compat.torch_xla._spmd import _mark_manual_sharding as _mark_manual_sharding
from spmd.compat.torch_xla._spmd import clear_sharding as _xla_clear_sharding  # noqa: F401
from spmd.compat.torch_xla._spmd import full_to_shard_shape as _spmd_full_to_shard_shape  # noqa: F401
from spmd.compat.torch_xla._spmd import shard_to_full_shape as _spmd_shard_to_full_shape  # noqa: F401
from spmd.compat.torch_xla._views import debug_info as _get_xla_tensor_debug_info  # noqa: F401
from spmd.compat.torch_xla._views import layout as _layout
from spmd.compat.torch_xla._views import sharding_text as _get_xla_sharding_spec  # noqa: F401
from spmd.compat.torch_xla._views import sharding_type as _get_xla_sharding_type  # noqa: F401


def _get_xla_op_sharding(t: Any) -> mesh_.ShardingSpec | None:
    return _layout(t)


def _xla_mark_sharding(t: Any, op_sharding: mesh_.ShardingSpec) -> None:
    from spmd.compat.torch_xla._spmd import mark_sharding

    mark_sharding(t, op_sharding.mesh, op_sharding.partition_spec)


def _xla_get_auto_sharding() -> bool:
    return False


def _xla_num_runtime_devices() -> int:
    return mesh_.device_count()

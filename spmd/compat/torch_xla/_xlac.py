"""`torch_xla._XLAC`: the queries of the C++ extension that programs use. All other names are refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from mesh import ShardingSpec as ShardingOnMesh
from mesh import device_count
from mesh.launch._xla_environment import check_env_flag
from spmd.base._convert import exact_dtypes
from spmd.base._errors import ShardError, message
from spmd.compat.torch_xla import _debug_metrics, _preemption_sync, _spmd, _step_ends, _tensor_views
from spmd.device._storage import Buffer, buffer_of
from spmd.program.lazy._region import Region, recording_mesh
from spmd.program.xla._target import platform_of
from spmd.xla_names._functional import annotate_custom_sharding
from spmd.xla_names._sharding_spec import ShardingSpec

_ids: weakref.WeakKeyDictionary[Buffer, int] = weakref.WeakKeyDictionary()


def mark_by_op_sharding(t: Any, op_sharding: ShardingOnMesh) -> None:
    """`mark_sharding` by a result of `mesh.get_op_sharding(spec)`."""
    _spmd.mark_sharding(t, op_sharding.mesh, op_sharding.partition_spec)


def tensor_id(t: torch.Tensor) -> int:
    """A number of the tensor's storage, unique in this process; a view has that of its base."""
    return _ids.setdefault(buffer_of(t), len(_ids) + 1)


def hlo_of(tensors: Sequence[torch.Tensor]) -> str:
    """HLO of the pending program for these tensors, before optimization. Tensors that have values are parameters.

    With `XLA_DUMP_POST_OPTIMIZATIONS=1` in the environment it is compiled, and the text is that after optimization.
    """
    pending = _pending_text([buffer_of(t) for t in tensors if t.device.type == "jax"])
    if pending is not None:
        return pending
    params = [f"  %p{i}.1 = {_shape(t)} parameter({i}){_sharding(t)}" for i, t in enumerate(tensors)]
    shapes, names = ", ".join(map(_shape, tensors)), ", ".join(f"%p{i}.1" for i in range(len(tensors)))
    root = f"  ROOT %tuple.1 = ({shapes}) tuple({names})"
    return "\n".join(["HloModule values", "", f"ENTRY %values () -> ({shapes}) {{", *params, root, "}", ""])


class _Shown(Region):
    """A program that is lowered but not compiled."""

    def note_lowered(self, program: Any) -> None:
        raise _LoweredText(program.compiler_ir("hlo").as_hlo_text())


class _LoweredText(Exception):
    """Carries the text out of the creation of a program that is not going to run."""


def _pending_text(buffers: Sequence[Buffer]) -> str | None:
    """HLO of the program that would compute these buffers' values now; None if none of them is pending."""
    recorded = next((lazy._recording for lazy in _step_ends._lazy), None)
    waiting = sorted({b.place_in_queue for b in buffers if b.is_waiting and b.queue is recorded})
    if recorded is None or not waiting:
        return None
    kind = Region if check_env_flag("XLA_DUMP_POST_OPTIMIZATIONS") else _Shown
    try:
        with exact_dtypes():
            return kind(recorded, waiting, frozenset(), platform_of(recording_mesh(recorded))).hlo()
    except _LoweredText as text:
        return str(text)


def _shape(t: torch.Tensor) -> str:
    return f"{_tensor_views.hlo_shape(t)}{{{','.join(map(str, reversed(range(t.dim()))))}}}"


def _sharding(t: torch.Tensor) -> str:
    text = _tensor_views.sharding_text(t)
    return f", sharding={text}" if text else ""


def from_cpu_shards(shards: Sequence[torch.Tensor], sharding: ShardingOnMesh, global_shape: Sequence[int] | None = None) -> torch.Tensor:
    """A sharded tensor from its shards, all of one shape, one per device in their order. Elements beyond `global_shape` are padding.

    Args:
        shards: CPU tensors.
        sharding: a result of `mesh.get_op_sharding(spec)`.
        global_shape: None: the total shape of the shards.

    Raises:
        ShardError: the number of shards differs from that of devices, or they do not fit the shape (a RuntimeError).
    """
    mesh, rank = sharding.mesh, len(sharding.partition_spec)
    piece = tuple(shards[0].shape) if shards else ()
    shape = tuple(piece) if global_shape is None else tuple(global_shape)
    fits = len(shards) == mesh.size() and len(piece) == len(shape) and all(tuple(s.shape) == piece for s in shards)
    spec = sharding if len(shape) == rank or not sharding.is_replicated else ShardingOnMesh(mesh, (None,) * len(shape))
    counts: tuple[int, ...] = ()
    if fits and len(spec.partition_spec) == len(shape):
        counts = spec.padded_shape((1,) * len(shape))  # number of shards along each dim
        shape = tuple(n * c for n, c in zip(piece, counts, strict=True)) if global_shape is None else shape
        # torch_xla's rule: each dim is as large as its shards, less at most what one row of devices can pad
        fits = all(size == n if c == 1 else n * c - c < size <= n * c for size, n, c in zip(shape, piece, counts, strict=True))
    else:
        fits = False
    if not fits:
        held = f"{len(shards)} shards of shape {piece}, {mesh.size()} devices"
        raise ShardError(
            message(f"the shards do not make up a tensor of shape {shape} with layout {sharding}", held, fix="pass one shard per device")
        )
    whole = torch.zeros([n * c for n, c in zip(piece, counts, strict=True)], dtype=shards[0].dtype)
    ordered = dict(zip(sorted(mesh.device_ids.tolist()), shards, strict=True))
    for device, held in zip(mesh.device_ids.tolist(), spec.shard_slices(tuple(whole.shape)), strict=True):
        whole[held.slices] = ordered[device]
    inside = whole[tuple(slice(size) for size in shape)]
    return _spmd.mark_sharding(inside.to("jax"), mesh, spec.partition_spec)


def local_shards(tensors: Sequence[torch.Tensor]) -> list[list[tuple[torch.Tensor, str]]]:
    """(CPU data, device) of every local shard, for each tensor."""
    return [[(shard.data, shard.shard_device) for shard in _tensor_views.shards(t)] for t in tensors]


def replica_and_indices(tensors: Sequence[torch.Tensor]) -> list[list[tuple[int, Any]]]:
    """(replica id, indices) of every local shard, for each tensor. Nothing is fetched."""
    return [[(shard.replica_id, shard.indices) for shard in _tensor_views.shards(t)] for t in tensors]


def set_matmul_precision(precision: str) -> None:
    """Set jax's matmul precision: "default", "high" or "highest"."""
    jax.config.update("jax_default_matmul_precision", precision)


def matmul_precision() -> str:
    config: Any = jax.config
    return config.jax_default_matmul_precision or "default"


QUERIES: dict[str, Callable[..., Any]] = {
    "OpSharding": ShardingSpec,
    "_activate_preemption_sync_manager": _preemption_sync.activate,
    "_deactivate_preemption_sync_manager": _preemption_sync.deactivate,
    "_ensure_xla_coordinator_initialized": lambda global_rank=0, world_size=1, master_addr="", port="": None,  # jax has its own
    "_get_local_shard_replica_and_indices": replica_and_indices,
    "_get_local_shards": local_shards,
    "_get_xla_op_sharding": _tensor_views.layout,
    "_get_xla_sharding_spec": _tensor_views.sharding_text,
    "_get_xla_sharding_type": _tensor_views.sharding_type,
    "_get_xla_tensor_debug_info": _tensor_views.debug_info,
    "_get_xla_tensors_hlo": hlo_of,
    "_global_tensor_from_cpu_shards": from_cpu_shards,
    "_mark_manual_sharding": _spmd.manual_only,
    "_spmd_full_to_shard_shape": _spmd.full_to_shard_shape,
    "_spmd_shard_to_full_shape": _spmd.shard_to_full_shape,
    "_sync_point_reached": _preemption_sync.sync_point_reached,
    "_xla_annotate_custom_sharding": lambda t, sharding: annotate_custom_sharding(t, sharding.mesh, sharding.partition_spec),
    "_xla_clear_sharding": _spmd.clear_sharding,
    "_xla_get_auto_sharding": lambda: False,
    "_xla_get_cpu_tensors": lambda tensors: [t.detach().cpu().as_subclass(torch.Tensor) for t in tensors],
    "_xla_get_mat_mul_precision": matmul_precision,
    "_xla_get_tensor_id": tensor_id,
    "_xla_mark_sharding": mark_by_op_sharding,
    "_xla_metrics_report": _debug_metrics.metrics_report,
    "_xla_num_runtime_devices": device_count,
    "_xla_set_mat_mul_precision": set_matmul_precision,
}

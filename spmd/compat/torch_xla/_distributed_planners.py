"""`SPMDSavePlanner` and `SPMDLoadPlanner`: torch's distributed checkpoints of sharded tensors, saved shard by shard.

    dist_cp.save(state_dict, storage_writer=FileSystemWriter(path, per_thread_copy_ahead=0), planner=SPMDSavePlanner())
    dist_cp.load(state_dict, storage_reader=FileSystemReader(path), planner=SPMDLoadPlanner())      # any other layout

The files are DCP's own, with global offsets, so a checkpoint can be loaded into any other layout, or without one.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections import ChainMap
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    create_default_global_load_plan,
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import find_state_dict_object

from spmd.base._torch import pytree
from spmd.base._torch_late import plan_parts
from spmd.compat.torch_xla._tensor_views import layout, shards
from spmd.sharding._annotate import wrap_if_sharded
from spmd.sharding._shard import XLAShard
from spmd.sharding._tensor import XLAShardedTensor


@dataclasses.dataclass
class _CpuShards:
    """The local shards of a sharded tensor, on the CPU."""

    shards: list[XLAShard]
    global_shape: torch.Size


def _is_sharded_tensor(x: Any) -> bool:
    """Whether `x` is split over a mesh."""
    spec = layout(x) if isinstance(x, XLAShardedTensor) else None
    return spec is not None and not spec.is_replicated


def _sharded_cpu_state_dict(state_dict: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
    """The state with `_CpuShards` for sharded tensors and CPU tensors for others, to be saved while training continues."""

    def on_cpu(t: torch.Tensor) -> Any:
        wrapped = wrap_if_sharded(t)
        if not _is_sharded_tensor(wrapped):
            return t.detach().cpu().as_subclass(torch.Tensor).clone() if t.device.type == "cpu" else _host(t)
        held = shards(wrapped)
        for shard in held:
            shard.data = shard.data.clone()  # fetched now, into memory of its own
        return _CpuShards(held, wrapped.shape)

    return pytree.tree_map_only(torch.Tensor, on_cpu, state_dict)


def _host(t: torch.Tensor) -> torch.Tensor:
    return t.detach().as_subclass(torch.Tensor).cpu()


def _separated(state_dict: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """(sharded, other, mappings): the state flattened by name, and its nesting."""
    flat, mappings = plan_parts().flatten_state_dict(state_dict)
    wrapped = {name: wrap_if_sharded(value) for name, value in flat.items()}
    is_sharded = {name: _is_sharded_tensor(value) or isinstance(value, _CpuShards) for name, value in wrapped.items()}
    plain = {name: v.as_subclass(torch.Tensor) if isinstance(v, XLAShardedTensor) else v for name, v in wrapped.items()}
    return (
        {name: value for name, value in wrapped.items() if is_sharded[name]},
        {name: value for name, value in plain.items() if not is_sharded[name]},
        mappings,
    )


def _chunk(shard: XLAShard) -> ChunkStorageMetadata:
    indices: Any = shard.indices
    return ChunkStorageMetadata(offsets=torch.Size([s.start for s in indices]), sizes=torch.Size([s.stop - s.start for s in indices]))


class SPMDSavePlanner(SavePlanner):
    """Plans a `dist_cp.save` of a state with sharded tensors, on the device or as `_CpuShards`. Replicas are written once."""

    def __init__(self) -> None:
        self.is_coordinator = False
        self.mappings: Any = None
        self.sharded_state_dict: dict[str, Any] = {}
        self.unsharded_state_dict: dict[str, Any] = {}
        self._local_shards: dict[str, list[XLAShard]] = {}

    def set_up_planner(self, state_dict: Any, is_coordinator: bool = False, storage_meta: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.is_coordinator = is_coordinator
        self.sharded_state_dict, self.unsharded_state_dict, self.mappings = _separated(state_dict)

    def create_local_plan(self) -> SavePlan:
        plan = create_default_local_save_plan(self.unsharded_state_dict, self.is_coordinator)
        items = [item for name in self.sharded_state_dict for item in self._write_items(name)]
        return dataclasses.replace(plan, items=[*plan.items, *items], planner_data=self.mappings)

    def _write_items(self, name: str) -> list[WriteItem]:
        value, held = self.sharded_state_dict[name], self._shards(name)
        size = value.global_shape if isinstance(value, _CpuShards) else value.shape
        dtype = held[0].data.dtype if isinstance(value, _CpuShards) else value.dtype
        items: list[WriteItem] = []
        for position, shard in enumerate(held):
            chunk = _chunk(shard)
            if shard.replica_id == 0 and math.prod(chunk.sizes):
                data = TensorWriteData(chunk, TensorProperties(dtype=dtype), size)
                items.append(WriteItem(MetadataIndex(name, chunk.offsets, position), WriteItemType.SHARD, tensor_data=data))
        return items

    def _shards(self, name: str) -> list[XLAShard]:
        if name not in self._local_shards:
            value = self.sharded_state_dict[name]
            self._local_shards[name] = value.shards if isinstance(value, _CpuShards) else shards(value)
        return self._local_shards[name]

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(plan_parts().dedup_save_plans(all_plans), rewrite_index_hints=False)
        return plans, dataclasses.replace(metadata, planner_data=dict(ChainMap(*(plan.planner_data for plan in plans))))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self.transform_object(write_item, self.lookup_object(write_item.index))

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value of an entry, or a shard without padding."""
        if index.fqn in self.unsharded_state_dict:
            return self.unsharded_state_dict[index.fqn]
        assert index.index is not None
        return self._shards(index.fqn)[index.index].unpadded_data

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """A tensor on the CPU, or the pickle of any other value."""
        if write_item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save(object, buffer)
            return buffer
        return _host(object) if object.device.type != "cpu" else object


class SPMDLoadPlanner(LoadPlanner):
    """Plans a `dist_cp.load` into a state with sharded tensors, in place and shard by shard."""

    def __init__(self) -> None:
        self.metadata: Any = None
        self.is_coordinator = False
        self.original_state_dict: Any = None
        self.mappings: Any = None
        self.sharded_state_dict: dict[str, Any] = {}
        self.unsharded_state_dict: dict[str, Any] = {}
        self._local_shards: dict[str, list[XLAShard]] = {}
        self._pending: dict[str, int] = {}  # number of elements still to be loaded

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.metadata, self.is_coordinator, self.original_state_dict = metadata, is_coordinator, state_dict
        self.sharded_state_dict, self.unsharded_state_dict, self.mappings = _separated(state_dict)

    def create_local_plan(self) -> LoadPlan:
        plan = create_default_local_load_plan(self.unsharded_state_dict, self.metadata)
        return dataclasses.replace(plan, items=[*plan.items, *(i for name in self.sharded_state_dict for i in self._read_items(name))])

    def _read_items(self, name: str) -> list[ReadItem]:
        saved: Any = self.metadata.state_dict_metadata[name]
        chunks = [_chunk(shard) for shard in shards(self.sharded_state_dict[name])]
        return [item for item in create_read_items_for_chunk_list(name, saved, chunks) if math.prod(item.lengths)]

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return create_default_global_load_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # As in torch's own planner, this unpickles data of whoever wrote the checkpoint.
        plan_parts().set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], torch.load(value, weights_only=False))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor, or the shard on the CPU, into which an entry of the checkpoint is loaded."""
        if index.fqn in self.unsharded_state_dict:
            return find_state_dict_object(self.unsharded_state_dict, index)
        if index.fqn not in self._local_shards:
            self._local_shards[index.fqn] = held = shards(self.sharded_state_dict[index.fqn])
            self._pending[index.fqn] = sum(shard.unpadded_data.numel() for shard in held)
        assert index.index is not None
        return self._local_shards[index.fqn][index.index].data

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """The part of the tensor that this read fills."""
        return _narrowed(tensor, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Store the new values of a sharded tensor after its last part was read."""
        name = read_item.dest_index.fqn
        if name not in self.sharded_state_dict:
            return
        self._pending[name] -= math.prod(read_item.lengths)
        assert self._pending[name] >= 0, f"{name} was filled twice"
        if not self._pending[name]:
            self.sharded_state_dict[name].load_local_shards_(self._local_shards.pop(name))


def _narrowed(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size) if size < tensor.size(dim) else tensor
    return tensor

"""Properties of sharded tensors as torch_xla's programs expect them: a string for the sharding, a tuple for the spec, lists of slices.

They replace properties of `XLAShardedTensor` while the modules are installed. Code of this package still gets the original ones.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import EllipsisType
from typing import Any

import torch

from mesh import ShardingSpec, ShardingType
from spmd.base._jax import is_tracer
from spmd.compat.torch_xla._caller import is_user
from spmd.device._storage import buffer_of, is_whole
from spmd.sharding._shard import XLAShard
from spmd.sharding._tensor import XLAShardedTensor, sharding_of
from spmd.xla_names._manual import ManualTensor


def enter(stack: ExitStack) -> None:
    """Replace the properties until `stack` closes."""
    for name, seen in (("sharding_spec", sharding_text), ("partition_spec", spec_tuple), ("local_shards", shards)):
        ours: Any = XLAShardedTensor.__dict__[name]
        setattr(XLAShardedTensor, name, property(_by_caller(ours.fget, seen)))
        stack.callback(setattr, XLAShardedTensor, name, ours)


def _by_caller(ours: Any, seen: Any) -> Any:
    return lambda self: seen(self) if is_user(1) else ours(self)


def layout(t: torch.Tensor) -> ShardingSpec | None:
    """The annotation of `t`, else the layout of its value if that is split, else None."""
    if t.device.type != "jax":
        return None
    buffer = buffer_of(t)
    buffer.settle()
    is_marked = buffer.annotation is not None and is_whole(t, buffer)
    if not is_marked and (buffer.value is None or is_tracer(buffer.value)):
        return None  # still on the host, and `sharding_of` would upload it, or a value inside a program
    found = sharding_of(t)
    return None if found is not None and found.is_replicated and not is_marked else found


def sharding_text(t: torch.Tensor) -> str:
    """`torch_xla._XLAC._get_xla_sharding_spec(t)`: "{devices=[2,4]0,1,...}", "{replicated}", "{manual}", or "" if it has none."""
    if isinstance(t, ManualTensor):
        return "{manual}"
    spec = layout(t)
    return "" if spec is None else spec.to_xla()


def sharding_type(t: torch.Tensor) -> ShardingType | None:
    """`torch_xla._XLAC._get_xla_sharding_type(t)`: None if it has no sharding."""
    if isinstance(t, ManualTensor):
        return ShardingType.MANUAL
    spec = layout(t)
    if spec is None:
        return None
    return ShardingType.REPLICATED if spec.is_replicated else spec.sharding_type


def spec_tuple(t: torch.Tensor) -> tuple[Any, ...] | None:
    """The partition spec as a tuple; axes that the program did not name are given by index."""
    spec = layout(t)
    if spec is None:
        return None
    unnamed = spec.mesh.axis_names == tuple(map(str, range(len(spec.mesh.axis_names))))
    shown = (lambda axis: int(axis)) if unnamed else (lambda axis: axis)
    return tuple(
        tuple(map(shown, entry)) if isinstance(entry, tuple) else None if entry is None else shown(entry) for entry in spec.partition_spec
    )


def shards(t: torch.Tensor) -> list[XLAShard]:
    """The local shards with torch_xla's indices: `...` for a replicated tensor, else a list of full slices."""
    ours: Any = XLAShardedTensor(t.detach())
    held: list[XLAShard] = _local_shards(ours)
    spec = layout(t)
    whole = spec is None or spec.is_replicated
    for position, shard in enumerate(held):
        if whole:
            shard.indices, shard.replica_id = ..., position
        elif not isinstance(shard.indices, EllipsisType):
            shard.indices = [slice(*s.indices(size)) for s, size in zip(shard.indices, t.shape, strict=True)]
    return held


def _local_shards(t: Any) -> list[XLAShard]:
    return t.local_shards


def debug_info(t: torch.Tensor) -> str:
    """`torch_xla._XLAC._get_xla_tensor_debug_info(t)`: device and layout of the value."""
    buffer = buffer_of(t)
    buffer.settle()
    if buffer.value is None and buffer.host is not None and buffer.annotation is None:
        return f"XLATensor {{\nDevice: SPMD:0\nIR: None\nXLAData: None\nTensor on host: with size {list(t.shape)}\n}}"
    spec = layout(t)
    lines = ["Data Device: SPMD:0", f"Data Shape: {hlo_shape(t)}"]
    if spec is not None:
        lines += [f"OpSharding: {spec.to_xla()}", f"NumShards: {spec.mesh.size()}"]
    kind = "XLAShardedData" if spec is not None else "XLAData"
    data = "".join(f"    {line}\n" for line in lines)
    return f"XLATensor {{\nDevice: SPMD:0\nIR: xla::device_data\nXLAData: \n  {kind}(\n{data}  )\nTensor on host: None\n}}"


_HLO_TYPES = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "bool": "pred"}


def hlo_shape(t: torch.Tensor) -> str:
    """Dtype and shape as XLA writes them: "f32[8,16]"."""
    name = str(t.dtype).removeprefix("torch.")
    kind = _HLO_TYPES.get(name) or name.replace("uint", "u").replace("int", "s").replace("complex", "c")
    return f"{kind}[{','.join(map(str, t.shape))}]"

"""Loads shards into a tensor, each on its own device: `XLAShardedTensor.load_local_shards_`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from spmd.base._convert import exact_dtypes, host_array, to_numpy_dtype
from spmd.base._errors import ShardError, message
from spmd.device._storage import buffer_of, is_whole, load, store
from spmd.sharding._names import name_of
from spmd.sharding._shard import XLAShard


def load_shards(tensor: torch.Tensor, shards: Sequence[XLAShard]) -> None:
    """Replace the values of `tensor` by those of `shards`; see `XLAShardedTensor.load_local_shards_`."""
    value = buffer_of(tensor).raw() if is_whole(tensor, buffer_of(tensor)) else load(tensor)
    if value.sharding.is_fully_replicated:
        raise _wrong(tensor, "it is replicated, so it has no shards", "copy the whole tensor: t.copy_(values)")
    held = {f"{s.device.platform.upper()}:{s.device.id}": s for s in value.addressable_shards}
    given: dict[str, Any] = {}
    for shard in shards:
        if shard.shard_device not in held or shard.shard_device in given:
            raise _wrong(
                tensor, f"device {shard.shard_device} has no shard of it, or was given two", f"pass one shard for each of {list(held)}"
            )
        given[shard.shard_device] = _piece(tensor, shard, held[shard.shard_device].data)
    missing = [device for device in held if device not in given]
    if missing:
        raise _wrong(tensor, f"no shard for {', '.join(missing)}", "pass all of t.local_shards")
    first: dict[str, np.ndarray[Any, Any]] = {}
    for device, array in given.items():
        original = first.setdefault(str(held[device].index), array)
        if original.tobytes() != array.tobytes():
            raise _wrong(
                tensor, f"device {device} got other values than another copy of the same shard", "give all its copies the same values"
            )
    with exact_dtypes():
        pieces = [jax.device_put(array, held[device].device) for device, array in given.items()]
        store(tensor, jax.make_array_from_single_device_arrays(value.shape, value.sharding, pieces))


def _piece(tensor: torch.Tensor, shard: XLAShard, old: Any) -> np.ndarray[Any, Any]:
    if tuple(shard.data.shape) != old.shape or to_numpy_dtype(shard.data.dtype) != old.dtype:
        found = (
            f"the shard for {shard.shard_device} is {shard.data.dtype} {list(shard.data.shape)}, expected {tensor.dtype} {list(old.shape)}"
        )
        raise _wrong(tensor, found, "give every shard the shape and dtype that it has in t.local_shards")
    return host_array(shard.data.cpu())


def _wrong(tensor: torch.Tensor, why: str, fix: str) -> ShardError:
    return ShardError(message(f"these shards cannot be loaded into {name_of(tensor)}", why, fix=fix))

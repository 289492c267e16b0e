"""`XLAShard` and `load_local_shards_`: a tensor's pieces out of it and back in; on any number of devices."""

from typing import Any

import pytest
import torch

import mesh
import spmd
from spmd.base import _counters
from tests.grids import grid, line
from tests.oracle import array_of, assert_same, batch

SPLIT = [
    (("data", "model"), grid),
    (("model", None), grid),
    ((None, "data"), grid),
    (("data", None), line),
    (((("data", "model")), None), grid),
]


@pytest.mark.parametrize(("spec", "where"), SPLIT, ids=[str(spec) for spec, _ in SPLIT])
def test_changed_shards_go_back_to_their_devices(spec: Any, where: Any) -> None:
    host = batch(8, 16)
    tensor = spmd.mark_sharding(host.to("jax"), where(), spec)
    if tensor.sharding_spec.is_replicated:
        with pytest.raises(spmd.ShardError, match="it is replicated"):
            tensor.load_local_shards_(tensor.local_shards)
        return
    shards = tensor.local_shards
    for shard in shards:
        shard.data *= -2
    before = array_of(tensor).sharding
    tensor.load_local_shards_(list(reversed(shards)))
    assert_same(tensor, host * -2)
    assert array_of(tensor).sharding == before
    assert all(torch.equal(shard.unpadded_data, (host * -2)[shard.indices]) for shard in tensor.local_shards)


@pytest.mark.multidevice(num=2)
def test_wrong_shards_are_refused_and_change_nothing() -> None:
    host = batch(8, 16)
    tensor = spmd.mark_sharding(host.to("jax"), line(), ("data", None))
    shards = tensor.local_shards
    cases: list[tuple[list[Any], str]] = [
        (shards[:-1], f"no shard for CPU:{mesh.device_count() - 1}"),
        ([*shards, shards[0]], "or was given two"),
        ([spmd.XLAShard(shards[0].data, ..., "TPU:9", 0), *shards[1:]], "device TPU:9 has no shard"),
        ([spmd.XLAShard(torch.zeros(1), s.indices, s.shard_device, 0) for s in shards], r"the shard for CPU:0 is torch.float32 \[1\]"),
        ([spmd.XLAShard(s.data.double(), s.indices, s.shard_device, 0) for s in shards], "torch.float64"),
    ]
    for given, message in cases:
        with pytest.raises(RuntimeError, match=message):
            tensor.load_local_shards_(given)
    assert_same(tensor, host)


@pytest.mark.multidevice(num=4)
def test_copies_of_a_piece_must_agree() -> None:
    tensor = spmd.mark_sharding(batch(8, 16).to("jax"), grid(), (None, "model"))
    shards = tensor.local_shards
    shards[0].data += 1
    with pytest.raises(spmd.ShardError, match="other values than another copy"):
        tensor.load_local_shards_(shards)


def test_a_shard_keeps_what_it_fetched_and_can_be_made() -> None:
    tensor = spmd.mark_sharding(batch(8, 16).to("jax"), line(), ("data", None))
    shard = tensor.local_shards[0]
    _counters.reset()
    assert shard.data is shard.data and _counters.snapshot() == {"host_reads": 1}
    shard.unpadded_data = torch.zeros_like(shard.data)
    assert shard.data.abs().sum() == 0 and tensor.cpu().abs().sum() > 0
    made = spmd.XLAShard(torch.arange(6).reshape(2, 3), [slice(4, 5), slice(0, 3)], "CPU:1", 2)
    assert made.unpadded_data.tolist() == [[0, 1, 2]] and made.replica_id == 2
    assert repr(made) == "XLAShard([4:5, 0:3], replica_id=2, device=CPU:1)"
    assert repr(spmd.XLAShard(torch.zeros(2), ..., "CPU:0", 0)) == "XLAShard([all], replica_id=0, device=CPU:0)"
    assert spmd.XLAShard(torch.zeros(2), ..., "CPU:0", 0).unpadded_data.shape == (2,)

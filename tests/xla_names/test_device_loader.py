"""`MpDeviceLoader`: batches laid out as they arrive, errors where they belong; on any number of devices."""

import collections
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import mesh
import spmd
from spmd.base import _counters
from tests.grids import grid, line
from tests.oracle import array_of, assert_same, batch


def dataset(size: int = 32) -> TensorDataset:
    return TensorDataset(batch(size, 3, 4), torch.arange(size))


def spec(*entries: Any, **options: Any) -> spmd.ShardingSpec:
    return spmd.ShardingSpec(line(), entries, **options)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_every_epoch_gives_every_batch_laid_out(prefetch: int) -> None:
    loader = DataLoader(dataset(), batch_size=8)
    device = spmd.MpDeviceLoader(loader, "jax", input_sharding=spec("data", None, None), device_prefetch_size=prefetch)
    assert len(device) == 4
    for _ in range(2):
        count = 0
        for (x, y), (want_x, want_y) in zip(device, loader, strict=True):
            assert isinstance(x, spmd.XLAShardedTensor) and x.partition_spec == ("data", None, None)
            assert type(y) is torch.Tensor and y.device.type == "jax"
            assert_same((x, y), (want_x, want_y))
            count += 1
        assert count == 4


def test_each_tensor_of_a_dict_has_its_own_layout() -> None:
    batches = [{"x": batch(8, 4), "y": torch.arange(8), "name": "first"}]
    shardings = {"x": spmd.ShardingSpec(grid(), ("data", "model")), "y": spec("data")}
    (out,) = list(spmd.MpDeviceLoader(batches, "jax", input_sharding=shardings))
    assert out["x"].partition_spec == ("data", "model") and out["y"].partition_spec == ("data",) and out["name"] == "first"
    assert_same(out["x"], batches[0]["x"])
    for wrong in ([batch(8, 4)], {"x": batch(8, 4)}):
        with pytest.raises(spmd.SpmdError, match="does not fit the batch"):
            list(spmd.MpDeviceLoader([wrong], input_sharding=shardings))


class Encoding(collections.UserDict[str, Any]):
    """A mapping of a class of its own, as tokenizers give it."""

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


@pytest.mark.parametrize("sharding", [None, "spec", "dict"])
def test_a_mapping_of_its_own_class_stays_one_and_its_tensors_move(sharding: str | None) -> None:
    batches = [Encoding(ids=batch(8, 4), mask=torch.ones(8))]
    given = {None: None, "spec": spec("data", None), "dict": {"ids": spec("data", None)}}[sharding]
    (out,) = list(spmd.MpDeviceLoader(batches, input_sharding=given))
    assert type(out) is Encoding and out.mask.device.type == "jax" and batches[0].ids.device.type == "cpu"
    assert sharding is None or out.ids.partition_spec == ("data", None)
    assert_same(out.ids, batches[0].ids)


def test_each_device_gets_its_rows_only() -> None:
    _counters.reset()
    (x,) = list(spmd.MpDeviceLoader([batch(8, 4)], input_sharding=spec("data", None)))
    assert _counters.snapshot() == {"uploads": 1, "upload_bytes": 8 * 4 * 4}
    assert {s.data.shape for s in array_of(x).addressable_shards} == {(8 // mesh.device_count(), 4)}


def test_a_minibatch_is_this_hosts_part() -> None:
    (x, y) = next(iter(spmd.MpDeviceLoader([(batch(8, 4), torch.arange(8))], input_sharding=spec("data", None, minibatch=True))))
    assert x.partition_spec == ("data", None) and x.sharding_spec.minibatch
    assert_same((x, y), (batch(8, 4), torch.arange(8)))


@pytest.mark.multidevice(num=2)
def test_a_minibatch_that_the_devices_do_not_divide_is_refused() -> None:
    rows = mesh.device_count() - 1
    with pytest.raises(RuntimeError, match=rf"per-host batch size must be divisible(?s:.*)\({rows}, 4\)"):
        list(spmd.MpDeviceLoader([batch(rows, 4)], input_sharding=spec("data", None, minibatch=True)))


def test_errors_of_the_loader_arrive_where_it_is_iterated() -> None:
    def failing() -> Any:
        yield batch(8, 4)
        raise OSError("disk")

    class Source:
        def __iter__(self) -> Any:
            return failing()

    out = iter(spmd.MpDeviceLoader(Source(), device_prefetch_size=4))
    assert_same(next(out), batch(8, 4))
    with pytest.raises(OSError, match="disk"):
        next(out)
    with pytest.raises(spmd.SpmdError, match="has no option colour"):
        spmd.MpDeviceLoader([], colour=1)


def test_leaving_an_epoch_early_stops_reading() -> None:
    read: list[int] = []

    class Source:
        def __iter__(self) -> Any:
            for i in range(100):
                read.append(i)
                yield batch(8)

    for _ in spmd.MpDeviceLoader(Source(), device_prefetch_size=2, batchdim=0, loader_prefetch_size=16):
        break
    assert len(read) <= 4


def test_a_spec_says_what_it_fits_and_marks_it() -> None:
    x = batch(8, 4).to("jax")
    assert spec("data", None).can_apply(x) and not spec("data").can_apply(x)
    spec("data", None).apply(x)
    assert spmd.wrap_if_sharded(x).partition_spec == ("data", None)
    assert spec("data", None) == mesh.ShardingSpec(line(), ("data", None)) and isinstance(spec("data"), mesh.ShardingSpec)

"""`from_dlpack`: the same memory on both sides, pieces as one sharded tensor, and what cannot be shared."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import mesh
import spmd
from tests.grids import grid
from tests.oracle import array_of, assert_same, batch


def aligned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers on the CPU, at an address that XLA takes as it is."""
    room = torch.zeros(int(np.prod(shape)) * dtype.itemsize + 64, dtype=torch.uint8)
    start = -room.data_ptr() % 64
    return room[start : start + int(np.prod(shape)) * dtype.itemsize].view(dtype).view(shape).copy_(batch(*shape).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool], ids=str)
def test_it_is_the_same_memory_both_ways(dtype: torch.dtype) -> None:
    host = aligned(8, 4, dtype=dtype)
    x = spmd.from_dlpack(host)
    assert (x.device.type, x.dtype) == ("jax", dtype)
    assert array_of(x).unsafe_buffer_pointer() == host.data_ptr()
    assert_same(x, host)
    back = torch.from_dlpack(array_of(x))
    assert (back.data_ptr(), back.dtype) == (host.data_ptr(), dtype)


def test_arrays_of_numpy_and_strides_that_jax_has() -> None:
    host = aligned(8, 4)
    assert_same(spmd.from_dlpack(host.numpy()), host)
    transposed = spmd.from_dlpack(host.t())
    assert array_of(transposed).unsafe_buffer_pointer() == host.data_ptr()
    assert_same(transposed, host.t())


def test_torch_and_programs_write_to_memory_of_their_own() -> None:
    host = aligned(8, 4)
    before = host.clone()
    x = spmd.from_dlpack(host)
    step = spmd.compile(lambda x: x.add_(1))
    for _ in range(2):
        step(x)
    assert_same(x, before + 2)
    spmd.from_dlpack(host).zero_()
    assert_same(host, before)


def test_to_copies_as_torch_promises() -> None:
    host = aligned(8, 4)
    before = host.clone()
    x = host.to("jax")
    host.zero_()
    assert_same(x, before)


def test_pieces_become_one_sharded_tensor() -> None:
    m = grid()
    rows, columns = m.mesh_shape
    pieces = [aligned(2, 3) + i for i in range(rows * columns)]
    x = spmd.from_dlpack(pieces, m, ("data", "model"))
    assert isinstance(x, spmd.XLAShardedTensor) and x.partition_spec == ("data", "model")
    assert_same(x.global_tensor, torch.cat([torch.cat(pieces[r * columns : (r + 1) * columns], 1) for r in range(rows)]))
    first = array_of(x).addressable_shards[0].data
    assert first.unsafe_buffer_pointer() == pieces[0].data_ptr() == torch.from_dlpack(first).data_ptr()


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "requires grad": (lambda: spmd.from_dlpack(aligned(2).requires_grad_()), r"cannot be shared with JAX(?s:.*)require gradient"),
    "gaps": (lambda: spmd.from_dlpack(aligned(4, 4)[:, :2]), r"cannot be shared with JAX(?s:.*)to\('jax'\)"),
    "alignment": (lambda: spmd.from_dlpack(aligned(65)[1:]), r"cannot be shared with JAX(?s:.*)aligned to 64 bytes"),
    "on the device": (lambda: spmd.from_dlpack(torch.ones(2, device="jax")), "use the tensor itself"),
    "pieces": (lambda: spmd.from_dlpack([aligned(2)] * (mesh.device_count() + 1), grid(), ("data",)), "one shard per device"),
}


@pytest.mark.parametrize(("call", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_shared_says_why(call: Callable[[], object], text: str) -> None:
    with pytest.raises(spmd.SpmdError, match=text):
        call()

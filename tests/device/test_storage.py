"""What a device tensor's storage holds: one buffer under all aliases, on the host until it is used, padded where dims are uneven."""

import jax
import numpy as np
import pytest
import torch

import mesh
import spmd
from spmd.base._errors import DroppedValueError
from spmd.device._storage import Buffer, buffer_of, is_device_tensor, is_unset, is_whole, load, store, wrap


def test_aliases_and_views_share_one_buffer_and_see_a_write() -> None:
    base = torch.zeros(2, 3).to("jax")
    aliases = base.detach(), base.data, base.view(6), base[1]
    assert {id(buffer_of(alias)) for alias in aliases} == {id(buffer_of(base))}
    store(base[1], jax.numpy.ones(3, np.float32))
    assert base.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert aliases[2].tolist() == [0, 0, 0, 1, 1, 1]


def test_value_stays_on_the_host_until_it_is_used() -> None:
    tensor = torch.arange(4.0).to("jax")
    buffer = buffer_of(tensor)
    assert buffer.value is None and buffer.host is not None
    assert load(tensor).tolist() == [0, 1, 2, 3]
    assert buffer.host is None and isinstance(buffer.value, jax.Array)


def test_empty_tensor_is_unset_until_it_is_written() -> None:
    tensor = torch.empty(3, device="jax")
    assert is_unset(buffer_of(tensor))
    tensor.fill_(1)
    assert not is_unset(buffer_of(tensor))


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda t: t, True),
        (lambda t: t.detach(), True),
        (lambda t: t.t(), False),
        (lambda t: t[1:], False),
        (lambda t: t.reshape(6), False),
        (lambda t: t.conj(), False),
    ],
    ids=["itself", "alias", "transposed", "slice", "reshaped", "conjugate"],
)
def test_whole_is_the_root_as_it_is(view: object, expected: bool) -> None:
    tensor = torch.ones(2, 3, dtype=torch.complex64).to("jax")
    assert callable(view) and is_whole(view(tensor), buffer_of(tensor)) == expected


def test_wrap_gives_a_tensor_of_the_arrays_shape_and_dtype() -> None:
    array = jax.numpy.ones((2, 3), jax.numpy.bfloat16)
    tensor = wrap(array)
    assert is_device_tensor(tensor) and tensor.shape == (2, 3) and tensor.dtype == torch.bfloat16
    assert buffer_of(tensor).get() is array
    assert not is_device_tensor(torch.ones(1)) and not is_device_tensor(array)


@pytest.mark.multidevice(num=8)
def test_uneven_dim_is_padded_in_storage_and_nowhere_else(mesh_4x2: mesh.Mesh) -> None:
    tensor = spmd.mark_sharding(torch.arange(6.0).to("jax"), mesh_4x2, ("data",))
    buffer = buffer_of(tensor)
    assert (buffer.shape, buffer.stored, buffer.raw().shape, buffer.get().shape) == ((6,), (8,), (8,), (6,))
    buffer.set(jax.numpy.zeros(6, np.float32))
    assert buffer.raw().shape == (8,) and tensor.tolist() == [0] * 6


def test_annotations_are_counted(mesh_4x2: mesh.Mesh) -> None:
    tensor = torch.ones(8).to("jax")
    before = Buffer.marks
    spmd.mark_sharding(tensor, mesh_4x2, ("data",))
    assert Buffer.marks == before + 1
    tensor.add_(1)
    assert Buffer.marks == before + 1


def test_dropped_value_says_why() -> None:
    buffer = Buffer(None, (2,))
    buffer.dropped = "the program did not keep it"
    with pytest.raises(DroppedValueError, match="the program did not keep it"):
        buffer.get()
    with pytest.raises(DroppedValueError, match="the program did not keep it"):
        _ = buffer.dtype
    buffer.set(jax.numpy.ones(2))
    assert buffer.get().tolist() == [1, 1]


def test_tensor_without_a_value_says_how_to_make_one() -> None:
    bare = torch._C._acc.create_empty_tensor((2,), torch.float32)  # type: ignore[attr-defined]
    with pytest.raises(spmd.SpmdError, match=r"shape \(2,\) on device 'jax' has no value\n  fix: create it with torch's factory functions"):
        buffer_of(bare)

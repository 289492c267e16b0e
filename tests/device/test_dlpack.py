"""DLPack hands out a copy on the host or says why not; no protocol gives an address without memory."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

import mesh
import spmd
from spmd.base._torch import torch_at_least

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("take", [np.from_dlpack, torch.from_dlpack, jax.dlpack.from_dlpack], ids=["numpy", "torch", "jax"])
def test_values_and_dtype_arrive(take: Callable[[Any], Any], dtype: torch.dtype) -> None:
    host = torch.arange(6).reshape(2, 3).to(dtype)
    with jax.enable_x64(True):
        for x, want in ((host.to("jax"), host), (host.to("jax").t()[1:], host.t()[1:])):
            got = take(x)
            assert np.asarray(got).dtype == want.numpy().dtype
            assert np.array_equal(np.asarray(got), want.numpy())


def test_bfloat16_arrives_in_torch() -> None:
    x = torch.arange(4).bfloat16()
    assert torch.equal(torch.from_dlpack(x.to("jax")), x)


def test_capsules_of_the_old_form_hold_the_values() -> None:
    x = torch.arange(4.0)
    for capsule in (torch.to_dlpack(x.to("jax")), x.to("jax").__dlpack__(), torch._C._to_dlpack(x.to("jax"))):
        assert torch.equal(torch.from_dlpack(capsule), x)


def test_a_split_tensor_arrives_whole(mesh_4x2: mesh.Mesh) -> None:
    x = spmd.mark_sharding(torch.arange(12.0).reshape(4, 3).to("jax"), mesh_4x2, ("data", None))
    assert np.array_equal(np.from_dlpack(x.detach()), np.arange(12.0, dtype=np.float32).reshape(4, 3))


def test_what_numpy_gets_is_read_only_and_a_copy() -> None:
    x = torch.zeros(3, device="jax")
    got = np.from_dlpack(x)
    assert not got.flags.writeable
    x.add_(1)
    assert got.tolist() == [0, 0, 0]
    assert x.tolist() == [1, 1, 1]


def test_read_only_may_be_asked_for_where_torch_knows_the_word() -> None:
    errors: list[str] = []
    for device in ("cpu", "jax"):
        x = torch.ones(3, device=device)
        if torch_at_least("2.14"):
            assert torch.equal(torch.from_dlpack(x.__dlpack__(read_only=False)), torch.ones(3))
            assert torch.equal(torch.from_dlpack(x.__dlpack__(max_version=(1, 0), read_only=True)), torch.ones(3))
            asked, error = {"read_only": True}, BufferError
        else:
            asked, error = {"read_only": True, "max_version": (1, 0)}, TypeError
        with pytest.raises(error, match="read_only") as raised:
            x.__dlpack__(**asked)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.__dlpack__(copy=False),
        lambda x: np.from_dlpack(x, copy=False),
        lambda x: torch.from_dlpack(x, copy=False),
        lambda x: x.__dlpack__(dl_device=(2, 0)),
    ],
)
def test_sharing_instead_of_copying_is_refused(ask: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(BufferError, match=r"cannot be exported(.|\n)*fix: leave out copy= and device=, or pass tensor.cpu\(\)"):
        ask(torch.zeros(3, device="jax"))


def test_a_tensor_that_requires_grad_is_refused_as_on_the_cpu() -> None:
    for device in ("cpu", "jax"):
        with pytest.raises(BufferError, match="Can't export tensors that require gradient"):
            torch.zeros(3, device=device, requires_grad=True).__dlpack__()


def test_inside_a_compiled_function_there_is_no_value() -> None:
    @spmd.compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * torch.from_dlpack(x).sum()

    with pytest.raises(spmd.TraceError, match="a value that only the compiled program will have"):
        f(torch.zeros(3, device="jax"))


@pytest.mark.parametrize("ask", [lambda x: x.numpy(), lambda x: x.__cuda_array_interface__, lambda x: x.__array_interface__, memoryview])
def test_no_other_protocol_hands_out_memory(ask: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises((TypeError, AttributeError)):
        ask(torch.zeros(3, device="jax"))


def test_cpu_tensors_still_share_their_memory() -> None:
    x = torch.zeros(3)
    np.from_dlpack(x)[0] = 1
    torch.from_dlpack(x)[1] = 2
    assert x.tolist() == [1, 2, 0]

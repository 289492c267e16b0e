"""Storages of the device are made, read and written by torch's own methods, as on the CPU: C++ would read memory that is not here."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mesh
import spmd

pytestmark = [pytest.mark.multidevice(num=8), pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")]
USES: dict[str, Callable[[Any], Any]] = {
    "a size": lambda x: torch.UntypedStorage(4, device=x.device).nbytes(),
    "empty": lambda x: torch.UntypedStorage(device=x.device).tolist(),
    "bytes": lambda x: torch.UntypedStorage([1, 2], device=x.device).tolist(),
    "typed": lambda x: torch.TypedStorage(4, device=x.device, dtype=torch.float32).fill_(2).tolist(),
    "for a worker's batch": lambda x: x._typed_storage()._new_shared(2, device=x.device).nbytes(),
    "list": lambda x: x.untyped_storage().tolist(),
    "item": lambda x: [x.untyped_storage()[i] for i in (6, -2)],
    "set item": lambda x: x.untyped_storage().__setitem__(3, 63),
    "fill": lambda x: x.untyped_storage().fill_(0).tolist(),
    "copy from the CPU": lambda x: x.untyped_storage().copy_(torch.ones(4).untyped_storage()).tolist(),
    "copy to the CPU": lambda x: torch.zeros(4).untyped_storage().copy_(x.untyped_storage()).tolist(),
    "byteswap": lambda x: x.untyped_storage().byteswap(torch.float32),
    "deepcopy": lambda x: copy.deepcopy(x.untyped_storage()).fill_(1).tolist(),
    "out of range": lambda x: x.untyped_storage()[99],
    "no int": lambda x: x.untyped_storage()[1.5],
    "set out of range": lambda x: x.untyped_storage().__setitem__(99, 1),
    "set slice": lambda x: x.untyped_storage().__setitem__(slice(2, 4), 63),
    "set slice with a step": lambda x: x.untyped_storage().__setitem__(slice(0, 4, 2), 63),
    "set no int": lambda x: x.untyped_storage().__setitem__(0, 1.5),
    "set more than a byte": lambda x: x.untyped_storage().__setitem__(0, 300),
    "fill with a negative": lambda x: x.untyped_storage().fill_(-1).nbytes(),
    "fill with no int": lambda x: x.untyped_storage().fill_(1.5),
    "size in a tensor": lambda x: torch.UntypedStorage(torch.tensor(3), device=x.device).nbytes(),
    "no size": lambda x: torch.UntypedStorage(1.5, device=x.device),
    "more than bytes": lambda x: torch.UntypedStorage([300, True], device=x.device).tolist(),
    "copy of no storage": lambda x: x.untyped_storage().copy_(3),
    "another size": lambda x: x.untyped_storage().copy_(torch.ones(3).untyped_storage()),
}


def outcome(use: Callable[[Any], Any], x: torch.Tensor) -> tuple[Any, list[float]]:
    try:
        found = use(x)
    except (IndexError, RuntimeError, TypeError) as error:
        found = type(error), str(error)
    return found, x.cpu().untyped_storage().tolist()


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_as_on_the_cpu(use: Callable[[Any], Any]) -> None:
    assert repr(outcome(use, torch.arange(4.0).to("jax"))) == repr(outcome(use, torch.arange(4.0)))  # NaN is itself


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("use", ["list", "set item", "fill", "deepcopy"])
def test_of_every_dtype(use: str, dtype: torch.dtype) -> None:
    def made(device: str) -> torch.Tensor:
        return torch.tensor([1, 0, 2]).to(dtype).to(device)

    assert repr(outcome(USES[use], made("jax"))) == repr(outcome(USES[use], made("cpu")))


def test_a_sharded_and_padded_storage_is_filled() -> None:
    grid = mesh.Mesh(range(4), (4,), ("data",))
    x: Any = spmd.mark_sharding(torch.arange(6.0).to("jax"), grid, ("data",))
    x.untyped_storage().fill_(0)
    assert x.tolist() == [0.0] * 6


def test_what_an_array_cannot_do_is_refused() -> None:
    x = torch.arange(4.0).to("jax")
    with pytest.raises(spmd.SpmdError, match="a storage on device 'jax' cannot be sliced"):
        x.untyped_storage()[:2]
    with pytest.raises(RuntimeError, match="the storage of a tensor on device 'jax' cannot be one on device 'cpu'"):
        torch.empty(0, device="jax").set_(torch.ones(3).untyped_storage())

"""A forked process refuses the devices of the process that it was forked from, instead of crashing or waiting for ever."""

import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import mesh
import spmd

pytestmark = pytest.mark.multidevice(num=8)

double = spmd.compile(lambda x: x * 2)
linear = torch.nn.Linear(4, 4).to("jax")


@spmd.compile
def made() -> torch.Tensor:
    return torch.ones(3, device="jax")


def ones(x: torch.Tensor) -> torch.Tensor:
    return made()


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "operator": lambda x: x + 1,
    "in place": lambda x: x.add_(1),
    "number": lambda x: x[0].item(),
    "branch": lambda x: bool(x[0]),
    "list": lambda x: x.tolist(),
    "equal": lambda x: torch.equal(x, x.clone()),
    "host copy": lambda x: x.cpu(),
    "text": repr,
    "device copy": lambda x: torch.ones(3).to("jax"),
    "draw": lambda x: torch.rand(3, device="jax"),
    "compiled": double,
    "compiled, without state": ones,
    "mark": lambda x: spmd.mark_sharding(x, mesh.Mesh(range(8), (8,), ("data",)), (None,)),
    "jax array": spmd.to_jax,
    "gradient of a module": lambda x: linear(x).sum().backward(),
    "storage": lambda x: x.untyped_storage().tolist(),
    "save": lambda x: pickle.dumps(x),
    "wait": lambda x: torch.accelerator.synchronize(),
}


def answers(x: torch.Tensor) -> list[str]:
    """What the child says of each use, through a pipe: it must not run this process's tests any further."""
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # jax's, of forks
        child = os.fork()
    if child == 0:
        told = []
        for name, use in USES.items():
            try:
                told.append(f"{name}: {type(use(x)).__name__}")
            except RuntimeError as error:
                told.append(f"{name}: {error}".splitlines()[0])
        os.write(writes, "\n".join(told).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text.splitlines()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system")
def test_every_use_of_the_devices_is_refused_in_a_fork() -> None:
    x = torch.arange(4.0).to("jax")
    assert double(x).tolist() == [0.0, 2.0, 4.0, 6.0] and ones(x).tolist() == [1.0] * 3
    says = "device 'jax' cannot be used in a forked process: it has none of the threads that run the devices"
    assert answers(x) == [f"{name}: {says}" for name in USES]
    assert (x + 1).tolist() == [1.0, 2.0, 3.0, 4.0]  # this process goes on


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_worker_of_a_data_loader_raises_it_for_tensors_on_the_devices() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4.0).to("jax")), batch_size=2, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match="cannot be used in a forked process"):
        list(loader)

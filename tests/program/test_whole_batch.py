"""A training step whose batch nobody split is said once, at its first compile; one that is split, anywhere, is not."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mesh
import spmd

pytestmark = [pytest.mark.multidevice(num=8), pytest.mark.filterwarnings("error")]
FIX = r"every device along 'data' .* in step: no argument is split over (.|\n)*fix: spmd.mark_sharding\(x, mesh, \('data', None\)\)"


def made(m: mesh.Mesh, prepare: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> Any:
    model = nn.Linear(8, 8).to("jax")
    spmd.shard_module(model, m, [("weight", ("model", None)), ("bias", None)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(prepare(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_a_batch_that_lies_whole_on_every_device_is_said_once(mesh_4x2: mesh.Mesh) -> None:
    step = made(mesh_4x2)
    with pytest.warns(UserWarning, match=FIX):
        step(torch.randn(16, 8).to("jax"))
    step(torch.randn(32, 8).to("jax"))
    assert step.num_traces == 2


def test_a_batch_from_the_host_is_whole_too(mesh_4x2: mesh.Mesh) -> None:
    with pytest.warns(UserWarning, match="every device along 'data'"):
        made(mesh_4x2, lambda x: x.to("jax"))(torch.randn(16, 8))


@pytest.mark.parametrize("where", ["argument", "inside", "too small", "no axis for batches"])
def test_what_is_split_or_cannot_be_is_no_news(where: str, mesh_4x2: mesh.Mesh) -> None:
    m = mesh.Mesh(range(8), (4, 2), ("expert", "model")) if where == "no axis for batches" else mesh_4x2
    inside = where == "inside"
    step = made(m, (lambda x: spmd.mark_sharding(x, m, ("data", None))) if inside else lambda x: x)
    x = torch.randn(2 if where == "too small" else 16, 8).to("jax")
    if where == "argument":
        spmd.mark_sharding(x, m, ("data", None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x)

"""Megatron training, compiled: equal to torch on the CPU, the collectives of the program written by hand, the same on every mesh."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import mesh
import spmd
from benchmarks import megatron

WIDTH, HIDDEN, BATCH = 1024, 4096, 64


def shard(model: nn.Module, grid: mesh.Mesh) -> nn.Module:
    """Column parallel up, row parallel down, over the axis `model`."""
    specs = {"up.weight": ("model", None), "up.bias": ("model",), "down.weight": (None, "model")}
    for name, parameter in model.named_parameters():
        if name in specs:
            spmd.mark_sharding(parameter, grid, specs[name])
    return model


def pair(grid: mesh.Mesh) -> tuple[nn.Module, nn.Module, Any, Any]:
    """(on the CPU, on the mesh, CPU batch, sharded batch)."""
    torch.manual_seed(0)
    host = megatron.MLP(WIDTH, HIDDEN)
    batch = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    sharded = [spmd.mark_sharding(t.to("jax"), grid, ("data", None)) for t in batch]
    return host, shard(copy.deepcopy(host).to("jax"), grid), batch, sharded


@pytest.mark.multidevice(num=8)
def test_outputs_and_gradients_equal_torch(mesh_4x2: mesh.Mesh) -> None:
    host, device, batch, sharded = pair(mesh_4x2)

    def forward_backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        out = model(x)
        F.mse_loss(out, y).backward()
        return out

    expected = forward_backward(host, *batch)
    out = spmd.compile(lambda x, y: forward_backward(device, x, y), keep_grads=True)(*sharded)
    torch.testing.assert_close(out.cpu(), expected)
    for p, q in zip(device.parameters(), host.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-4, atol=1e-7)  # sums over 4096 elements in another order


@pytest.mark.multidevice(num=8)
def test_fifty_adamw_steps_equal_torch_in_one_executable(mesh_4x2: mesh.Mesh) -> None:
    host, device, batch, sharded = pair(mesh_4x2)
    on_host, on_device = megatron.torch_step(host), spmd.compile(megatron.torch_step(device))
    losses = [on_device(*sharded) for _ in range(50)]
    expected = [on_host(*batch).item() for _ in range(50)]
    assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-5)
    for p, q in zip(device.parameters(), host.parameters(), strict=True):
        # Where a gradient is as small as its rounding error, a step of Adam (1e-3 long) may differ: seen 2e-5 at most, mean 1e-8.
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-5, atol=1e-4)
        assert (p.detach().cpu() - q.detach()).abs().mean() < 1e-7
    assert (on_device.num_executables, on_device.retraces) == (1, [])


@pytest.mark.multidevice(num=8)
def test_collectives_and_flops_are_those_of_jax_by_hand(mesh_4x2: mesh.Mesh) -> None:
    found = megatron.contenders(mesh_4x2, WIDTH, HIDDEN, BATCH, 1)
    found["ours"].step()
    ours, hand = (found[name].facts() for name in ("ours", "jax") if found[name].facts is not None)
    assert ours["collectives"] == hand["collectives"] == {"all-reduce over data": 1, "all-reduce over model": 1}
    assert ours["flops"] == hand["flops"]


def dropout_losses(grid: mesh.Mesh | None) -> list[float]:
    """Losses of ten steps with dropout; without a mesh everything lies on one device."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": nn.Linear(32, 64), "drop": nn.Dropout(0.3), "down": nn.Linear(64, 32)})
    x, y = torch.randn(16, 32), torch.randn(16, 32)
    model = model.to("jax")
    x, y = x.to("jax"), y.to("jax")
    if grid is not None:
        shard(model, grid)
        spmd.mark_sharding(x, grid, ("data", None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @spmd.compile
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model["down"](model["drop"](F.gelu(model["up"](x)))), y)
        loss.backward()
        optimizer.step()
        return loss

    torch.manual_seed(1)
    losses = [step(x, y) for _ in range(10)]
    assert (step.num_executables, step.retraces) == (1, [])
    return [loss.item() for loss in losses]


GRIDS: dict[str, Callable[[], mesh.Mesh]] = {
    f"{data}x{model}": lambda data=data, model=model: mesh.Mesh(range(data * model), (data, model), ("data", "model"))
    for data, model in [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (8, 1), (4, 2), (2, 4), (1, 8)]
}


@pytest.fixture(scope="module")
def one_device_losses() -> list[float]:
    return dropout_losses(None)


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("name", GRIDS)
def test_losses_do_not_depend_on_the_mesh_with_dropout_on(name: str, one_device_losses: list[float]) -> None:
    assert dropout_losses(GRIDS[name]()) == pytest.approx(one_device_losses, rel=1e-5)

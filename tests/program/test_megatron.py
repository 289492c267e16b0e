"""Megatron training, compiled: equal to torch on the CPU, the collectives of the program written by hand, the same on every mesh."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import mesh
import spmd
from benchmarks import megatron
from spmd.program.xla import _hlo
from tests.oracle import array_of, assert_reordered, assert_same

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
    host = megatron.MLP(megatron.Config(width=WIDTH, hidden=HIDDEN))
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
        assert_same(p.grad, q.grad)
        assert (p.grad.cpu() - q.grad).abs().max() < 1e-9  # they are small: the table's atol would say little


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("steps", [15, pytest.param(50, marks=pytest.mark.slow)])
def test_adamw_steps_equal_torch_in_one_executable(steps: int, mesh_4x2: mesh.Mesh) -> None:
    host, device, batch, sharded = pair(mesh_4x2)
    exact = copy.deepcopy(host).double()
    on_host, on_device, exactly = train_step_of(host), spmd.compile(train_step_of(device)), train_step_of(exact)
    losses = [on_device(*sharded) for _ in range(steps)]
    expected = [on_host(*batch).item() for _ in range(steps)]
    for _ in range(steps):
        exactly(*(t.double() for t in batch))
    assert_reordered([loss.item() for loss in losses], expected)
    for p, q, r in zip(device.parameters(), host.parameters(), exact.parameters(), strict=True):
        # Where a gradient is as small as its rounding error, a step of Adam (1e-3 long) is as good as any other. So what counts is
        # that float32 here is no worse than float32 there: their distances from float64.
        ours, cpus = (float((t.detach().cpu().double() - r.detach()).norm()) for t in (p, q))
        assert ours < 2 * cpus, f"{ours:.1e} from float64, CPU torch {cpus:.1e}"
    assert (on_device.num_executables, on_device.retraces) == (1, [])


def train_step_of(model: nn.Module) -> Callable[..., torch.Tensor]:
    optimizer = megatron.optimizer(model.parameters())

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = megatron.loss(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return train_step


def step_by_hand(params: Any, x: jax.Array, y: jax.Array) -> Any:
    """Gradients and an update in JAX: the products and the collectives are those of the step, whatever the optimizer."""

    def loss_of(params: Any) -> jax.Array:
        hidden = jax.nn.gelu(x @ params["up"].T + params["up_bias"], approximate=False)
        return jnp.mean(jnp.square(hidden @ params["down"].T + params["down_bias"] - y))

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), loss


@pytest.mark.multidevice(num=8)
def test_collectives_and_flops_are_those_of_jax_by_hand(mesh_4x2: mesh.Mesh) -> None:
    _, device, _, sharded = pair(mesh_4x2)
    step = spmd.compile(train_step_of(device))
    step(*sharded)
    arrays = {"up": device.up.weight, "up_bias": device.up.bias, "down": device.down.weight, "down_bias": device.down.bias}
    whole = mesh.ShardingSpec(mesh_4x2, (None,)).to_jax()
    params = {
        name: jax.device_put(array_of(p.detach().as_subclass(spmd.XLAShardedTensor)), whole if name == "down_bias" else None)
        for name, p in arrays.items()
    }
    placed = {name: value.sharding for name, value in params.items()}
    hand = jax.jit(step_by_hand, out_shardings=(placed, None)).lower(params, *(array_of(t) for t in sharded)).compile().as_text()
    assert hand is not None
    theirs = _hlo.collectives(hand, tuple(mesh_4x2.axis_names), tuple(mesh_4x2.mesh_shape)).by_axis()
    assert step.collectives().by_axis() == theirs == {("all-reduce", ("data",)): 1, ("all-reduce", ("model",)): 1}
    assert step.flops() == _hlo.flops(hand)


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
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in ("1x1", "8x1", "2x4") else [pytest.mark.slow]) for n in GRIDS])
def test_losses_do_not_depend_on_the_mesh_with_dropout_on(name: str, one_device_losses: list[float]) -> None:
    assert dropout_losses(GRIDS[name]()) == pytest.approx(one_device_losses, rel=1e-5)

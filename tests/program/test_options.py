"""`spmd.compile`'s options: several steps per call, stale constants found, the module with the first NaN named."""

import ctypes
import types
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mesh
import spmd
from tests.oracle import assert_reordered


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.25), nn.GELU(), nn.Linear(16, 4)).to("jax")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


def test_n_steps_per_call_equal_n_calls(mesh_4x2: mesh.Mesh) -> None:
    xs, ys = torch.randn(6, 8, 8), torch.randn(6, 8, 4)
    results = []
    for steps in (1, 3):
        model, _, step = make()
        spmd.mark_sharding(model[0].weight, mesh_4x2, ("model", None))
        compiled = spmd.compile(step, steps_per_call=steps)
        torch.manual_seed(7)
        losses = []
        for start in range(0, 6, steps):
            x, y = xs[start : start + steps].to("jax"), ys[start : start + steps].to("jax")
            if steps == 1:
                x, y = x[0], y[0]
            else:
                x = spmd.mark_sharding(x, mesh_4x2, (None, "data", None))
            losses += compiled(x, y).reshape(-1).tolist()
        assert (compiled.num_executables, compiled.retraces) == (1, [])
        results.append((losses, [p.detach().cpu() for p in model.parameters()]))
    assert_reordered(results[0][0], results[1][0])
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert_reordered(a, b)


def test_steps_per_call_refuses_what_is_not_stacked(mesh_4x2: mesh.Mesh) -> None:
    _, _, step = make()
    compiled = spmd.compile(step, steps_per_call=4)
    with pytest.raises(spmd.SpmdError, match="stacked along a first dim of 4"):
        compiled(torch.randn(8, 8).to("jax"), torch.randn(8, 4).to("jax"))
    stacked = spmd.mark_sharding(torch.randn(4, 8, 8).to("jax"), mesh_4x2, ("data", None, None))
    with pytest.raises(spmd.SpmdError, match="is the step and cannot be sharded"):
        compiled(stacked, torch.randn(4, 8, 4).to("jax"))


@pytest.mark.parametrize("write", ["count", "log", "tensor", "argument"])
def test_steps_per_call_refuses_writes_to_python(write: str) -> None:
    held = types.SimpleNamespace(count=0, log=[], tensor=None, seen=False)

    def step(x: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        held.seen = True  # the same in every step
        if write == "count":
            held.count += 1
        elif write == "log":
            held.log.append(1)
        elif write == "tensor":
            held.tensor = x
        elif write == "argument":
            batch["y"] = x
        return x * 2

    stack = torch.ones(3, 2).to("jax")
    with pytest.raises(spmd.TraceError, match=r"steps_per_call > 1 writes to a Python object"):
        spmd.compile(step, steps_per_call=3)(stack, {"x": stack})
    write = "nothing"
    assert spmd.compile(step, steps_per_call=3)(stack, {"x": stack}).shape == (3, 2)
    assert held.seen


def test_check_finds_a_stale_constant_and_leaves_state_alone() -> None:
    weight, length = torch.ones(3).to("jax"), ctypes.CDLL(None).strlen
    text = ctypes.create_string_buffer(b"ab", 9)
    address = ctypes.c_void_p(ctypes.addressof(text))

    @spmd.compile(check=True)
    def scaled() -> torch.Tensor:
        weight.mul_(float(length(address)))  # what a function in C reads at an address is not guarded
        return weight.sum()

    assert scaled().item() == 6.0
    assert scaled().item() == 12.0
    text.value = b"abc"
    with pytest.raises(spmd.TraceError, match=r"(?s)scaled now traces to a different program.*2\.0.*3\.0"):
        scaled()
    assert weight.tolist() == [4.0, 4.0, 4.0]


def test_check_finds_a_stale_constant_of_a_jax_function() -> None:
    length, text = ctypes.CDLL(None).strlen, ctypes.create_string_buffer(b"ab", 9)
    address = ctypes.c_void_p(ctypes.addressof(text))

    @spmd.compile(check=True)
    def scaled(x: torch.Tensor) -> torch.Tensor:
        table = np.full(3, length(address), np.float32)
        return spmd.call_jax(jax.jit(lambda x: x * table), (x,))

    assert scaled(torch.ones(3).to("jax")).tolist() == scaled(torch.ones(3).to("jax")).tolist() == [2.0, 2.0, 2.0]
    text.value = b"abc"
    with pytest.raises(spmd.TraceError, match=r"(?s)scaled now traces to a different program.*2\. 2\..*3\. 3\."):
        scaled(torch.ones(3).to("jax"))


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_check_takes_a_parameter_that_the_first_call_lays_out(optimizer: Any) -> None:
    linear = torch.nn.Linear(6, 3).to("jax")
    opt = optimizer(linear.parameters(), lr=0.1)

    @spmd.compile(check=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = linear(x).pow(2).mean()
        loss.backward()
        opt.step()
        return loss

    grid = mesh.Mesh(range(8), (2, 4), ("data", "model"))
    for _ in range(3):
        step(spmd.mark_sharding(torch.ones(8, 6).to("jax"), grid, ("data", None)))
    assert step.num_traces == 1


def test_debug_nans_names_the_first_module_and_keeps_the_state() -> None:
    model, optimizer, step = make()
    compiled = spmd.compile(step, debug_nans=True)
    x, y = torch.randn(4, 8).to("jax"), torch.randn(4, 4).to("jax")
    compiled(x, y)
    before = [p.detach().cpu() for p in model.parameters()]
    with torch.no_grad():
        model[3].weight.fill_(float("inf"))
    with pytest.raises(spmd.NonFiniteError, match="output of module '3' is not finite"):
        compiled(x, y)
    assert torch.isinf(model[3].weight.cpu()).all()
    torch.testing.assert_close(model[0].weight.detach().cpu(), before[0])
    assert optimizer.state[model[0].weight]["step"].item() == 1.0

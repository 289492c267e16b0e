"""Step counters that are equal are one in a compiled program, and stay right when they are not. See Note [Equal counters]."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import spmd
from spmd.device._storage import buffer_of
from tests.oracle import assert_same_model, descend

ADAM: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}
X = torch.linspace(-1, 1, 12).reshape(3, 4)


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    return host, copy.deepcopy(host).to("jax")


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: descend(model, optimizer, x)


def counters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [buffer_of(s["step"]).value for s in optimizer.state.values()]


@pytest.mark.parametrize("name", ADAM)
def test_training_equals_torch_with_one_executable(name: str) -> None:
    host, device = pair()
    on_host = step_of(host, ADAM[name](host.parameters()))
    on_device = spmd.compile(step_of(device, ADAM[name](device.parameters())))
    for _ in range(5):
        assert on_device(X.to("jax")).item() == pytest.approx(on_host(X).item(), rel=1e-5)
    assert_same_model(device, host)
    assert (on_device.num_executables, on_device.retraces) == (1, [])


def test_parameters_share_one_counter_and_its_bias_corrections() -> None:
    _, device = pair()
    optimizer = ADAM["AdamW"](device.parameters())
    step = spmd.compile(step_of(device, optimizer))
    step(X.to("jax"))
    assert len(set(map(id, counters(optimizer)))) == 1
    assert step.hlo().count(" power(") <= 3  # two of beta ** step, one square root


def test_counters_set_apart_between_steps_are_seen() -> None:
    host, device = pair()
    optimizers = ADAM["AdamW"](host.parameters()), ADAM["AdamW"](device.parameters())
    on_host, on_device = step_of(host, optimizers[0]), spmd.compile(step_of(device, optimizers[1]))
    for number in range(4):
        if number == 2:
            for optimizer in optimizers:
                next(iter(optimizer.state.values()))["step"].fill_(40.0)
        on_host(X)
        on_device(X.to("jax"))
    assert_same_model(device, host)
    assert on_device.num_executables == 2
    assert "step counters" in on_device.retraces[0]


def test_counters_of_parameters_that_take_turns() -> None:
    """Two programs of one optimizer: in one of them half the parameters have no gradient, so their counters stand still."""
    host, device = pair()
    calls: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
    for model, compiled in ((host, False), (device, True)):
        optimizer = ADAM["AdamW"](model.parameters())
        whole = step_of(model, optimizer)

        def half(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model[2](torch.cat([x, x[:, :1]], dim=1)).square().mean().backward()
            optimizer.step()

        calls.append((spmd.compile(whole), spmd.compile(half)) if compiled else (whole, half))
    for number in (0, 1, 1, 0, 1, 0, 0):
        calls[0][number](X)
        calls[1][number](X.to("jax"))
        assert_same_model(device, host)


def test_eager_step_after_a_compiled_one() -> None:
    host, device = pair()
    on_host = step_of(host, ADAM["AdamW"](host.parameters()))
    eager = step_of(device, ADAM["AdamW"](device.parameters()))
    compiled = spmd.compile(eager)
    for call in (compiled, eager, compiled, compiled, eager):
        on_host(X)
        call(X.to("jax"))
    assert_same_model(device, host)
    assert compiled.num_executables == 1

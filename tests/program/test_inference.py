"""Compiled calls under inference_mode, no_grad and set_grad_enabled, outside and inside the function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import spmd
from tests.oracle import assert_same, batch, twins

MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "set_grad_enabled(False)": lambda: torch.set_grad_enabled(False),
}


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))


@pytest.mark.parametrize("mode", MODES)
def test_a_call_in_a_mode_computes_and_updates_as_on_the_cpu(mode: str) -> None:
    host, device = twins(normed)
    step = spmd.compile(lambda x: device(x))
    x = batch(4, 8)
    for _ in range(2):
        with MODES[mode]():
            got, want = step(x.to("jax")), host(x)
            assert got.is_inference() == want.is_inference()
        assert_same(got, want.detach())
        assert_same(dict(device.state_dict()), dict(host.state_dict()))
    assert step.num_traces == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_inside_the_function(mode: str) -> None:
    def fn(model: nn.Module, x: torch.Tensor) -> Any:
        with MODES[mode]():
            y = model(x)
        return y, y.requires_grad, torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    host, device = twins()
    step = spmd.compile(lambda x: fn(device, x))
    x = batch(4, 8)
    for _ in range(2):
        got, want = step(x.to("jax")), fn(host, x)
        assert_same(got[0], want[0].detach())
        assert got[0].is_inference() == want[0].is_inference()
        assert got[1:] == want[1:]
    assert step.num_traces == 1


def _in_modes(wrap: Any, device: str) -> list[bool]:
    """Which results are inference tensors, of a function that makes some in inference mode and some outside of it."""
    other, left = torch.inference_mode(), dict[str, Any]()

    def fn(x: torch.Tensor) -> tuple[Any, ...]:
        with torch.inference_mode():
            inside = x * 2
            with torch.inference_mode(mode=False):
                outside = x * 3
            views = (x + 1).split(1)
            copy = (x - 1).cpu()
        with other:
            left["kept"] = x.exp()
        return inside, inside[:1], outside, outside.t(), views, copy, x.sin()

    step, x, found = wrap(fn), torch.ones(2, 2).to(device), []
    for around in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with around():
            inside, part, outside, turned, views, copy, last = step(x)
        found += [value.is_inference() for value in (inside, part, outside, turned, *views, copy, last, left["kept"])]
        other.mode = not other.mode
    return found


def test_results_are_inference_tensors_where_they_are_on_the_cpu() -> None:
    assert _in_modes(spmd.compile, "jax") == _in_modes(lambda fn: fn, "cpu")


def test_grad_mode_switched_inside_is_switched_after_every_call() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        return x * 2

    step = spmd.compile(fn)
    x = batch(2).to("jax")
    try:
        for _ in range(3):
            torch.set_grad_enabled(True)
            step(x)
            assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    assert step.num_traces == 1


def test_a_model_and_a_batch_of_inference_mode() -> None:
    with torch.inference_mode():
        host, device = twins()
        step = spmd.compile(lambda x, c: device(x) + c.to(x.device))
        x = batch(4, 8)
        for _ in range(2):
            assert_same(step(x.to("jax"), torch.ones(8)), host(x) + 1)
    assert step.num_traces == 1


def test_training_after_inference_is_as_before() -> None:
    host, device = twins()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (host, device)]

    def fn(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        if torch.is_grad_enabled():
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.detach()

    step = spmd.compile(lambda x: fn(device, optimizers[1], x))
    x = batch(4, 8)
    for i in range(6):
        with torch.inference_mode(i % 2 == 0):
            assert_same(step(x.to("jax")), fn(host, optimizers[0], x))
    assert step.num_traces == 2

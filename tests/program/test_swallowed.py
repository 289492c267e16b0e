"""A refusal that the function catches fails the step all the same, with the first reason."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import spmd
from tests.oracle import assert_same, batch, twins


def by_except(x: torch.Tensor) -> torch.Tensor:
    try:
        return x * round(x.sum().item(), 1)
    except Exception:
        pass
    return x * 3


def by_suppress(x: torch.Tensor) -> torch.Tensor:
    k = 1.0
    with contextlib.suppress(RuntimeError):
        k = round(x.sum().item(), 1)
    return x * k


def by_finally(x: torch.Tensor) -> torch.Tensor:
    try:
        x.repeat(99).tolist()
    finally:
        return x  # noqa: B012


def by_default(x: torch.Tensor) -> torch.Tensor:
    values = []
    for read in (lambda: str(x[0].item()), lambda: x.numpy(), lambda: x * round(x.sum().item(), 1)):
        try:
            values.append(read())
        except BaseException:
            values.append(0)
    return x * len(values)


def in_a_hook(x: torch.Tensor) -> torch.Tensor:
    w = x.detach().clone().requires_grad_()

    def hook(grad: torch.Tensor) -> torch.Tensor | None:
        try:
            return grad * round(grad.norm().item(), 1)
        except Exception:
            return None

    w.register_hook(hook)
    return torch.autograd.grad((w * w).sum(), w)[0]


@pytest.mark.parametrize("fn", [by_except, by_suppress, by_finally, by_default, in_a_hook], ids=lambda f: f.__name__)
def test_a_refusal_is_not_lost(fn: Callable[..., Any]) -> None:
    with pytest.raises(spmd.TraceError, match="was needed as a Python|only the compiled program will have") as caught:
        spmd.compile(fn)(batch(3).to("jax"))
    assert "test_swallowed.py" in str(caught.value)


def test_an_exception_of_its_own_instead_passes() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        try:
            return x * round(x.sum().item(), 1)
        except RuntimeError as error:
            raise KeyError("mine") from error

    with pytest.raises(KeyError, match="mine") as caught:
        spmd.compile(fn)(batch(3).to("jax"))
    assert isinstance(caught.value.__cause__, spmd.TraceError)


def test_errors_that_torch_raises_on_the_cpu_too_may_be_caught() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        try:
            return x @ torch.ones(7, 7, device=x.device)
        except RuntimeError:
            return x + 1

    x = batch(3, 3)
    assert_same(spmd.compile(fn)(x.to("jax")), fn(x))


@pytest.mark.parametrize("wraps", [False, True])
def test_what_only_asks_for_another_trace_is_not_lost_either(wraps: bool) -> None:
    """An optimizer that the search misses stops the trace; accumulation into missing gradients starts it again."""
    host, device = twins()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (host, device)]
    hidden = {"cpu": lambda: optimizers[0], "jax": lambda: optimizers[1]}

    def fn(model: nn.Module, x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        try:
            hidden[x.device.type]().step()
        except Exception as error:
            if wraps:
                raise ValueError("lost") from error

    step = spmd.compile(lambda x: fn(device, x), keep_grads=True)
    x = batch(4, 8)
    for _ in range(2):
        step(x.to("jax"))
        fn(host, x)
        assert_same(dict(device.state_dict()), dict(host.state_dict()))

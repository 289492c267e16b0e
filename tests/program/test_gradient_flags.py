"""`requires_grad` that a compiled function changes or reads: every call leaves it, and finds it, as the function itself would."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import spmd

Run = Callable[[Any, str], Any]


def flips_a_tensor(wrap: Any, device: str) -> Any:
    w = torch.ones(2, device=device, requires_grad=True)

    def fn(x: torch.Tensor) -> bool:
        found = (x * w).requires_grad
        w.requires_grad_(not w.requires_grad)
        return found

    step = wrap(fn)
    return [(step(torch.ones(2, device=device)), w.requires_grad) for _ in range(5)]


def freezes_a_critic(wrap: Any, device: str) -> Any:
    critic, calls = nn.Linear(2, 1).to(device), [0]

    def fn(x: torch.Tensor) -> torch.Tensor:
        critic.requires_grad_(True)
        critic(x).sum().backward()
        found = critic.weight.grad
        assert found is not None
        critic.zero_grad()
        calls[0] += 1
        if calls[0] % 2 == 0:
            critic.requires_grad_(False)
        return found * 1

    step = wrap(fn)
    found = [(step(torch.ones(1, 2, device=device)).tolist(), critic.weight.requires_grad) for _ in range(6)]
    assert wrap is not spmd.compile or step.num_traces <= 4  # by what it finds and by what it leaves
    return found


def lets_arguments_require_one(wrap: Any, device: str) -> Any:
    def fn(batch: dict[str, torch.Tensor], view: torch.Tensor) -> torch.Tensor:
        for value in (batch["x"], view):
            value.requires_grad_()
        return torch.autograd.grad((batch["x"] * view).sum(), view)[0]

    step, found = wrap(fn), []
    for i in range(3):
        batch, view = {"x": torch.full((2,), float(i), device=device)}, torch.ones(4, device=device)[:2]
        found.append((step(batch, view).tolist(), batch["x"].requires_grad, view.requires_grad))
    return found


def unfreezes_before_backward(wrap: Any, device: str) -> Any:
    layer = nn.Linear(2, 1).to(device).requires_grad_(False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def fn(x: torch.Tensor) -> None:
        layer.requires_grad_(True)
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()
        layer.requires_grad_(False)

    step, before = wrap(fn), layer.weight.detach().clone()
    for _ in range(3):
        step(torch.ones(1, 2, device=device))
    return [round(v, 5) for v in (layer.weight - before).flatten().tolist()], layer.weight.requires_grad


class Slots:
    __slots__ = ("tensor",)


def reads_tensors_that_it_computes_nothing_with(wrap: Any, device: str) -> Any:
    listed, slots = [torch.ones(2, device=device)], Slots()
    slots.tensor = torch.ones(2, device=device)
    step = wrap(lambda x: x * sum(t.requires_grad for t in (*listed, slots.tensor)))
    found = []
    for i in range(4):
        listed[0].requires_grad_(i % 2 == 1)
        slots.tensor.requires_grad_(i > 1)
        found.append(step(torch.ones(2, device=device)).tolist())
    return found


@pytest.mark.parametrize(
    "run",
    [
        flips_a_tensor,
        freezes_a_critic,
        lets_arguments_require_one,
        unfreezes_before_backward,
        reads_tensors_that_it_computes_nothing_with,
    ],
)
def test_every_call_finds_and_leaves_what_python_does(run: Run) -> None:
    assert run(spmd.compile, "jax") == run(lambda fn: fn, "cpu")


def test_an_error_leaves_the_flags() -> None:
    w = torch.ones(2, device="jax")

    @spmd.compile
    def fails(x: torch.Tensor) -> None:
        w.requires_grad_()
        raise ValueError(x.shape)

    with pytest.raises(ValueError):
        fails(torch.ones(2, device="jax"))
    assert not w.requires_grad


def test_several_steps_per_call_cannot_change_it() -> None:
    w = torch.ones(2, device="jax")
    step = spmd.compile(lambda x: (x * w.requires_grad_()).detach(), steps_per_call=2)
    with pytest.raises(spmd.TraceError, match=r"changes requires_grad[\s\S]*between calls"):
        step(torch.ones(2, 2, device="jax"))
    assert not w.requires_grad

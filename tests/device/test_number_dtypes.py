"""Numbers that vary are 64-bit inputs of a program. Arrays of 32 bits do not become 64-bit ones because of them, as in torch."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import spmd
from tests.oracle import assert_same

SIZE = 1200
OPERATIONS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=n),
    "addcdiv": lambda x, n: torch.addcdiv(x, x, x + 9, value=n),
    "_foreach_addcmul": lambda x, n: torch._foreach_addcmul([x], [x], [x], n)[0],
    "add": lambda x, n: torch.add(x, x, alpha=n),
    "index_add": lambda x, n: x.index_add(0, torch.arange(10, device=x.device), x[:10], alpha=n),
    "addmm": lambda x, n: torch.addmm(x.view(30, 40), x[:30].view(30, 1), x[:40].view(1, 40), alpha=n, beta=n),
    "baddbmm": lambda x, n: torch.baddbmm(x.view(2, 30, 20), x[:60].view(2, 30, 1), x[:40].view(2, 1, 20), alpha=n, beta=n),
    "clamp": lambda x, n: x.clamp(-n, n),
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "hardtanh": lambda x, n: F.hardtanh(x, -n, n),
    "softplus": F.softplus,
    "threshold": lambda x, n: F.threshold(x, n, n),
    "hardshrink": F.hardshrink,
    "lerp": lambda x, n: torch.lerp(x, x * 2, n),
    "power": lambda x, n: x.abs() ** (n + 1),
    "celu": F.celu,
    "softshrink": F.softshrink,
    "dropout": lambda x, n: F.dropout(x, n) * 0,
    "huber_loss": lambda x, n: F.huber_loss(x, x * 2, delta=n, reduction="none"),
    "multi_margin_loss": lambda x, n: F.multi_margin_loss(x.view(30, 40), torch.arange(30, device=x.device), margin=n),
}
# C++ takes these as plain numbers, in the operation or in its derivative
OF_EACH_VALUE: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "addr": lambda x, n: torch.addr(x.view(30, 40), x[:30], x[:40], alpha=n, beta=n),
    "cauchy_": lambda x, n: torch.empty_like(x).cauchy_(0, n) * x * 0,
    "rrelu": lambda x, n: F.rrelu(x, n / 2, n, training=False),
}


class Schedule:
    """A number that every step changes."""

    def __init__(self) -> None:
        self.value = 0.5

    def next(self) -> float:
        self.value *= 0.9
        return self.value


def wide_arrays(hlo: str) -> list[str]:
    return [line.strip() for line in hlo.splitlines() if re.search(r"= \(?f64\[(\d{3,}|\d+,\d)", line) and " parameter(" not in line]


@pytest.mark.parametrize("name", [*OPERATIONS, *OF_EACH_VALUE])
def test_a_number_that_varies_does_not_widen_results_or_gradients(name: str) -> None:
    x, found = torch.linspace(-2, 2, SIZE), list[Any]()
    for device in ("cpu", "jax"):
        numbers = Schedule()

        def step(x: torch.Tensor, numbers: Schedule = numbers) -> tuple[torch.Tensor, torch.Tensor]:
            result = (OPERATIONS | OF_EACH_VALUE)[name](x, numbers.next())
            return result, torch.autograd.grad((result * result).sum(), x)[0]

        run: Any = spmd.compile(step) if device == "jax" else step
        given = x.detach().to(device).requires_grad_()
        found.append([[t.detach() for t in run(given)] for _ in range(3)])
    assert_same(found[1], found[0])
    assert not wide_arrays(run.hlo())
    assert run.num_traces == (2 if name in OPERATIONS else 3)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adadelta", "NAdam", "RAdam", "Adagrad", "Adamax"])
def test_an_optimizers_state_is_computed_in_its_own_dtype(name: str) -> None:
    """AdamW's second moment was computed in 64 bits: a quarter more temporary memory, and emulated on TPUs."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, SIZE, device="jax"))
    optimizer = getattr(torch.optim, name)([weight], lr=0.01)

    @spmd.compile
    def step() -> None:
        optimizer.zero_grad()
        (weight.sin() * weight).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    assert not wide_arrays(step.hlo())


def test_the_gradient_of_a_power_of_a_number_that_varies() -> None:
    """torch has no logarithm of a symbolic number, so it is a constant of each trace."""
    found: list[Any] = []
    for device in ("cpu", "jax"):
        numbers = Schedule()

        def step(x: torch.Tensor, numbers: Schedule = numbers) -> torch.Tensor:
            return torch.autograd.grad((numbers.next() ** x).sum(), x)[0]

        run: Any = spmd.compile(step) if device == "jax" else step
        found.append([run(torch.linspace(0.1, 1, 5, device=device, requires_grad=True)) for _ in range(3)])
    assert_same(found[1], found[0])

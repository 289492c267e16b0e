"""FLOPs that torch's counter sees: the CPU's, eager and in every call of a program."""

from typing import Any

import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import spmd
from tests.oracle import batch


def counts(wrap: Any, device: str) -> list[Any]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to(device), batch(2, 3, 8).to(device)
    step = wrap(lambda x: torch.autograd.grad(model(x).sum(), list(model.parameters())))
    found, counter = [], FlopCounterMode(display=False)
    step(x)  # has a program without the counter
    with counter:
        for _ in range(3):
            step(x)
            found.append({name: dict(of_module) for name, of_module in counter.get_flop_counts().items()})
    step(x)
    with counter:
        step(x)
    return [*found, counter.get_total_flops()]


def test_flops_are_the_cpus_in_every_call() -> None:
    expected = counts(lambda fn: fn, "cpu")
    assert counts(lambda fn: fn, "jax") == expected
    assert counts(spmd.compile, "jax") == expected


class Names(TorchDispatchMode):
    """Collects the names of the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_operators_of_the_cpu_and_no_others() -> None:
    def seen(device: str) -> list[str]:
        x, w = torch.ones(3, 7, device=device, requires_grad=True), torch.ones(5, 7, device=device, requires_grad=True)
        with Names() as names:
            torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, w), torch.ones_like(x[:, 0], dtype=torch.int64)).backward()
        return names.seen

    assert seen("jax") == seen("cpu")

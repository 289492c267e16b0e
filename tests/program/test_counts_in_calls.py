"""Integers that change and that torch takes as a size, a dim or a count: one program for each of their values, other numbers are inputs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import spmd

CALLS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "topk": lambda x, n: x.topk(n)[0],
    "interpolate": lambda x, n: F.interpolate(x[None], size=n),
    "avg_pool2d": lambda x, n: F.avg_pool2d(x[None], n),
    "chunk": lambda x, n: x.chunk(n)[0],
    "split": lambda x, n: x.split(n)[0],
    "kthvalue": lambda x, n: x.kthvalue(n)[0],
    "unfold": lambda x, n: x.unfold(0, n, 1),
    "eye": lambda x, n: torch.eye(n, device=x.device),
    "linspace": lambda x, n: torch.linspace(0, 1, n, device=x.device),
    "one_hot": lambda x, n: F.one_hot((x[0] * 0).long(), num_classes=n),
    "sum": lambda x, n: x.sum(dim=n - 1),
    "transpose": lambda x, n: x.transpose(0, n - 1),
    "stack": lambda x, n: torch.stack([x, x], dim=n),
    "softmax": lambda x, n: x.softmax(dim=n - 1),
    "repeat_interleave": lambda x, n: x.repeat_interleave(n, dim=0),
    "conv1d": lambda x, n: F.conv1d(x[None], torch.ones(4, 1, 2, device=x.device), groups=4, padding=n, dilation=n),
    "ignore_index": lambda x, n: F.cross_entropy(x, (x[0] * 0).long() + 3, ignore_index=n),
    "fft": lambda x, n: torch.fft.fft(x, n=n).real,
    "matrix_power": lambda x, n: torch.linalg.matrix_power(x, n),
    "cumsum times a number": lambda x, n: x.cumsum(n - 1) * n,
}


class State:
    def __init__(self) -> None:
        self.calls, self.count = 0, 0


@pytest.mark.parametrize("name", list(CALLS))
def test_a_count_is_traced_for_each_value_and_other_numbers_are_inputs(name: str) -> None:
    def run(device: str) -> tuple[list[Any], int]:
        state = State()

        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            state.calls += 1
            return CALLS[name](x, 1 + state.count), x * state.calls

        compiled: Any = spmd.compile(step) if device == "jax" else step
        found: list[Any] = []
        for i in range(9):
            state.count = i // 2 % 2
            results = compiled(torch.arange(16.0, device=device).reshape(4, 4) + 0.5)
            found.extend(result.cpu() for result in results)
        return found, getattr(compiled, "num_traces", 0)

    (on_jax, num_traces), (on_cpu, _) = run("jax"), run("cpu")
    for ours, theirs in zip(on_jax, on_cpu, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert num_traces <= 4


def test_a_call_that_torch_refuses_raises_torchs_error() -> None:
    state = State()

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        state.calls += 1
        return x.topk(state.count)[0] * state.calls

    x = torch.arange(4.0, device="jax")
    for state.count in (1, 2, 3):
        assert step(x).shape == (state.count,)
    state.count = 5
    with pytest.raises(RuntimeError, match="k"):
        step(x)
    assert state.calls == 3


INTEGERS = torch.tensor([7, 9])
ON_THE_CPU: dict[str, Callable[[int], torch.Tensor]] = {
    "arange": lambda n: torch.arange(n),
    "arange of two": lambda n: torch.arange(n, 2 * n),
    "range": lambda n: torch.arange(0, 3 * n, n),
    "operator": lambda n: torch.ops.aten.arange(n),
    "full": lambda n: torch.full((2,), n),
    "new_full": lambda n: torch.tensor([7, 9]).new_full((2,), n),
    "tensor": lambda n: torch.tensor([n, 2]),
    "scalar_tensor": lambda n: torch.scalar_tensor(n),
    "clamp": lambda n: torch.tensor([1, 9]).clamp(max=n),
    "method of the class": lambda n: torch.Tensor.clamp(torch.tensor([1, 9]), max=n),
    "mapped": lambda n: torch.stack(list(map(torch.full, [(2,)], [n]))),
    "partial": lambda n: partial(torch.full, (2,))(n),
    "clamp_min": lambda n: torch.tensor([1, 9]).clamp_min(n),
    "where": lambda n: torch.where(torch.tensor([True, False]), n, 2 * n),
    "where of a tensor": lambda n: torch.where(torch.tensor([True, False]), torch.tensor(3), n),
    "operators": lambda n: torch.stack([INTEGERS % n, n - INTEGERS, INTEGERS // n, n ** torch.tensor([2, 3])]),
    "bits": lambda n: (torch.tensor([7, 9]) & n) | (torch.tensor([7, 9]) << n),
    "remainder": lambda n: torch.remainder(torch.tensor([7, 9]), n),
    "alpha": lambda n: torch.add(torch.tensor([1, 2]), torch.tensor([1, 1]), alpha=n),
    "masked_fill": lambda n: torch.tensor([7, 9]).masked_fill(torch.tensor([True, False]), n),
    "fill_": lambda n: torch.zeros(2, dtype=torch.int64).fill_(n),
    "add_": lambda n: torch.zeros(2, dtype=torch.int64).add_(n),
    "pad": lambda n: F.pad(torch.tensor([1, 0]), (n, 0), value=n),
    "roll": lambda n: torch.tensor([1, 0, 3]).roll(n),
    "bincount": lambda n: torch.bincount(torch.tensor([1, 2]), minlength=n),
    "repeat_interleave": lambda n: torch.tensor([1, 2]).repeat_interleave(n),
    "tril_indices": lambda n: torch.tril_indices(n, n + 1),
}


@pytest.mark.parametrize("kind", ["state", "argument", "tensor"])
@pytest.mark.parametrize("name", list(ON_THE_CPU))
def test_an_integer_that_changes_is_one_where_the_cpu_computes(name: str, kind: str) -> None:
    def run(device: str) -> list[Any]:
        state = State()

        def step(x: torch.Tensor, given: Any) -> Any:
            n = state.count if kind == "state" else given if kind == "argument" else int(given[0])
            made = ON_THE_CPU[name](n)
            return made.dtype, made.tolist(), x[:2] * made.flatten()[:2].to(x.device)

        compiled: Any = spmd.compile(step) if device == "jax" else step
        found: list[Any] = []
        for n in (2, 2, 3, 4, 2):
            state.count = n
            dtype, values, result = compiled(torch.arange(4.0, device=device), torch.tensor([n, 3]) if kind == "tensor" else n)
            found.append((dtype, values, result.dtype, result.tolist()))
        return found

    assert run("jax") == run("cpu")

"""In-place updates of items at a position that changes: one program, with CPU torch's values, and a view where one is seen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from tests.oracle import assert_same

Update = Callable[[torch.Tensor, int, float], Any]
CALLS = [(1, 0.5), (2, -1.5), (0, 0.0), (-1, 2.25), (3, 7.75), (-6, 3.0), (5, 1.0)]
OUTSIDE = [(1, 0.5), (2, -1.5), (6, 0.0), (-7, 2.25), (3, 7.75)]


def operators(x: torch.Tensor, k: int, v: float) -> None:
    x[k] += 1
    x[k, 1] += 2 * v
    x[:, k % 4] *= v
    x[k] -= x[1]
    x[k] //= 2


def methods(x: torch.Tensor, k: int, v: float) -> None:
    x[k].add_(v)
    x[k, 2].fill_(v)
    x[k].mul_(2).clamp_(max=20)
    x[..., k % 4].add_(x[:, 0], alpha=v)
    x[k].copy_(x[k % 2])


def windows(x: torch.Tensor, k: int, v: float) -> None:
    x[k % 3 : k % 3 + 2] += v
    x[k % 3 : k % 3 + 2].mul_(2)


def chains(x: torch.Tensor, k: int, v: float) -> None:
    x[k][1] = v
    x[k][1] += v
    x[k][k % 4] += v
    x[k][1:3] *= 2


def temporal_difference(x: torch.Tensor, k: int, v: float) -> torch.Tensor:
    state, action = k % 6, k % 4
    error = v + 0.9 * x[(state + 1) % 6].max() - x[state, action]
    x[state, action] += 0.5 * error
    return error


def named(x: torch.Tensor, k: int, v: float) -> tuple[torch.Tensor, ...]:
    row, whole = x[k], x.view(-1)
    row += v
    row.mul_(2)
    row[1] = k
    return row + 1, x.sum(), whole * 1


def gradients(x: torch.Tensor, k: int, v: float) -> tuple[torch.Tensor, torch.Tensor]:
    start = x.clone().requires_grad_()
    y = start * start
    y[k] += v
    y[k, 2] *= start[k].sum()
    y[k].mul_(3)
    return y.detach(), torch.autograd.grad(y.square().sum(), start)[0]


def caught(x: torch.Tensor, k: int, v: float) -> None:
    try:
        x[k] += torch.ones(3, device=x.device)
    except RuntimeError:
        x[k] += v


def rows() -> torch.Tensor:
    return torch.arange(24.0).view(6, 4)


def outcome(fn: Any, *given: Any) -> Any:
    try:
        return fn(*given)
    except IndexError as error:
        return str(error)


def assert_calls_agree(update: Update, calls: Any) -> Any:
    """Compare calls, and what they leave in the tensor, with those on the CPU. Returns the step."""
    ours, torchs = rows().to("jax"), rows()
    step: Any = spmd.compile(update)
    for k, v in calls:
        found, expected = outcome(step, ours, k, v), outcome(update, torchs, k, v)
        if isinstance(expected, (str, type(None))):
            assert found == expected
        else:
            assert_same(found, expected)
        assert_same(ours, torchs)
    return step


@pytest.mark.parametrize("update", [operators, methods, windows, chains, temporal_difference, named, gradients, caught])
def test_an_item_is_updated_by_one_program(update: Update) -> None:
    assert assert_calls_agree(update, CALLS).num_traces == 2


@pytest.mark.parametrize("update", [operators, methods, chains])
def test_a_position_outside_is_the_cpus_error(update: Update) -> None:
    assert assert_calls_agree(update, OUTSIDE).num_traces <= 4


def two_views(x: torch.Tensor, k: int, v: float) -> torch.Tensor:
    row, same = x[k], x[k % 3]
    row += v
    same += v
    return row * 1


def view_of_a_view(x: torch.Tensor, k: int, v: float) -> torch.Tensor:
    item = x[k][k % 4]
    x[k] = v
    return item * 1


def assigned_to_itself(x: torch.Tensor, k: int, v: float) -> torch.Tensor:
    row = x[k]
    x[k] = v
    x[k] = row
    return row * 1


def returned(x: torch.Tensor, k: int, v: float) -> torch.Tensor:
    return x[k].add_(v)


def as_out(x: torch.Tensor, k: int, v: float) -> None:
    torch.add(x[0], v, out=x[k])


def expanded(x: torch.Tensor, k: int, v: float) -> None:
    x.expand(2, 6, 4)[:, k][0] += v


@pytest.mark.parametrize("update", [two_views, view_of_a_view, assigned_to_itself, returned, as_out, expanded])
def test_what_is_seen_to_be_a_view_is_one(update: Update) -> None:
    assert_calls_agree(update, CALLS[:5])


def listed(x: torch.Tensor, k: int, v: float) -> None:
    x[k, [0, 3]] = torch.tensor([v, 2.0], device=x.device)
    x[[0, 2], k % 4] = v
    x[torch.tensor([1, 1, 3], device=x.device), k % 4] += v
    x[[0, 1], [k % 4, -1 - k % 4]] *= 2
    x[k % 3 : k % 3 + 2, [0, 1]] -= v
    x[[k, 0]] = x[[0, k]] + 1


def test_lists_of_indices_beside_numbers_are_written_by_one_program() -> None:
    assert assert_calls_agree(listed, CALLS).num_traces == 2
    assert assert_calls_agree(listed, OUTSIDE).num_traces <= 4


def test_a_buffer_is_updated_at_a_counter_in_a_loop() -> None:
    def step(x: torch.Tensor, k: int) -> torch.Tensor:
        for i in range(3):
            x[(k + i) % 6, i] += i
            x[k % 6] += x[(k + i) % 6]
        return x.sum()

    compiled, ours, torchs = spmd.compile(step), rows().to("jax"), rows()
    for k in range(5):
        assert_same(compiled(ours, k), step(torchs, k))
        assert_same(ours, torchs)
    assert compiled.num_traces == 2

"""Indexing with tensors: indices that lie on the host."""

from collections.abc import Callable

import pytest
import torch

import spmd
from tests.lowering.against_cpu import check, normal

ROWS, MASK = torch.tensor([2, 0, 2]), torch.tensor([True, False, True, True])


def put(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[index] = x[index] * 2
    return y


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x[ROWS],
    "columns": lambda x: x[:, ROWS],
    "mask": lambda x: x[MASK],
    "write": lambda x: put(x, ROWS[:2]),
    "write by mask": lambda x: put(x, MASK),
}


@pytest.mark.parametrize("name", CASES)
def test_an_index_on_the_host_picks_what_it_picks_on_the_cpu(name: str) -> None:
    check(CASES[name], normal(4, 3))


def test_an_index_on_the_host_is_an_input_of_a_compiled_step() -> None:
    pick = spmd.compile(lambda x, index: x[index])
    x = normal(4, 3, grad=False)
    for index in (ROWS, ROWS.flip(0), torch.tensor([1, 1, 1])):
        torch.testing.assert_close(pick(x.to("jax"), index).cpu(), x[index])
    assert pick.num_traces == 1

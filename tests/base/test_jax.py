"""What a trace computed from constants alone is known while tracing; what an input has part in is not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import spmd
from spmd.base._jax import known_value
from spmd.device._storage import load, wrap
from tests.waits import waiting


def test_branch_on_positions_made_in_the_step_is_taken_by_their_value() -> None:
    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[0], device=x.device)
        jumps = (torch.diff(positions) != 1).cumsum(0)
        return x if (jumps[-1] == 0).all() else -x

    x = torch.randn(5)
    assert torch.equal(step(x.to("jax")).cpu(), x)
    assert step.num_traces == 1


def test_number_from_constants_can_be_a_size() -> None:
    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return x[: int(torch.arange(4, device="jax").sum().item())]

    x = torch.randn(8)
    assert torch.equal(step(x.to("jax")).cpu(), x[:6])


HELD = torch.nn.Parameter(torch.ones(3).to("jax"))
INPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "argument": lambda x: x if x.sum() > 0 else -x,
    "state": lambda x: x if HELD.sum() > 0 else -x,
    "state and constants": lambda x: x if (HELD + torch.arange(3, device="jax")).sum() > 0 else -x,
    "random numbers": lambda x: x if torch.rand((), device="jax") > 0 else -x,
}


@pytest.mark.parametrize("fn", INPUTS.values(), ids=INPUTS)
def test_branch_on_an_input_is_decided_by_each_call(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    step = spmd.compile(fn)
    with waiting(step):
        for x in (torch.ones(3), -torch.ones(3)):
            assert torch.equal(step(x.to("jax")).cpu(), x.abs() if fn is INPUTS["argument"] else x)
    assert step.num_traces == 1 + (fn is INPUTS["argument"])
    assert step._program.sides


def test_value_of_the_trace_around_is_not_known_inside_a_branch() -> None:
    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        outer = x.sum()
        return torch.cond(x[0] > 0, lambda x: x * outer.item(), lambda x: -x, (x,))

    x = torch.ones(3)
    assert torch.equal(step(x.to("jax")).cpu(), x * 3)


POSITIONS = torch.arange(512).reshape(-1, 1) >= torch.arange(512)
LARGE_MASKS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "alike": (lambda rows: rows >= 0, (1, 1, 512, 512)),
    "one sequence is not": (lambda rows: rows != 7, (32, 1, 512, 512)),
}


@pytest.mark.parametrize("name", LARGE_MASKS)
def test_a_large_mask_is_looked_at_once_for_sequences_that_are_alike(name: str) -> None:
    kept, shape = LARGE_MASKS[name]
    told: list[tuple[int, ...]] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        queries = torch.arange(512, device="jax").reshape(1, 1, -1, 1)
        rows = kept(torch.arange(32, device="jax")).reshape(-1, 1, 1, 1)
        mask = rows & (queries >= torch.arange(512, device="jax").reshape(1, 1, 1, -1))

        def tell(seen: Any) -> Any:
            told.append(seen.shape)
            return seen

        seen = known_value(load(mask), lambda array: False, of=tell, num_alike=2)
        expected = kept(torch.arange(32)).reshape(-1, 1, 1, 1) & POSITIONS
        assert torch.equal(torch.from_numpy(np.array(seen)).expand(expected.shape), expected)
        return x

    jax.make_jaxpr(lambda array: load(step(wrap(array))))(jnp.ones(3))
    assert told == [shape]

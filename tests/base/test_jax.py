"""What a trace computed from constants alone is known while tracing; what an input has part in is not."""

from collections.abc import Callable

import pytest
import torch

import spmd


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
def test_branch_on_an_input_is_refused(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(spmd.TraceError, match="a number of the traced program was needed"):
        spmd.compile(fn)(torch.randn(3).to("jax"))


def test_value_of_the_trace_around_is_not_known_inside_a_branch() -> None:
    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        outer = x.sum()
        return torch.cond(x[0] > 0, lambda x: x * outer.item(), lambda x: -x, (x,))

    x = torch.ones(3)
    assert torch.equal(step(x.to("jax")).cpu(), x * 3)

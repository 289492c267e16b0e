"""What Python calls equal and a program must not: -0.0 and 0.0, 1 and True; and NaN, which is itself."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import spmd
from tests.oracle import batch


@dataclasses.dataclass(frozen=True)
class Scale:
    by: Any


TOLD_APART = [(0.0, -0.0), (1, True), (1, 1.0), (complex(0.0, 0.0), complex(0.0, -0.0)), (np.float32(0.0), np.float32(-0.0))]
USES: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "argument": lambda x, k: 1 / torch.full((2,), k, dtype=x.dtype, device=x.device),
    "operand": lambda x, k: x / k,
    "scalar": lambda x, k: x.clamp(max=0.0).div(torch.as_tensor(k, dtype=x.dtype)),
}


@pytest.mark.parametrize(("a", "b"), TOLD_APART, ids=str)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: {"k": (v,)}, Scale, lambda v: frozenset([v])])
def test_arguments_that_differ_only_exactly_have_programs_of_their_own(a: Any, b: Any, wrap: Callable[[Any], Any]) -> None:
    step = spmd.compile(lambda x, k: x * 1)
    x = batch(2).to("jax")
    for value in (a, b, a, b):
        step(x, wrap(value))
    assert step.num_traces == 2


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("wrap", [spmd.compile, lambda fn: fn], ids=["compiled", "eager"])
def test_negative_zero_is_used_as_such(use: str, wrap: Callable[[Any], Any]) -> None:
    fn = wrap(USES[use])
    x = batch(2)
    for k in (0.0, -0.0, 0.0, -0.0):
        torch.testing.assert_close(fn(x.to("jax"), k).cpu(), USES[use](x, k), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], Scale])
def test_not_a_number_is_the_same_argument_again(wrap: Callable[[Any], Any]) -> None:
    step = spmd.compile(lambda x, k: x * 1)
    x = batch(2).to("jax")
    for value in (math.nan, float("nan"), np.float64("nan").item()):
        step(x, wrap(value))
    assert step.num_traces == 1


def test_a_closure_tells_negative_zero_apart() -> None:
    k = 0.0
    step = spmd.compile(lambda x: x / k)
    x = torch.ones(1).to("jax")
    found = [step(x).item()]
    k = -0.0
    found.append(step(x).item())
    assert found == [math.inf, -math.inf]

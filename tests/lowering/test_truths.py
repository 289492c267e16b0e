"""Reductions to bools, and integers beside floats of 16 bits, equal the CPU's."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.oracle import assert_same

TRUTHS: dict[str, Callable[[str], Any]] = {
    "any of complex": lambda d: torch.tensor([[0, 1j], [0, 0]], device=d).any(),
    "any of complex, along": lambda d: torch.tensor([[0, 1j], [0, 0]], device=d).any(1, keepdim=True),
    "all of complex": lambda d: torch.tensor([1j, 2.0], device=d).all(),
    "sum of complex as bool": lambda d: torch.tensor([0, 1j], device=d).sum(dtype=torch.bool),
    "prod of complex as bool": lambda d: torch.tensor([1j, 2j], device=d).prod(dtype=torch.bool),
    "any of no dims": lambda d: torch.any(torch.tensor([[0, 1], [0, 0]], device=d), dim=()),
    "all of no dims": lambda d: torch.all(torch.tensor([[0, 1], [0, 0]], dtype=torch.uint8, device=d), dim=()),
    "any of nan": lambda d: torch.tensor([0.0, math.nan], device=d).any(),
    "float_power of a complex zero": lambda d: torch.float_power(torch.zeros(1, dtype=torch.complex64, device=d), 0),
    **{f"median of no {t}": lambda d, t=t: torch.zeros(0, dtype=t, device=d).median() for t in (torch.bool, torch.int8, torch.int64)},
}


@pytest.mark.parametrize("name", TRUTHS)
def test_truths_of_complex_numbers_and_of_nothing(name: str) -> None:
    assert_same(TRUTHS[name]("jax"), TRUTHS[name]("cpu"))


@pytest.mark.parametrize("op", [torch.mul, torch.add, torch.div, torch.remainder, torch.pow, torch.maximum, torch.gt])
def test_integers_become_floats_of_16_bits_before_they_are_combined(op: Callable[..., torch.Tensor]) -> None:
    for dtype, count in ((torch.bfloat16, 257), (torch.float16, 2049)):
        floats, integers = torch.tensor([1.5, 2.0], dtype=dtype), torch.tensor([count, 3])
        for left, right in ((floats, integers), (integers, floats)):
            assert_same(op(left.to("jax"), right.to("jax")), op(left, right))

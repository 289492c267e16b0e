"""Tensors made from numbers alone, also into a tensor that is there: its dtype is theirs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from tests.lowering.against_cpu import assert_equal

INTO: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": lambda out: torch.zeros(3, out=out),
    "ones": lambda out: torch.ones(3, 2, out=out),
    "full": lambda out: torch.full((3,), 1.0, out=out),
    "eye": lambda out: torch.eye(3, out=out),
    "eye of two sizes": lambda out: torch.eye(2, 3, out=out),
    "arange": lambda out: torch.arange(2.0, out=out),
    "arange with a step": lambda out: torch.arange(1.0, 6.0, 2.0, out=out),
    "linspace": lambda out: torch.linspace(0, 1, 4, out=out),
    "logspace": lambda out: torch.logspace(0, 1, 3, out=out),
    "range": lambda out: torch.range(0.0, 1.0, out=out),
    "range with a step": lambda out: torch.range(0.0, 4.0, 2.0, out=out),
}


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("name", INTO)
def test_numbers_made_into_a_tensor_have_its_dtype(name: str, dtype: torch.dtype) -> None:
    host, device = torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype, device="jax")
    assert_equal(INTO[name](device), INTO[name](host))


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize("ends", [(0, 3), (0.5, 3), (3, 0, -1), (0, 1, 0.3)], ids=str)
def test_range_has_both_ends(ends: tuple[Any, ...]) -> None:
    assert_equal(torch.range(*ends, device="jax"), torch.range(*ends))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize("numbers", [(0.0, 3.0, 1.5), (0.5, 3.0, 1.0), (0.9, 4.1, 1.9), (5.5, 0.0, -1.5)], ids=str)
def test_arange_counts_as_torch(numbers: tuple[float, float, float], dtype: torch.dtype) -> None:
    assert_equal(torch.arange(*numbers, dtype=dtype, device="jax"), torch.arange(*numbers, dtype=dtype))


@pytest.mark.parametrize("draw", [torch.rand, torch.randn], ids=["rand", "randn"])
def test_random_numbers_drawn_into_a_tensor_are_the_devices(draw: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(3)
    before, want = torch.get_rng_state(), draw(5, device="jax")
    torch.manual_seed(3)
    assert torch.equal(draw(5, out=torch.empty(5, device="jax")).cpu(), want.cpu())
    assert torch.equal(torch.get_rng_state(), before)  # the host's stream did not move


@pytest.mark.parametrize("args", [(0,), (1,), (6,), (5, False), (8, True, 3.0)], ids=str)
def test_kaiser_window(args: tuple[Any, ...]) -> None:
    torch.testing.assert_close(torch.kaiser_window(*args, device="jax").cpu(), torch.kaiser_window(*args))


NEGATIVE: dict[str, Callable[[str], torch.Tensor]] = {
    "empty": lambda device: torch.empty(2, -1, device=device),
    "zeros": lambda device: torch.zeros(-1, device=device),
    "full": lambda device: torch.full((-1,), 2.0, device=device),
    "rand": lambda device: torch.rand(-2, 3, device=device),
    "randn": lambda device: torch.randn(-1, device=device),
    "randint": lambda device: torch.randint(0, 3, (-1,), device=device),
    "normal": lambda device: torch.normal(0.0, 1.0, (-1,), device=device),
    "new_empty": lambda device: torch.ones(1, device=device).new_empty(3, -1, 2),
    "empty_strided": lambda device: torch.empty_strided((-1,), (1,), device=device),
    "bincount": lambda device: torch.bincount(torch.ones(1, dtype=torch.int64, device=device), minlength=-1),
}


@pytest.mark.parametrize("wrap", [lambda fn: fn, spmd.compile], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", NEGATIVE)
def test_a_negative_size_is_torchs_error(name: str, wrap: Any) -> None:
    with pytest.raises(RuntimeError) as expected:
        NEGATIVE[name]("cpu")
    with pytest.raises(RuntimeError) as raised:
        wrap(lambda: NEGATIVE[name]("jax"))()
    assert str(raised.value) == str(expected.value)

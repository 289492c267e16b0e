"""Numbers that change, assigned to elements of a tensor: inputs of one program, converted to the dtype as on the CPU, with its errors."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import spmd
from tests.oracle import assert_same

Write = Callable[[torch.Tensor, int, float], Any]
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
]
CALLS = [(1, 0.5), (2, 1.25), (0, 0.0), (3, 7.75), (-1, 2.5), (-6, 3.0)]


def to_item(x: torch.Tensor, i: int, r: float) -> None:
    x[i] = r


def to_fixed_row(x: torch.Tensor, i: int, r: float) -> None:
    x[3] = r


def to_all(x: torch.Tensor, i: int, r: float) -> None:
    x[:] = r
    x[...] = x + 1
    x[...] = i % 3


def to_masked(x: torch.Tensor, i: int, r: float) -> None:
    x[x == 7] = r
    x[x[:, 0] == 0] = r


def to_column(x: torch.Tensor, i: int, r: float) -> None:
    x[:, 2] = r
    x[None, :, :1] = i % 2


def to_window(x: torch.Tensor, i: int, r: float) -> None:
    x[i % 3 : i % 3 + 2] = r


def to_listed(x: torch.Tensor, i: int, r: float) -> None:
    x[[0, 2]] = r
    x[torch.tensor([0, 2], device=x.device), 1] = 2 * r


def to_own(x: torch.Tensor, i: int, r: float) -> torch.Tensor:
    made = torch.zeros_like(x)
    made[i, 1] = r
    made[2] = i % 5
    made[1:3, 0] = r + 1
    return made


WRITES = [to_item, to_fixed_row, to_all, to_masked, to_column, to_window, to_listed, to_own]


def start(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(24).view(6, 4).to(dtype)


def outcome(write: Any, x: torch.Tensor, *numbers: Any) -> Any:
    """What a call returns or raises."""
    try:
        return write(x, *numbers)
    except (RuntimeError, ValueError) as error:
        return type(error), str(error).splitlines()[0]


def assert_calls_agree(write: Any, dtype: torch.dtype, calls: Any) -> tuple[Any, int]:
    """Compare calls, and what they leave in the tensor, with those on the CPU. Returns the step and the number of errors."""
    ours, torchs, num_errors = start(dtype).to("jax"), start(dtype), 0
    step = spmd.compile(write)
    for numbers in calls:
        expected = outcome(write, torchs, *numbers)
        found = outcome(step, ours, *numbers)
        if isinstance(expected, tuple):
            num_errors += 1
            assert found == expected
        elif expected is not None:
            assert_same(found, expected)
        else:
            assert found is None
        assert ours.dtype == torchs.dtype
        torch.testing.assert_close(ours.cpu(), torchs, rtol=0, atol=0, equal_nan=True)
    return step, num_errors


@pytest.mark.parametrize("write", WRITES)
def test_a_number_is_assigned_by_one_program(write: Write) -> None:
    step, _ = assert_calls_agree(write, torch.float32, CALLS)
    assert step.num_traces == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_is_converted_to_the_dtype(dtype: torch.dtype) -> None:
    def write(x: torch.Tensor, i: int, r: float) -> None:
        x[i, :2] = r
        x[1:3, 2] = i % 4
        x[x == 3] = 2 * r

    step, _ = assert_calls_agree(write, dtype, CALLS)
    assert step.num_traces == 2


NUMBERS = {
    "floats": [0.5, 2.7, -1.5, 0.0, -0.0, math.nan, 3.99, math.inf, -math.inf, 1e300, -3.7, 7e4, 1e10, 300.0],
    "ints": [1, 2, 0, -1, 127, 128, 300, -129, 70000, 2**31, 2**40, 2**53 + 1, 2**63 - 1, 2**63, 5],
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_that_the_dtype_does_not_hold_is_the_cpus_error(dtype: torch.dtype, kind: str) -> None:
    def write(x: torch.Tensor, r: float) -> None:
        x[1] = r
        x[2:4, 1] = r

    step, num_errors = assert_calls_agree(write, dtype, [(n,) for n in NUMBERS[kind]])
    assert step.num_traces <= num_errors + 6


def test_an_item_of_a_table_is_assigned() -> None:
    table = np.array([1.5, 2.0, 3.25, 5.0, 7.0])

    def write(x: torch.Tensor, i: int) -> None:
        x[1] = table[i]
        x[i] = 2 * table[i]

    step, _ = assert_calls_agree(write, torch.float32, [(i,) for i in (0, 1, 3, -1, 2)])
    assert step.num_traces == 2


def test_a_number_assigned_to_a_tensor_stops_its_gradient() -> None:
    def step(x: torch.Tensor, i: int, r: float) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        y = x * x
        y[i] = r
        y[:, 1] = r
        return y.detach(), torch.autograd.grad((y * y).sum(), x)[0]

    compiled = spmd.compile(step)
    for i, r in CALLS:
        assert_same(compiled(start().to("jax"), i, r), step(start(), i, r))
    assert compiled.num_traces == 2


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int32, np.int64])
def test_a_number_of_numpy_that_torch_does_not_take_is_the_cpus_error(kind: Any) -> None:
    def write(x: torch.Tensor, r: Any) -> torch.Tensor:
        x[0] = r
        return x

    step = spmd.compile(write)
    for r in (1.5, 2.5, kind(3), kind(4)):
        outcomes: list[Any] = []
        for device, fn in (("cpu", write), ("jax", step)):
            try:
                outcomes.append(fn(torch.ones(2, device=device), r).tolist())
            except TypeError as error:
                outcomes.append(str(error).replace("torch.jax.", "torch."))
        assert outcomes[0] == outcomes[1]

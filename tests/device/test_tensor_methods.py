"""Methods that look at a device tensor from Python, or change the tensor itself: print, compare, iterate, resize, assign."""

from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch

import spmd
from spmd.base._convert import exact_dtypes
from spmd.device._storage import load, wrap


def ramp(device: str) -> torch.Tensor:
    return torch.arange(12.0, device=device).reshape(3, 4)


def reads(device: str) -> Any:
    x = ramp(device)
    same = torch.equal(x, x.clone()), torch.equal(x, x[:2]), torch.allclose(x, x + 1e-9)
    return x.tolist(), [row.tolist() for row in x], bool(x[0, 1]), int(x[1, 1]), len(x), float(x.sum()), same


def resized(device: str) -> Any:
    x = torch.arange(4.0, device=device)
    square = x.resize_(2, 2).tolist()
    grown = x.resize_(2, 4).flatten()[:4].tolist()
    empty = torch.zeros(0, device=device).resize_(3, 2).fill_(1.0)
    last = torch.empty(1, 4, 2, 3, device=device).resize_((1, 4, 2, 3), memory_format=torch.channels_last)
    return square, grown, x.resize_(2).tolist(), empty.tolist(), last.stride()


def turned_in_place(device: str) -> Any:
    x = ramp(device).clone()
    x.t_().add_(1)
    turned = x.shape, x.stride(), x.tolist()
    x.unsqueeze_(0).transpose_(0, 1)
    return *turned, x.shape, x.stride(), x.squeeze_().shape


def set_to_another_storage(device: str) -> Any:
    x, source = torch.zeros(2, device=device), torch.arange(6.0, device=device)
    x.set_(source.reshape(2, 3))
    y = torch.zeros(0, device=device)
    y.set_(source.untyped_storage(), 1, (2, 2), (2, 1))
    source.add_(1)
    return x.tolist(), y.tolist(), torch.zeros(3, device=device).set_().shape


def data_assigned(device: str) -> Any:
    parameter = torch.nn.Parameter(torch.ones(3, device=device))
    parameter.data = ramp(device)
    (parameter * parameter).sum().backward()
    assert parameter.grad is not None
    return parameter.tolist(), parameter.grad.tolist()


def out_given(device: str) -> Any:
    x, out = ramp(device), torch.empty(0, device=device)
    torch.add(x, x, out=out)
    columns = torch.zeros(3, 8, device=device)
    torch.mul(x, 2, out=columns[:, ::2])
    values, places = torch.empty(0, device=device), torch.empty(0, dtype=torch.int64, device=device)
    torch.sort(x, descending=True, out=(values, places))
    return out.tolist(), columns.tolist(), values.tolist(), places.tolist()


def indexed_by_mask(device: str) -> Any:
    x = ramp(device)
    chosen = x[x > 5].tolist()
    x[x > 8] = 0
    x[:, torch.tensor([True, False, True, False], device=device)] += 100
    x[x == 7] = torch.tensor([5.0], device=device)
    x[torch.tensor([0, 2], device=device), torch.tensor([1, 3], device=device)] = -1
    return chosen, x.tolist(), x[None, [0, 2], ..., 1:].tolist(), torch.nonzero(x < 0).tolist()


CASES: list[Callable[[str], Any]] = [
    reads,
    resized,
    turned_in_place,
    set_to_another_storage,
    data_assigned,
    out_given,
    indexed_by_mask,
]


@pytest.mark.parametrize("case", CASES)
def test_result_equals_the_cpus(case: Callable[[str], Any]) -> None:
    assert case("jax") == case("cpu")


PRINTED = [
    ramp("cpu"),
    torch.tensor(1),
    torch.tensor([True]),
    torch.zeros(0, 3),
    torch.tensor([float("nan"), 1e-9, -1e6]),
    torch.ones(2, dtype=torch.complex64),
    torch.ones(2, dtype=torch.bfloat16),
    torch.ones(3000),
]


@pytest.mark.parametrize("host", PRINTED)
def test_printing_shows_what_the_cpu_shows_and_the_device(host: torch.Tensor) -> None:
    shown = repr(host.to("jax"))
    assert "device='jax:0'" in shown
    words = shown.replace("device='jax:0'", "").replace(",", " ").replace(")", " ").split()
    assert words == repr(host).replace(",", " ").replace(")", " ").split()


def traced(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
    with exact_dtypes():
        return jax.jit(lambda array: load(fn(wrap(array))))(load(x.to("jax")))


def test_write_through_a_mask_needs_no_values_in_a_trace() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[x < 2] = torch.tensor([70.0, 80.0], device=x.device)
        x[x > 75] = 0
        return x

    assert traced(write, ramp("cpu")).tolist() == write(ramp("cpu")).tolist()


def test_mask_of_the_wrong_count_is_an_error() -> None:
    x = ramp("jax")
    with pytest.raises(RuntimeError, match=r"shape mismatch: value tensor of shape \[3\]"):
        x[x < 2] = torch.ones(3, device="jax")


@pytest.mark.parametrize("fn", [lambda x: x[x > 5], torch.nonzero, torch.unique, lambda x: torch.bincount(x.long().flatten())])
def test_shape_from_values_in_a_trace_names_op_line_and_fix(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(spmd.TraceError, match="depends on values") as caught:
        traced(fn, ramp("cpu"))
    assert "called at test_tensor_methods.py" in str(caught.value) and "fix:" in str(caught.value)

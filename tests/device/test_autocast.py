"""Autocast follows PyTorch's own lists, and casts what they say."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from spmd.base._torch import torch_at_least
from spmd.device import _autocast
from tests.oracle import assert_same

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def listed(macro: str) -> set[str]:
    body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", HEADER.read_text(), re.DOTALL)
    assert body is not None
    return {re.sub(r",\s*", ".", entry) for entry in re.findall(r"_\(([\w, ]+)\)", body.group(1))}


@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", _autocast.LOW),
        ("AT_FORALL_FP32", _autocast.FLOAT32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", _autocast.FLOAT32_BY_DTYPE),
        ("AT_FORALL_PROMOTE", _autocast.WIDEST),
    ],
)
def test_lists_are_those_of_the_installed_torch(macro: str, ours: list[str]) -> None:
    # Until torch 2.13 there were overloads for named tensors, which torch hands to no kernel written in Python.
    assert set(ours) == {name for name in listed(macro) if torch_at_least("2.13") or "dimname" not in name.lower()}


def test_matmul_runs_low_and_losses_run_in_float32() -> None:
    x, w = torch.randn(4, 8).to("jax"), torch.randn(3, 8).to("jax")
    with torch.autocast("jax", dtype=torch.bfloat16):
        y = F.linear(x, w)
        loss = F.mse_loss(y, torch.zeros_like(y))
        assert (y.dtype, loss.dtype, (y + y).dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
        assert y.softmax(-1).dtype == torch.float32
        assert torch.addcmul(x[:, :1], y[:, :1], y[:, :1]).dtype == torch.float32
        with torch.autocast("jax", enabled=False):
            assert F.linear(x, w).dtype == torch.float32
    assert F.linear(x, w).dtype == torch.float32
    assert F.linear(x.double(), w.double()).dtype == torch.float64


def test_gradients_reach_float32_parameters_as_on_the_cpu() -> None:
    w = torch.randn(8, 8)
    x = torch.randn(4, 8)
    grads = []
    for device in ("cpu", "jax"):
        parameter = w.to(device).detach().requires_grad_()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.linear(x.to(device), parameter).float().square().mean()
        loss.backward()
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
        grads.append(parameter.grad.cpu())
    assert_same(grads[1], grads[0])


def test_binary_cross_entropy_is_refused() -> None:
    p = torch.rand(4).to("jax")
    with torch.autocast("jax", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(p, p)

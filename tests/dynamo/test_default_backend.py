"""`torch.compile(fn)` without a backend: graphs on the device are compiled by backend "spmd", all others by inductor."""

import copy

import pytest
import torch
from torch import nn

from tests.oracle import assert_same


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, of a module that inductor imports
def test_the_default_backend_is_ours_for_this_device_and_its_options_are_refused() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    want = model(x).square().sum()
    want.backward()
    device, on_device = copy.deepcopy(model).to("jax"), x.detach().to("jax").requires_grad_()
    found = torch.compile(device)(on_device).square().sum()
    found.backward()
    assert_same([found, on_device.grad, device.weight.grad], [want, x.grad, model.weight.grad])
    with pytest.raises(Exception, match=r"a mode or options of inductor(?s:.*)triton.cudagraphs(?s:.*)fix: torch.compile\(fn\)"):
        torch.compile(lambda x: x + 1, mode="reduce-overhead")(torch.ones(2, device="jax"))
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2, device="jax")).cpu().tolist() == [2.0, 2.0]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_graph_that_creates_its_tensors_on_the_device_is_one_of_them() -> None:
    assert torch.compile(lambda n: torch.arange(n, device="jax") * 2)(3).tolist() == [0, 2, 4]
    assert torch.compile(lambda x: x.to("jax") + 1)(torch.ones(2)).tolist() == [2.0, 2.0]

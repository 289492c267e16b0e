"""`device="xla"` and `torch.device("xla")`, wherever a program may say it, and what `t.device` answers."""

import io
import threading
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn as nn

import spmd
from tests.grids import line
from tests.oracle import assert_same, batch

XLA = torch.device("xla:0")

MADE: list[Any] = [
    lambda d: torch.zeros(2, 3, device=d),
    lambda d: torch.randn(2, 3, device=d),
    lambda d: torch.empty(2, 3, device=d),
    lambda d: torch.full((2, 3), 1.5, device=d),
    lambda d: torch.arange(6, device=d),
    lambda d: torch.eye(3, device=d),
    lambda d: torch.linspace(0, 1, 5, device=d),
    lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
    lambda d: torch.as_tensor(np.ones(3), device=d),
    lambda d: torch.ones(2).to(d),
    lambda d: torch.ones(2).to(device=d),
    lambda d: torch.ones(2).to(d, torch.float64),
    lambda d: torch.ones(2).to(d, non_blocking=True),
    lambda d: torch.zeros_like(torch.ones(2), device=d),
    lambda d: torch.ones(2).new_zeros(3, device=d),
    lambda d: torch.ones(2).new_tensor([1.0], device=d),
    lambda d: nn.Linear(2, 3, device=d).weight,
    lambda d: nn.Linear(2, 3).to(d).weight,
    lambda d: nn.Linear(2, 3).to(device=d, dtype=torch.bfloat16).bias,
    lambda d: nn.BatchNorm1d(3).to(d).running_mean,
    lambda d: nn.Embedding(4, 2, device=d).weight,
    lambda d: nn.Parameter(torch.randn(2, device=d)),
    lambda d: torch.ones(2).to(d).to(torch.float16).float(),
    lambda d: torch.ones(2).to(d).to(torch.ones(1, device=d)),
]


@pytest.mark.parametrize(
    "device", ["xla", "xla:0", torch.device("xla"), XLA], ids=["text", "text with index", "device", "device with index"]
)
@pytest.mark.parametrize("make", MADE)
def test_a_tensor_is_made_on_the_device_however_it_is_said(make: Any, device: Any) -> None:
    made = make(device)
    assert made.device == XLA and made.device.type == "xla" and made.is_xla
    assert not made.cpu().is_xla and made.cpu().device.type == "cpu"
    assert isinstance(made.cpu().numpy() if made.dtype != torch.bfloat16 and not made.requires_grad else 0, object)


def test_the_device_of_a_tensor_may_be_handed_on() -> None:
    x = torch.ones(2, device="xla")
    assert torch.zeros(3, device=x.device).device == x.device == torch.device("xla", 0)
    assert torch.ones(1).to(x.device).device == XLA
    assert x.to("cpu").device == torch.device("cpu") and x.to("xla") is x
    assert {x.device: 1}[XLA] == 1 and str(x.device) == "xla:0" and x.device.index == 0


def test_results_of_operations_and_views_are_there_too() -> None:
    x = torch.ones(4, 2, device="xla")
    for result in (x + 1, x @ x.T, x.sum(), x[0], x.T, x.detach(), x.clone(), x.reshape(-1), torch.cat([x, x])):
        assert result.device == XLA
    assert torch.ones(2).device.type == "cpu" and not torch.ones(2).is_xla


@pytest.mark.parametrize("device", ["xla", XLA])
def test_a_device_context_makes_it_the_default(device: Any) -> None:
    with torch.device(device):
        x, layer = torch.ones(3), nn.Linear(2, 2)
        assert x.device == layer.weight.device == XLA
    assert torch.ones(3).device.type == "cpu"
    torch.set_default_device(device)
    try:
        assert torch.ones(3).device == XLA and torch.get_default_device() == XLA
    finally:
        torch.set_default_device(None)
    assert torch.get_default_device().type == "cpu"


def test_a_tensor_is_printed_with_that_device() -> None:
    x = torch.ones(2, device="xla")
    assert repr(x) == "tensor([1., 1.], device='xla:0')" and "xla:0" in f"{x}" and "xla:0" in str(x)


def test_threads_started_by_the_program_know_it() -> None:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(torch.ones(2, device="xla").device))
    thread.start()
    thread.join()
    assert seen == [XLA]


class Scale(torch.autograd.Function):
    """Multiplies by a tensor that its backward pass makes on the device of the gradient."""

    devices: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        Scale.devices.append(grad.device)
        return grad * torch.full((), 2.0, device="xla")


@pytest.mark.parametrize("run", ["backward", "autograd.backward", "autograd.grad"])
def test_backward_passes_of_the_program_know_it(run: str) -> None:
    x = torch.ones(3, device="xla", requires_grad=True)
    loss = Scale.apply(x).sum()
    Scale.devices.clear()
    if run == "backward":
        loss.backward()
        grad = x.grad
    elif run == "autograd.backward":
        torch.autograd.backward([loss])
        grad = x.grad
    else:
        (grad,) = torch.autograd.grad(loss, x)
    assert Scale.devices == [XLA]
    assert_same(grad, torch.full((3,), 2.0))


def test_autocast_and_files_take_it() -> None:
    x = torch.ones(2, 2, device="xla")
    with torch.autocast("xla"):
        assert (x @ x).dtype == torch.bfloat16
    with torch.autocast(device_type="xla", dtype=torch.float16):
        assert (x @ x).dtype == torch.float16
    with torch.amp.autocast("xla", enabled=False):
        assert (x @ x).dtype == torch.float32
    held = io.BytesIO()
    torch.save({"x": x}, held)
    for device in ("xla", XLA, "xla:0"):
        held.seek(0)
        assert torch.load(held, map_location=device)["x"].device == XLA
    held.seek(0)
    assert torch.load(held)["x"].device.type == "cpu"


def test_a_program_compiled_from_such_code_runs() -> None:
    layer = nn.Linear(4, 4).to("xla")
    optimizer = torch.optim.Adam(layer.parameters())

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        assert x.device == XLA
        optimizer.zero_grad()
        loss = (layer(x.to("xla")) + torch.ones(4, device=x.device)).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    losses = [float(step(batch(2, 4).to("xla")).detach()) for _ in range(3)]
    assert losses[2] < losses[0] and step.num_traces == 1


def test_this_package_is_told_the_truth_and_everything_ends_with_uninstall() -> None:
    x = torch.ones(8, device="xla")
    spmd.mark_sharding(x, line(), ("data",))
    assert isinstance(x, spmd.XLAShardedTensor)
    spmd.compat.torch_xla.uninstall()
    try:
        assert x.device == torch.device("jax:0") and not x.is_xla
        with pytest.raises((RuntimeError, NotImplementedError)):
            torch.ones(2, device="xla")
        with pytest.raises(ModuleNotFoundError):
            import torch_xla  # noqa: F401  # pyright: ignore
        assert not issubclass(spmd.SpmdError, AssertionError)
    finally:
        spmd.compat.torch_xla.install()

"""Modules whose parameters are others while they run (gathered ones, casts) and which the model passes on meanwhile.

Nothing has changed when a call ends, so no later call traces again; and a parameter that the program replaces is the new one.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mesh
import spmd
from tests.oracle import batch, descend

pytestmark = pytest.mark.multidevice(num=8)
WIDTH = 16


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias


class Layer(nn.Module):
    """Calls its body in the way `call`: called as `call(layer, x)`."""

    def __init__(self, call: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call, self.scaled = call, Scaled()

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self, x)


CALLS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "partial": lambda layer, x: functools.partial(Layer.body, layer)(x),
    # the layers of transformers checkpoint their forward in this way, inside the hooks of `fully_shard`
    "checkpoint of a partial": lambda layer, x: checkpoint(functools.partial(Layer.body, layer), x, use_reentrant=False),
    "functions of C": lambda layer, x: functools.reduce(lambda y, each: each.body(y), sorted([layer], key=id), x),
    "repr": lambda layer, x: layer.body(x) * len(repr(layer)) / len(repr(layer)),
}


def trained(place: Callable[[nn.Module], Any], call: str, change: Callable[[Any, str], None], device: str) -> tuple[list[float], Any]:
    """The losses of five steps, with `change(model, device)` before the third; and the step."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(CALLS[call]), Layer(CALLS[call])).to(device)
    place(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        return descend(model, optimizer, x)

    run: Any = step if device == "cpu" else spmd.compile(step)
    x, losses = batch(8, WIDTH).to(device), list[float]()
    for number in range(5):
        if number == 2:
            change(model, device)
        losses.append(run(x).item())
    return losses, run


def sharded(model: Any) -> None:
    grid = mesh.Mesh(range(8), (8,), ("fsdp",))
    for layer in model:
        spmd.fully_shard(layer, grid)


def cast(model: nn.Module) -> None:
    spmd.mixed_precision(model, spmd.MixedPrecisionPolicy(torch.float64, output_dtype=torch.float32))


def new_parameter(model: Any, device: str) -> None:
    model[0].scaled.weight = nn.Parameter(torch.full((WIDTH,), 2.0).to(device))


def frozen(model: Any, device: str) -> None:
    model[0].scaled.weight.requires_grad_(False)


def tied(model: Any, device: str) -> None:
    model[0].scaled.bias = model[0].scaled.weight


def nothing(model: Any, device: str) -> None:
    pass


@pytest.mark.filterwarnings("ignore:every device along 'fsdp':UserWarning")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("place", [sharded, cast])
def test_a_module_that_is_passed_on_is_traced_once(place: Callable[[nn.Module], None], call: str) -> None:
    want, _ = trained(lambda model: None, call, nothing, "cpu")
    got, step = trained(place, call, nothing, "jax")
    torch.testing.assert_close(got, want, rtol=2e-6, atol=0)  # float32, summed in another order over the devices
    assert step.num_traces == 1


@pytest.mark.filterwarnings("ignore:every device along 'fsdp':UserWarning")
@pytest.mark.parametrize("change", [new_parameter, frozen, tied])
@pytest.mark.parametrize("place", [sharded, cast])
def test_a_parameter_that_is_replaced_between_calls_is_the_new_one(
    place: Callable[[nn.Module], None], change: Callable[[Any, str], None]
) -> None:
    want, _ = trained(lambda model: None, "partial", change, "cpu")
    got, step = trained(place, "partial", change, "jax")
    torch.testing.assert_close(got, want, rtol=2e-6, atol=0)  # float32, summed in another order over the devices
    assert step.num_traces == 2

"""`torch.nn.utils` on device 'jax': eager, compiled, and with the first dim of each parameter split over eight devices."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.utils as utils
from torch.nn.utils import parametrizations, parametrize

import mesh
import spmd
from tests.oracle import assert_same, batch

Wrap = Callable[[Any], Any]
TOLERANCE = (2e-4, 2e-5)  # three steps; a power iteration and a matrix inverse among them


class Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).t()


def trained(model: nn.Module, wrap: Wrap, x: torch.Tensor) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = wrap(step)
    return [step(x) for _ in range(3)], dict(model.state_dict())


def by(prepare: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda model, wrap, x: trained(prepare(model), wrap, x)


def removed(model: Any) -> Any:
    parametrizations.weight_norm(model)
    return parametrize.remove_parametrizations(model, "weight")


def symmetric(model: Any) -> Any:
    parametrize.register_parametrization(model, "weight", Symmetric())
    return model


def clipped(model: nn.Module, wrap: Wrap, x: torch.Tensor) -> Any:
    def fn(x: torch.Tensor) -> Any:
        model.zero_grad()
        model(x).square().sum().backward()
        norm = utils.clip_grad_norm_(model.parameters(), 1.0)
        utils.clip_grad_value_(model.parameters(), 0.1)
        total = utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        utils.clip_grads_with_norm_(model.parameters(), 1.0, total)
        return norm, total, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    return wrap(fn)(x)


def detached(model: Any, wrap: Wrap, x: torch.Tensor) -> Any:
    def fn(x: torch.Tensor) -> Any:
        y = model(x)
        z = y * 2
        z.detach_()
        copied = model.weight.clone().detach_().mul_(2)
        return torch.autograd.grad((y * z).sum(), model.weight)[0], copied, z.requires_grad, copied.is_leaf

    return wrap(fn)(x)


def of_a_parameter(model: Any, wrap: Wrap, x: torch.Tensor) -> Any:
    return wrap(lambda x: nn.functional.linear(x, nn.Parameter(model.weight)).detach())(x)


def vectors(model: Any, wrap: Wrap, x: torch.Tensor) -> Any:
    step = wrap(lambda s: utils.vector_to_parameters(utils.parameters_to_vector(model.parameters()) * s, model.parameters()))
    for _ in range(2):
        step(x.mean())
    return dict(model.state_dict())


CASES: dict[str, Callable[..., Any]] = {
    "weight_norm": by(utils.weight_norm),
    "parametrizations.weight_norm": by(parametrizations.weight_norm),
    "remove_parametrizations": by(removed),
    "parametrizations.orthogonal": by(lambda m: parametrizations.orthogonal(m, orthogonal_map="cayley")),
    "parametrize.register_parametrization": by(symmetric),
    "clip_grad": clipped,
    "detach_": detached,
    "Parameter of a parameter": of_a_parameter,
    "vector_to_parameters": vectors,
}


def compared(name: str, wrap: Wrap, grid: mesh.Mesh | None) -> None:
    torch.manual_seed(0)
    host = nn.Linear(4, 4)
    device = copy.deepcopy(host).to("jax")
    for p in device.parameters() if grid is not None else ():
        spmd.mark_sharding(p, grid, ("model", *[None] * (p.dim() - 1)))
    x = batch(8, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the older weight_norm is deprecated
        got, want = CASES[name](device, wrap, x.to("jax")), CASES[name](host, lambda fn: fn, x)
    assert_same(got, want, TOLERANCE)


@pytest.mark.parametrize("wrap", [lambda fn: fn, spmd.compile], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_cpu(name: str, wrap: Wrap) -> None:
    compared(name, wrap, None)


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_cpu_on_eight_devices(name: str, mesh_4x2: mesh.Mesh) -> None:
    compared(name, spmd.compile, mesh_4x2)


@pytest.mark.parametrize("wrap", [lambda fn: fn, spmd.compile], ids=["eager", "compiled"])
def test_spectral_norm_from_the_same_start(wrap: Wrap) -> None:
    torch.manual_seed(0)
    host = parametrizations.spectral_norm(nn.Linear(4, 4))
    device = parametrizations.spectral_norm(nn.Linear(4, 4).to("jax"))
    device.load_state_dict(host.state_dict())
    x = batch(8, 4)
    assert_same(trained(device, wrap, x.to("jax")), trained(host, lambda fn: fn, x), TOLERANCE)


@pytest.mark.parametrize("lengths", [torch.tensor([3, 2, 1]), [2, 3, 1]], ids=["sorted tensor", "list in any order"])
@pytest.mark.parametrize("wrap", [lambda fn: fn, spmd.compile], ids=["eager", "compiled"])
def test_packed_sequences_with_lengths_of_the_host(lengths: Any, wrap: Wrap) -> None:
    torch.manual_seed(0)
    host = nn.LSTM(4, 5, batch_first=True)
    device = copy.deepcopy(host).to("jax")

    def fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        packed = utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=isinstance(lengths, torch.Tensor))
        return utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True, total_length=4)[0].detach()

    x = batch(3, 4, 4)
    step = wrap(lambda x: fn(device, x))
    for _ in range(2):
        assert_same(step(x.to("jax")), fn(host, x))


@pytest.mark.parametrize("is_sorted", [True, False])
def test_lengths_that_are_an_argument_select_a_program(is_sorted: bool) -> None:
    host = nn.GRU(4, 5, batch_first=True)
    device = copy.deepcopy(host).to("jax")

    def fn(model: nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=is_sorted)
        return utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True, total_length=4)[0].detach()

    step = spmd.compile(lambda x, lengths: fn(device, x, lengths))
    lengths = torch.tensor([3, 3, 1])
    for changed in (1, 2, 3, 1):
        lengths[int(is_sorted)] = changed  # the same tensor: its values count
        x = batch(3, 4, 4, seed=changed)
        assert_same(step(x.to("jax"), lengths), fn(host, x, lengths))
    assert step.num_traces == 3


def test_ctc_loss_with_lengths_of_the_host() -> None:
    loss = nn.CTCLoss()
    logits, targets = batch(5, 3, 4).log_softmax(-1), torch.tensor([[1, 2], [1, 3], [2, 2]])
    step = spmd.compile(lambda x, t, a, b: loss(x, t, a, b))
    for lengths in ([5, 5, 5], [4, 5, 3]):
        given = targets, torch.tensor(lengths), torch.tensor([2, 1, 2])
        assert_same(step(logits.to("jax"), *given), loss(logits, *given))

"""Recurrent networks equal the CPU's in outputs, states and gradients, padded and packed."""

import copy
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from tests.lowering.against_cpu import assert_equal, assert_same_gradients, check, normal, on_jax

NETWORKS: dict[str, torch.nn.RNNBase] = {
    "LSTM": torch.nn.LSTM(5, 6),
    "LSTM, two layers both ways": torch.nn.LSTM(5, 6, 2, bidirectional=True, batch_first=True),
    "LSTM with projections": torch.nn.LSTM(5, 6, 2, proj_size=3),
    "GRU": torch.nn.GRU(5, 6, 2, bidirectional=True),
    "GRU without bias": torch.nn.GRU(5, 6, bias=False),
    "RNN": torch.nn.RNN(5, 6, batch_first=True),
    "RNN of relu": torch.nn.RNN(5, 6, nonlinearity="relu", bidirectional=True),
}
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")  # the CPU's


@pytest.mark.parametrize("kind", ["batched", "unbatched", "packed"])
@pytest.mark.parametrize("name", NETWORKS)
def test_network_equals_cpu(name: str, kind: str) -> None:
    cpu = copy.deepcopy(NETWORKS[name])
    device = copy.deepcopy(cpu).to("jax")
    x = normal(4, 5) if kind == "unbatched" else normal(3, 4, 5) if cpu.batch_first else normal(4, 3, 5)
    x_jax = on_jax(x)
    results: list[Any] = []
    for network, input in ((device, x_jax), (cpu, x)):
        if kind == "packed":
            packed = pack_padded_sequence(input, torch.tensor([2, 4, 1]), network.batch_first, enforce_sorted=False)
            out, state = network(packed)
            results.append((out.data, state))
        else:
            results.append(network(input))
    assert_equal(*results)
    assert_same_gradients((results[0], x_jax, list(device.parameters())), (results[1], x, list(cpu.parameters())))


@pytest.mark.parametrize("cell", [torch.nn.LSTMCell(5, 6), torch.nn.GRUCell(5, 6), torch.nn.RNNCell(5, 6)], ids=lambda c: type(c).__name__)
def test_cell_equals_cpu(cell: torch.nn.Module) -> None:
    device = copy.deepcopy(cell).to("jax")
    x = normal(3, 5)
    x_jax = on_jax(x)
    expected, actual = cell(x), device(x_jax)
    assert_equal(actual, expected)
    assert_same_gradients((actual, x_jax), (expected, x))


def test_second_derivatives_of_an_lstm_equal_cpu() -> None:
    weights = [normal(*p.shape, seed=i, dtype=torch.float64) for i, p in enumerate(torch.nn.LSTM(3, 4).parameters())]

    def penalty(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        start = torch.zeros(1, 2, 4, dtype=x.dtype, device=x.device)
        out, _, cell = torch.lstm(x, [start, start], weights, True, 1, 0.0, True, False, False)
        (g,) = torch.autograd.grad(out.pow(2).sum() + cell.sum(), x, create_graph=True)
        return g.pow(2).sum()

    check(penalty, normal(3, 2, 3, dtype=torch.float64), *weights)


def test_dropout_between_layers_repeats_under_a_seed_and_is_off_in_evaluation() -> None:
    network = torch.nn.GRU(5, 6, 2, dropout=0.5).to("jax")
    x = normal(4, 3, 5, grad=False).to("jax")
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(network(x)[0].detach().cpu())
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    network.eval()
    assert torch.equal(network(x)[0].detach().cpu(), network(x)[0].detach().cpu())

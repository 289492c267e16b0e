"""A graph runs on the arrays that its tensors have: what pytorch/xla#7255 asks of a Dynamo backend. Nothing is copied on the way."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
import torch
from torch import nn

from spmd.dynamo import graphs
from spmd.dynamo._graph_executables import GraphExecutables
from tests.oracle import array_of, assert_same, batch, twins


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Any]]]:
    """What executables were given, call by call."""
    found: list[list[Any]] = []
    torchs: Callable[..., list[Any]] = GraphExecutables.arrays
    monkeypatch.setattr(GraphExecutables, "arrays", lambda self, tensors, given: found.append(torchs(self, tensors, given)) or found[-1])
    yield found


class Model(nn.Module):
    """Parameters, a buffer, and a result that is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)

    def forward(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(self.up(inputs["x"])), inputs["y"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_model_runs_on_the_arrays_that_there_are(calls: list[list[Any]], dynamic: bool) -> None:
    others = graphs()  # of functions in other modules, whose globals Dynamo keeps them in
    host, model = twins(Model)
    compiled = torch.compile(model, backend="spmd", fullgraph=True, dynamic=dynamic)
    inputs = {"x": batch(8, 8), "y": batch(3)}
    on_device = {name: value.to("jax") for name, value in inputs.items()}
    for i in range(2):
        calls.clear()
        before = [array_of(t) for t in (*model.parameters(), *model.buffers(), on_device["x"])]
        with jax.transfer_guard("disallow" if i and not dynamic else "allow"):  # the sizes of a call are sent
            result, same = compiled(on_device)
        assert_same([result, same], list(host(inputs)), (2e-5, 2e-5))
        assert same is on_device["y"]
        assert {id(a) for a in before} <= {id(a) for given in calls for a in given}
    assert not any(graph.refused or graph.sizes for graph in graphs() if graph not in others)


def test_gradients_are_computed_from_the_arrays_that_there_are(calls: list[list[Any]]) -> None:
    model = nn.Linear(8, 8).to("jax")
    compiled = torch.compile(model, backend="spmd", fullgraph=True)
    x = batch(4, 8).to("jax").requires_grad_()
    result = compiled(x)
    calls.clear()
    result.sum().backward()
    (kept,) = calls
    assert {id(a) for a in kept} <= {id(array_of(t)) for t in (x, *model.parameters())}

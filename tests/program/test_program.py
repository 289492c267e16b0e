"""The compiled program of a step: its state is donated and stays where it was laid out, its arguments stay the caller's."""

from typing import Any

import pytest
import torch
from torch import nn

import mesh
import spmd
from spmd.device._storage import buffer_of


def array(tensor: torch.Tensor) -> Any:
    """The jax array that holds the tensor's value."""
    return buffer_of(tensor).raw()


def step_of(model: nn.Module) -> spmd.Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_state_is_donated_and_arguments_are_not() -> None:
    model, x = nn.Linear(4, 4).to("jax"), torch.ones(2, 4).to("jax")
    step = step_of(model)
    step(x)
    weight, argument = array(model.weight), array(x)
    step(x)
    assert weight.is_deleted() and not argument.is_deleted()
    assert not array(model.weight).is_deleted()


def test_what_a_program_only_reads_is_not_donated() -> None:
    table = torch.ones(4).to("jax")
    read = spmd.compile(lambda x: x + table)
    x = torch.ones(4).to("jax")
    read(x)
    held = array(table)
    assert read(x).tolist() == [2] * 4 and not held.is_deleted()


@pytest.mark.multidevice(num=8)
def test_state_stays_where_it_was_laid_out_and_what_is_unmarked_is_replicated(mesh_4x2: mesh.Mesh) -> None:
    model = nn.Linear(8, 8).to("jax")
    spmd.mark_sharding(model.weight, mesh_4x2, ("model", None))
    x = spmd.mark_sharding(torch.ones(8, 8).to("jax"), mesh_4x2, ("data", None))
    step = step_of(model)
    for _ in range(2):
        step(x)
        assert tuple(array(model.weight).sharding.spec) == ("model", None)
        assert array(model.bias).sharding.is_fully_replicated and len(array(model.bias).sharding.device_set) == 8
    assert (step.num_traces, step.num_executables) == (1, 1)


def test_value_written_from_outside_is_used_by_the_same_executable() -> None:
    model, x = nn.Linear(1, 1, bias=False).to("jax"), torch.ones(1, 1).to("jax")
    evaluate = spmd.compile(lambda x: model(x))
    evaluate(x)
    with torch.no_grad():
        model.weight.fill_(3)
    assert evaluate(x).item() == 3
    assert (evaluate.num_traces, evaluate.num_executables) == (1, 1)


def test_program_says_what_it_costs_without_a_call() -> None:
    x = torch.ones(4, 4).to("jax")
    product = spmd.compile(lambda x: x @ x)
    program = product.program(x)
    assert program.flops() == 2 * 4**3
    assert program.memory().argument_bytes >= 64
    assert program.collectives().counts() == {}

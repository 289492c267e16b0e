"""The compiled program of a step: its state is donated and stays where it was laid out, its arguments stay the caller's."""

from typing import Any

import pytest
import torch
from torch import nn

import mesh
import spmd
from spmd.device._storage import buffer_of
from tests.oracle import assert_same, assert_same_model, batch, twins


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


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("order", ["eval train eval", "train eval train", "eval eval train train"])
def test_a_layout_inside_one_program_leaves_the_others_right(mesh_4x2: mesh.Mesh, order: str) -> None:
    """No parameter is marked: the mesh of the program is that of the layout inside, and its state lies there from then on."""
    host, model = twins()
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (host, model))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        hidden = model(x)
        hidden = spmd.mark_sharding(hidden, mesh_4x2, ("data", None)) if hidden.device.type == "jax" else hidden
        loss = hidden.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    steps = {"eval": spmd.compile(lambda x: model(x) * 2), "train": spmd.compile(lambda x: train(model, ours, x))}
    expected = {"eval": lambda x: host(x) * 2, "train": lambda x: train(host, theirs, x)}
    x = batch(8, 8)
    for name in (*order.split(), *order.split()):
        assert_same(steps[name](x.to("jax")).detach(), expected[name](x).detach())
    assert_same_model(model, host)
    assert steps["train"].mesh == mesh_4x2 and steps["train"].num_traces == 1
    assert steps["eval"].num_traces <= 2


@pytest.mark.multidevice(num=8)
def test_an_argument_that_another_program_left_on_a_mesh(mesh_4x2: mesh.Mesh) -> None:
    x = batch(8, 8)
    double = spmd.compile(lambda t: t * 2)
    spread = spmd.compile(lambda t: spmd.mark_sharding(t + 1, mesh_4x2, ("data", None)) * 1)
    for given in (x.to("jax"), spread(x.to("jax")), x.to("jax")):
        assert_same(double(given), given.cpu() * 2)

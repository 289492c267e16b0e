"""A training step under torch.compile(backend="spmd") is one donated program; what is no such step, or cannot be one, is Dynamo's."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mesh
import spmd
from spmd.dynamo import graphs, step_of
from spmd.dynamo._whole_step import is_whole_step
from tests.oracle import MLP, assert_same, assert_same_model, batch, twins

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), torch.zeros_like(x))
        loss.backward()
        optimizer.step()
        return loss

    return train_step


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_step_is_one_program_under_a_schedule(name: str, fullgraph: bool) -> None:
    host, model = twins()
    theirs, ours = OPTIMIZERS[name](host.parameters()), OPTIMIZERS[name](model.parameters())
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (theirs, ours)]
    fast, eager = torch.compile(steps_of(model, ours), backend="spmd", fullgraph=fullgraph), steps_of(host, theirs)
    count = len(graphs())
    for i in range(3):
        assert_same(fast(batch(4, 8, seed=i).to("jax")).detach(), eager(batch(4, 8, seed=i)).detach())
        for schedule in schedules:
            schedule.step()
    assert_same_model(model, host)
    assert step_of(fast).num_traces == step_of(fast).num_executables == 1
    assert step_of(fast).memory().alias_bytes > 0
    assert len(graphs()) == count


@pytest.mark.multidevice(num=8)
def test_a_sharded_step_is_one_program_over_the_mesh(mesh_4x2: mesh.Mesh) -> None:
    host, model = twins()
    spmd.mark_sharding(model.up.weight, mesh_4x2, ("model", None))
    spmd.mark_sharding(model.down.weight, mesh_4x2, (None, "model"))
    theirs, ours = OPTIMIZERS["adamw"](host.parameters()), OPTIMIZERS["adamw"](model.parameters())
    fast, eager = torch.compile(steps_of(model, ours), backend="spmd"), steps_of(host, theirs)
    for i in range(2):
        x = spmd.mark_sharding(batch(8, 8, seed=i).to("jax"), mesh_4x2, ("data", None))
        assert_same(fast(x).detach(), eager(batch(8, 8, seed=i)).detach())
    assert_same_model(model, host)
    assert step_of(fast).mesh == mesh_4x2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_has_few_programs_for_sizes_that_vary(name: str) -> None:
    host, model = twins()
    theirs, ours = OPTIMIZERS[name](host.parameters()), OPTIMIZERS[name](model.parameters())
    fast, eager = torch.compile(steps_of(model, ours), backend="spmd", dynamic=True, fullgraph=True), steps_of(host, theirs)
    for size in (4, 12, 9, 16, 11, 5, 7):
        assert_same(fast(batch(size, 8).to("jax")).detach(), eager(batch(size, 8)).detach())
    assert_same_model(model, host)
    assert step_of(fast).num_executables == 3  # the first size; 8 and 16


def test_gradients_without_an_optimizer_are_kept() -> None:
    host, model = twins()

    @torch.compile(backend="spmd")
    def backward(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    for i in range(2):  # the second time they add up
        backward(batch(4, 8, seed=i).to("jax"))
        host(batch(4, 8, seed=i)).square().sum().backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in host.parameters()])


def test_kept_gradients_are_an_option_and_others_are_refused() -> None:
    model = MLP().to("jax")
    step = steps_of(model, OPTIMIZERS["sgd"](model.parameters()))
    torch.compile(step, backend="spmd", options={"keep_grads": True})(batch(4, 8).to("jax"))
    assert model.up.weight.grad is not None and float(model.up.weight.grad.abs().sum()) > 0
    with pytest.raises(spmd.SpmdError, match="no option 'donate'"):
        torch.compile(step, backend="spmd", options={"donate": True})


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo asks an intermediate result for it
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, of a module that Dynamo imports for an optimizer
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_no_program_can_be_runs_in_dynamos_graphs(name: str, caplog: pytest.LogCaptureFixture) -> None:
    host, model = twins()
    theirs, ours = OPTIMIZERS[name](host.parameters()), OPTIMIZERS[name](model.parameters())
    seen: list[float] = []

    def with_value(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            seen.extend({round(float(loss.detach()), 3): None})  # a key needs the value
            loss.backward()
            optimizer.step()
            return loss

        return step

    fast, eager = torch.compile(with_value(model, ours), backend="spmd"), with_value(host, theirs)
    with caplog.at_level(logging.WARNING, "spmd.dynamo"):
        for i in range(3):
            assert_same(fast(batch(4, 8, seed=i).to("jax")).detach(), eager(batch(4, 8, seed=i)).detach())
    assert_same_model(model, host)
    assert seen[::2] == seen[1::2] and len(seen) == 6 and "cannot run as one program" in caplog.text
    with pytest.raises(spmd.TraceError):
        torch.compile(with_value(model, ours), backend="spmd", fullgraph=True)(batch(4, 8).to("jax"))


class Trainer:
    """A step that is a method, and names another one."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)

    def update(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        self.update(loss)
        return loss


def test_a_method_is_a_step_too() -> None:
    host, model = twins()
    theirs, ours = Trainer(host), Trainer(model)
    fast = torch.compile(ours.step, backend="spmd")
    for i in range(2):
        assert_same(fast(batch(4, 8, seed=i).to("jax")).detach(), theirs.step(batch(4, 8, seed=i)).detach())
    assert_same_model(model, host)
    assert step_of(fast).num_traces == 1


def test_an_optimizers_own_step_is_one_program() -> None:
    host, model = twins()
    theirs, ours = OPTIMIZERS["adamw"](host.parameters()), OPTIMIZERS["adamw"](model.parameters())
    fast = torch.compile(ours.step, backend="spmd")
    for i in range(3):
        model(batch(4, 8, seed=i).to("jax")).square().sum().backward()
        host(batch(4, 8, seed=i)).square().sum().backward()
        fast()
        theirs.step()
        assert_same_model(model, host)
        ours.zero_grad()
        theirs.zero_grad()
    assert step_of(fast).num_traces == 1


def test_inside_spmd_compile_a_step_is_part_of_its_program() -> None:
    host, model = twins()
    theirs, ours = OPTIMIZERS["sgd"](host.parameters()), OPTIMIZERS["sgd"](model.parameters())
    inner, eager = torch.compile(steps_of(model, ours), backend="spmd"), steps_of(host, theirs)
    outer = spmd.compile(lambda x: inner(x) * 2)
    for i in range(2):
        assert_same(outer(batch(4, 8, seed=i).to("jax")).detach(), eager(batch(4, 8, seed=i)).detach() * 2)
    assert_same_model(model, host)
    assert outer.num_traces == 1 and step_of(inner).num_traces == 0


def test_a_stance_of_torchs_holds() -> None:
    model = MLP().to("jax")
    fast = torch.compile(steps_of(model, OPTIMIZERS["sgd"](model.parameters())), backend="spmd")
    with torch.compiler.set_stance("force_eager"):
        fast(batch(4, 8).to("jax"))
    assert step_of(fast).num_traces == 0


_model = MLP()


def _forward(x: torch.Tensor) -> torch.Tensor:
    return _model(x).square().mean()


def _gradients(x: torch.Tensor) -> Any:
    return torch.autograd.grad(_forward(x), list(_model.parameters()))


@pytest.mark.parametrize(
    ("fn", "is_step"),
    [
        (_forward, False),
        (_gradients, True),
        (_model, False),
        (_model.forward, False),
        (lambda x: torch.Tensor.backward(x), True),
        (torch.optim.SGD(_model.parameters()).step, True),
        (Trainer(_model).step, True),
        (torch.sin, False),
    ],
)
def test_which_functions_are_steps(fn: Any, is_step: bool) -> None:
    assert is_whole_step(fn) == is_step


def test_what_is_no_step_has_no_program_of_one() -> None:
    with pytest.raises(spmd.SpmdError, match="is not a training step"):
        step_of(torch.compile(_forward, backend="spmd"))
    assert not hasattr(torch.compile(_gradients, backend="eager"), "spmd_step")


def test_a_model_is_compiled_after_its_step() -> None:
    """Dynamo looks at each parameter's gradient, which a step does not keep."""
    host, model = twins()
    theirs, ours = OPTIMIZERS["sgd"](host.parameters()), OPTIMIZERS["sgd"](model.parameters())
    eager = steps_of(host, theirs)
    step, forward = torch.compile(steps_of(model, ours), backend="spmd"), torch.compile(model, backend="spmd")
    for i in range(2):
        step(batch(4, 8, seed=i).to("jax"))
        eager(batch(4, 8, seed=i))
        assert_same(forward(batch(4, 8).to("jax")).detach(), host(batch(4, 8)).detach())
    with pytest.raises(spmd.DroppedValueError, match="not kept"):
        torch.compile(lambda p: p.grad * 2, backend="spmd")(model.up.weight)

"""An exception at any place of a step is the user's own, leaves everything as it was, and the next step is right.

Each place fails once before the first good step and once between two, eager and compiled. The oracle is the same code on CPU
tensors: with the failures where the device is eager, without them where the step is compiled, whose failures leave nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import scan, while_loop
from torch.utils.checkpoint import checkpoint

import spmd
from spmd.device._engine import _raised
from tests.oracle import assert_same, batch
from tests.sweeps import part_of

MODES = ["eager", "compiled"]
OPTIMIZER = importlib.import_module("torch.optim.optimizer")


class BoomError(Exception):
    """What the places raise."""


class Net(nn.Module):
    """Linear layers around a BatchNorm; draws a number, so that a step advances the random stream."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand((), device=x.device)
        return self.down(self.norm(torch.tanh(self.up(x)))) + drawn.floor()


class Job:
    """A model, its optimizer, and `fail`, which raises while `fails` is true. `forward` gives the loss."""

    def __init__(self, device: str, place: Place) -> None:
        torch.manual_seed(0)
        self.model = Net().to(device)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.device, self.fails = device, False
        self.forward = place(self) or self.loss

    def fail(self, *ignored: Any) -> None:
        if self.fails:
            raise BoomError("raised by the place")

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.forward(x)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def tensors(self) -> dict[str, Any]:
        """Values of the model and of the optimizer's state."""
        state = {f"state {i} {k}": v for i, s in self.optimizer.state_dict()["state"].items() for k, v in s.items()}
        return {k: v.detach().cpu().clone() for k, v in {**self.model.state_dict(), **state}.items()}

    def gradients(self) -> dict[str, Any]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


Forward = Callable[[torch.Tensor], torch.Tensor]
Place = Callable[[Job], Forward | None]
PLACES: dict[str, Place] = {}


def place(fn: Place) -> Place:
    PLACES[fn.__name__] = fn
    return fn


# --- gradient hooks


@place
def hook_of_a_parameter(job: Job) -> None:
    job.model.up.weight.register_hook(job.fail)


@place
def hook_of_an_intermediate_tensor(job: Job) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = job.model.up(x)
        y.register_hook(job.fail)
        return job.loss(x) + y.mean()

    return forward


@place
def hook_before_retaining_a_gradient(job: Job) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = job.model(x)
        y.retain_grad()
        y.register_hook(job.fail)
        return y.square().mean()

    return forward


@place
def hook_after_accumulation(job: Job) -> None:
    job.model.down.weight.register_post_accumulate_grad_hook(job.fail)


@place
def hook_of_a_node(job: Job) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = job.model(x).square()
        y.grad_fn.register_hook(job.fail)
        return y.mean()

    return forward


@place
def prehook_of_a_node(job: Job) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = job.model(x).square()
        y.grad_fn.register_prehook(job.fail)
        return y.mean()

    return forward


@place
def hook_of_an_accumulator(job: Job) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        node = torch.autograd.graph.get_gradient_edge(job.model.up.bias).node
        node.register_hook(job.fail)
        job.accumulator = node  # C++ forgets the hooks of an accumulator that nobody holds
        return job.loss(x)

    return forward


@place
def prehook_of_an_accumulator(job: Job) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        node = torch.autograd.graph.get_gradient_edge(job.model.up.bias).node
        node.register_prehook(job.fail)
        job.accumulator = node
        return job.loss(x)

    return forward


@place
def multi_grad_hook(job: Job) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        torch.autograd.graph.register_multi_grad_hook([job.model.up.weight, job.model.down.weight], job.fail)
        return job.loss(x)

    return forward


@place
def backward_hook_of_a_module(job: Job) -> None:
    job.model.norm.register_full_backward_hook(job.fail)


@place
def backward_pre_hook_of_a_module(job: Job) -> None:
    job.model.norm.register_full_backward_pre_hook(job.fail)


@place
def callback_at_the_end_of_backward(job: Job) -> Forward:
    def queue(grad: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(job.fail)

    def forward(x: torch.Tensor) -> torch.Tensor:
        loss = job.loss(x)
        loss.register_hook(queue)
        return loss

    return forward


@place
def hook_that_packs_a_saved_tensor(job: Job) -> Forward:
    def pack(t: torch.Tensor) -> torch.Tensor:
        job.fail()
        return t

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return job.loss(x)

    return forward


@place
def hook_that_unpacks_a_saved_tensor(job: Job) -> Forward:
    def unpack(t: torch.Tensor) -> torch.Tensor:
        job.fail()
        return t

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            return job.loss(x)

    return forward


# --- custom functions


def custom(job: Job, forward_fails: bool) -> Forward:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if forward_fails:
                job.fail()
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if not forward_fails:
                job.fail()
            return grad * 2

    return lambda x: Double.apply(job.loss(x))


@place
def forward_of_a_function(job: Job) -> Forward:
    return custom(job, forward_fails=True)


@place
def backward_of_a_function(job: Job) -> Forward:
    return custom(job, forward_fails=False)


# --- modules


@place
def forward_of_a_module(job: Job) -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            job.fail()
            return self.inner(x)

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

    job.model.down = Failing(job.model.down)  # type: ignore[assignment]


@place
def forward_pre_hook_of_a_module(job: Job) -> None:
    job.model.norm.register_forward_pre_hook(job.fail)


@place
def forward_hook_of_a_module(job: Job) -> None:
    job.model.norm.register_forward_hook(job.fail)


@place
def loss_after_the_model(job: Job) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = job.model(x)
        job.fail()
        return F.mse_loss(y, x)

    return forward


# --- optimizers


@place
def step_of_an_optimizer(job: Job) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            job.fail()
            return result

    job.optimizer = Failing(job.model.parameters(), lr=0.01, momentum=0.9)


@place
def step_pre_hook_of_an_optimizer(job: Job) -> None:
    job.optimizer.register_step_pre_hook(job.fail)


@place
def step_post_hook_of_an_optimizer(job: Job) -> None:
    job.optimizer.register_step_post_hook(job.fail)


# --- control flow and recomputation. CPU tensors take the branch in Python: torch would compile it with Dynamo.


@place
def branch_of_a_cond(job: Job) -> Forward:
    def failing(x: torch.Tensor) -> torch.Tensor:
        job.fail()
        return x * 2

    def forward(x: torch.Tensor) -> torch.Tensor:
        loss = job.loss(x)
        return failing(loss) if job.device == "cpu" else torch.cond(loss > -1, failing, lambda x: x * 3, (loss,))

    return forward


@place
def body_of_a_while_loop(job: Job) -> Forward:
    def body(i: torch.Tensor) -> tuple[torch.Tensor]:
        job.fail()
        return (i + 1,)

    def forward(x: torch.Tensor) -> torch.Tensor:
        start = torch.zeros((), dtype=torch.int64, device=x.device)
        (count,) = body(start) if job.device == "cpu" else while_loop(lambda i: i < 1, body, (start,))
        return job.loss(x) * count

    return forward


@place
def body_of_a_scan(job: Job) -> Forward:
    def combine(carry: torch.Tensor, row: torch.Tensor) -> Any:
        job.fail()
        return carry + row, carry * 1

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = job.model(x)
        total = y[0] * 0
        if job.device == "cpu":
            for row in y:
                total = combine(total, row)[0]
        else:
            total = scan(combine, total, y)[0]
        return total.mean() * 0.1

    return forward


@place
def checkpointed_function(job: Job) -> Forward:
    calls: list[int] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        if len(calls) > 1:  # while it recomputes
            job.fail()
        return torch.tanh(job.model.up(x))

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.clear()
        y = checkpoint(run, x * 1, use_reentrant=False)
        return job.loss(x) + y.square().mean()

    return forward


@place
def checkpointed_function_with_a_backward_inside_backward(job: Job) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        def run(y: torch.Tensor) -> torch.Tensor:
            z = torch.tanh(y)
            if z.requires_grad:
                z.register_hook(job.fail)
            return z

        y = checkpoint(run, job.model.up(x), use_reentrant=True)
        return job.loss(x) + y.square().mean()

    return forward


@place
def remat_of_a_block(job: Job) -> Forward:
    def run(x: torch.Tensor) -> torch.Tensor:
        job.fail()
        return torch.tanh(job.model.up(x))

    block = run if job.device == "cpu" else spmd.remat("nothing")(run)
    return lambda x: job.loss(x) + block(x).square().mean()


# --- modes


@place
def under_no_grad(job: Job) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            job.fail()
        return job.loss(x)

    return forward


@place
def under_autocast(job: Job) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = x @ x.T
            job.fail()
        return job.loss(x) + y.float().mean() * 0

    return forward


@place
def under_a_transform(job: Job) -> Forward:
    def square(x: torch.Tensor) -> torch.Tensor:
        job.fail()
        return x.square().sum()

    return lambda x: job.loss(x) + torch.func.vmap(torch.func.grad(square))(x).mean()


@place
def data(job: Job) -> Forward:
    def rows(x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x
        job.fail()
        yield x

    return lambda x: sum((job.loss(row) for row in rows(x)), torch.zeros((), device=x.device))


# --- what is looked at


def surroundings() -> dict[str, Any]:
    """What a trace or a backward might have left changed in Python: functions that were replaced, hooks of all modules, modes."""
    owners = [torch, torch.autograd, torch.autograd.graph, torch.compiler, F, torch.nn.modules.module, OPTIMIZER, random]
    owners += [torch.utils.checkpoint, torch.Tensor, nn.Module, nn.Linear, nn.BatchNorm1d, torch.optim.Optimizer, torch.optim.SGD]
    found = {f"{o.__name__}.{k}": v for o in owners for k, v in vars(o).items() if isinstance(v, FunctionType)}
    module = torch.nn.modules.module
    found |= {k: sorted(vars(module)[k]) for k in vars(module) if k.startswith("_global_") and hasattr(vars(module)[k], "items")}
    found["optimizer hooks"] = len(OPTIMIZER._global_optimizer_pre_hooks)
    found["modes"] = (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("jax"), torch.get_default_dtype()),
        *(torch._C._is_multithreading_enabled(), torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        *(spmd.device._storage.recording.get(), dict(_raised)),
    )
    return found


@contextmanager
def nothing_changes(*looks: Callable[[], Any]) -> Iterator[None]:
    before = [look() for look in looks]
    yield
    for look, was in zip(looks, before, strict=True):
        now = look()
        assert [k for k in {**now, **was} if now.get(k) is not was.get(k) and not same(now.get(k), was.get(k))] == []


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else type(a) is type(b) and a == b


def attempt(job: Job, step: Callable[..., Any], x: torch.Tensor) -> None:
    """A step that fails, and what must be true of that."""
    job.fails = True
    try:
        step(x.to(job.device))
    except BoomError as error:
        assert str(error) == "raised by the place"
        assert error.__cause__ is None
        assert not isinstance(error.__context__, SystemError)
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        assert trace is not None
        assert trace.tb_frame.f_code.co_name == "fail"
    else:
        raise AssertionError("nothing was raised")
    finally:
        job.fails = False


ROWS = [(at, mode) for at in PLACES for mode in MODES]


# every place compiled; eagerly, where nothing is traced, every second one
@pytest.mark.parametrize("row", part_of(ROWS, lambda number, row: row[1] != "eager" or number % 4 < 2), ids="-".join)
def test_an_exception_is_the_users_and_the_next_step_is_right(row: tuple[str, str]) -> None:
    at, mode = row
    host, device = Job("cpu", PLACES[at]), Job("jax", PLACES[at])
    step = spmd.compile(device.step) if mode == "compiled" else device.step
    for x in (batch(4, 8), batch(6, 8, seed=2)):  # of another shape: a compiled step is traced again
        if mode == "eager":
            with nothing_changes(surroundings):
                attempt(device, step, x)
            attempt(host, host.step, x)
            got, want = device.gradients(), host.gradients()  # how far backward came is the graph's: a linear layer is one node here
            for name in got.keys() & want.keys():
                assert_same(got[name], want[name])
        else:
            kept = device.gradients()
            with nothing_changes(surroundings, device.tensors, lambda: {"stream": torch.jax.get_rng_state()}):
                attempt(device, step, x)
            assert {k: id(g) for k, g in device.gradients().items()} == {k: id(g) for k, g in kept.items()}
        assert_same(device.tensors(), host.tensors())
        with nothing_changes(surroundings):
            loss = step(x.to("jax"))
        assert_same(loss, host.step(x))
        assert_same(device.tensors(), host.tensors())
    assert len(PLACES) >= 20


def test_an_exception_holds_plain_numbers() -> None:
    class StoppedError(Exception):
        at: Any

    state = types.SimpleNamespace(n=0, fails=False)

    def count(x: torch.Tensor) -> torch.Tensor:
        if state.fails:
            error = StoppedError(state.n, [state.n + 1])
            error.at = {"n": (state.n, types.SimpleNamespace(n=state.n))}
            raise error from KeyError(state.n)
        return x * state.n

    step, x = spmd.compile(count), torch.ones(1).to("jax")
    for state.n, state.fails in ((1, False), (2, False), (3, False), (4, True)):
        with pytest.raises(StoppedError) if state.fails else contextlib.nullcontext() as caught:
            step(x)
    error: Any = caught.value  # type: ignore[union-attr]
    numbers = (error.args[0], *error.args[1], error.at["n"][0], error.at["n"][1].n, error.__cause__.args[0])
    assert (numbers, set(map(type, numbers))) == ((4, 5, 4, 4, 4), {int})


class PrintsItsTensor(TypeError):
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __str__(self) -> str:
        return f"the sum is {self.tensor.sum().item()}"


@pytest.mark.parametrize("kind", [ValueError, TypeError, RuntimeError, KeyError, IndexError, AssertionError, PrintsItsTensor])
def test_an_exception_with_a_tensor_keeps_its_class_and_its_arguments(kind: Any) -> None:
    weight, state = torch.nn.Parameter(torch.ones(2, device="jax")), types.SimpleNamespace(n=0)

    @spmd.compile
    def step(x: torch.Tensor, fails: bool) -> torch.Tensor:
        state.n += 1  # varies from the second call on
        if fails:
            raise kind(x) if kind is PrintsItsTensor else kind("found", x, weight)
        return x * state.n

    x = torch.ones(2, device="jax")
    for fails in (True, False, False, True, True):
        with pytest.raises(kind) if fails else contextlib.nullcontext() as caught:
            step(x, fails)
        error: Any = caught.value if fails else None  # type: ignore[union-attr]
        if error is not None and kind is not PrintsItsTensor:
            assert (type(error), error.args[0], error.args[1].tolist(), error.args[2] is weight) == (kind, "found", [1.0, 1.0], True)
            assert "tensor([1., 1.]" in str(error)
    assert state.n == 2

"""Every torch.optim optimizer in a compiled step: equal to CPU torch on sharded parameters, with how many executables."""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mesh
import spmd
from spmd.device._numbers import of_settings
from spmd.device._storage import buffer_of
from spmd.program.optim import _lifted_numbers
from tests.oracle import MLP, assert_same, assert_same_model, batch, train, twins
from tests.sweeps import part_of

optim = torch.optim
Make = Callable[[Any], torch.optim.Optimizer]
# steps whose state depends on the first gradient, or whose counter lives on the host, have a first program of their own
OPTIMIZERS: dict[str, tuple[Make, int]] = {
    "sgd": (lambda p: optim.SGD(p, lr=0.1), 1),
    "sgd_momentum": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), 1),
    "sgd_nesterov": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01), 1),
    "sgd_dampening": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1), 2),
    "sgd_maximize": (lambda p: optim.SGD(p, lr=0.1, maximize=True), 1),
    "sgd_loop": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=False), 1),
    "adam": (lambda p: optim.Adam(p, lr=0.01), 1),
    "adam_amsgrad": (lambda p: optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1), 1),
    "adam_loop": (lambda p: optim.Adam(p, lr=0.01, foreach=False), 1),
    "adam_everything": (lambda p: optim.Adam(p, lr=0.01, amsgrad=True, maximize=True, decoupled_weight_decay=True, weight_decay=0.1), 1),
    "adamw": (lambda p: optim.AdamW(p, lr=0.01), 1),
    "adamw_maximize": (lambda p: optim.AdamW(p, lr=0.01, maximize=True), 1),
    "rmsprop": (lambda p: optim.RMSprop(p, lr=0.01), 1),
    "adamw_amsgrad_loop": (lambda p: optim.AdamW(p, lr=0.01, amsgrad=True, foreach=False), 1),
    "rmsprop_loop": (lambda p: optim.RMSprop(p, lr=0.01, foreach=False, maximize=True, weight_decay=0.1), 1),
    "rmsprop_centered": (lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9), 1),
    "adagrad": (lambda p: optim.Adagrad(p, lr=0.1), 1),
    "adagrad_decay": (lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1), 1),
    "adagrad_loop": (lambda p: optim.Adagrad(p, lr=0.1, maximize=True, foreach=False), 1),
    "adadelta": (lambda p: optim.Adadelta(p), 1),
    "adadelta_loop": (lambda p: optim.Adadelta(p, maximize=True, weight_decay=0.1, foreach=False), 1),
    "adamax": (lambda p: optim.Adamax(p, lr=0.01), 1),
    "adamax_loop": (lambda p: optim.Adamax(p, lr=0.01, maximize=True, weight_decay=0.1, foreach=False), 1),
    "nadam_maximize": (lambda p: optim.NAdam(p, lr=0.01, maximize=True), 1),
    "nadam": (lambda p: optim.NAdam(p, lr=0.01), 1),
    "nadam_decoupled": (lambda p: optim.NAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, foreach=False), 1),
    "radam": (lambda p: optim.RAdam(p, lr=0.01), 1),
    "radam_loop": (lambda p: optim.RAdam(p, lr=0.01, foreach=False), 1),
    "asgd": (lambda p: optim.ASGD(p, lr=0.01, t0=3), 1),
    "asgd_loop": (lambda p: optim.ASGD(p, lr=0.01, t0=3, foreach=False), 1),
    "rprop": (lambda p: optim.Rprop(p), 1),
    "rprop_loop": (lambda p: optim.Rprop(p, maximize=True, foreach=False), 1),
    "adafactor": (lambda p: optim.Adafactor(p, lr=0.01), 2),
    "adafactor_loop": (lambda p: optim.Adafactor(p, lr=0.01, foreach=False), 2),
    "muon": (lambda p: optim.Muon([q for q in p if q.dim() == 2], lr=0.01), 1),
}
WIDER = {"muon": (2e-1, 2e-3)}  # orthogonalises in bfloat16: rounding differs by the order of sums


def sharded_twins(grid: mesh.Mesh | None) -> tuple[Any, Any]:
    host, device = twins()
    if grid is not None:
        spmd.mark_sharding(device.up.weight, grid, ("model", None))
        spmd.mark_sharding(device.up.bias, grid, ("model",))
        spmd.mark_sharding(device.down.weight, grid, (None, "model"))
    return host, device


def run_both(
    make: Make, grid: mesh.Mesh | None, steps: int, between: Callable[[Any, int], None] | None = None, tolerance: Any = None
) -> Any:
    """(device model, its optimizer, step) after `steps` steps of both, parameters compared after each."""
    host, device = sharded_twins(grid)
    optimizers = [make(list(m.parameters())) for m in (host, device)]
    step = spmd.compile(functools.partial(train, device, optimizers[1]))
    for i in range(steps):
        x, y = batch(8, 8, seed=i), batch(8, 8, seed=i + 50)
        assert_same(step(x.to("jax"), y.to("jax")), train(host, optimizers[0], x, y), tolerance)
        assert_same_model(device, host, tolerance)
        for optimizer in optimizers if between is not None else ():
            between(optimizer, i)
    return device, optimizers[1], step


LOOPS = ("sgd_loop", "adamw_amsgrad_loop", "nadam_decoupled", "adafactor_loop")  # of the rows with foreach=False


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("name", part_of(OPTIMIZERS, lambda _, name: "_loop" not in name or name in LOOPS))
def test_ten_steps_equal_cpu_torch_and_state_has_its_parameters_sharding(name: str, mesh_4x2: mesh.Mesh) -> None:
    make, executables = OPTIMIZERS[name]
    _, optimizer, step = run_both(make, mesh_4x2, 10, tolerance=WIDER.get(name, (1e-4, 5e-6)))
    assert step.num_executables == executables
    if executables == 2:
        assert step.retraces == [f"{type(optimizer).__name__}'s state has other entries than when it was traced"]
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                assert buffer_of(value).value.sharding.is_equivalent_to(buffer_of(parameter).value.sharding, value.dim())


def test_every_optimizer_of_torch_is_here() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    made = {type(make(parameters)).__name__ for make, _ in OPTIMIZERS.values()}
    classes = {name for name in optim.__all__ if isinstance(getattr(optim, name), type)}
    assert classes - made == {"Optimizer", "LBFGS", "SparseAdam"}


class Scalars(nn.Module):
    """Two parameters without dims, and one with a dim."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.tensor(n)) for n in (1.5, -0.5))
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale * x).sin() + self.weight * self.shift + self.shift**2


@pytest.mark.parametrize(
    "name", part_of([n for n in OPTIMIZERS if n != "muon"], lambda _, name: "rprop" in name or name in ("adamw", "asgd"))
)
def test_parameters_without_dims_are_trained(name: str) -> None:
    make, executables = OPTIMIZERS[name]
    pair = twins(Scalars)
    optimizers = [make(list(m.parameters())) for m in pair]
    step = spmd.compile(functools.partial(train, pair[1], optimizers[1]))
    for i in range(6):
        x, y = batch(2, seed=i), batch(2, seed=i + 50)
        assert_same(step(x.to("jax"), y.to("jax")), train(pair[0], optimizers[0], x, y))
        assert_same_model(pair[1], pair[0])
    assert step.num_executables == executables


CAPTURABLE = ["Adam", "AdamW", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "Adadelta", "RMSprop"]


@pytest.mark.parametrize("name", part_of(CAPTURABLE, lambda _, name: name in ("AdamW", "RAdam", "ASGD")))
def test_capturable_changes_nothing(name: str) -> None:
    pair = twins()
    kinds = [{}, {"capturable": True}]
    optimizers = [getattr(optim, name)(m.parameters(), **kind) for m, kind in zip(pair, kinds, strict=True)]
    step = spmd.compile(functools.partial(train, pair[1], optimizers[1]))
    for i in range(10):
        x, y = batch(8, 8, seed=i), batch(8, 8, seed=i + 50)
        assert_same(step(x.to("jax"), y.to("jax")), train(pair[0], optimizers[0], x, y), WIDER.get(name.lower(), (1e-4, 5e-6)))
    assert step.num_executables == 1


def change_momentum(optimizer: Any, i: int) -> None:
    for group in optimizer.param_groups:
        group["momentum"] = 0.9 - 0.1 * i


def change_betas(optimizer: Any, i: int) -> None:
    for group in optimizer.param_groups:
        group["betas"] = (0.9 - 0.1 * i, 0.99 - 0.01 * i)
        group["lr"] *= 0.5


def change_weight_decay(optimizer: Any, i: int) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1 * (i + 2)


def remove_weight_decay(optimizer: Any, i: int) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0 if i == 1 else 0.1


def add_weight_decay(optimizer: Any, i: int) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.5 if i >= 1 else 0.0


HYPERPARAMETERS: list[tuple[Any, Make, int]] = [
    (change_momentum, lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), 1),
    (change_betas, lambda p: optim.Adam(p, lr=0.01), 1),
    (change_betas, lambda p: optim.NAdam(p, lr=0.01), 1),
    (change_weight_decay, lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1), 1),
    (remove_weight_decay, lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1), 2),
    (add_weight_decay, lambda p: optim.SGD(p, lr=0.1, weight_decay=0.0), 2),
]


@pytest.mark.parametrize(("change", "make", "executables"), HYPERPARAMETERS, ids=lambda v: getattr(v, "__name__", None))
def test_a_changed_hyperparameter_is_used(change: Any, make: Make, executables: int) -> None:
    _, _, step = run_both(make, None, 5, change, (1e-4, 5e-6))
    assert step.num_executables == executables
    if executables == 2:
        assert "a branch on a number now goes the other way" in step.retraces[0]


def test_param_groups_have_their_own_numbers() -> None:
    def make(p: list[torch.Tensor]) -> torch.optim.Optimizer:
        return optim.SGD([{"params": p[:2], "lr": 0.1}, {"params": p[2:], "lr": 0.01, "momentum": 0.9}], lr=1.0)

    def between(optimizer: Any, i: int) -> None:
        optimizer.param_groups[1]["lr"] *= 0.5

    _, _, step = run_both(make, None, 4, between)
    assert step.num_executables == 1


def test_two_optimizers_in_one_step() -> None:
    def steps(model: Any, optimizers: Any, x: torch.Tensor) -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    host, device = twins()
    pairs = [(optim.SGD(m.up.parameters(), lr=0.1, momentum=0.9), optim.AdamW(m.down.parameters(), lr=0.01)) for m in (host, device)]
    step = spmd.compile(lambda x: steps(device, pairs[1], x))
    for i in range(4):
        x = batch(8, 8, seed=i)
        assert_same(step(x.to("jax")), steps(host, pairs[0], x))
        for pair in pairs:
            pair[1].param_groups[0]["lr"] *= 0.5
    assert_same_model(device, host)
    assert (step.num_executables, step.retraces) == (1, [])


def test_a_parameter_added_later_retraces_and_has_its_own_state() -> None:
    host, device = twins()
    optimizers = [optim.Adam(m.down.parameters(), lr=0.01) for m in (host, device)]
    step = spmd.compile(functools.partial(train, device, optimizers[1]))
    for i in range(4):
        if i == 2:
            for optimizer, model in zip(optimizers, (host, device), strict=True):
                optimizer.add_param_group({"params": list(model.up.parameters()), "lr": 0.1})
                for p in model.up.parameters():
                    p.grad = None
        x, y = batch(8, 8, seed=i), batch(8, 8, seed=i + 50)
        assert_same(step(x.to("jax"), y.to("jax")), train(host, optimizers[0], x, y))
    assert_same_model(device, host)
    assert step.num_executables == 2


def through_state_dict(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def through_cpu(optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state_dict()
    moved = {k: {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in s.items()} for k, s in state["state"].items()}
    optimizer.load_state_dict({**state, "state": moved})


@pytest.mark.parametrize("load", [through_state_dict, through_cpu])
@pytest.mark.parametrize("make", [OPTIMIZERS["adam"][0], OPTIMIZERS["sgd_momentum"][0]], ids=["adam", "sgd"])
def test_loading_an_optimizer_state_between_steps_goes_on_from_it(load: Any, make: Make) -> None:
    def between(optimizer: torch.optim.Optimizer, i: int) -> None:
        if i == 1:
            load(optimizer)

    _, _, step = run_both(make, None, 4, between)
    assert step.num_executables == 2
    assert "state was replaced (load_state_dict)" in step.retraces[0]


def test_a_training_that_began_eagerly_goes_on_compiled() -> None:
    host, device = twins()
    optimizers = [optim.AdamW(m.parameters(), lr=0.01) for m in (host, device)]
    step = spmd.compile(functools.partial(train, device, optimizers[1]))
    for i in range(4):
        x, y = batch(8, 8, seed=i), batch(8, 8, seed=i + 50)
        run = step if i >= 2 else functools.partial(train, device, optimizers[1])
        assert_same(run(x.to("jax"), y.to("jax")), train(host, optimizers[0], x, y))
    assert_same_model(device, host)
    assert step.num_executables == 1


def test_state_dict_of_a_compiled_training_loads_on_the_cpu() -> None:
    device, optimizer, _ = run_both(OPTIMIZERS["adamw"][0], None, 2)
    host = MLP()
    host.load_state_dict(device.state_dict())
    again = optim.AdamW(host.parameters(), lr=0.01)
    again.load_state_dict(optimizer.state_dict())
    state = again.state[host.up.weight]
    assert state["exp_avg"].device.type == "cpu" and state["step"].item() == 2.0


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum; state of zeros."""

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                update = state["exp_avg"] * beta1 + p.grad * (1 - beta1)
                p.add_(update.sign(), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


class OwnAdam(torch.optim.Optimizer):
    """As people write it: the step counter is a Python int, the average starts as the first gradient."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["average"], state["square"] = 0, p.grad.clone(), torch.zeros_like(p)
                state["step"] += 1
                state["average"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                correction = 1 - 0.99 ** state["step"]
                p.sub_(group["lr"] * state["average"] / (state["square"].sqrt() / math.sqrt(correction) + 1e-8))
                if state["step"] > 3:
                    p.mul_(0.99)


class Assigning(torch.optim.Optimizer):
    """Replaces its state tensor instead of updating it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            before = self.state[p].get("average", torch.zeros_like(p))
            self.state[p]["average"] = before * 0.9 + p.grad
            p.sub_(self.state[p]["average"], alpha=self.param_groups[0]["lr"])


def test_a_users_optimizer_has_one_program() -> None:
    _, _, step = run_both(Lion, None, 4)
    assert step.num_executables == 1


def test_a_users_optimizer_with_a_counter_in_python_is_not_stale() -> None:
    _, optimizer, step = run_both(OwnAdam, None, 6)
    assert step.num_executables == 3
    assert "state has other entries" in step.retraces[0] and "now goes the other way" in step.retraces[1]
    assert [s["step"] for s in optimizer.state.values()] == [6] * 4
    assert all(type(s["step"]) is int for s in optimizer.state.values())


def test_what_follows_from_equal_counters_of_many_parameters_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [nn.Parameter(torch.ones(2, device="jax")) for _ in range(12)]
    optimizer = OwnAdam(weights)

    @spmd.compile
    def step() -> None:
        optimizer.zero_grad()
        torch.stack(list(weights)).square().sum().backward()
        optimizer.step()

    for _ in range(5):
        step()
    asked: list[tuple[Any, Any]] = []
    monkeypatch.setattr(_lifted_numbers, "of_settings", lambda key, settings: asked.append((key, *settings)) or of_settings(key, settings))
    step()
    assert len(asked) == len(set(asked)) > 0
    assert len(optimizer.state) == 12


def test_a_users_optimizer_that_replaces_its_state_has_a_program_for_the_first_step_and_one_for_the_others() -> None:
    _, _, step = run_both(Assigning, None, 4)
    assert step.num_executables == 2


class Sharp(torch.optim.Optimizer):
    """Steps from the gradient at a point uphill, as SAM does: its own `step` needs a closure, or is not there."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base = optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        for p in self.param_groups[0]["params"]:
            uphill = self.param_groups[0]["rho"] * p.grad
            self.state[p].setdefault("uphill", torch.zeros_like(p)).copy_(uphill)
            p.add_(uphill)
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p]["uphill"])
        self.base.step()
        self.zero_grad()


class SharpWithClosure(Sharp):
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "needs a closure"
        self.climb()
        with torch.enable_grad():
            closure()
        self.descend()


class SharpInNewMemory(Sharp):
    """Gives each parameter other memory, before an optimizer that creates a count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base = optim.Adam(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def descend(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = p.data - self.state[p]["uphill"]
        self.base.step()
        self.zero_grad()


@pytest.mark.parametrize("make", [Sharp, SharpWithClosure, SharpInNewMemory])
def test_an_optimizer_whose_step_cannot_run_alone_trains(make: Make) -> None:
    host, device = twins()

    def trained(model: Any, x: torch.Tensor, wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        optimizer: Any = make(model.parameters())

        def backward() -> torch.Tensor:
            loss = (model(x) - x).square().mean()
            loss.backward()
            return loss.detach()

        def step() -> torch.Tensor:
            loss = backward()
            if make is SharpWithClosure:
                optimizer.step(backward)
            else:
                optimizer.climb()
                backward()
                optimizer.descend()
            return loss

        run = wrap(step)
        return [run() for _ in range(4)]

    x = batch(4, 8)
    assert_same(trained(device, x.to("jax"), spmd.compile), trained(host, x, lambda fn: fn))
    assert_same_model(device, host)


def test_lbfgs_is_refused_with_the_reason() -> None:
    words = r"LBFGS cannot step inside a compiled function(?s:.*)data-dependent number of times(?s:.*)fix: compile its closure"
    with pytest.raises(spmd.TraceError, match=words):
        run_both(lambda p: optim.LBFGS(p), None, 1)


def test_a_closure_of_lbfgs_is_compiled_and_the_search_is_eager() -> None:
    def trained(model: nn.Module, x: torch.Tensor, wrap: Callable[..., Any]) -> list[torch.Tensor]:
        optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        compiled = wrap(closure)
        return [optimizer.step(compiled) for _ in range(3)]

    host, device = twins()
    x = batch(4, 8)
    assert_same(trained(device, x.to("jax"), lambda fn: spmd.compile(fn, keep_grads=True)), trained(host, x, lambda fn: fn))
    assert_same_model(device, host)


def test_an_optimizer_made_inside_is_refused() -> None:
    _, device = twins()

    @spmd.compile
    def step(x: torch.Tensor) -> None:
        train(device, optim.SGD(device.parameters(), lr=0.1), x, x)

    with pytest.raises(spmd.TraceError, match="the compiled function creates its own SGD"):
        step(batch(8, 8).to("jax"))


INNER: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda params: optim.Adam(params, lr=0.1, amsgrad=True),
    "AdamW": lambda params: optim.AdamW(params, lr=0.1),
    "RMSprop": lambda params: optim.RMSprop(params, lr=0.01, momentum=0.5),
    "Adagrad": lambda params: optim.Adagrad(params, lr=0.1),
    "Adadelta": lambda params: optim.Adadelta(params),
    "NAdam": lambda params: optim.NAdam(params),
    "RAdam": lambda params: optim.RAdam(params),
    "Adamax": lambda params: optim.Adamax(params),
    "ASGD": lambda params: optim.ASGD(params),
    "Rprop": lambda params: optim.Rprop(params),
}


@pytest.mark.parametrize("name", INNER)
def test_a_copy_of_a_model_is_trained_inside_by_its_own_optimizer(name: str) -> None:
    """As meta-learning and adaptation to a batch do: each call begins with the model's parameters of that call."""

    def adapted(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = copy.deepcopy(model)
        optimizer = INNER[name](inner.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            inner(x).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            for p, q in zip(model.parameters(), inner.parameters(), strict=True):
                p.lerp_(q, 0.1)
        return inner(x).detach(), next(inner.parameters()).detach()

    host, device = twins()
    INNER[name]([nn.Parameter(torch.ones(1))])  # torch wraps the method `step` of a class when the first optimizer is made
    step = spmd.compile(lambda x: adapted(device, x))
    for i in range(3):
        for got, want in zip(step(batch(8, 8, seed=i).to("jax")), adapted(host, batch(8, 8, seed=i)), strict=True):
            assert_same(got, want)
        assert_same_model(device, host)
    assert step.num_traces == 1


def test_a_copied_optimizer_trains_the_copied_model_inside() -> None:
    def adapted(model: nn.Module, optimizer: optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        inner, stepping = copy.deepcopy((model, optimizer))
        for _ in range(2):
            train(inner, stepping, x, x)
        return inner(x).detach()

    host, device = twins()
    optimizers = [optim.Adam(model.parameters(), lr=0.1) for model in (host, device)]
    train(host, optimizers[0], batch(8, 8), batch(8, 8))
    train(device, optimizers[1], batch(8, 8).to("jax"), batch(8, 8).to("jax"))
    step = spmd.compile(lambda x: adapted(device, optimizers[1], x))
    for i in range(3):
        assert_same(step(batch(8, 8, seed=i).to("jax")), adapted(host, optimizers[0], batch(8, 8, seed=i)))


def test_an_optimizer_made_inside_for_old_and_new_parameters_is_refused() -> None:
    _, device = twins()

    @spmd.compile
    def step(x: torch.Tensor) -> None:
        added = nn.Parameter(torch.ones_like(x))
        optimizer = optim.SGD([*device.parameters(), added], lr=0.1)
        device(x * added).sum().backward()
        optimizer.step()

    with pytest.raises(spmd.TraceError, match="the compiled function creates its own SGD"):
        step(batch(8, 8).to("jax"))


@pytest.mark.parametrize("how", ["scheduler", "by_hand"])
def test_a_learning_rate_set_inside_is_used_and_kept(how: str) -> None:
    models = twins()
    optimizers = [optim.SGD(model.parameters(), lr=0.1) for model in models]
    schedules = [optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]

    def step(i: int, x: torch.Tensor) -> None:
        train(models[i], optimizers[i], x, x)
        if how == "scheduler":
            schedules[i].step()
        else:
            optimizers[i].param_groups[0]["lr"] *= 0.5

    compiled = spmd.compile(lambda x: step(1, x))
    for seed in range(4):
        x = batch(8, 8, seed=seed)
        step(0, x)
        compiled(x.to("jax"))
        assert optimizers[1].param_groups[0]["lr"] == optimizers[0].param_groups[0]["lr"]
    assert_same_model(models[1], models[0])
    assert compiled.num_traces <= 2


def test_the_learning_rate_can_be_returned() -> None:
    _, device = twins()
    optimizer = optim.SGD(device.parameters(), lr=0.1)

    @spmd.compile
    def step(x: torch.Tensor) -> dict[str, Any]:
        train(device, optimizer, x, x)
        return {"lr": optimizer.param_groups[0]["lr"]}

    x = batch(8, 8).to("jax")
    first = step(x)
    optimizer.param_groups[0]["lr"] = 0.5
    assert (first, step(x)) == ({"lr": 0.1}, {"lr": 0.5})
    assert step.num_executables == 1


def test_an_average_that_is_updated_outside_of_the_step_follows_it() -> None:
    host, device = twins()
    optimizers = [optim.SGD(m.parameters(), lr=0.1) for m in (host, device)]
    averages = [optim.swa_utils.AveragedModel(m, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9)) for m in (host, device)]
    step = spmd.compile(lambda x: train(device, optimizers[1], x, x))
    for i in range(3):
        x = batch(8, 8, seed=i)
        assert_same(step(x.to("jax")), train(host, optimizers[0], x, x))
        for average, model in zip(averages, (host, device), strict=True):
            average.update_parameters(model)
    assert_same_model(averages[1], averages[0])
    assert step.num_executables == 1


def test_sparse_adam_is_refused_by_itself() -> None:
    with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients"):
        run_both(lambda p: optim.SparseAdam(p), None, 1)


@pytest.mark.parametrize("roll", [False, True])
def test_powers_of_bias_corrections_are_computed_once_for_all_parameters(roll: bool) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6))).to("jax")
    optimizer = torch.optim.AdamW(model.parameters())

    @spmd.compile(roll=roll)
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        optimizer.step()
        return loss

    step(torch.ones(2, 8, device="jax"))
    assert step.hlo().count(" power(") == 2


def double_steps(make: Make, num_steps: int, between: Callable[[Any, int], None] = lambda optimizer, i: None) -> tuple[Any, Any, Any]:
    """(CPU weight, device weight, compiled step) after steps of float64, in which a rounding to 32 bits shows."""
    weights = [nn.Parameter(torch.linspace(-1.0, 1.0, 8, dtype=torch.float64).to(device)) for device in ("cpu", "jax")]
    optimizers = [make([weight]) for weight in weights]

    def step(index: int) -> None:
        optimizers[index].zero_grad()
        (weights[index].sin() * weights[index]).sum().backward()
        optimizers[index].step()

    compiled = spmd.compile(lambda: step(1))
    for i in range(num_steps):
        for optimizer in optimizers:
            between(optimizer, i)
        step(0)
        compiled()
        torch.testing.assert_close(weights[1].cpu(), weights[0], rtol=1e-13, atol=0)  # float64: last bits
    return *weights, compiled


@pytest.mark.parametrize("name", ["Adam", "NAdam", "RAdam"])
def test_steps_of_float64_have_its_digits(name: str) -> None:
    double_steps(lambda p: getattr(optim, name)(p, lr=0.1), 8)  # RAdam rectifies from step 6 on


def test_radams_counts_are_right_where_counters_have_64_bits_already() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        double_steps(lambda p: optim.RAdam(p, lr=0.1), 4)
    finally:
        torch.set_default_dtype(torch.float32)


def test_which_end_a_moment_is_nearer_to_is_no_part_of_the_program() -> None:
    """`lerp` goes from the nearer end: Adam's `1 - beta1` decides which, once for a program and not in each of its updates."""
    betas = (0.9, 0.8, 0.3, 0.4, 0.7)

    def change(optimizer: Any, i: int) -> None:
        optimizer.param_groups[0]["betas"] = (betas[i], 0.999)

    *_, compiled = double_steps(lambda p: optim.Adam(p, lr=1e-2), len(betas), change)
    assert compiled.num_traces == 2
    assert " select(" not in compiled.hlo()


class Decayed(optim.Optimizer):
    """Divides by one of its settings, and asks `math` of another."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "decay": 0.01, "warm": 2.0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["decay"]).sub_(p.grad, alpha=group["lr"] ** 0.5 / group["warm"])
                p.sub_(p.grad * math.exp(group["lr"]), alpha=math.log(group["warm"]))


def test_what_follows_from_settings_alone_is_computed_by_the_host() -> None:
    def change(optimizer: Any, i: int) -> None:
        optimizer.param_groups[0].update(lr=0.1 / (i + 1), decay=0.01 * i)

    *_, compiled = double_steps(Decayed, 4, change)
    assert compiled.num_traces == 1
    assert not any(" f64[] " in line and (" multiply(" in line or " divide(" in line) for line in compiled.hlo().splitlines())


def test_what_python_raises_for_settings_is_raised_before_the_step() -> None:
    (weight,) = (nn.Parameter(torch.linspace(-1.0, 1.0, 8, dtype=torch.float64).to("jax")),)
    optimizer = Decayed([weight])

    @spmd.compile
    def step() -> None:
        optimizer.zero_grad()
        weight.sin().sum().backward()
        optimizer.step()

    step()
    before = weight.detach().clone()
    optimizer.param_groups[0]["warm"] = 0.0
    with pytest.raises(ZeroDivisionError):
        step()
    optimizer.param_groups[0].update(warm=-1.0)
    with pytest.raises(ValueError):
        step()
    optimizer.param_groups[0].update(warm=2.0, lr=-0.1)
    with pytest.raises(spmd.TraceError, match=r"an optimizer computes .*j\) from its settings"):
        step()
    assert torch.equal(weight, before)
    optimizer.param_groups[0]["lr"] = 0.1
    step()
    assert not torch.equal(weight, before)
    assert step.num_traces == 1


TEXTS: dict[str, Callable[[float], Any]] = {
    "spec": lambda lr: f"{lr:.3f} {lr!r:>9} {lr:{5}.2f} {lr=:.2e}",
    "percent": lambda lr: "%d %s %5.2f" % (lr * 100, lr, lr),  # noqa: UP031
    "format": lambda lr: "{a:.2f}{0}".format(lr, a=lr),  # noqa: UP032
    "format_map": lambda lr: "{a:.2f}".format_map({"a": lr}),
    "divmod": lambda lr: divmod(lr, 0.03),
    "is_integer": lambda lr: ((lr * 10).is_integer(), 1 if (lr * 20).is_integer() else 2),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_setting_is_shown_and_asked_as_the_float_that_it_is(name: str) -> None:
    weight = nn.Parameter(torch.ones(2, device="jax"))
    optimizer = optim.SGD([weight], lr=0.1)

    @spmd.compile
    def step() -> Any:
        shown = TEXTS[name](optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
        return shown

    for lr in (0.1, 0.05, 0.1):
        optimizer.param_groups[0]["lr"] = lr
        assert step() == TEXTS[name](lr)


def test_an_optimizer_without_parameters_on_the_device_steps() -> None:
    """One whose groups were emptied has nothing to prepare; what one of the CPU updates is refused, and put back."""

    def run(wrap: Any, device: str) -> list[list[float]]:
        weight = nn.Parameter(torch.ones(2, device=device))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()

        compiled, found = wrap(step), list[list[float]]()
        for edit in (list, list, optimizer.param_groups[0]["params"].clear, optimizer.param_groups.clear):
            edit()
            compiled()
            found.append(weight.tolist())
        return found

    assert run(spmd.compile, "jax") == run(lambda fn: fn, "cpu")


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"foreach": True}, {"momentum": 0.9}], ids=str)
def test_an_optimizer_of_the_cpu_in_a_step_updates_as_eager_code_or_is_refused(options: dict[str, Any]) -> None:
    """One that reads what it has written is refused, and all of it is put back."""

    def run(wrap: Any, device: str) -> list[list[float]]:
        weights = [nn.Parameter(torch.ones(n)) for n in (2, 100)]
        optimizer, found = torch.optim.SGD(weights, lr=0.1, **options), list[list[float]]()
        compiled = wrap(lambda x: (optimizer.step(), x * 2)[1])
        try:
            for seed in range(3):
                for weight in weights:
                    weight.grad = torch.full_like(weight, seed)
                compiled(torch.ones(2, device=device))
                found.append([*weights[0].tolist(), *weights[1].tolist()])
        except spmd.TraceError as error:
            assert "on the CPU" in str(error) or "reads" in str(error)
            return [weight.tolist() for weight in weights]
        return found

    expected = run(lambda fn: fn, "cpu") if not options.keys() & {"foreach", "momentum"} else [[1.0] * 2, [1.0] * 100]
    assert run(spmd.compile, "jax") == expected

"""`spmd.compile`: eager, compiled and CPU torch agree; when a call is traced again, and when not; what is refused."""

import copy
import functools
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import mesh
import spmd
from spmd.base._errors import TraceAgain
from tests.oracle import MLP, array_of, assert_same, assert_same_model, batch, descend, on_device, train, twins


class Trainer:
    """A training step as a method; everything it needs is on `self`."""

    def __init__(self, model: nn.Module, scale: float = 1.0) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.scale = scale

    def plain(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return train(self.model, self.optimizer, x, y * self.scale)

    @spmd.compile
    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.plain(x, y)


MODEL: Any = None


OPTIMIZER: Any = None


def by_globals(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return train(MODEL, OPTIMIZER, x, y)


def by_closure(model: nn.Module, optimizer: Any) -> Callable[..., torch.Tensor]:
    return lambda x, y: train(model, optimizer, x, y)


def steps_of(kind: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> Callable[..., torch.Tensor]:
    """A training step on `model` that finds its state in one of four ways."""
    wrap: Any = spmd.compile if compiled else lambda fn: fn
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "self":
        trainer = Trainer(model)
        return trainer.step if compiled else trainer.plain
    if kind == "globals":
        monkeypatch.setitem(globals(), "MODEL", model)
        monkeypatch.setitem(globals(), "OPTIMIZER", optimizer)
        return wrap(by_globals)
    if kind == "arguments":
        return functools.partial(wrap(train), model, optimizer)
    if kind == "partial":
        return wrap(functools.partial(train, model, optimizer))
    return wrap(by_closure(model, optimizer))


@pytest.mark.parametrize("kind", ["closure", "globals", "self", "arguments", "partial"])
def test_state_is_found_and_eager_compiled_and_cpu_agree(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host, device = twins()
    eager = copy.deepcopy(device)
    x, y = batch(8, 8), batch(8, 8, seed=2)
    for model, compiled, move in ((host, False, False), (eager, False, True), (device, True, True)):
        step = steps_of(kind, model, monkeypatch, compiled)
        for _ in range(3):
            step(*(on_device((x, y)) if move else (x, y)))
    assert_same_model(device, host)
    assert_same_model(eager, host)


def test_method_shows_its_step_and_each_object_has_its_own_program() -> None:
    trainers = [Trainer(twins(seed=s)[1]) for s in (0, 1)]
    x, y = batch(8, 8).to("jax"), batch(8, 8).to("jax")
    before = Trainer.step.num_traces
    losses = [t.step(x, y).item() for t in trainers for _ in range(2)]
    assert Trainer.step.num_traces == before + 2
    assert trainers[0].step.num_executables == Trainer.step.num_executables
    assert losses[0] != losses[2]


@pytest.mark.parametrize("lr", [0.1, 1, torch.tensor(0.1)], ids=["float", "int", "tensor"])
def test_lr_set_by_hand_is_used(lr: Any) -> None:
    host, device = twins()
    optimizers = [torch.optim.SGD(m.parameters(), lr=copy.deepcopy(lr), foreach=False) for m in (host, device)]
    step = spmd.compile(by_closure(device, optimizers[1]))
    x, y = batch(8, 8), batch(8, 8, seed=2)
    for factor in (1.0, 0.5, 0.25):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = lr * factor
        train(host, optimizers[0], x, y)
        step(x.to("jax"), y.to("jax"))
    assert_same_model(device, host)


def test_returned_values_stay_when_the_state_moves_on() -> None:
    weight = torch.zeros(3).to("jax")

    @spmd.compile
    def grow() -> tuple[torch.Tensor, ...]:
        weight.add_(1)
        return weight.clone(), weight, weight[:2]

    first, second = grow(), grow()
    assert first[0].tolist() == [1.0] * 3 and second[0].tolist() == [2.0] * 3
    assert first[1] is weight and first[2].tolist() == [2.0, 2.0]  # the state itself, and a view of it, as in torch


def test_tied_weights_stay_one_tensor() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(8, 8) / 3)
            self.head = nn.Linear(8, 8, bias=False)
            self.head.weight = self.table

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(x @ self.table))

    host, device = twins(Tied)
    assert device.head.weight is device.table
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (host, device)]
    step = spmd.compile(by_closure(device, optimizers[1]))
    x, y = batch(8, 8), batch(8, 8, seed=2)
    for _ in range(4):
        train(host, optimizers[0], x, y)
        step(x.to("jax"), y.to("jax"))
    assert_same_model(device, host)
    assert step.num_executables == 1
    assert device.head.weight is device.table


@pytest.mark.multidevice(num=8)
def test_batch_norm_statistics_are_global(mesh_4x2: mesh.Mesh) -> None:
    host, device = twins(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (host, device)]
    step = spmd.compile(lambda x: descend(device, optimizers[1], x))
    for i in range(3):
        x = batch(16, 4, seed=i) * (i + 1)
        descend(host, optimizers[0], x)
        step(spmd.mark_sharding(x.to("jax"), mesh_4x2, ("data", None)))
    assert_same_model(device, host)
    assert device[1].num_batches_tracked.item() == 3


def dropped(model: nn.Module, shape: tuple[int, int] | None, calls: int, compiled: bool) -> list[list[float]]:
    torch.manual_seed(7)
    x = torch.ones(16, 8).to("jax")
    if shape is not None:
        grid = mesh.Mesh(range(shape[0] * shape[1]), shape, ("data", "model"))
        spmd.mark_sharding(x, grid, ("data", "model"))
    run: Any = spmd.compile(lambda x: model(x)) if compiled else model
    return [run(x).flatten().tolist() for _ in range(calls)]


@pytest.mark.multidevice(num=8)
def test_dropout_draws_the_same_numbers_on_every_mesh_compiled_or_not() -> None:
    model = nn.Dropout(0.5)
    want = dropped(model, None, 3, compiled=False)
    assert want[0] != want[1] != want[2]
    for shape in (None, (8, 1), (1, 8), (2, 4)):
        for compiled in (True, False):
            assert dropped(model, shape, 3, compiled) == want, (shape, compiled)


def test_eager_draws_and_compiled_draws_share_one_stream() -> None:
    model = nn.Dropout(0.5)
    step = spmd.compile(lambda x: model(model(x)))
    x = torch.ones(64).to("jax")
    torch.manual_seed(3)
    want = [model(model(x)).tolist(), model(x).tolist(), model(model(x)).tolist()]
    torch.manual_seed(3)
    assert [step(x).tolist(), model(x).tolist(), step(x).tolist()] == want
    torch.manual_seed(3)
    state = torch.jax.get_rng_state()  # pyright: ignore[reportAttributeAccessIssue]
    first = step(x).tolist()
    torch.jax.set_rng_state(state)  # pyright: ignore[reportAttributeAccessIssue]
    assert step(x).tolist() == first == want[0]


def test_an_error_inside_leaves_everything_as_it_was() -> None:
    _, device = twins(lambda: MLP(p=0.5))
    device.register_buffer("count", torch.zeros((), device="jax"))
    optimizer = torch.optim.Adam(device.parameters(), lr=0.1)
    fails = [True]

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        device.count.add_(1)
        device.drop.p = 0.25
        loss = device(x).sum()
        loss.backward()
        optimizer.step()
        if fails[0]:
            raise KeyError("the user's own")
        return loss

    x = batch(4, 8).to("jax")
    for prepared in (False, True):
        before = copy.deepcopy((dict(device.state_dict()), optimizer.state_dict()))
        stream = torch.jax.get_rng_state()  # pyright: ignore[reportAttributeAccessIssue]
        fails[0], device.drop.p = True, 0.5
        grads = [p.grad for p in device.parameters()]
        with pytest.raises(KeyError, match="the user's own"):
            step(x)
        assert_same((dict(device.state_dict()), optimizer.state_dict()), before)
        assert torch.equal(stream, torch.jax.get_rng_state())  # pyright: ignore[reportAttributeAccessIssue]
        assert all(p.grad is g for p, g in zip(device.parameters(), grads, strict=True))
        assert device.drop.p == 0.5
        fails[0] = False
        if not prepared:
            step(x)


def test_hooks_fire_in_the_trace_and_their_math_is_in_the_program() -> None:
    def wire(model: MLP) -> None:
        model.up.register_forward_hook(lambda module, args, out: out * 2)
        model.down.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model.up.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 3,))
        model.down.weight.register_hook(lambda grad: grad * 0.5)
        model.up.bias.register_post_accumulate_grad_hook(_double_gradient)

    def run(model: MLP, optimizer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        assert x.grad is not None
        return loss, x.grad

    host, device = twins()
    for model in (host, device):
        wire(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (host, device)]
    step = spmd.compile(lambda x: run(device, optimizers[1], x))
    for i in range(3):
        x = batch(4, 8, seed=i)
        assert_same(step(x.to("jax")), run(host, optimizers[0], x))
    assert_same_model(device, host)
    assert (step.num_executables, step.retraces) == (1, [])


def _double_gradient(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


class Cube(torch.autograd.Function):
    """A gradient that autograd would not find: seven times x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 7 * x


def gradient_of(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        fn(x).sum().backward()
        assert x.grad is not None
        return x.grad

    return run


def without_gradient(x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    with torch.no_grad():
        a = x * 2
    return torch.autograd.grad((a * x).sum(), x)[0]


def second_order(x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "custom_function": gradient_of(Cube.apply),
    "no_grad": without_gradient,
    "inference_mode": torch.inference_mode()(lambda x: x * 2),
    "second_order": second_order,
    "checkpoint": gradient_of(lambda x: checkpoint(lambda t: torch.sin(t) * t, x, use_reentrant=False)),
    "checkpoint_reentrant": gradient_of(lambda x: checkpoint(lambda t: torch.sin(t) * t, x, use_reentrant=True)),
    "func_grad": torch.func.grad(lambda x: (x**3).sum()),
    "func_vmap": torch.func.vmap(lambda a: a * 2 + a.sin()),
    "func_jacrev": torch.func.jacrev(lambda x: x**3),
    "func_jacfwd": torch.func.jacfwd(lambda x: x**3),
    "per_sample_grad": torch.func.vmap(torch.func.grad(lambda a: a**3)),
    "iteration": lambda x: [row * 2 for row in x],
    "in_place": lambda x: x.clone().mul_(2).add_(x),
    "set_item": lambda x: (y := x.clone(), y.__setitem__(0, 5.0))[0],
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward-mode rules use it
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_functions_of_tensors_agree(name: str) -> None:
    x = batch(5)
    step = spmd.compile(FUNCTIONS[name])
    for _ in range(2):
        assert_same(step(x.to("jax")), FUNCTIONS[name](x))
    assert step.num_traces == 1


def test_an_ensemble_runs_as_one_module_that_the_function_copies() -> None:
    pairs = [twins(seed=k) for k in range(3)]

    def run(models: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
        params, buffers = torch.func.stack_module_state(models)
        base = copy.deepcopy(models[0])
        return torch.func.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (x,)))(params, buffers)

    step = spmd.compile(lambda x: run([m for _, m in pairs], x))
    for seed in (1, 2):
        x = batch(4, 8, seed=seed)
        assert_same(step(x.to("jax")), run([m for m, _ in pairs], x))


def test_checkpointed_dropout_recomputes_with_its_own_mask() -> None:
    def run(x: torch.Tensor, saved: bool) -> torch.Tensor:
        x = x.clone().requires_grad_()
        f = functools.partial(F.dropout, p=0.5)
        y = checkpoint(lambda t: f(t * t), x, use_reentrant=False) if saved else f(x * x)
        return torch.autograd.grad(y.sum(), x)[0]

    step, x, grads = spmd.compile(run), batch(32).to("jax"), []
    for saved in (True, False):
        torch.manual_seed(5)
        grads.append([step(x, saved).tolist() for _ in range(2)])
    assert grads[0] == grads[1]
    assert grads[0][0] != grads[0][1]


def test_functional_call_with_parameters_as_arguments() -> None:
    host, device = twins()

    def gradients(model: nn.Module, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        return torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().sum())(parameters)

    x = batch(4, 8)
    step = spmd.compile(lambda p, x: gradients(device, p, x))
    for scale in (1.0, 2.0):
        want = {k: p.detach() * scale for k, p in host.named_parameters()}
        assert_same(step(on_device(want), x.to("jax")), gradients(host, want, x))
    assert step.num_traces == 1


def test_a_compiled_function_inside_another_is_part_of_it() -> None:
    host, device = twins()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (host, device)]
    inner = spmd.compile(lambda x, y: F.mse_loss(device(x), y))

    @spmd.compile
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizers[1].zero_grad()
        loss = inner(x, y)
        loss.backward()
        optimizers[1].step()
        return loss

    x, y = batch(8, 8), batch(8, 8, seed=2)
    for _ in range(3):
        assert_same(step(x.to("jax"), y.to("jax")), train(host, optimizers[0], x, y))
    assert_same_model(device, host)
    assert (step.num_traces, inner.num_traces) == (1, 0)


def test_many_retraces_warn_and_an_uncalled_step_has_nothing_to_show() -> None:
    step = spmd.compile(lambda x, k: x * len(k), max_retraces=2)
    with pytest.raises(spmd.SpmdError, match="has no program yet"):
        step.collectives()
    with pytest.warns(UserWarning, match="was traced again 2 times") as warned:
        for k in range(4):
            step(torch.ones(2).to("jax"), "k" * k)
    assert len(warned) == 1
    assert len(step.retraces) == 3


@pytest.mark.multidevice(num=8)
def test_marking_inside_a_compiled_function_is_a_constraint(mesh_4x2: mesh.Mesh) -> None:
    _, device = twins()
    spmd.mark_sharding(device.up.weight, mesh_4x2, ("model", None))

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return spmd.mark_sharding(device(x), mesh_4x2, ("data", "model"))

    out = step(batch(8, 8).to("jax"))
    assert isinstance(out, spmd.XLAShardedTensor)
    assert tuple(array_of(out).sharding.spec) == ("data", "model")
    assert tuple(out.partition_spec) == ("data", "model")


@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
def test_a_trace_leaves_the_garbage_collector_as_it_was(enabled: bool) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError

    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ValueError):
            spmd.compile(fails)(torch.ones(1).to("jax"))
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_traces_that_always_ask_for_another_one_end_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asks(TraceAgain):
        def other_settings(self, settings: Any) -> Any:
            return replace(settings, unreached=(*settings.unreached, nn.Linear(1, 1)))

    def asking(*args: Any) -> Any:
        raise Asks

    step = spmd.compile(lambda x: x + 1)
    monkeypatch.setattr(step, "_new", asking)
    with pytest.raises(spmd.TraceError, match=r"traced 100 times in one call, and each trace asked for another one \(Asks\)"):
        step(torch.ones(2, device="jax"))

"""When a compiled step is traced again because the model changed, with which reason, and when it is not."""

import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

import mesh
import spmd
from tests.oracle import MLP, array_of, assert_same, assert_same_model, batch, descend, train, twins


def by_closure(model: nn.Module, optimizer: Any) -> Callable[..., torch.Tensor]:
    return lambda x, y: train(model, optimizer, x, y)


def test_train_and_eval_have_a_program_each_and_return_to_it() -> None:
    _, device = twins(lambda: MLP(p=0.5))
    step = spmd.compile(lambda x: device(x))
    x = batch(4, 8).to("jax")
    for training in (True, False, True, False):
        device.train(training)
        a, b = step(x), step(x)
        assert torch.equal(a, b) is not training
    assert step.num_executables == 2
    assert "training changed from True to False" in step.retraces[0]
    assert len(step.retraces) == 1


def test_a_mode_set_inside_the_function_is_set_by_every_call() -> None:
    _, device = twins(lambda: MLP(p=0.5))

    @spmd.compile
    def fit(x: torch.Tensor) -> torch.Tensor:
        device.train()
        return device(x)

    @spmd.compile
    def test(x: torch.Tensor) -> torch.Tensor:
        device.eval()
        return device(x)

    x = batch(4, 8).to("jax")
    for _ in range(3):
        fit(x)
        assert device.training and device.drop.training
        test(x)
        assert not device.training and not device.drop.training
    assert fit.num_executables <= 2 and test.num_executables == 1


def test_freezing_a_layer_retraces_once_with_the_reason() -> None:
    host, device = twins()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1) for m in (host, device)]
    step = spmd.compile(by_closure(device, optimizers[1]))
    x, y = batch(8, 8), batch(8, 8, seed=2)
    for i in range(4):
        if i == 2:
            for model in (host, device):
                model.up.requires_grad_(False)
        train(host, optimizers[0], x, y)
        step(x.to("jax"), y.to("jax"))
    assert_same_model(device, host)
    assert step.num_executables == 2
    assert "requires_grad of a parameter" in step.retraces[0] and "from True to False" in step.retraces[0]


def change_attribute(model: MLP) -> None:
    model.drop.p = 0.0


def replace_data(model: MLP) -> None:
    model.up.weight.data = torch.ones_like(model.up.weight)


def replace_parameter(model: MLP) -> None:
    model.up.weight = nn.Parameter(torch.ones_like(model.up.weight))


def replace_module(model: MLP) -> None:
    model.down = nn.Linear(16, 8, device=model.down.weight.device)
    for parameter in model.down.parameters():
        nn.init.constant_(parameter, 0.5)


def add_hook(model: MLP) -> None:
    model.up.register_forward_hook(lambda module, args, out: out * 2)


CHANGES = [
    (change_attribute, "drop.p changed from 0.5 to 0.0"),
    (replace_data, "up.weight was given another storage"),
    (replace_parameter, "up.weight is another tensor"),
    (replace_module, "down is another Linear"),
    (add_hook, "up._forward_hooks got or lost entries"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES, ids=[c.__name__ for c, _ in CHANGES])
def test_a_changed_model_retraces_with_the_reason(change: Callable[[Any], None], reason: str) -> None:
    host, device = twins(lambda: MLP(p=0.5 if change is change_attribute else 0.0))
    step = spmd.compile(lambda x: device(x))
    x = batch(4, 8)
    step(x.to("jax"))
    change(device)
    change(host)
    assert_same(step(x.to("jax")), host(x))
    assert step.num_traces == 2
    assert reason in step.retraces[0]


def test_loading_a_model_state_needs_no_retrace_and_is_used() -> None:
    host, device = twins()
    other, _ = twins(seed=5)
    step = spmd.compile(lambda x: device(x))
    x = batch(4, 8)
    step(x.to("jax"))
    device.load_state_dict(other.state_dict())
    assert_same(step(x.to("jax")), other(x))
    device.load_state_dict(host.state_dict())
    assert_same(step(x.to("jax")), host(x))
    assert (step.num_traces, step.retraces) == (1, [])


def test_a_model_that_was_defined_anew_is_the_one_that_runs() -> None:
    _, device = twins()

    def make() -> Any:
        return spmd.compile(lambda x: device(x))

    step, x = make(), batch(4, 8)
    step(x.to("jax"))
    other, device = twins(seed=5)
    assert_same(step(x.to("jax")), other(x))
    assert "device is another MLP" in step.retraces[0]


@pytest.mark.multidevice(num=8)
def test_marking_anew_between_calls_is_kept_and_retraces(mesh_4x2: mesh.Mesh) -> None:
    host, device = twins()
    spmd.mark_sharding(device.up.weight, mesh_4x2, ("model", None))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (host, device)]
    step = spmd.compile(by_closure(device, optimizers[1]))
    x, y = batch(8, 8), batch(8, 8, seed=2)
    for spec in (("model", None), (None, "model"), (None, "model")):
        spmd.mark_sharding(device.up.weight, mesh_4x2, spec)
        train(host, optimizers[0], x, y)
        step(x.to("jax"), y.to("jax"))
        assert array_of(device.up.weight).sharding == mesh.ShardingSpec(mesh_4x2, spec).to_jax()
    assert_same_model(device, host)
    assert step.num_executables == 2
    assert "the sharding of a state tensor" in step.retraces[0]


def test_a_tensor_hook_registered_later_retraces() -> None:
    _, device = twins()
    optimizer = torch.optim.SGD(device.parameters(), lr=0.1)
    step = spmd.compile(lambda x: descend(device, optimizer, x))
    x = batch(4, 8).to("jax")
    step(x)
    before = device.down.bias.tolist()
    device.down.bias.register_hook(lambda grad: grad * 0)
    step(x)
    assert device.down.bias.tolist() == before
    assert "got or lost a hook" in step.retraces[0]


def test_an_attribute_of_a_module_that_gave_way_to_another_is_seen() -> None:
    model = MLP().to("jax")
    model.scale = 2.0
    step = spmd.compile(lambda x: model(x) * getattr(model, "scale", 1.0))
    x = batch(4, 8).to("jax")
    scaled = step(x).cpu()
    del model.scale
    model.factor = 3.0  # as many attributes as before
    assert_same(step(x), scaled / 2)
    assert "model.scale changed from 2.0 to absent" in step.retraces[0]


def _after_changes(device: str, change: Callable[[int, list[torch.Tensor]], None]) -> list[list[float]]:
    tensors = [torch.full((2,), i + 1.0).to(device).requires_grad_() for i in range(3)]
    optimizer = torch.optim.SGD(tensors, lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        torch.stack([t.square().sum() for t in tensors]).sum().backward()
        optimizer.step()

    run, found = spmd.compile(step) if device == "jax" else step, list[list[float]]()
    for i in range(5):
        change(i, tensors)
        run()
        found.append([round(value, 4) for t in tensors for value in t.tolist()])
    return found


def halve(tensor: torch.Tensor) -> None:
    assert tensor.grad is not None
    tensor.grad.mul_(0.5)


def test_hooks_and_flags_of_tensors_that_no_module_has_are_seen() -> None:
    def changes() -> Callable[[int, list[torch.Tensor]], None]:
        handles: list[Any] = []

        def change(i: int, tensors: list[torch.Tensor]) -> None:
            if i == 1:
                handles.append(tensors[0].register_hook(lambda g: g * 2))
                handles.append(tensors[1].register_post_accumulate_grad_hook(halve))
            if i == 2:
                handles[1].remove()
            if i == 3:
                handles[0].remove()
                tensors[2].requires_grad_(False)
            if i == 4:
                tensors[2].requires_grad_(True)

        return change

    assert _after_changes("jax", changes()) == _after_changes("cpu", changes())


def test_a_hook_of_an_argument_runs_in_calls_after_it_was_registered() -> None:
    @spmd.compile
    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(x.square().sum(), x)[0]

    x = torch.ones(2, device="jax", requires_grad=True)
    found = [gradient(x).tolist()]
    handle = x.register_hook(lambda g: g * 3)
    found.append(gradient(x).tolist())
    handle.remove()
    assert [*found, gradient(x).tolist()] == [[2.0, 2.0], [6.0, 6.0], [2.0, 2.0]]


def test_hooks_of_a_gradient_accumulator_are_seen() -> None:
    def run(wrap: Any, device: str) -> list[float]:
        w = torch.ones(2, device=device, requires_grad=True)
        node, found, handles = torch.autograd.graph.get_gradient_edge(w).node, list[float](), list[Any]()

        def triple(outs: Any, ins: Any) -> None:
            w.grad.mul_(3)  # type: ignore[union-attr]

        def train(x: torch.Tensor) -> torch.Tensor:
            w.grad = None
            loss = (w * x).square().sum()
            loss.backward()
            with torch.no_grad():
                w.sub_(w.grad, alpha=0.125)  # type: ignore[arg-type]
            return loss.detach()

        step = wrap(train)
        for change in (
            lambda: None,
            lambda: handles.append(node.register_prehook(lambda grads: (grads[0] * 2,))),
            lambda: handles.append(node.register_hook(triple)),
            lambda: w.register_hook(lambda grad: grad + 1).remove(),  # takes a number, and changes nothing
            lambda: handles[0].remove(),
            lambda: w.requires_grad_(False).requires_grad_(True),
        ):
            change()
            found.append(step(torch.ones(2, device=device)).item())
        return found

    steps: list[Any] = []
    ours = run(lambda fn: steps.append(spmd.compile(fn)) or steps[0], "jax")
    assert ours == pytest.approx(run(lambda fn: fn, "cpu")) and steps[0].num_traces == 4
    assert steps[0].retraces == ["the gradient accumulator of a parameter of shape [2] got or lost a hook"] * 3


def test_a_hook_of_the_accumulator_of_an_argument_is_refused() -> None:
    x = torch.ones(2, device="jax", requires_grad=True)
    node = torch.autograd.graph.get_gradient_edge(x).node
    node.register_prehook(lambda grads: (grads[0] * 2,))
    with pytest.raises(spmd.TraceError, match="the gradient accumulator of an argument of shape \\[2\\] has a hook"):
        spmd.compile(lambda x: torch.autograd.grad(x.square().sum(), x)[0])(x)


def test_a_method_that_is_registered_as_a_hook_of_each_argument_is_one_hook() -> None:
    class Scale:
        def hook(self, grad: torch.Tensor) -> torch.Tensor:
            return grad * 3

    scale, step = Scale(), spmd.compile(lambda x: torch.autograd.grad(x.square().sum(), x)[0])
    for _ in range(3):
        x = torch.ones(2, device="jax", requires_grad=True)
        x.register_hook(scale.hook)
        assert step(x).tolist() == [6.0, 6.0]
    assert step.num_traces == 1


def test_a_trace_takes_no_number_of_a_hook() -> None:
    model = nn.Linear(2, 2).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    before = RemovableHandle.next_id
    spmd.compile(lambda x: descend(model, optimizer, x))(torch.ones(2, 2, device="jax"))
    assert RemovableHandle.next_id == before


def test_counters_that_shared_an_array_and_then_differ() -> None:
    def run(wrap: Any, device: str) -> list[float]:
        a, b = (torch.full((2,), value, device=device, requires_grad=True) for value in (1.0, 2.0))
        optimizer = torch.optim.Adam([a, b], lr=0.125)

        @wrap
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (a * x + b).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        found = list[float]()
        for i in range(6):
            if i == 2:  # the parameter is stepped twice from now on
                optimizer.param_groups.append({**optimizer.param_groups[0], "params": [b]})
            found.append(step(torch.ones(2, device=device)).item())
        return [*found, *(state["step"].item() for state in optimizer.state.values())]

    assert run(spmd.compile, "jax") == pytest.approx(run(lambda fn: fn, "cpu"))


def test_settings_of_torchs_own_objects_are_seen() -> None:
    def run(wrap: Any, device: str) -> list[Any]:
        w, found = torch.full((), 2.0, device=device, requires_grad=True), list[Any]()
        cast, kept = torch.autocast(device, torch.bfloat16), saved_tensors_hooks(lambda t: t * 2, lambda t: t)

        @wrap
        def step(x: torch.Tensor) -> tuple[torch.Tensor, str]:
            with kept:
                y = w * w * x
            with cast:
                z = x.reshape(1, 1) @ x.reshape(1, 1)
            return torch.autograd.grad(y, w)[0], str(z.dtype)

        for change in (
            lambda: None,
            lambda: setattr(kept, "pack_hook", lambda t: t * 3),
            lambda: setattr(kept, "unpack_hook", lambda t: t + 1),
            lambda: setattr(cast, "fast_dtype", torch.float16),
            lambda: setattr(cast, "_enabled", False),
        ):
            change()
            grad, dtype = step(torch.ones((), device=device))
            found += [grad.item(), dtype]
        return found

    assert run(spmd.compile, "jax") == run(lambda fn: fn, "cpu")


def test_settings_of_a_gradient_scaler_are_seen() -> None:
    def run(wrap: Any, device: str) -> list[float]:
        w = torch.ones(2, device=device, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=0.125, fused=True)
        scaler = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=1)

        @wrap
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (w * x).square().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        found, x = list[float](), torch.ones(2, device=device)
        for change, scale in (
            (lambda: None, 1.0),
            (lambda: scaler.set_growth_factor(3.0), 1.0),
            (lambda: scaler.set_growth_interval(2), 1.0),
            (lambda: scaler.set_backoff_factor(0.25), torch.inf),
            (lambda: scaler.update(8.0), 1.0),
            (lambda: setattr(scaler, "_enabled", False), 1.0),
        ):
            change()
            found += [step(x * scale).item(), scaler.get_scale()]
        return found

    assert run(spmd.compile, "jax") == run(lambda fn: fn, "cpu")


def test_a_tensor_that_got_other_sizes_in_place_is_seen() -> None:
    def run(wrap: Any, device: str) -> list[list[float]]:
        w, unused = torch.arange(6.0).reshape(2, 3).to(device), torch.ones(2, 3, device=device)
        step, found = wrap(lambda x: (w * x).sum(0).sum() * w.shape[0] + 10 * unused.dim() + unused.stride(0)), []
        for change in (lambda: None, w.t_, lambda: unused.unsqueeze_(0), lambda: unused.squeeze_(0), w.t_):
            change()
            found.append(step(torch.ones(w.shape[1], device=device)).item())
        return found

    assert run(spmd.compile, "jax") == run(lambda fn: fn, "cpu")


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        return found * 2 if func is torch.Tensor.sin else found


class Negated(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        return -found if func is torch.ops.aten.sin.default else found


def test_a_mode_around_some_calls_has_a_program_of_its_own() -> None:
    def run(wrap: Any, device: str) -> list[float]:
        w = torch.ones((), device=device, requires_grad=True)
        step, found = wrap(lambda x: torch.autograd.grad((w * x.sin()).cos(), w)[0]), []
        kept, functions, operators = saved_tensors_hooks(lambda t: t * 2, lambda t: t), Doubled(), Negated()
        for around in (nullcontext(), functions, operators, kept, functions, nullcontext(), torch.device(device)):
            with around:
                found.append(step(torch.ones((), device=device)).item())
        return found

    steps: list[Any] = []
    ours = run(lambda fn: steps.append(spmd.compile(fn)) or steps[0], "jax")
    assert ours == pytest.approx(run(lambda fn: fn, "cpu"), rel=1e-5)
    assert steps[0].num_traces == 5 and "the active torch modes and hooks changed" in steps[0].retraces[0]


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda k: [0.1, 0.05], "holder.value is another list with the same text, [0.1, 0.05]"),
        (lambda k: {1, 2}, "holder.value is another set"),
        (lambda k: torch.ones(2), "holder.value is another tensor"),
        (lambda k: nn.Linear(2, 2), "holder.value is another Linear"),
        (lambda k: type("Other", (), {})(), "holder.value is of another class named Other"),
        (lambda k: [k], "holder.value changed from [0] to [1]"),
    ],
    ids=["equal list", "set", "tensor", "module", "class", "other list"],
)
def test_a_reason_says_what_is_another_object(make: Callable[[int], Any], reason: str) -> None:
    holder = types.SimpleNamespace()
    step = spmd.compile(lambda x: x * (2 if id(holder.value) else 3))
    for k in range(2):
        holder.value = make(k)
        step(torch.ones(2).to("jax"))
    assert step.retraces == [reason]

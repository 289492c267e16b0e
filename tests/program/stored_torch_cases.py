"""Cases of torch: modules, hooks, gradients, modes, optimizers. See `stored_harness`."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from tests.program.stored_harness import Values, calls, case, inputs, train, trained


def mlp(device: str, *more: nn.Module) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), *more).to(device)


def losses(model: nn.Module, wrap: Any, device: str, count: int = 2) -> Values:
    """Outputs of forward passes, detached."""
    return [v.detach() for v in calls(wrap(lambda x: model(x)), device, count)]


@case
def a_pre_hook(device: str, wrap: Any, changed: bool) -> Values:
    model, scale = mlp(device), 3.0 if changed else 2.0
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * scale,))
    return losses(model, wrap, device)


@case
def a_backward_hook(device: str, wrap: Any, changed: bool) -> Values:
    model, scale = mlp(device), 3.0 if changed else 2.0
    model[2].register_full_backward_hook(lambda module, ins, outs: (ins[0] * scale,))
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1), wrap, device)


@case
def a_hook_of_a_tensor(device: str, wrap: Any, changed: bool) -> Values:
    model, scale = mlp(device), 3.0 if changed else 2.0
    model[2].weight.register_hook(lambda grad: grad * scale)
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1), wrap, device)


def _scaled_gradient(scale: float) -> Any:
    def hook(p: torch.Tensor) -> None:
        p.grad.mul_(scale)  # type: ignore[union-attr]

    return hook


@case
def a_hook_after_accumulation(device: str, wrap: Any, changed: bool) -> Values:
    model, scale = mlp(device), 3.0 if changed else 2.0
    model[2].weight.register_post_accumulate_grad_hook(_scaled_gradient(scale))
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1), wrap, device)


@case
def a_hook_of_an_optimizer(device: str, wrap: Any, changed: bool) -> Values:
    model, scale = mlp(device), 3.0 if changed else 2.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.mul_(scale)

    optimizer.register_step_pre_hook(halve)
    return trained(model, optimizer, wrap, device)


@case
def a_hook_of_all_modules(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2) if changed else contextlib.nullcontext()
    with handle:
        return losses(model, wrap, device)


@case
def forward_replaced_on_the_class(device: str, wrap: Any, changed: bool) -> Values:
    model, before = mlp(device), nn.Linear.forward
    if changed:
        nn.Linear.forward = lambda self, x: before(self, x) * 2  # type: ignore[method-assign]
    try:
        return losses(model, wrap, device)
    finally:
        nn.Linear.forward = before  # type: ignore[method-assign]


@case
def a_replaced_function_of_torch(device: str, wrap: Any, changed: bool) -> Values:
    model, before = mlp(device, nn.GELU()), functional.gelu
    if changed:
        functional.gelu = lambda x, approximate="none": before(x) * 2  # type: ignore[assignment]
    try:
        return losses(model, wrap, device)
    finally:
        functional.gelu = before


@case
def a_replaced_function_inside_torch(device: str, wrap: Any, changed: bool) -> Values:
    before = functional.pad
    functional.softmin_was = functional.softmin  # type: ignore[attr-defined]
    if changed:
        functional.softmin = lambda *args, **kwargs: before(*args)  # type: ignore[assignment]
    original = functional.relu
    if changed:
        functional.relu = lambda x, inplace=False: original(x) * 2  # type: ignore[assignment]
    try:
        layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, activation="relu", batch_first=True)
        torch.manual_seed(1)
        for p in layer.parameters():
            nn.init.uniform_(p, -0.5, 0.5)
        return losses(layer.to(device), wrap, device)
    finally:
        functional.relu, functional.softmin = original, functional.softmin_was  # type: ignore[attr-defined]


@case
def a_function_that_torch_calls(device: str, wrap: Any, changed: bool) -> Values:
    before = functional.linear
    if changed:
        functional.linear = lambda *args: before(*args) * 2  # type: ignore[assignment]
    try:
        torch.manual_seed(1)
        attention = nn.MultiheadAttention(4, 2, batch_first=True).to(device)
        return losses(lambda x: attention(x, x, x)[0], wrap, device)  # type: ignore[arg-type]
    finally:
        functional.linear = before


@case
def a_replaced_operator_of_tensors(device: str, wrap: Any, changed: bool) -> Values:
    before: Any = torch.Tensor.__add__
    if changed:
        torch.Tensor.__add__ = torch.Tensor.__sub__  # type: ignore[method-assign,assignment]
    try:
        return calls(wrap(lambda x: x + 3), device)
    finally:
        torch.Tensor.__add__ = before  # type: ignore[method-assign]


@case
def a_replaced_method_of_tensors(device: str, wrap: Any, changed: bool) -> Values:
    before: Any = torch.Tensor.relu
    if changed:
        torch.Tensor.relu = lambda self: before(self) * 2  # type: ignore[method-assign,assignment]
    try:
        return calls(wrap(lambda x: x.relu()), device)
    finally:
        torch.Tensor.relu = before  # type: ignore[method-assign]


@case
def a_parametrization(device: str, wrap: Any, changed: bool) -> Values:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 3.0 if changed else 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    model = mlp(device)
    parametrize.register_parametrization(model[0], "weight", Twice())
    return losses(model, wrap, device)


@case
def weight_norm(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    parametrizations.weight_norm(model[2 if changed else 0])
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1), wrap, device)


@case
def spectral_norm(device: str, wrap: Any, changed: bool) -> Values:
    torch.manual_seed(5)
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4), n_power_iterations=3 if changed else 1)).to(device)
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1), wrap, device)


@case
def one_module_twice(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    if changed:
        model[2] = model[0]
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1), wrap, device)


@case
def a_view_of_a_parameter(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    rows = model[0].weight.detach()[1] if changed else torch.ones(4, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        rows.mul_(2)
        return model(x).detach() + rows

    return calls(wrap(step), device)


@case
def a_buffer_that_is_an_argument(device: str, wrap: Any, changed: bool) -> Values:
    model = nn.BatchNorm1d(4).to(device)
    other = torch.ones(4, device=device)
    compiled = wrap(lambda x, y: model(x).detach() * y)
    return [*calls(lambda x: compiled(x, model.running_mean if changed else other), device), *model.buffers()]


@case
def a_part_in_evaluation_mode(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device, nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model[4 if changed else 3].eval()
    return [*losses(model, wrap, device), *model.buffers()]


@case
def an_added_attribute_of_a_module(device: str, wrap: Any, changed: bool) -> Values:
    model: Any = mlp(device)
    if changed:
        model.scale = 3.0
    return calls(wrap(lambda x: model(x).detach() * getattr(model, "scale", 1.0)), device)


def _with_gradients(model: nn.Module, wrap: Any, device: str, clears: bool) -> Values:
    """Losses and gradients of two backward passes. `clears`: whether each clears the gradients first."""

    def step(x: torch.Tensor) -> torch.Tensor:
        if clears:
            model.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    found = calls(wrap(step, keep_grads=True), device)
    return [*found, *(p.grad for p in model.parameters())]


@case
def a_gradient_from_before(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    if changed:
        model(inputs(device)).sum().backward()
    return _with_gradients(model, wrap, device, clears=False)


@case
def accumulated_gradients(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3 if changed else 2):
            (model(x).sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        return model[0].weight.detach().clone()

    return calls(wrap(step), device)


@case
def the_default_dtype(device: str, wrap: Any, changed: bool) -> Values:
    torch.set_default_dtype(torch.float64 if changed else torch.float32)
    try:
        found = calls(wrap(lambda x: x * torch.ones(4, device=x.device)), device)
        return [*found, str(found[0].dtype)]
    finally:
        torch.set_default_dtype(torch.float32)


@case
def autocast(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    amp = torch.autocast(device, dtype=torch.float16 if changed else torch.bfloat16)

    def step(x: torch.Tensor) -> torch.Tensor:
        with amp:
            return model(x).detach()

    found = calls(wrap(step), device)
    return [str(found[0].dtype)]


@case
def autocast_outside(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    compiled = wrap(lambda x: model(x).detach())
    with torch.autocast(device, dtype=torch.bfloat16, enabled=changed):
        found = calls(compiled, device)
    return [str(found[0].dtype)]


@case
def a_function_without_gradients(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)

    @torch.set_grad_enabled(changed)
    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        y = forward(x)
        return y.detach() * (2 if y.requires_grad else 3), y.requires_grad

    return [v for pair in calls(wrap(step), device) for v in pair]


@case
def a_mapped_function(device: str, wrap: Any, changed: bool) -> Values:
    rows = torch.func.vmap(lambda row: row * row.sum(), in_dims=1 if changed else 0)
    return calls(wrap(lambda x: rows(x)), device)


@case
def a_gradient_function(device: str, wrap: Any, changed: bool) -> Values:
    grad = torch.func.grad(lambda x, y: (x * y * y).sum(), argnums=1 if changed else 0)
    return calls(wrap(lambda x: grad(x, x + 1)), device)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 5


@case
def the_backward_of_a_function(device: str, wrap: Any, changed: bool) -> Values:
    before = Scaled.__dict__["backward"]
    if changed:
        Scaled.backward = staticmethod(lambda ctx, grad: grad * 7)  # type: ignore[method-assign,assignment]
    model = mlp(device)
    try:
        return trained(nn.Sequential(model, _Apply()), torch.optim.SGD(model.parameters(), lr=0.1), wrap, device)
    finally:
        Scaled.backward = before  # type: ignore[method-assign]


class _Apply(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x)


@case
def saved_tensors(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    hooks = torch.autograd.graph.saved_tensors_hooks((lambda t: t * 2) if changed else (lambda t: t), lambda t: t)
    with hooks:
        return trained(model, torch.optim.SGD(model.parameters(), lr=0.1), wrap, device)


@case
def checkpointing(device: str, wrap: Any, changed: bool) -> Values:
    from torch.utils.checkpoint import checkpoint

    model = mlp(device)
    inner = functools.partial(checkpoint, model[:2] if changed else model, use_reentrant=False)
    return trained(_Called(inner, model), torch.optim.SGD(model.parameters(), lr=0.1), wrap, device)


class _Called(nn.Module):
    def __init__(self, fn: Any, model: nn.Module) -> None:
        super().__init__()
        self.fn, self.model = fn, model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(x)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "nesterov": (torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}),
    "dampening": (torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}),
    "maximize": (torch.optim.SGD, {}, {"maximize": True}),
    "foreach": (torch.optim.AdamW, {"foreach": False}, {"foreach": True}),
    "adagrad": (torch.optim.Adagrad, {}, {"lr_decay": 0.1}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}, {"lr": 1.0, "rho": 0.5}),
    "rmsprop": (torch.optim.RMSprop, {}, {"centered": True}),
    "rmsprop_momentum": (torch.optim.RMSprop, {"momentum": 0.1}, {"momentum": 0.0}),
    "nadam": (torch.optim.NAdam, {}, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": (torch.optim.RAdam, {}, {"weight_decay": 0.1}),
    "rprop": (torch.optim.Rprop, {}, {"etas": (0.4, 1.3)}),
    "adamax": (torch.optim.Adamax, {}, {"weight_decay": 0.1}),
    "asgd": (torch.optim.ASGD, {}, {"lambd": 0.1}),
    "tensor_rate": (torch.optim.Adam, {}, {"amsgrad": True}),
}


def _optimizer_case(name: str) -> None:
    def run(device: str, wrap: Any, changed: bool) -> Values:
        cls, first, other = OPTIMIZERS[name]
        model = mlp(device)
        return trained(model, cls(model.parameters(), **{"lr": 0.01, **(other if changed else first)}), named, device)

    def named(fn: Any) -> Any:
        fn.__name__ = run.__name__
        return WRAPS[-1](fn)

    def outer(device: str, wrap: Any, changed: bool) -> Values:
        WRAPS.append(wrap)
        return run(device, wrap, changed)

    run.__name__ = outer.__name__ = f"optimizer_{name}"
    case(outer)


WRAPS: list[Any] = []
for _name in OPTIMIZERS:
    _optimizer_case(_name)


class Lion(torch.optim.Optimizer):
    """With state in its groups and in itself."""

    def __init__(self, params: Any, lr: float, beta: float) -> None:
        super().__init__(params, {"lr": lr})
        self.beta, self.count = beta, 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                average = state.setdefault("average", torch.zeros_like(p))
                p.add_((average * self.beta + p.grad * (1 - self.beta)).sign(), alpha=-group["lr"])
                average.mul_(0.9).add_(p.grad, alpha=0.1)


@case
def an_optimizer_of_the_user(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    optimizer = Lion(model.parameters(), 0.01, 0.5 if changed else 0.9)
    return [*trained(model, optimizer, wrap, device), optimizer.count]


@case
def a_step_before_the_first_call(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if changed:
        model(inputs(device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return trained(model, optimizer, wrap, device)


@case
def loaded_state(device: str, wrap: Any, changed: bool) -> Values:
    other = mlp("cpu")
    theirs = torch.optim.Adam(other.parameters(), lr=0.01)
    other(inputs("cpu")).sum().backward()
    theirs.step()
    model = mlp(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if changed:
        optimizer.load_state_dict(theirs.state_dict())
    return trained(model, optimizer, wrap, device)


@case
def two_optimizers(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters(), lr=0.1)
    chosen = [second] if changed else [first, second]

    def step(x: torch.Tensor) -> torch.Tensor:
        (model(x) ** 2).sum().backward()
        for optimizer in chosen:
            optimizer.step()
        model.zero_grad()
        return model[0].weight.detach().clone()

    return [*calls(wrap(step), device), *(p.detach() for p in model.parameters()), len(first.state), len(second.state)]


@case
def the_model_as_an_argument(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device, *([nn.ReLU()] if changed else []))
    optimizer, compiled, x = torch.optim.Adam(model.parameters(), lr=0.1), wrap(train), inputs(device)
    return [*(compiled(model, optimizer, x) for _ in range(3)), *(p.detach() for p in model.parameters())]


@case
def an_optimizer_of_another_model(device: str, wrap: Any, changed: bool) -> Values:
    models = mlp(device), mlp(device)
    optimizer, compiled, x = torch.optim.SGD(models[0].parameters(), lr=0.1), wrap(train), inputs(device)
    return [*(compiled(models[changed], optimizer, x) for _ in range(3)), *(p.detach() for m in models for p in m.parameters())]


@case
def the_same_model_twice_as_arguments(device: str, wrap: Any, changed: bool) -> Values:
    models = mlp(device), mlp(device)
    for p in models[1].parameters():
        p.data = p.data * 2

    def step(one: Any, other: Any, x: torch.Tensor) -> torch.Tensor:
        return (one(x) - other(x) if one is other else one(x) + other(x)).detach()

    compiled, x = wrap(step), inputs(device)
    return [compiled(models[0], models[not changed], x) for _ in range(2)]


def _plain_loss(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def _other_loss(y: torch.Tensor) -> torch.Tensor:
    return y.abs().mean()


@case
def a_function_as_an_argument(device: str, wrap: Any, changed: bool) -> Values:
    model, x = mlp(device), inputs(device)
    compiled = wrap(lambda x, loss_of: loss_of(model(x)).detach())
    return [compiled(x, _other_loss if changed else _plain_loss) for _ in range(2)]


class _Trainer:
    """As users write it: a step that is a method, of state in attributes."""

    def __init__(self, device: str, scale: float) -> None:
        self.model, self.scale = mlp(device), scale
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return train(self.model, self.optimizer, x * self.scale)


@case
def a_trainer_as_an_argument(device: str, wrap: Any, changed: bool) -> Values:
    trainer, compiled, x = _Trainer(device, 3.0 if changed else 2.0), wrap(_Trainer.step), inputs(device)
    return [*(compiled(trainer, x) for _ in range(3)), *(p.detach() for p in trainer.model.parameters())]


@case
def an_lstm(device: str, wrap: Any, changed: bool) -> Values:
    torch.manual_seed(3)
    model = nn.LSTM(4, 4, num_layers=2 if changed else 1, batch_first=True).to(device)
    return losses(model, lambda step: wrap(lambda x: step(x[None])[0]), device)


@case
def losses_in_a_list(device: str, wrap: Any, changed: bool) -> Values:
    model, log = mlp(device), [7.0] if changed else list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = train(model, optimizer, x)
        log.append(loss.item())
        return loss

    found = calls(wrap(step), device, 3)
    return [*found, *(torch.tensor(number) for number in log)]


@case
def a_tensor_of_the_cpu_from_the_step_itself(device: str, wrap: Any, changed: bool) -> Values:
    length = 3 if changed else 4

    def step(x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(length)  # on the CPU, as libraries make masks
        return x * (positions.sum().item() + positions[:, None].to(x.device).sum())

    return calls(wrap(step), device)


def scheduled(scheduler_of: Any, wrap: Any, device: str) -> Values:
    """Losses and weights of training steps, with a scheduler that steps outside them. It wraps the optimizer's `step`."""
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler, found = scheduler_of(optimizer), list[Any]()

    compiled, x = wrap(lambda x: train(model, optimizer, x)), inputs(device)
    for _ in range(4):
        found.append(compiled(x))
        scheduler.step()
    return [*found, *(p.detach() for p in model.parameters()), *scheduler.get_last_lr()]


@case
def a_scheduler_of_steps(device: str, wrap: Any, changed: bool) -> Values:
    return scheduled(lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.2 if changed else 0.5), wrap, device)


@case
def a_scheduler_with_warmup(device: str, wrap: Any, changed: bool) -> Values:
    schedulers = torch.optim.lr_scheduler

    def made(optimizer: torch.optim.Optimizer) -> Any:
        parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=2), schedulers.CosineAnnealingLR(optimizer, 5 if changed else 8)]
        return schedulers.SequentialLR(optimizer, parts, milestones=[2])

    return scheduled(made, wrap, device)


@case
def a_scheduler_of_momentum(device: str, wrap: Any, changed: bool) -> Values:
    return scheduled(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3 if changed else 0.2, total_steps=6), wrap, device)


@case
def no_scheduler_or_one(device: str, wrap: Any, changed: bool) -> Values:
    schedulers = torch.optim.lr_scheduler
    return scheduled(lambda o: schedulers.ExponentialLR(o, 0.5) if changed else schedulers.ConstantLR(o, 0.5), wrap, device)


@case
def a_scheduler(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, (lambda n: 0.5**n) if changed else (lambda n: 0.9**n))

    def step(x: torch.Tensor) -> torch.Tensor:
        (model(x) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return model[0].weight.detach().clone()

    return [*calls(wrap(step), device, 3), optimizer.param_groups[0]["lr"], scheduler.last_epoch]


@case
def sub_steps(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    clip = 0.01 if changed else 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss.detach()

    return [*calls(wrap(step), device, 3), *(p.detach() for p in model.parameters())]


@case
def random_numbers(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device, nn.Dropout(0.5))
    torch.manual_seed(11 if changed else 7)
    compiled = wrap(lambda x: model(x).detach())
    if device == "cpu":
        return [True]
    found = calls(compiled, device)
    torch.manual_seed(11 if changed else 7)
    plain = [model(inputs(device)).detach() for _ in found]
    return [all(torch.equal(a.cpu() == 0, b.cpu() == 0) for a, b in zip(found, plain, strict=True))]


@case
def the_same_tensor_twice(device: str, wrap: Any, changed: bool) -> Values:
    def step(x: torch.Tensor) -> Any:
        y = x * 2
        return y, y, y.t(), x

    y, again, turned, x = wrap(step)(inputs(device))
    y.add_(1)
    return [y, again, turned, x, y is again]


@case
def kept_gradients(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    model[0].weight.requires_grad_(not changed)
    return _with_gradients(model, wrap, device, clears=True)


@case
def a_tensor_of_the_cpu(device: str, wrap: Any, changed: bool) -> Values:
    table = torch.tensor([1.0, 2.0, 3.0, 9.0 if changed else 4.0])
    return calls(wrap(lambda x: x * table.to(x.device)), device)


@case
def a_tensor_of_the_cpu_as_argument(device: str, wrap: Any, changed: bool) -> Values:
    compiled = wrap(lambda x, y: x * y)
    return calls(lambda x: compiled(x, torch.tensor(3.0 if changed else 2.0)), device)


@case
def slices_as_arguments(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    compiled = wrap(lambda x, y: ((model(x).sum(1) - y.sum(1)).detach(), x.is_contiguous(), x.stride(), y[:, :1]))
    base = torch.arange(60, dtype=torch.float32).reshape(3, 20).to(device) / 50
    results = [compiled(base[:, i : i + 4], base[:, i + 1 : i + 5]) for i in range(2)]
    turned = base.t().contiguous().t() if changed else base  # the same shapes, other strides
    results.append(compiled(turned[:, :4], turned[:, 1:5]))
    found = [(loss.clone(), is_contiguous, stride, part.clone()) for loss, is_contiguous, stride, part in results]
    base.fill_(-1.0)
    turned.fill_(-2.0)
    return [value for one in found for value in one] + [part for *_, part in results]


@case
def a_transposed_argument_that_is_written(device: str, wrap: Any, changed: bool) -> Values:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sum(1 if changed else 0)

    base = torch.arange(12, dtype=torch.float32).reshape(4, 3).to(device)
    compiled = wrap(step)
    return [compiled(base.t()), compiled(base.t()), base]


@case
def a_slice_of_the_state_as_argument(device: str, wrap: Any, changed: bool) -> Values:
    table = torch.arange(12, dtype=torch.float32).reshape(4, 3).to(device)
    compiled = wrap(lambda x: table.sum(0) + x.sum(0))
    found = [compiled(table[1:]), compiled(table[:3])]
    if not changed:
        return [*found, compiled(table[1:, :])]
    other = torch.ones(3, 3, device=device)
    return [*found, compiled(other)]


@case
def cpu_tensors_of_a_trace(device: str, wrap: Any, changed: bool) -> Values:
    size = 4 if changed else 3
    step = wrap(lambda x: (x * 2, torch.arange(size), torch.zeros(2, dtype=torch.bfloat16)[1:]))
    return [value for result in calls(step, device) for value in result]

"""Stored traces of programs with hooks of tensors, arguments, modules, optimizers and gradient accumulators."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from tests.oracle import step_in_hooks
from tests.program.stored_harness import Values, calls, case, inputs, trained


def linear(device: str) -> nn.Linear:
    model = nn.Linear(4, 3).to(device)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.arange(p.numel(), dtype=torch.float32).reshape(p.shape) / 10)
    return model


def train_with(hook: Any, device: str, wrap: Any) -> Values:
    model = linear(device)
    model.weight.register_hook(hook)
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1), wrap, device)


def doubled(grad: torch.Tensor) -> torch.Tensor:
    return grad * 2


def halved(grad: torch.Tensor) -> torch.Tensor:
    return grad / 2


def multiplied(scale: float, grad: torch.Tensor) -> torch.Tensor:
    return grad * scale


def double_gradient(p: torch.Tensor) -> None:
    p.grad.mul_(2)  # type: ignore[union-attr]


def halve_gradient(p: torch.Tensor) -> None:
    p.grad.mul_(0.5)  # type: ignore[union-attr]


class Scale:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def hook(self, grad: torch.Tensor) -> torch.Tensor:
        return grad * self.scale

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        return grad + self.scale


@case
def a_function_as_a_hook(device: str, wrap: Any, changed: bool) -> Values:
    return train_with(halved if changed else doubled, device, wrap)


@case
def a_lambda_as_a_hook(device: str, wrap: Any, changed: bool) -> Values:
    return train_with((lambda grad: grad * 3) if changed else (lambda grad: grad * 4), device, wrap)


@case
def a_method_as_a_hook(device: str, wrap: Any, changed: bool) -> Values:
    return train_with(Scale(3.0 if changed else 2.0).hook, device, wrap)


@case
def an_object_as_a_hook(device: str, wrap: Any, changed: bool) -> Values:
    return train_with(Scale(3.0 if changed else 2.0), device, wrap)


@case
def a_partial_as_a_hook(device: str, wrap: Any, changed: bool) -> Values:
    return train_with(functools.partial(multiplied, 3.0 if changed else 2.0), device, wrap)


@case
def hooks_in_another_order(device: str, wrap: Any, changed: bool) -> Values:
    model, hooks = linear(device), [doubled, Scale(1.0)]
    for hook in reversed(hooks) if changed else hooks:
        model.weight.register_hook(hook)
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1), wrap, device)


@case
def a_hook_that_was_removed(device: str, wrap: Any, changed: bool) -> Values:
    model = linear(device)
    handles = [model.weight.register_hook(halved), model.weight.register_hook(Scale(1.0))]
    handles[0 if changed else 1].remove()
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1), wrap, device)


@case
def a_function_after_accumulation(device: str, wrap: Any, changed: bool) -> Values:
    model = linear(device)
    model.weight.register_post_accumulate_grad_hook(halve_gradient if changed else double_gradient)
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1), wrap, device)


@case
def an_optimizer_in_the_backward_pass(device: str, wrap: Any, changed: bool) -> Values:
    model = linear(device)
    step_in_hooks(model, lr=0.2 if changed else 0.1, momentum=0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) ** 2).mean()
        loss.backward()
        return loss.detach()

    return [*calls(wrap(step), device, 3), *(p.detach() for p in model.parameters())]


def gradients_of_an_argument(register: Any, device: str, wrap: Any) -> Values:
    def step(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        (x * scale).sum().backward()
        scale.grad.mul_(1.5)  # type: ignore[union-attr]
        return x + scale.detach()

    found, compiled = list[Any](), wrap(step, keep_grads=True)
    for _ in range(2):
        scale = torch.ones(4, device=device, requires_grad=True)
        register(scale)
        found += compiled(inputs(device), scale), scale.grad
    return found


@case
def a_hook_of_an_argument(device: str, wrap: Any, changed: bool) -> Values:
    return gradients_of_an_argument(lambda scale: scale.register_hook(halved if changed else doubled), device, wrap)


@case
def a_method_as_a_hook_of_an_argument(device: str, wrap: Any, changed: bool) -> Values:
    scales = Scale(3.0 if changed else 2.0)
    return gradients_of_an_argument(lambda scale: scale.register_hook(scales.hook), device, wrap)


@case
def a_hook_of_an_argument_after_accumulation(device: str, wrap: Any, changed: bool) -> Values:
    hook = halve_gradient if changed else double_gradient
    return gradients_of_an_argument(lambda scale: scale.register_post_accumulate_grad_hook(hook), device, wrap)


@case
def a_hook_of_an_argument_that_was_not_there(device: str, wrap: Any, changed: bool) -> Values:
    return gradients_of_an_argument(lambda scale: scale.register_hook(doubled) if changed else None, device, wrap)


@case
def a_hook_of_an_accumulator(device: str, wrap: Any, changed: bool) -> Values:
    model = linear(device)
    node = torch.autograd.graph.get_gradient_edge(model.weight).node
    if changed:
        node.register_prehook(lambda grads: (grads[0] * 3,))
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1), wrap, device)


@case
def a_hook_of_a_module_after_a_trace(device: str, wrap: Any, changed: bool) -> Values:
    model = linear(device)
    found = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), wrap, device)
    model.register_forward_hook((lambda module, args, out: out * 3) if changed else (lambda module, args, out: out * 2))
    evaluate = wrap(lambda x: model(x) + 1)
    return [*found, *(v.detach() for v in calls(evaluate, device))]


@case
def a_hook_that_collects(device: str, wrap: Any, changed: bool) -> Values:
    model, features = nn.Sequential(linear(device), nn.Tanh()), dict[str, Any]()
    name = "a" if changed else "b"
    model[0].register_forward_hook(lambda module, args, out: features.__setitem__(name, out.detach()))

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).detach() + next(iter(features.values())).mean()

    return [*calls(wrap(step), device), *features]

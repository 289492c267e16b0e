"""Gradients that are there before a call are inputs of its program: whichever tensors they are today."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import mesh
import spmd
from spmd.device._storage import buffer_of
from tests.oracle import MLP, assert_same, assert_same_model, batch, twins

Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw, one by one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
}


def plain(model: nn.Module, optimizer: Any) -> Any:
    optimizer.step()
    optimizer.zero_grad()


def clipped(model: nn.Module, optimizer: Any) -> Any:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return norm


def zeroed(model: nn.Module, optimizer: Any) -> Any:
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("update", [plain, clipped, zeroed], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_eager_backward_and_a_compiled_step_have_one_program(name: str, update: Callable[..., Any], check: bool) -> None:
    host, device = twins()
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (host, device)]
    step = spmd.compile(lambda: update(device, optimizers[1]), check=check)
    for i in range(4):
        x = batch(4, 8, seed=i)
        host(x).square().mean().backward()
        device(x.to("jax")).square().mean().backward()
        assert_same(step(), update(host, optimizers[0]))
        assert_same_model(device, host)
        for p, q in zip(device.parameters(), host.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                assert_same(p.grad, q.grad)
        if update is clipped:
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert (step.num_traces, step.retraces) == (1, [])


@pytest.mark.parametrize("to_none", [True, False])
def test_accumulation_over_calls_has_at_most_two_programs(to_none: bool) -> None:
    host, device = twins()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (host, device)]

    def micro(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    step = spmd.compile(lambda x: micro(device, x), keep_grads=True)
    for i in range(12):
        x = batch(4, 8, seed=i)
        assert_same(step(x.to("jax")), micro(host, x))
        for p, q in zip(device.parameters(), host.parameters(), strict=True):
            assert_same(p.grad, q.grad)
        if i % 3 == 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
            assert_same_model(device, host)
    assert step.num_traces == 2


def test_gradients_of_only_some_parameters() -> None:
    host, device = twins(lambda: nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1) for m in (host, device)]
    step = spmd.compile(lambda: plain(device, optimizers[1]))
    for i in range(6):
        x, which = batch(2, 4, seed=i), "ab"[i % 2]
        host[which](x).sum().backward()
        device[which](x.to("jax")).sum().backward()
        step()
        plain(host, optimizers[0])
        assert_same_model(device, host)
    assert step.num_traces == 2


def test_the_gradient_of_an_argument() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        assert x.grad is not None
        x.grad.mul_(2)
        return x.grad + 1

    step = spmd.compile(double)
    for i in range(4):
        x, here = (batch(3, seed=i).to(d).requires_grad_() for d in ("jax", "cpu"))
        for t in (x, here):
            t.square().sum().backward()
        assert_same(step(x), double(here))
        assert_same(x.grad, here.grad)
    assert step.num_traces == 1


def test_no_gradient_is_held_after_a_call() -> None:
    _, device = twins()
    optimizer = torch.optim.SGD(device.parameters(), lr=0.1)
    step = spmd.compile(lambda: plain(device, optimizer))
    device(batch(4, 8).to("jax")).sum().backward()
    held = [weakref.ref(buffer_of(p.grad).value) for p in device.parameters()]
    step()
    gc.collect(1)
    assert [reference() for reference in held] == [None] * 4


def test_a_gradient_of_another_layout_has_a_program_of_its_own() -> None:
    w = nn.Parameter(batch(4, 4).to("jax"))
    optimizer = torch.optim.SGD([w], lr=0.1)
    step = spmd.compile(lambda: optimizer.step())
    want = batch(4, 4)
    for i in range(4):
        grad = batch(4, 4, seed=i)
        want = want - 0.1 * (grad.t() if i % 2 else grad)
        w.grad = grad.to("jax").t() if i % 2 else grad.to("jax")
        step()
        assert_same(w.detach(), want)
    assert step.num_traces == 2
    assert "another shape, dtype or layout" in step.retraces[0]


@pytest.mark.multidevice(num=8)
def test_sharded_over_eight_devices(mesh_4x2: mesh.Mesh) -> None:
    host, device = twins(lambda: MLP(8, 16))
    for name, p in device.named_parameters():
        spmd.mark_sharding(p, mesh_4x2, (None, "model") if name.endswith("weight") else ("model",))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (host, device)]
    step = spmd.compile(lambda: clipped(device, optimizers[1]))
    for i in range(3):
        x = batch(8, 8, seed=i)
        host(x).square().mean().backward()
        device(spmd.mark_sharding(x.to("jax"), mesh_4x2, ("data", None))).square().mean().backward()
        assert_same(step(), clipped(host, optimizers[0]))
        assert_same_model(device, host)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert step.num_traces == 1


def test_the_gradient_of_an_argument_that_is_new_in_every_call_has_one_program() -> None:
    host, device = twins()

    def attacked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model(x).square().mean().backward(inputs=[x])
        assert x.grad is not None
        return x.detach() + 0.1 * x.grad.sign()

    step = spmd.compile(lambda x: attacked(device, x))
    for i in range(3):
        x = batch(4, 8, seed=i)
        assert_same(step(x.to("jax").requires_grad_()), attacked(host, x.clone().requires_grad_()))
    assert (step.num_traces, step.retraces) == (1, [])

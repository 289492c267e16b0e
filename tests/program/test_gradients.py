"""`.grad` around a compiled step: kept, dropped, accumulated exactly as torch does, or refused."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import mesh
import spmd
from tests.oracle import assert_same, assert_same_model, batch, descend, on_device, twins


def zero_after(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = never_zero(model, optimizer, x)
    optimizer.zero_grad()
    return loss


def zero_in_place(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=False)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def never_zero(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def micro_batches(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    losses = []
    for part in x.chunk(4):
        loss = model(part).square().mean() / 4
        loss.backward()
        losses.append(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return torch.stack(losses).sum()


def clipped_value(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    optimizer.step()
    return norm


STEPS = [descend, zero_after, zero_in_place, micro_batches, clipped_value]
Between = Callable[[Any, int], None]


def run_both(fn: Callable[..., torch.Tensor], calls: int, between: Between = lambda o, i: None, **options: Any) -> tuple[Any, Any, Any]:
    """(host model, device model, step) after `calls` calls of both, losses compared."""
    host, device = twins()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (host, device)]
    step = spmd.compile(lambda x: fn(device, optimizers[1], x), **options)
    for i in range(calls):
        x = batch(8, 8, seed=i)
        assert_same(step(x.to("jax")), fn(host, optimizers[0], x))
        for optimizer in optimizers:
            between(optimizer, i)
    return host, device, step


@pytest.mark.parametrize("keep_grads", [False, True])
@pytest.mark.parametrize("fn", STEPS, ids=[f.__name__ for f in STEPS])
def test_one_program_whatever_way_gradients_are_zeroed(fn: Callable[..., torch.Tensor], keep_grads: bool) -> None:
    host, device, step = run_both(fn, 4, keep_grads=keep_grads)
    assert_same_model(device, host)
    assert (step.num_executables, step.retraces) == (1, [])
    for p, want in zip(device.parameters(), host.parameters(), strict=True):
        if keep_grads or want.grad is None:
            assert_same([p.grad], [want.grad])
        else:
            with pytest.raises(spmd.DroppedValueError, match=r"computed inside a compiled step and not kept(?s:.*)keep_grads=True"):
                p.grad.sum().item()


def test_kept_gradients_are_new_tensors_each_call() -> None:
    _, device = twins()
    optimizer = torch.optim.SGD(device.parameters(), lr=0.1)
    step = spmd.compile(lambda x: descend(device, optimizer, x), keep_grads=True)
    step(batch(8, 8).to("jax"))
    first = device.up.weight.grad
    value = first.tolist()
    step(batch(8, 8, seed=2).to("jax"))
    assert first.tolist() == value
    assert device.up.weight.grad.tolist() != value


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroing_between_calls_is_honoured(set_to_none: bool) -> None:
    host, device, step = run_both(never_zero, 4, lambda optimizer, i: optimizer.zero_grad(set_to_none=set_to_none))
    assert_same_model(device, host)
    assert step.num_executables == (1 if set_to_none else 2)


def test_a_gradient_that_is_zeroed_between_calls_is_not_that_of_the_next_call() -> None:
    _, device = twins()
    optimizer = torch.optim.SGD(device.parameters(), lr=0.05)
    step = spmd.compile(lambda x: descend(device, optimizer, x))
    x = batch(8, 8, seed=0).to("jax")
    step(x)
    optimizer.zero_grad(set_to_none=False)
    zeros = [p.grad for p in device.parameters()]
    for _ in range(2):
        step(x)
        for p, zero in zip(device.parameters(), zeros, strict=True):
            assert p.grad is not None and zero is not None
            assert not zero.cpu().any()
            with pytest.raises(spmd.DroppedValueError, match="not kept"):
                p.grad.cpu()
    assert step.num_traces == 1


def test_gradients_that_are_never_zeroed_add_up_if_kept() -> None:
    host, device, step = run_both(never_zero, 4, keep_grads=True)
    assert_same_model(device, host)
    assert_same([p.grad for p in device.parameters()], [p.grad for p in host.parameters()])
    assert step.num_executables == 2
    assert "to which the function adds, was missing and is present" in step.retraces[0]


def test_gradients_zeroed_now_and_then_add_up_if_kept() -> None:
    host, device, _ = run_both(never_zero, 6, lambda optimizer, i: optimizer.zero_grad() if i % 3 == 2 else None, keep_grads=True)
    assert_same_model(device, host)


def test_gradients_that_are_never_zeroed_are_refused_if_dropped() -> None:
    host, device, step = run_both(never_zero, 1)
    before = [p.tolist() for p in device.parameters()]
    for _ in range(2):
        with pytest.raises(spmd.DroppedValueError, match=r"(?s)adds to gradients of an earlier call.*fix: call optimizer.zero_grad"):
            step(batch(8, 8).to("jax"))
    assert [p.tolist() for p in device.parameters()] == before
    assert_same_model(device, host)


@pytest.mark.parametrize("kept", [False, True])
def test_a_compiled_backward_with_an_eager_step(kept: bool) -> None:
    host, device = twins()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (host, device)]
    step = spmd.compile(lambda x: device(x).square().mean().backward(), keep_grads=kept)
    for i in range(3):
        x = batch(8, 8, seed=i)
        host(x).square().mean().backward()
        step(x.to("jax"))
        if not kept:
            with pytest.raises(spmd.DroppedValueError, match="not kept"):
                optimizers[1].step()
            return
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_model(device, host)
    assert step.num_executables == 1


def test_parameters_that_no_optimizer_zeroes_do_not_stop_the_others() -> None:
    host, device = twins()
    optimizers = [torch.optim.SGD(m.down.parameters(), lr=0.05) for m in (host, device)]
    step = spmd.compile(lambda x: descend(device, optimizers[1], x))
    for i in range(3):
        x = batch(8, 8, seed=i)
        assert_same(step(x.to("jax")), descend(host, optimizers[0], x))
    assert (step.num_executables, step.retraces) == (1, [])
    assert_same_model(device, host)
    with pytest.raises(spmd.DroppedValueError, match="not kept"):
        device.up.weight.grad.sum().item()


@pytest.mark.parametrize("keep_grads", [False, True])
def test_leaf_tensors_outside_of_modules(keep_grads: bool) -> None:
    def make(weight: torch.Tensor, zeroes: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            loss = (x * weight).square().sum()
            loss.backward()
            assert weight.grad is not None
            with torch.no_grad():
                weight.sub_(0.1 * weight.grad)
            if zeroes:
                weight.grad = None
            return loss

        return run

    x = torch.ones(3)
    for zeroes in (True, False):
        host, device = torch.ones(3, requires_grad=True), torch.ones(3, device="jax", requires_grad=True)
        plain, step = make(host, zeroes), spmd.compile(make(device, zeroes), keep_grads=keep_grads)
        for i in range(3):
            if not zeroes and not keep_grads and i:
                with pytest.raises(spmd.DroppedValueError, match="adds to gradients of an earlier call"):
                    step(x.to("jax"))
                break
            assert_same(step(x.to("jax")), plain(x))
            assert_same(device, host)


@pytest.mark.parametrize("keep_grads", [False, True])
def test_the_gradient_of_an_argument_is_left_on_the_argument_of_the_call(keep_grads: bool) -> None:
    step = spmd.compile(lambda x: x.square().sum().backward(), keep_grads=keep_grads)
    for value in (1.0, 2.0):
        x = torch.full((3,), value).to("jax").requires_grad_()
        step(x)
        assert x.grad is not None
        if keep_grads:
            assert x.grad.tolist() == [2 * value] * 3
            step(x)
            assert x.grad.tolist() == [4 * value] * 3
        else:
            with pytest.raises(spmd.DroppedValueError, match="keep_grads=True"):
                x.grad.tolist()
            with pytest.raises(spmd.DroppedValueError, match="adds to gradients of an earlier call|not kept"):
                step(x)
                x.grad.tolist()


def test_a_step_on_a_model_that_no_discovery_finds() -> None:
    class Hidden:
        __slots__ = ("model", "optimizer")

    host, device = twins()
    box = Hidden()
    box.model, box.optimizer = device, torch.optim.Adam(device.parameters(), lr=0.01)
    optimizer = torch.optim.Adam(host.parameters(), lr=0.01)
    step = spmd.compile(lambda x: descend(box.model, box.optimizer, x))
    for i in range(4):
        x = batch(8, 8, seed=i)
        assert_same(step(x.to("jax")), descend(host, optimizer, x))
        for o in (optimizer, box.optimizer):
            o.param_groups[0]["lr"] *= 0.5
    assert_same_model(device, host)
    assert (step.num_executables, step.retraces) == (1, [])


def test_zeroing_in_place_leaves_unused_parameters_alone() -> None:
    host, device = twins()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.5) for m in (host, device)]

    def run(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = F.linear(x, model.up.weight).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step = spmd.compile(lambda x: run(device, optimizers[1], x))
    for i in range(2):
        x = batch(8, 8, seed=i)
        assert_same(step(on_device(x)), run(host, optimizers[0], x))
    assert_same_model(device, host)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_result_that_is_a_kept_gradient_is_that_gradient(is_sharded: bool, mesh_4x2: mesh.Mesh) -> None:
    """What is done to the result is done to the gradient, and the next backward adds to both."""

    def results(device: str, wrap: Callable[[Any], Any]) -> list[Any]:
        weight = nn.Parameter(torch.arange(1.0, 6.0).to(device))
        if is_sharded and device == "jax":
            spmd.mark_sharding(weight, mesh_4x2, ("data",))

        def step(x: torch.Tensor) -> Any:
            (weight * x * x).sum().backward()
            return weight.grad, {"again": weight.grad}, x.grad

        run = wrap(step)
        found: list[Any] = []
        x: Any = torch.ones(5, device=device).requires_grad_()
        for _ in range(3):
            grad, again, of_x = run(x)
            found.append((grad is weight.grad, again["again"] is grad, of_x is x.grad, grad.tolist(), of_x.tolist()))
            grad.mul_(0.5)
            found.append(weight.grad.tolist())  # type: ignore[union-attr]
        return found

    assert results("jax", lambda fn: spmd.compile(fn, keep_grads=True)) == results("cpu", lambda fn: fn)


def test_a_gradient_from_before_a_parameter_was_frozen_is_used_and_zeroed_by_every_call() -> None:
    def run(device: str) -> list[Any]:
        w, v = (nn.Parameter(torch.tensor([n], device=device)) for n in (1.0, 2.0))
        optimizer = torch.optim.SGD([w, v], lr=0.1)

        def loss(x: torch.Tensor) -> None:
            (w * v * x).square().sum().backward()
            optimizer.step()

        def zeroed(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            loss(x)

        def added(x: torch.Tensor) -> None:
            v.grad = None
            loss(x)

        both = [spmd.compile(fn, keep_grads=True) if device == "jax" else fn for fn in (zeroed, added)]
        seen: list[Any] = []
        for k in range(8):
            w.requires_grad_(k in (0, 2))
            if k == 6:
                w.grad = torch.tensor([1.0], device=device)
            both[k > 3](torch.tensor([0.5], device=device))
            seen.append([w.item(), v.item(), *(None if p.grad is None else p.grad.item() for p in (w, v))])
        return seen

    for ours, expected in zip(run("jax"), run("cpu"), strict=True):
        assert ours == pytest.approx(expected)


def test_whether_there_is_a_gradient_is_what_python_sees() -> None:
    def run(device: str) -> list[Any]:
        w, v = (nn.Parameter(torch.tensor([n], device=device)) for n in (1.0, 2.0))

        def ask(x: torch.Tensor) -> list[bool]:
            before = [p.grad is None for p in (w, v)]
            for p in (w, v):
                p.grad = None
            (w * v * x).sum().backward(inputs=[w])
            return [*before, w.grad is None, getattr(v, "grad", None) is None]

        step = spmd.compile(ask) if device == "jax" else ask
        seen: list[Any] = []
        for k in range(6):
            if k == 3:
                w.grad = None
            if k == 4:
                v.grad = torch.ones(1, device=device)
            seen.append(step(torch.tensor([0.5], device=device)))
        return seen

    assert run("jax") == run("cpu")


def test_torchs_own_zero_grad_has_one_program_with_and_without_gradients() -> None:
    model = nn.Linear(2, 2).to("jax")

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    for _ in range(3):
        step(torch.ones(3, 2, device="jax"))
    assert step.num_traces == 1


def test_hooks_of_gradients_run_in_torchs_order() -> None:
    def order(device: str, is_compiled: bool = False) -> list[str]:
        block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)
        model = nn.Sequential(nn.Linear(6, 6), block, nn.Unflatten(-1, (1, 6)), nn.Conv1d(1, 2, 3)).to(device)
        found: list[str] = []
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: found.append(name))

        def step(x: torch.Tensor) -> None:
            model(x).sum().backward()

        (spmd.compile(step) if is_compiled else step)(torch.ones(4, 6, device=device))
        return found

    assert order("jax") == order("jax", is_compiled=True) == order("cpu")


def test_a_tensor_from_before_that_becomes_a_gradient_is_not_lost() -> None:
    """After the call `.grad` was None."""
    weight, x = torch.nn.Parameter(torch.ones(2, device="jax")), torch.full((2,), 2.0, device="jax")

    def step(x: torch.Tensor) -> None:
        weight.grad = x

    with pytest.raises(spmd.TraceError, match=r"p\.grad = tensor\.clone\(\)"):
        spmd.compile(step, keep_grads=True)(x)
    spmd.compile(step)(x)
    with pytest.raises(RuntimeError, match="not kept"):
        weight.grad.tolist()  # pyright: ignore[reportOptionalMemberAccess]


def test_a_gradient_of_two_leaves_is_one_tensor() -> None:
    left, right = (torch.nn.Parameter(torch.ones(2, device="jax")) for _ in range(2))

    @functools.partial(spmd.compile, keep_grads=True)
    def step(x: torch.Tensor) -> None:
        left.grad = x * 1
        right.grad = left.grad

    for _ in range(2):
        step(torch.full((2,), 2.0, device="jax"))
        assert left.grad is right.grad and right.grad is not None
        left.grad.zero_()
        assert right.grad.tolist() == [0, 0]

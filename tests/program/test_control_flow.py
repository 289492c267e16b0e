"""Torch's control flow operators: on CPU tensors, on device tensors, and as lax's inside a compiled function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._higher_order_ops as control_flow
from torch import nn
from torch._higher_order_ops import scan, while_loop

import mesh
import spmd
from tests.oracle import assert_same, batch, on_device, twins

MODES = ["eager", "compiled"]


def run(mode: str, fn: Callable[..., Any], *args: Any) -> Any:
    """`fn` on device copies of the CPU arguments, as it stands or compiled; values and gradients are returned by `fn`."""
    return (spmd.compile(fn) if mode == "compiled" else fn)(*on_device(args))


def with_gradients(fn: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """The results of `fn` and the gradient of their sum of squares for each floating tensor."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    out = torch.utils._pytree.tree_leaves(fn(*leaves))
    loss = sum((o.square() * (i + 1)).sum() for i, o in enumerate(out) if o.requires_grad)
    return out, torch.autograd.grad(loss, [t for t in leaves if t.requires_grad])


def branches(x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda a, b: (a.sin() * b, b.clone()), lambda a, b: (a * 2, b.exp() + a), (x, y))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sign", [1, -1])
def test_cond_takes_the_branch_and_its_gradient(mode: str, sign: int) -> None:
    x, y = batch(4).abs() * sign, batch(4, seed=2)
    want = with_gradients(lambda a, b: (a.sin() * b, b.clone()) if a.sum() > 0 else (a * 2, b.exp() + a), x, y)
    assert_same(run(mode, lambda a, b: with_gradients(branches, a, b), x, y), want)


def test_a_compiled_cond_is_one_program_for_both_branches() -> None:
    step = spmd.compile(lambda x, y: with_gradients(branches, x, y))
    for sign in (1, -1, 1):
        x, y = batch(4).abs() * sign, batch(4, seed=2)
        assert_same(step(x.to("jax"), y.to("jax")), with_gradients(branches, x, y))
    assert step.num_executables == 1
    assert "conditional(" in step.hlo()


class Gated(nn.Module):
    """One of two layers, by the sign of the input; counts the times that it took the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("taken", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale.exp()  # a closure tensor that is no leaf

        def first(x: torch.Tensor) -> torch.Tensor:
            self.taken.add_(1)
            return self.a(x) * scale

        def second(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.b(x)).detach() + scale * x

        if x.device.type == "cpu":
            return first(x) if x.sum() > 0 else second(x)
        return torch.cond(x.sum() > 0, first, second, (x,))


def test_branches_close_over_parameters_and_write_buffers(mesh_4x2: mesh.Mesh) -> None:
    host, device = twins(Gated)
    spmd.mark_sharding(device.a.weight, mesh_4x2, ("model", None))

    def train(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum() + model.scale.sum()
        loss.backward()
        optimizer.step()
        return loss

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (host, device)]
    for p in host.parameters():  # torch leaves None where a branch was not taken, a program has zeros
        p.grad = torch.zeros_like(p)
    optimizers[0].zero_grad = lambda: [p.grad.zero_() for p in host.parameters()]
    step = spmd.compile(lambda x: train(device, optimizers[1], x))
    for i, sign in enumerate((1, -1, -1, 1)):
        x = batch(2, 4, seed=i).abs() * sign
        assert_same(step(x.to("jax")), train(host, optimizers[0], x))
    assert_same(dict(device.state_dict()), dict(host.state_dict()), (1e-4, 1e-5))
    assert (device.taken.item(), step.num_executables) == (2.0, 1)


def test_a_number_of_the_device_decides() -> None:
    step = spmd.compile(lambda x: torch.cond(x.max().item() > 1, lambda x: x + 1, lambda x: x - 1, (x,)))
    assert step(torch.tensor([0.0, 2.0]).to("jax")).tolist() == [1.0, 3.0]
    assert step(torch.tensor([0.0, 0.5]).to("jax")).tolist() == [-1.0, -0.5]
    assert step.num_executables == 1


def test_a_branch_on_an_item_in_a_body_names_torch_cond() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum().item() > 0 else x

    step = spmd.compile(lambda x: torch.cond(x.max() > 3, body, torch.clone, (x,)))
    with pytest.raises(spmd.TraceError, match=r"(?s)Python bool \(a branch\).*test_control_flow.py:\d+ in body.*torch\.cond"):
        step(batch(3).to("jax"))


def test_nested_control_flow_has_gradients() -> None:
    w = torch.randn(3, generator=torch.Generator().manual_seed(3))

    def nested(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        scaled = w * 2

        def inner(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.max() > 1, lambda x: x * scaled, lambda x: x + w, (x,))

        return torch.cond(x.sum() > 0, inner, lambda x: x * x, (x,))

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x * (w * 2) if x.max() > 1 else x + w) if x.sum() > 0 else x * x

    step = spmd.compile(lambda x, w: with_gradients(nested, x, w))
    for x in (torch.tensor([2.0, 1.0, 0.0]), torch.tensor([0.5, 0.1, 0.2])):
        assert_same(step(x.to("jax"), w.to("jax")), with_gradients(plain, x, w))


def test_branches_of_different_shapes_are_refused() -> None:
    step = spmd.compile(lambda x: torch.cond(x.sum() > 0, lambda x: x[:2].clone(), lambda x: x * 1.0, (x,)))
    with pytest.raises(spmd.TraceError, match=r"(?s)results of different shapes.*\(2,\).*\(3,\)"):
        step(batch(3).to("jax"))


class Recurrent(nn.Module):
    """A recurrence whose body closes over its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 3)

    def forward(self, h: torch.Tensor, xs: torch.Tensor, reverse: bool = False) -> Any:
        def body(h: torch.Tensor, x: torch.Tensor) -> Any:
            h = torch.tanh(self.cell(torch.cat([h, x], -1)))
            return h, h * 2

        if xs.device.type == "jax":
            return scan(body, h, xs, reverse=reverse)
        order = range(xs.shape[0])
        ys = []
        for i in reversed(order) if reverse else order:
            h, y = body(h, xs[i])
            ys.append(y)
        return h, torch.stack(ys[::-1] if reverse else ys)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reverse", [False, True])
def test_scan_and_its_gradients_equal_a_python_loop(mode: str, reverse: bool) -> None:
    host, device = twins(Recurrent)
    h, xs = batch(2, 3), batch(5, 2, 3, seed=2)

    def gradients(model: Any, h: torch.Tensor, xs: torch.Tensor) -> Any:
        out, grads = with_gradients(lambda h, xs: model(h, xs, reverse), h, xs)
        loss = sum(o.square().sum() for o in model(h, xs, reverse))
        return out, grads, torch.autograd.grad(loss, list(model.parameters()))

    assert_same(run(mode, lambda h, xs: gradients(device, h, xs), h, xs), gradients(host, h, xs))


def test_a_compiled_scan_is_one_loop_whatever_its_length() -> None:
    _, device = twins(Recurrent)
    sizes = []
    for length in (4, 12):
        step = spmd.compile(lambda h, xs: with_gradients(device, h, xs))
        step(batch(2, 3).to("jax"), batch(length, 2, 3).to("jax"))
        sizes.append(len(step.hlo().splitlines()))
        assert " while(" in step.hlo()
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)


@pytest.mark.parametrize("mode", MODES)
def test_scan_draws_the_numbers_of_a_python_loop(mode: str) -> None:
    def noisy(xs: torch.Tensor) -> Any:
        return scan(lambda c, x: ((c + torch.rand_like(x)), c * x), torch.zeros_like(xs[0]), xs)

    def loop(xs: torch.Tensor) -> Any:
        c, ys = torch.zeros_like(xs[0]), []
        for x in xs:
            c, y = c + torch.rand_like(x), c * x
            ys.append(y)
        return c, torch.stack(ys)

    xs = batch(4, 3).to("jax")
    torch.manual_seed(5)
    want = loop(xs), torch.rand(2, device="jax")
    torch.manual_seed(5)
    got = run(mode, noisy, batch(4, 3)), torch.rand(2, device="jax")
    assert_same([t.cpu() for t in (*got[0], got[1])], [t.cpu() for t in (*want[0], want[1])])


@pytest.mark.parametrize("mode", MODES)
def test_while_loop_runs_until_its_condition_fails(mode: str) -> None:
    def collatz(n: torch.Tensor, x: torch.Tensor) -> Any:
        body: Any = lambda n, x: (torch.where(n % 2 == 0, n // 2, 3 * n + 1), x * 1.5)  # noqa: E731
        return while_loop(lambda n, x: n > 1, body, (n, x))

    got = run(mode, collatz, torch.tensor(7), torch.ones(2))
    assert got[0].item() == 1 and got[0].dtype == torch.int64
    assert got[1].tolist() == pytest.approx([1.5**16] * 2)


@pytest.mark.parametrize("mode", MODES)
def test_while_loop_carries_a_python_int(mode: str) -> None:
    got = run(mode, lambda x: while_loop(lambda i, x: 2 * i < x.shape[0], lambda i, x: (i + 1, x + i), (0, x)), torch.zeros(5))
    assert got[1].tolist() == [3.0] * 5
    assert got[0] == 3


def test_while_loop_without_gradient_or_fixed_draws_is_refused() -> None:
    x = batch(3).to("jax").requires_grad_()
    with pytest.raises(spmd.TraceError, match=r"while_loop in a compiled function has no gradient(?s:.*)fix: .*scan"):
        spmd.compile(lambda x: while_loop(lambda x: x.sum() < 3, lambda x: (x + 1,), (x,)))(x)
    with pytest.raises(spmd.TraceError, match=r"while_loop in a compiled function draws random numbers"):
        spmd.compile(lambda x: while_loop(lambda x: x.sum() < 3, lambda x: (x + torch.rand_like(x),), (x,)))(x.detach())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("combine_mode", ["pointwise", "generic"])
def test_associative_scan_and_its_gradient(mode: str, reverse: bool, combine_mode: str) -> None:
    def affine(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    def gradients(mode: str) -> Callable[..., Any]:
        return lambda a, b: with_gradients(lambda a, b: control_flow.associative_scan(affine, (a, b), 0, reverse, mode), a, b)

    a, b = batch(7, 2), batch(7, 2, seed=2)
    assert_same(run(mode, gradients(combine_mode), a, b), gradients("generic")(a, b))


def test_a_cond_under_autocast_computes_in_its_dtype() -> None:
    layer = nn.Linear(4, 4).to("jax")

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("jax", dtype=torch.bfloat16):
            return torch.cond(x.sum() > 0, layer, lambda x: torch.tanh(layer(x)), (x,))

    assert step(batch(2, 4).to("jax")).dtype == torch.bfloat16


def test_a_parameter_that_only_a_custom_function_uses_must_be_an_operand() -> None:
    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, w = ctx.saved_tensors
            return grad * w, grad * x

    w = torch.nn.Parameter(torch.ones(3, device="jax"))
    x = batch(3).to("jax")

    def loss(x: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        out = torch.cond(x.sum() > 0, lambda x, *o: Times.apply(x, *(o or (w,))), lambda x, *o: x * w, (x, *operands))
        return torch.autograd.grad(out.sum(), w)[0]

    with pytest.raises(spmd.TraceError, match=r"(?s)torch does not report.*fix: pass the tensor as an operand"):
        spmd.compile(loss)(x)
    assert_same(spmd.compile(lambda x: loss(x, w))(x), x.cpu())

"""`scan`, `scan_layers`, `gradient_accumulation`, `assume_pure`: loops and pure functions give what the plain code gives."""

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn

import mesh
import spmd
from tests.grids import line
from tests.oracle import MLP, assert_same, batch, on_device


def cumulate(carry: Any, x: Any) -> Any:
    new = carry["sum"] * 0.5 + x["a"] * x["b"].tanh()
    return {"sum": new, "count": carry["count"] + 1}, (new * 2, None)


def start() -> Any:
    return {"sum": torch.zeros(3), "count": torch.zeros((), dtype=torch.int64)}, {"a": batch(5, 3), "b": batch(5, 3, seed=2)}


def reference(init: Any, xs: Any) -> Any:
    carry, ys = init, []
    for i in range(5):
        carry, (y, _) = cumulate(carry, {k: v[i] for k, v in xs.items()})
        ys.append(y)
    return carry, torch.stack(ys)


@pytest.mark.parametrize("compiled", [False, True])
def test_scan_is_the_loop(compiled: bool) -> None:
    init, xs = start()
    run = spmd.compile(lambda init, xs: spmd.scan(cumulate, init, xs)) if compiled else lambda i, x: spmd.scan(cumulate, i, x)
    carry, (ys, none) = run(on_device(init), on_device(xs))
    want_carry, want_ys = reference(init, xs)
    assert none is None
    assert_same((carry, ys), (want_carry, want_ys))
    if compiled:
        assert str(run._program.captured.jaxpr).count(" scan[") == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_reach_carry_inputs_and_what_the_body_closes_over(compiled: bool) -> None:
    torch.manual_seed(0)
    host = nn.ParameterDict({"w": batch(3, 3), "init": batch(2, 3, seed=5), "xs": batch(4, 2, 3, seed=6)})
    device = copy.deepcopy(host).to("jax")

    def loss_of(p: Any, loop: Any) -> torch.Tensor:
        def body(carry: torch.Tensor, x: torch.Tensor) -> Any:
            new = torch.tanh(carry @ p["w"] + x) + carry.detach() * 0.1  # detach stops the gradient here, as everywhere
            return new, new.square().sum()

        last, ys = loop(body, p["init"], p["xs"])
        return last.sum() + (ys * torch.arange(4.0, device=ys.device)).sum()

    def plain(body: Any, carry: Any, xs: Any) -> Any:
        ys = []
        for i in range(4):
            carry, y = body(carry, xs[i])
            ys.append(y)
        return carry, torch.stack(ys)

    want = loss_of(host, plain)
    want.backward()

    def step() -> torch.Tensor:
        loss = loss_of(device, spmd.scan)
        loss.backward()
        return loss

    run = spmd.compile(step, keep_grads=True) if compiled else step
    assert_same(run().detach(), want.detach())
    assert_same([p.grad for p in device.values()], [p.grad for p in host.values()])


class Layer(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.mlp = MLP(p=p)
        self.register_buffer("scale", torch.rand(8) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x) * self.scale


@pytest.mark.parametrize("compiled", [False, True])
def test_scanned_layers_train_as_a_sequence_of_them(compiled: bool) -> None:
    torch.manual_seed(0)
    host = nn.ModuleList([Layer() for _ in range(4)])
    device = copy.deepcopy(host).to("jax")
    for layer in device:
        spmd.mark_sharding(layer.mlp.up.weight, line(), ("data", None))
    x = batch(8, 8)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (host, device)]

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizers[1].zero_grad()
        loss = spmd.scan_layers(device, x).square().mean()
        loss.backward()
        optimizers[1].step()
        return loss

    run = spmd.compile(step) if compiled else step
    for _ in range(2):
        loss = run(x.to("jax"))
        optimizers[0].zero_grad()
        want = nn.Sequential(*host)(x).square().mean()
        want.backward()
        optimizers[0].step()
        assert_same(loss.detach(), want.detach())
    assert_same([p.detach() for p in device.parameters()], [p.detach() for p in host.parameters()])


def test_a_program_of_scanned_layers_does_not_grow_with_their_number() -> None:
    def program(count: int) -> int:
        layers = nn.ModuleList([Layer() for _ in range(count)]).to("jax")

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = spmd.scan_layers(layers, x).square().mean()
            loss.backward()
            return loss

        run = spmd.compile(step)
        run(batch(8, 8).to("jax"))
        return run.hlo().count(" dot(")

    assert program(4) == program(8) > 0


def test_layers_are_scanned_while_module_outputs_are_checked() -> None:
    layers = nn.ModuleList([Layer() for _ in range(3)]).to("jax")
    x = batch(8, 8).to("jax")
    run = spmd.compile(lambda x: spmd.scan_layers(layers, x), debug_nans=True)
    assert_same(run(x).detach(), nn.Sequential(*layers)(x).detach().cpu())


def test_a_change_within_scanned_layers_is_seen() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(p=0.5) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return spmd.scan_layers(self.layers, x)

    model, x = Model().to("jax"), batch(8, 8).to("jax")
    run = spmd.compile(lambda x: model(x).detach())
    assert not torch.equal(run(x), run(x))
    model.layers.eval()
    assert_same(run(x), nn.Sequential(*model.layers)(x).detach().cpu())
    model.layers.train()
    for layer in model.layers:
        layer.mlp.drop.p = 0.0
    assert torch.equal(run(x), run(x))
    assert [reason.partition(" ")[0] for reason in run.retraces] == ["layers.0.mlp.drop.training", "layers.0.mlp.drop.p"]


def test_layers_without_parameters_are_called_one_by_one() -> None:
    x = batch(8, 8)
    run = spmd.compile(lambda x: spmd.scan_layers([nn.GELU(), nn.GELU()], x))
    assert_same(run(x.to("jax")), nn.Sequential(nn.GELU(), nn.GELU())(x))


def test_every_round_draws_its_own_numbers() -> None:
    def draw(carry: torch.Tensor, x: torch.Tensor) -> Any:
        return carry, torch.rand(4, device="jax")

    xs = torch.zeros(3, 1, device="jax")
    torch.manual_seed(7)
    eager = spmd.scan(draw, xs[0], xs)[1]
    after = torch.rand(2, device="jax")
    torch.manual_seed(7)
    step = spmd.compile(lambda xs: spmd.scan(draw, xs[0], xs)[1])
    compiled = step(xs)
    assert_same(compiled, eager.cpu())
    assert_same(torch.rand(2, device="jax"), after.cpu())
    assert len({tuple(row) for row in eager.tolist()}) == 3


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([nn.Dropout(0.1), nn.Dropout(0.1, True)], "layers 0 and 1 differ in: the layer.inplace\n.*False in layer 0, True in layer 1"),
        ([nn.Sequential(nn.GELU()), nn.Sequential(nn.GELU()).eval()], r"differ in: (the layer|0)\.training"),
        ([nn.Sequential(nn.GELU()), nn.Sequential(nn.ReLU())], "differ in: 0"),
        ([nn.Sequential(nn.GELU()), nn.Sequential(nn.GELU(), nn.GELU())], "differ in: 1"),
        ([nn.GELU(), nn.GELU("tanh")], "differ in: the layer.approximate"),
    ],
    ids=["flag", "training", "class", "structure", "text"],
)
def test_layers_with_other_settings_are_refused(layers: list[nn.Module], text: str) -> None:
    with pytest.raises(spmd.SpmdError, match=text):
        spmd.scan_layers(layers, torch.ones(2, 2).to("jax"))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (lambda c, x: (c[None], x), r"from torch.float32\[2\]\n  to torch.float32\[1, 2\]"),
        (lambda c, x: (c.double(), x), r"from torch.float32\[2\]\n  to torch.float64\[2\]"),
        (lambda c, x: ([c], x), "to the same leaves in other containers"),
        (lambda c, x: c, r"returns a pair, \(carry, y\)"),
        (lambda c, x: (c, x, x), "got 3 values"),
    ],
)
def test_scan_refuses_a_body_that_returns_something_else(body: Any, text: str, compiled: bool) -> None:
    xs = torch.ones(3, 2, device="jax")
    run = (lambda xs: spmd.scan(body, xs[0], xs)) if not compiled else spmd.compile(lambda xs: spmd.scan(body, xs[0], xs))
    with pytest.raises(spmd.SpmdError, match=text):
        run(xs)


def test_scan_refuses_what_it_cannot_do() -> None:
    xs = torch.ones(3, 2, device="jax")
    refused = {
        (xs, xs.T): r"sizes: \[2, 3\](?s:.*)x\[:2\]",
        (xs, xs[0, 0]): "a 0-dim tensor",
        (xs, 1.0): "a float",
        (xs, None): "a NoneType",
        (): "no tensor",
    }
    for given, text in refused.items():
        with pytest.raises(spmd.SpmdError, match=text):
            spmd.scan(lambda c, x: (c, x), xs[0], given)
    with pytest.raises(spmd.SpmdError, match="spmd.scan takes a function, got 3"):
        spmd.scan(3, xs[0], xs)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    total = torch.zeros(2, device="jax")
    with pytest.raises(spmd.TraceError, match="writes in place to a tensor from outside"):
        spmd.compile(lambda xs: spmd.scan(lambda c, x: (c, total.add_(x)), xs[0], xs))(xs)
    with pytest.raises(spmd.SpmdError, match=r"layers 0 and 1 differ in: bias, weight"):
        spmd.scan_layers([nn.Linear(2, 2).to("jax"), nn.Linear(2, 3).to("jax")], xs)
    assert spmd.scan_layers([], xs) is xs
    empty = spmd.scan(lambda c, x: (c, x), xs[0], xs[:0])
    assert_same(empty[0], torch.ones(2))


@pytest.mark.parametrize("compiled", [False, True])
def test_accumulated_gradients_are_those_of_the_mean_loss(compiled: bool) -> None:
    host = MLP()
    device = copy.deepcopy(host).to("jax")
    x, y = batch(4, 8, 8), batch(4, 8, 8, seed=2)

    def train_step(x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> Any:
        return (device(x) - y).square().mean(), count + 10

    def step(x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> Any:
        return spmd.gradient_accumulation(train_step, (x, y), device, (count,))

    run = spmd.compile(step, keep_grads=True) if compiled else step
    loss, count = run(x.to("jax"), y.to("jax"), torch.tensor(20, device="jax"))
    want = sum((host(a) - b).square().mean() for a, b in zip(x, y, strict=True)) / 4
    want.backward()
    assert_same((loss, count), (want.detach(), torch.tensor(60)))
    assert_same([p.grad for p in device.parameters()], [p.grad for p in host.parameters()])
    with pytest.raises(spmd.SpmdError, match="no iterable tensors"):
        spmd.gradient_accumulation(train_step, (), device)
    with pytest.raises(spmd.SpmdError, match=r"first dims: \[4, 3\]"):
        spmd.gradient_accumulation(train_step, (x, y[:3]), device)


def test_a_pure_function_is_traced_once_and_gives_the_same() -> None:
    host = MLP()
    device = copy.deepcopy(host).to("jax")
    traced: list[int] = []

    @spmd.assume_pure
    def block(x: torch.Tensor, scale: float = 1.0) -> Any:
        traced.append(1)
        out = device(x) * scale
        return {"out": out, "frozen": out.detach(), "n": 3}

    x = batch(8, 8).requires_grad_()
    dx = x.detach().to("jax").requires_grad_()
    for _ in range(3):
        got = block(dx, scale=2.0)
        want = host(x) * 2.0
        assert got["n"] == 3 and not got["frozen"].requires_grad
        assert_same(got["out"].detach(), want.detach())
        grads = torch.autograd.grad(got["out"].square().sum(), [dx, *device.parameters()])
        assert_same(grads, torch.autograd.grad(want.square().sum(), [x, *host.parameters()]))
        with torch.no_grad():  # parameters are read anew by every call
            for a, b in zip(host.parameters(), device.parameters(), strict=True):
                a.mul_(0.9)
                b.mul_(0.9)
    count = len(traced)
    block(dx, scale=2.0)
    assert len(traced) == count
    with torch.no_grad():
        before = block(dx)["out"]
        device.up.weight.mul_(2)
        host.up.weight.mul_(2)
        assert_same(block(dx)["out"], host(x))
        assert not torch.equal(before, block(dx)["out"])


def test_a_pure_function_draws_anew_and_joins_programs() -> None:
    module = nn.Dropout(0.5)
    drop = spmd.assume_pure(module)
    x = torch.ones(64, device="jax")
    first, second = drop(x), drop(x)
    assert not torch.equal(first, second)
    module.eval()
    assert torch.equal(drop(x), x)
    double = spmd.assume_pure(lambda x: x * 2)
    assert_same(spmd.compile(lambda x: double(x) + 1)(x), torch.full((64,), 3.0))
    product, square = spmd.assume_pure(lambda x: x @ x), torch.ones(4, 4, device="jax")
    assert product(square).dtype == torch.float32
    with torch.autocast("jax", dtype=torch.bfloat16):
        assert product(square).dtype == torch.bfloat16
    with pytest.raises(spmd.SpmdError, match="was given a set"):
        double({1})
    assert mesh.device_count() >= 1

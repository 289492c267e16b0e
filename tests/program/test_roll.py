"""Layers that are alike as one loop: the same numbers, collectives and Python-side state as the program without, in a size that stays."""

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mesh
import spmd
from spmd.device._storage import buffer_of
from spmd.program.roll import _rolled_program
from tests.oracle import assert_same, descend

WIDTH = 8


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, depth: int, dropout: float = 0.0, again: bool = False) -> None:
        super().__init__()
        self.first, self.head, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), again
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x)


def made(depth: int = 4, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(depth, **options)


def step_of(model: nn.Module, optimizer: Any, **options: Any) -> spmd.Step[Any, Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    return spmd.compile(step, **options)


def trained(model: nn.Module, batch: torch.Tensor, steps: int = 5, **options: Any) -> tuple[list[float], spmd.Step[Any, Any]]:
    step = step_of(model, torch.optim.AdamW(model.parameters(), 1e-2), **options)
    return [step(batch).item() for _ in range(steps)], step


def batch() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


OPTIONS = {"plain": {}, "dropout": {"dropout": 0.3}, "computed again": {"again": True}}


@pytest.mark.parametrize("name", ["plain", "computed again", pytest.param("dropout", marks=pytest.mark.slow)])
def test_losses_and_parameters_are_those_of_the_program_without_loops(name: str) -> None:
    rolled, plain = made(**OPTIONS[name]).to("jax"), made(**OPTIONS[name]).to("jax")
    torch.manual_seed(5)
    losses, step = trained(rolled, batch().to("jax"), roll=True)
    torch.manual_seed(5)
    expected, _ = trained(plain, batch().to("jax"))
    assert losses == pytest.approx(expected, rel=1e-6)
    for p, q in zip(rolled.parameters(), plain.parameters(), strict=True):
        assert_same(p.detach(), q.detach().cpu())
    assert [(loop.passes, loop.why_not) for loop in step.rolled][:2] == [(4, None)] * 2
    assert step.rolled[0].where == "model/blocks/*"
    assert step.retraces == []


def test_size_does_not_grow_with_the_layers() -> None:
    """Counted in operations of the compiled program."""
    sizes = {}
    for depth in (4, 12):
        _, step = trained(made(depth).to("jax"), batch().to("jax"), 1, roll=True)
        sizes[depth] = step.hlo().count(" = ")
    assert sizes[12] <= 1.02 * sizes[4]


def test_parameters_are_read_written_saved_and_loaded_between_steps() -> None:
    """What programs without loops do, bit by bit the same on both sides of each access."""
    model, x = made().to("jax"), batch().to("jax")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = step_of(model, optimizer, roll=True)
    step(x)
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    went_on = [step(x).item() for _ in range(3)]
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert [step(x).item() for _ in range(3)] == went_on
    with torch.no_grad():
        model.blocks[1].up.weight.zero_()  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType, reportCallIssue]
        before = model.blocks[2].up.weight.cpu()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    host = made()
    host.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    assert step(x).item() == pytest.approx(host(batch()).square().mean().item(), rel=1e-5)
    assert not torch.equal(before, model.blocks[2].up.weight.detach().cpu())  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]


def test_a_state_dict_is_bit_by_bit_the_same_in_both_forms() -> None:
    """Of the stacked state, of the state taken apart, and of a program without loops that took it over."""
    model, plain, x = made().to("jax"), made().to("jax"), batch().to("jax")
    step = step_of(model, torch.optim.AdamW(model.parameters(), 1e-2), roll=True)
    look = spmd.compile(lambda x: model(x).sum(), roll=True)
    step(x)
    taken_apart = {name: value.cpu() for name, value in model.state_dict().items()}
    look(x)  # stacks them again, and writes nothing
    plain.load_state_dict(model.state_dict())
    for found in (model.state_dict(), plain.state_dict()):
        assert all(torch.equal(found[name].cpu(), value) for name, value in taken_apart.items())
    unrolled = step_of(plain, torch.optim.SGD(plain.parameters(), 1e-2), roll=False)
    unrolled(x)
    model.load_state_dict(plain.state_dict())
    look(x)
    assert all(torch.equal(value.cpu(), plain.state_dict()[name].cpu()) for name, value in model.state_dict().items())


def test_state_stays_stacked_between_steps_and_is_taken_apart_by_who_reads_it() -> None:
    model, x = made().to("jax"), batch().to("jax")
    step = step_of(model, torch.optim.AdamW(model.parameters(), 1e-2), roll=True)
    step(x)
    buffers = [buffer_of(block.up.weight) for block in model.blocks]  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    assert all(b.is_waiting for b in buffers)
    step(x)
    assert all(b.is_waiting for b in buffers)
    model.blocks[0].up.weight.sum().item()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    assert not any(b.is_waiting for b in buffers)


def test_other_programs_and_eager_code_see_what_the_step_left() -> None:
    model, x = made().to("jax"), batch().to("jax")
    step = step_of(model, torch.optim.SGD(model.parameters(), 1e-2), roll=True)
    evaluate, rolled = spmd.compile(lambda x: model(x).sum()), spmd.compile(lambda x: model(x).sum(), roll=True)
    for _ in range(3):
        step(x)
        with torch.no_grad():
            seen = [evaluate(x).item(), rolled(x).item(), model(x).sum().item()]
            with spmd.lazy():
                seen.append(model(x).sum().item())
        host = made()
        host.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
        assert seen == pytest.approx([host(batch()).sum().item()] * 4, rel=1e-5)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    "AdamW, one at a time": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-2, centered=True),
}


@pytest.mark.parametrize("name", ["AdamW, fused", *(pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS if n != "AdamW, fused")])
def test_optimizers(name: str) -> None:
    losses = []
    for roll in (True, False):
        model = made().to("jax")
        step = step_of(model, OPTIMIZERS[name](model.parameters()), roll=roll)
        losses.append([step(batch().to("jax")).item() for _ in range(4)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("how", ["tensor parallel", "fully sharded"])
def test_collectives_are_those_of_the_program_without_loops(how: str, mesh_4x2: mesh.Mesh) -> None:
    """Kinds, axes and bytes; small ones may be combined otherwise, so their number may differ."""
    found, losses = [], []
    for roll in (True, False):
        model = made(6).to("jax")
        if how == "fully sharded":
            for block in model.blocks:
                spmd.fully_shard(block, mesh=mesh_4x2, axis="data")
            spmd.fully_shard(model, mesh=mesh_4x2, axis="data")
        else:
            rules = [("blocks.*.up.weight", ("model", None)), ("blocks.*.up.bias", ("model",)), ("blocks.*.down.weight", (None, "model"))]
            spmd.shard_module(model, mesh_4x2, [*rules, ("**", None)])
        x = spmd.mark_sharding(batch().to("jax"), mesh_4x2, ("data", None))
        losses_of, step = trained(model, x, roll=roll)
        losses.append(losses_of)
        traffic: dict[Any, int] = {}
        for item in step.collectives():
            traffic[item.kind, str(item.axes)] = traffic.get((item.kind, str(item.axes)), 0) + item.count * item.num_bytes
        found.append(traffic)
        if roll:  # see Note [Layers are gathered after they are cut out]
            assert not re.search(r"= f32\[1,\d+,\d+\]\S* all-gather\(", step.hlo())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert found[0] == found[1]


def test_what_does_not_repeat_is_compiled_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).to("jax")
    _, step = trained(model, batch().to("jax"), 1, roll=True)
    assert step.rolled == []


FUNCTIONS = (torch.sin, torch.cos, torch.tanh, torch.exp, torch.sigmoid, torch.relu, torch.erf, torch.abs, torch.floor, torch.sqrt)


def why_not(step: spmd.Step[Any, Any]) -> set[str]:
    return {re.sub(r"\d[\d,]*", "n", loop.why_not or "") for loop in step.rolled}


def test_by_default_a_large_program_that_loops_halve_is_rolled_and_it_is_said_why_another_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    small = trained(made(12).to("jax"), batch().to("jax"), 1)[1]
    assert why_not(small) == {"the program is small enough to be compiled as it is: n operations, loops from n on"}
    monkeypatch.setitem(_rolled_program._SMALLEST, "cpu", 100)
    many = trained(made(12).to("jax"), batch().to("jax"), 1)[1]
    assert why_not(many) == {""}
    assert many.hlo().count(" = ") < 0.5 * small.hlo().count(" = ")
    assert trained(made(12).to("jax"), batch().to("jax"), 1, roll=False)[1].rolled == []


def test_by_default_a_program_that_loops_hardly_shorten_is_compiled_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_rolled_program._SMALLEST, "cpu", 50)
    model = made(3).to("jax")

    @spmd.compile
    def run(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return sum(torch.sin(torch.cos(torch.tanh(y + torch.ones(i, 1, device="jax").sum()))).sum() for i in range(2, 40, 19)) + sum(
            fn(torch.ones(i, 7, device="jax") * y.sum()).sum() for i, fn in enumerate(FUNCTIONS, 1)
        )

    run(batch().to("jax"))
    assert why_not(run) == {"loops would leave n of the program's n operations"}


def test_images_keep_their_channels_last_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_rolled_program._SMALLEST, "cpu", 100)
    convolutions = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(12))).to("jax")
    step = step_of(convolutions, torch.optim.SGD(convolutions.parameters(), 1e-2))
    step(torch.ones(2, 4, 8, 8, device="jax"))
    assert "its convolutions are computed with channels last, which loops on CPU devices do not keep" in why_not(step)


class OneMasked(Net):
    """Its third block also reads what the first one gave."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = None
        for block in self.blocks:
            x = block(x)
            kept = x if kept is None else kept
            x = x * kept
        return self.head(x)


def test_a_value_of_one_layer_that_all_read_is_no_carry() -> None:
    losses = []
    for roll in (True, False):
        torch.manual_seed(0)
        losses.append(trained(OneMasked(5).to("jax"), batch().to("jax"), roll=roll)[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_gradients_that_are_kept_and_steps_in_one_call() -> None:
    model, x = made().to("jax"), batch().to("jax")
    loss = spmd.compile(lambda x: model(x).square().mean().backward(), keep_grads=True, roll=True)
    loss(x)
    host = made()
    host(batch()).square().mean().backward()
    for p, q in zip(model.parameters(), host.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert_same(p.grad, q.grad)
    stacked = torch.stack([batch()] * 3).to("jax")
    losses = []
    for roll in (True, False):
        several = made().to("jax")
        step = step_of(several, torch.optim.SGD(several.parameters(), 1e-2), roll=roll, steps_per_call=3)
        losses.append(step(stacked).tolist())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_wrong_option_is_refused_with_what_would_be_right() -> None:
    with pytest.raises(spmd.SpmdError, match=r'roll="auto"'):
        spmd.compile(lambda x: x, roll="always")  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_counters_of_layers_that_are_frozen_meanwhile_keep_their_values() -> None:
    """A program of fewer layers takes over the array that all step counters share, and leaves it to those it does not update."""
    models = [made(6), made(6).to("jax")]
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in models]
    steps: list[Any] = [step_of(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    steps[0] = steps[0].__wrapped__
    steps[1] = spmd.compile(steps[1].__wrapped__, roll=True)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    for i in range(5):
        for model in models:
            model.blocks[:2].requires_grad_(i not in (1, 2))
        assert_same(steps[1](x.to("jax")), steps[0](x))
    assert any(loop.why_not is None for loop in steps[1].rolled)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert optimizers[0].state[p]["step"].item() == optimizers[1].state[q]["step"].item()


def split(model: Net, how: str, grid: mesh.Mesh) -> None:
    """Shard some of the parameters of each block; the others stay unmarked. A dim of 6 is uneven over the 4 devices of "data"."""
    for block in model.blocks:
        assert isinstance(block, Block)
        if how == "fully sharded":
            spmd.fully_shard(block, grid, axis="data", ignored_params={block.up.bias, block.norm.weight})
        elif how == "gradients sharded":
            spmd.fully_shard(block, grid, axis="data", stage=2, ignored_params={block.down.weight})
        else:
            spmd.mark_sharding(block.up.weight, grid, ("model", None) if how == "tensor parallel" else (None, "data"))


def kept(model: Net, x: torch.Tensor, compile: Callable[..., Any]) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Losses of three steps with frozen norms in two of six blocks, and the gradients that the last one leaves."""
    for block in model.blocks[:2]:
        block.norm.requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    step = compile(functools.partial(descend, model, optimizer))
    losses = torch.stack([step(x).detach().cpu() for _ in range(3)])
    return losses, [p.grad for p in model.parameters()]


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("width", [8, 6])
@pytest.mark.parametrize("how", ["tensor parallel", "split along dim 1", "fully sharded", "gradients sharded"])
def test_kept_gradients_are_sharded_as_without_loops_also_those_of_unmarked_parameters(
    how: str, width: int, mesh_4x2: mesh.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "WIDTH", width)
    wanted = kept(made(6), batch(), lambda fn: fn)
    shardings: list[Any] = []
    for roll in (True, False):
        model = made(6).to("jax")
        split(model, how, mesh_4x2)
        found = kept(model, spmd.mark_sharding(batch().to("jax"), mesh_4x2, ("data", None)), spmd.compile(keep_grads=True, roll=roll))
        shardings.append([None if g is None else (buffer_of(g).annotation, buffer_of(g).raw().sharding) for g in found[1]])
        assert_same(found[0], wanted[0])
        assert_same([None if g is None else g.detach().cpu() for g in found[1]], wanted[1])
    assert shardings[0] == shardings[1]


@pytest.mark.multidevice(num=8)
def test_a_kept_gradient_of_a_parameter_that_the_program_does_not_read_is_replicated(mesh_4x2: mesh.Mesh) -> None:
    layer = nn.Linear(WIDTH, WIDTH).to("jax")

    @spmd.compile(keep_grads=True)
    def step(x: torch.Tensor) -> None:
        layer.weight.grad = x.T @ x

    step(spmd.mark_sharding(batch().to("jax"), mesh_4x2, ("data", None)))
    assert layer.weight.grad is not None and buffer_of(layer.weight.grad).raw().sharding.is_fully_replicated
    assert_same(layer.weight.grad.cpu(), batch().T @ batch())


SCALED_BY: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "jit": lambda jitted: jitted,
    "jit in jit": lambda jitted: jax.jit(lambda x: jitted(x)),
    "jit in a branch": lambda jitted: lambda x: jax.lax.cond(x[0, 0] > -9, jitted, lambda x: x, x),
    "jit in a loop": lambda jitted: lambda x: jax.lax.fori_loop(0, 2, lambda _, x: jitted(x), x),
    "jit in checkpoint": lambda jitted: jax.checkpoint(lambda x: jitted(x)),
}


@pytest.mark.parametrize("name", SCALED_BY)
@pytest.mark.parametrize("differ", [True, False])
def test_a_constant_of_a_jax_function_is_that_of_each_layer(name: str, differ: bool) -> None:
    tables = [np.linspace(0.5, 0.7 + 0.05 * i * differ, WIDTH, dtype=np.float32) for i in range(5)]
    scaled = [jax.jit(lambda x, table=table: x * table) for table in tables]
    calls = list(map(SCALED_BY[name], scaled if differ else 5 * scaled[:1]))

    def run(model: Net, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        for block, call, table in zip(model.blocks, calls, tables, strict=True):
            x = block(x)
            x = x * torch.tensor(table) ** (2 if name == "jit in a loop" else 1) if x.is_cpu else spmd.call_jax(call, (x,))
        return x, torch.autograd.grad(x.sum(), list(model.blocks.parameters()))

    rolled = spmd.compile(run, roll=True)
    assert_same(rolled(made(5).to("jax"), batch().to("jax")), run(made(5), batch()))
    assert differ or max(loop.passes for loop in rolled.rolled) >= 4

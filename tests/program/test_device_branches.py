"""Branches on values that only the device knows: each call takes the sides of CPU torch, with its writes, results and gradients."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spmd
from tests.grids import grid
from tests.oracle import assert_same, batch, on_device
from tests.waits import WAITS, waiting


class Lamb(torch.optim.Optimizer):
    """A trust ratio for each parameter, in the forms in which repositories write it."""

    def __init__(self, params: Any, form: str) -> None:
        super().__init__(params, {"lr": 0.02})
        self.form = form

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(p)
                state["step"] += 1
                update = state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                weight_norm, update_norm = p.norm(), update.norm()
                if self.form == "expression":
                    ratio: Any = 1.0 if weight_norm == 0 or update_norm == 0 else weight_norm / update_norm
                elif self.form == "else":
                    if weight_norm == 0 or update_norm == 0:
                        ratio = 1.0
                    else:
                        ratio = (weight_norm / update_norm).item()
                else:
                    ratio = 1.0
                    if weight_norm.item() > 0:  # noqa: SIM102
                        if update_norm.item() > 0:
                            ratio = weight_norm.item() / update_norm.item()
                state["ratio"] = ratio
                p.add_(update * ratio, alpha=-group["lr"])


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with torch.no_grad():
        for layer in (model[0], model[4]):
            layer.bias.zero_()
    return model


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        if loss > 3:
            loss = loss * 0.5
        else:
            loss = loss + 0.1
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize("form", ["expression", "else", "nested"])
def test_trust_ratios_of_an_optimizer_equal_the_cpus(form: str) -> None:
    host, device = network(), network().to("jax")
    optimizers = Lamb(host.parameters(), form), Lamb(device.parameters(), form)
    theirs, ours = training(host, optimizers[0]), spmd.compile(training(device, optimizers[1]))
    with waiting(ours):
        for i in range(6):
            assert_same(ours(batch(4, 8, seed=i).to("jax")), theirs(batch(4, 8, seed=i)))
    for p, q in zip(host.parameters(), device.parameters(), strict=True):
        assert_same(q.detach(), p.detach())
        assert math.isclose(float(optimizers[0].state[p]["ratio"]), float(optimizers[1].state[q]["ratio"]), rel_tol=1e-4)
    assert ours.num_traces <= 7  # biases are zero in the first call; entries of the state are new in the first calls


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("roll", [False, True])
def test_trust_ratios_of_sharded_and_rolled_layers_equal_the_cpus(roll: bool) -> None:
    host, device = network(), network().to("jax")
    for layer in (device[0], device[2], device[4]):
        spmd.mark_sharding(layer.weight, grid(), ("model", None))
    theirs = training(host, Lamb(host.parameters(), "expression"))
    ours = spmd.compile(training(device, Lamb(device.parameters(), "expression")), roll=roll)
    with waiting(ours):
        for i in range(4):
            assert_same(ours(spmd.mark_sharding(batch(8, 8, seed=i).to("jax"), grid(), ("data", None))), theirs(batch(8, 8, seed=i)))


def skips(device: str) -> tuple[Callable[..., Any], Any]:
    """A step that is skipped where the loss is not finite."""
    torch.manual_seed(0)
    model, log = nn.Linear(3, 1).to(device), []
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (x[0] / x[1] * model(x[2:5])).sum()
        if torch.isfinite(loss):
            loss.backward()
            optimizer.step()
            log.append(loss.item())
        else:
            log.append("skipped")
        return loss.detach()

    return step, lambda: [*log, model.weight.detach().cpu(), model.bias.detach().cpu()]


class Best:
    def __init__(self) -> None:
        self.best, self.patience, self.stops = float("inf"), 0, False


def plateau(device: str) -> tuple[Callable[..., Any], Any]:
    """The best loss so far, and the number of calls since then."""
    held, w = Best(), torch.ones(6).to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (x * w).sum().abs()
        if loss.item() < held.best:
            held.best, held.patience = loss.item(), 0
        else:
            held.patience += 1
            held.stops = held.patience >= 2
        return loss

    return step, lambda: [held.best, held.patience, held.stops]


def halves(device: str) -> tuple[Callable[..., Any], Any]:
    """A loop until a norm is small."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        count = 0
        while x.norm() > 1:
            x, count = x * 0.5, count + 1
        return x, count

    return step, list


def leaves_early(device: str) -> tuple[Callable[..., Any], Any]:
    log: list[Any] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        for k in range(4):
            x = x + 1
            if x.max() > 3:
                log.append(k)
                break
        else:
            return x * 100
        return -x if (x < 0).any() else x

    return step, lambda: list(log)


def handles(device: str) -> tuple[Callable[..., Any], Any]:
    """A side that raises what the function handles."""

    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            if x.sum() > 3:
                raise KeyError("large")
            scale = 1
        except KeyError:
            scale = 2
        except Exception:
            scale = 3
        return x * scale

    return step, list


def sorts(device: str) -> tuple[Callable[..., Any], Any]:
    def step(x: torch.Tensor) -> Any:
        return sorted(v.item() for v in x[:3]), [i for i, v in enumerate(x[:4]) if v > 0], any(v > 2 for v in x), 2.5 in x

    return step, list


def draws(device: str) -> tuple[Callable[..., Any], Any]:
    """Sides that draw different numbers of random numbers, of which no value is compared."""
    counts: list[int] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        if x.mean() > 0:
            counts.append(len(torch.rand(3, device=x.device)))
        return x

    return step, lambda: list(counts)


SIGNS = (1.0, -1.0, 2.0, 0.25, -3.0, 1.0, 5.0, -0.5)


@pytest.mark.parametrize("make", [skips, plateau, halves, leaves_early, handles, sorts, draws])
def test_every_call_takes_the_sides_of_the_cpu(make: Callable[[str], tuple[Callable[..., Any], Any]]) -> None:
    (theirs, expected), (fn, left) = make("cpu"), make("jax")
    ours = spmd.compile(fn)
    with waiting(ours):
        for sign in SIGNS:
            x = torch.tensor([1.0, 2.0 if sign != 2 else 0.0, -0.5, 2.5, 0.3, 1.5]) * sign
            assert_same(ours(x.to("jax")), theirs(x))
            assert_same(copy.deepcopy(left()), expected())


def printed(device: str) -> tuple[Callable[..., Any], Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        print("start")
        for i in range(3):
            if x[i] > 1:
                print("large", i)
                x = x + 1
            else:
                print("small", i)
        print(f"{x.sum().item():.2f}")
        return x

    return step, list


def test_every_call_prints_what_its_sides_print(capsys: pytest.CaptureFixture[str]) -> None:
    (theirs, _), (fn, _) = printed("cpu"), printed("jax")
    ours = spmd.compile(fn)
    with waiting(ours):
        for sign in SIGNS:
            x = torch.tensor([1.0, 2.0, -0.5]) * sign
            ours(x.to("jax"))
            got = capsys.readouterr().out
            theirs(x)
            assert got == capsys.readouterr().out


def test_traces_are_at_most_one_for_each_path() -> None:
    best = Best()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = x.sum()
        if loss.item() < best.best:
            best.best = loss.item()
        return loss

    compiled = spmd.compile(step)
    with waiting(compiled):
        for value in (9, 8, 7, 10, 6, 5, 12, 4, 3, 8, 1):
            compiled(torch.full((2,), float(value), device="jax"))
    assert best.best == 2.0
    assert compiled.num_traces <= 3, compiled.retraces


def test_the_first_program_warns_with_the_line() -> None:
    step = spmd.compile(lambda x: x + 1 if x.sum() > 0 else x)
    with pytest.warns(UserWarning, match=WAITS + r"test_device_branches.py:\d+ in <lambda>\n.*\n  fix: torch.where"):
        step(batch(3).to("jax"))
    step(-batch(3).to("jax"))
    step(batch(3).abs().to("jax"))


def fails() -> Any:
    raise KeyError("negative")


def test_state_is_as_before_if_another_side_raises() -> None:
    """The program of one side runs first; what it computed is dropped."""
    weight = torch.ones(3, device="jax")

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.add_(1)
        if x.sum() > 0:
            return weight * 1
        weight.add_(100)
        return fails()

    compiled = spmd.compile(step)
    x = torch.ones(3)
    with waiting(compiled):
        assert_same(compiled(x.to("jax")), torch.full((3,), 2.0))
        assert_same(compiled(x.to("jax")), torch.full((3,), 3.0))
        with pytest.raises(KeyError, match="negative"):
            compiled(-x.to("jax"))
        assert_same(weight, torch.full((3,), 3.0))
        assert_same(compiled(x.to("jax")), torch.full((3,), 4.0))


@pytest.mark.parametrize("option", ["check", "keep_grads", "debug_nans", "check_indices"])
def test_options_of_compile_do_not_change_sides(option: str) -> None:
    (theirs, expected), (fn, left) = skips("cpu"), skips("jax")
    if option == "debug_nans":
        (theirs, expected), (fn, left) = halves("cpu"), halves("jax")
    options: dict[str, Any] = {option: True}
    ours = spmd.compile(fn, **options)
    with waiting(ours):
        for scale in (1.0, 8.0, 3.0):
            x = torch.tensor([1.0, 2.0, 0.5, -2.5, 0.3, 1.5]) * scale
            assert_same(ours(x.to("jax")), theirs(x))
    assert_same(left(), expected())


@pytest.mark.parametrize("same", [True, False])
def test_state_of_an_optimizer_that_gets_the_object_it_had_is_written(same: bool) -> None:
    """A number that is written again is the same object of the code, and another one may be there in a later call."""
    values = {"a": 1.0, "b": 1.0 if same else 3.0, "c": 2.0}

    def run(device: str) -> list[float]:
        p = nn.Parameter(torch.ones(2).to(device))
        optimizer, found = torch.optim.SGD([p], lr=0.1), list[float]()

        def step(x: torch.Tensor, mode: str) -> None:
            optimizer.zero_grad()
            (p * x).sum().backward()
            optimizer.step()
            optimizer.state[p]["ratio"] = values[mode]

        compiled = spmd.compile(step) if device == "jax" else step
        for mode in "abcbabcab":
            compiled(*on_device((torch.ones(2),)) if device == "jax" else (torch.ones(2),), mode)
            found.append(optimizer.state[p]["ratio"])
        return found

    assert run("jax") == run("cpu")


def test_an_exported_program_takes_one_side_and_is_refused(tmp_path: Path) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x.abs().sqrt()

    with waiting(spmd.compile(fn)), pytest.raises(spmd.SpmdError, match=r"(?s)branches on a value of the device, at .*fix: torch.where"):
        spmd.export(fn, (batch(3).to("jax"),), path=tmp_path / "fn")

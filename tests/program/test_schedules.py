"""Every learning-rate schedule of torch: twenty compiled steps equal to CPU torch, from one trace."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import spmd
from tests.oracle import assert_same, assert_same_model, batch, train, twins

s = torch.optim.lr_scheduler
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    return s.LinearLR(optimizer, start_factor=0.1, total_iters=5)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: s.LambdaLR(o, lambda i: np.cos(i / 30)),
    "MultiplicativeLR": lambda o: s.MultiplicativeLR(o, lambda i: 0.9),
    "StepLR": lambda o: s.StepLR(o, 4, 0.5),
    "MultiStepLR": lambda o: s.MultiStepLR(o, [3, 9], 0.3),
    "ConstantLR": lambda o: s.ConstantLR(o, 0.3, total_iters=7),
    "LinearLR": warm_up,
    "ExponentialLR": lambda o: s.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: s.SequentialLR(o, [warm_up(o), s.CosineAnnealingLR(o, 15)], [5]),
    "CosineAnnealingLR": lambda o: s.CosineAnnealingLR(o, 10),
    "ChainedScheduler": lambda o: s.ChainedScheduler([warm_up(o), s.ExponentialLR(o, 0.95)]),
    "ReduceLROnPlateau": lambda o: s.ReduceLROnPlateau(o, patience=1, threshold=0.1),
    "CyclicLR": lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 4, 2),
    "OneCycleLR": lambda o: s.OneCycleLR(o, max_lr=0.1, total_steps=25),
    "PolynomialLR": lambda o: s.PolynomialLR(o, 18, 2.0),
}


def test_every_schedule_of_torch_is_here() -> None:
    assert set(SCHEDULES) == set(s.__all__) - {"LRScheduler"}


@pytest.mark.parametrize(("name", "make"), [*((n, SGD) for n in SCHEDULES), ("OneCycleLR", ADAM), ("CyclicLR", ADAM)])
def test_twenty_steps_equal_cpu_torch_from_one_trace(name: str, make: Any) -> None:
    pair = twins()
    optimizers = [make(m.parameters()) for m in pair]
    schedules = [SCHEDULES[name](o) for o in optimizers]
    seen: set[float] = set()
    step = spmd.compile(functools.partial(train, pair[1], optimizers[1]))
    for i in range(20):
        x, y = batch(8, 8, seed=i % 2), batch(8, 8, seed=50 + i % 2)
        losses = train(pair[0], optimizers[0], x, y), step(x.to("jax"), y.to("jax"))
        assert_same(losses[1], losses[0], (1e-4, 1e-6))
        for schedule, loss in zip(schedules, losses, strict=True):
            schedule.step(*([loss.item()] if name == "ReduceLROnPlateau" else []))
        seen.add(optimizers[1].param_groups[0]["lr"])
    assert_same_model(pair[1], pair[0], (1e-4, 1e-5))
    assert (step.num_traces, step.num_executables, step.retraces) == (1, 1, [])
    assert len(seen) > 1


def test_a_plateau_that_the_step_sees_has_one_program_for_each_branch() -> None:
    def run(device: str) -> tuple[list[Any], Any]:
        weight = torch.nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        schedule = s.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)

        def body(x: torch.Tensor, loss: float) -> torch.Tensor:
            weight.grad = x * weight.detach()
            optimizer.step()
            schedule.step(loss)
            return weight.sum()

        step, found = spmd.compile(body) if device == "jax" else body, list[Any]()
        for i in range(14):
            total = step(torch.ones(3, device=device), 1 / (i + 1) if i < 5 else 0.3).item()
            found.append((pytest.approx(total), schedule.get_last_lr(), schedule.best, schedule.num_bad_epochs, schedule.last_epoch))
        return found, step

    (want, _), (got, step) = run("cpu"), run("jax")
    assert got == want
    assert step.num_traces == 5


def test_a_polynomial_schedule_that_ends_inside_the_step() -> None:
    """Behind its last step its formula divides by zero, before the branch that keeps it from doing so is asked again."""
    pair = twins()
    optimizers = [SGD(m.parameters()) for m in pair]
    schedules = [s.PolynomialLR(o, 4) for o in optimizers]

    def run(k: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = train(pair[k], optimizers[k], x, y)
        schedules[k].step()
        return loss

    step = spmd.compile(functools.partial(run, 1))
    for i in range(7):
        x, y = batch(8, 8, seed=i), batch(8, 8, seed=50 + i)
        assert_same(step(x.to("jax"), y.to("jax")), run(0, x, y))
        assert schedules[1].get_last_lr() == pytest.approx(schedules[0].get_last_lr())


@pytest.mark.parametrize("name", ["ExponentialLR", "OneCycleLR", "LambdaLR"])
def test_a_tensor_that_a_schedule_sets_in_the_step_is_refused(name: str) -> None:
    rate = torch.tensor(0.01)
    weight = torch.nn.Parameter(torch.ones(2, device="jax"))
    optimizer = torch.optim.AdamW([weight], lr=rate)
    schedule = SCHEDULES[name](optimizer)
    before = rate.clone()

    @spmd.compile
    def step(x: torch.Tensor) -> Any:
        (weight * x).sum().backward()
        optimizer.step()
        schedule.step()
        return schedule.get_last_lr()

    with pytest.raises(spmd.TraceError, match=r"sets 'lr' of an optimizer, which is a tensor: 0\.0"):
        step(torch.ones(2, device="jax"))
    assert optimizer.param_groups[0]["lr"] is rate
    assert torch.equal(rate, before)


def test_a_tensor_that_is_a_learning_rate_is_returned_as_it_is() -> None:
    rate = torch.tensor(0.01)
    weight = torch.nn.Parameter(torch.ones(2, device="jax"))
    optimizer = torch.optim.AdamW([weight], lr=rate)

    @spmd.compile
    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()
        return optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["lr"] * 1.0

    for i in range(4):
        rate.fill_(0.01 / (i + 1))
        found, computed = step(torch.ones(2, device="jax"))
        assert found is rate
        assert float(computed) == float(rate)

"""GradScaler and fused optimizers leave parameters, gradients and state as on the CPU."""

from typing import Any

import pytest
import torch

import spmd
from tests.oracle import MLP, assert_same, assert_same_model, batch, descend, twins

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD, all of it": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD, dampened": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "Adam, amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_optimizer_equals_the_cpus(name: str) -> None:
    make, options = OPTIMIZERS[name]
    host, device = twins(MLP)
    for model in (host, device):
        optimizer = make(model.parameters(), fused=True, **options)
        for seed in range(3):
            descend(model, optimizer, batch(4, 8, seed=seed).to(next(model.parameters()).device))
    assert_same_model(device, host)


@pytest.mark.parametrize("name", ["Adam, amsgrad", "AdamW", "Adagrad"])
def test_numbers_of_a_step_have_pythons_digits(name: str) -> None:
    make, options = OPTIMIZERS[name]
    weights = [torch.nn.Parameter(torch.linspace(-1.0, 1.0, 8, dtype=torch.float64).to(device)) for device in ("cpu", "jax")]
    for weight in weights:
        optimizer = make([weight], fused=True, **options)
        for _ in range(5):
            optimizer.zero_grad()
            (weight.sin() * weight).sum().backward()
            optimizer.step()
    torch.testing.assert_close(weights[1].cpu(), weights[0], rtol=1e-13, atol=0)  # float64: last bits of five steps


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaler_skips_the_step_that_overflows(fused: bool) -> None:
    host, device = twins(MLP)
    scales = []
    for model, name in ((host, "cpu"), (device, "jax")):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler(name, init_scale=2.0**10, growth_interval=2)
        seen: list[Any] = []
        for round in range(5):
            optimizer.zero_grad()
            loss = model(batch(4, 8, seed=round).to(name)).square().mean()
            scaler.scale(loss * (float("inf") if round == 2 else 1.0)).backward()
            if not fused:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
        scales.append((seen, scaler.state_dict()))
    assert_same(scales[1], scales[0])
    assert scales[0][0] == [1024, 2048, 1024, 1024, 2048]
    assert_same_model(device, host)


@pytest.mark.parametrize("with_scaler", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_it_is_one_program_under_a_schedule(name: str, with_scaler: bool) -> None:
    make, options = OPTIMIZERS[name]
    host, device = twins(MLP)
    scales: list[list[float]] = []
    for model, where in ((host, "cpu"), (device, "jax")):
        optimizer = make(model.parameters(), fused=True, **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        scaler = torch.amp.GradScaler(where, init_scale=8.0, growth_interval=2, enabled=with_scaler)

        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer, scaler: Any = scaler) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        run: Any = spmd.compile(step) if where == "jax" else step
        scales.append([])
        for i in range(5):
            x = torch.full((4, 8), float("inf")) if with_scaler and i == 2 else batch(4, 8, seed=i)
            run(x.to(where))
            schedule.step()
            scales[-1].append(scaler.get_scale())
        if where == "jax":
            assert run.num_traces == (2 if options.get("dampening") else 1)  # the first step is not dampened
    assert scales[0] == scales[1]
    assert_same_model(device, host)


def test_a_scaler_needs_a_fused_optimizer_in_a_program() -> None:
    weight = torch.ones(2, device="jax", requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("jax")

    @spmd.compile
    def step() -> None:
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    with pytest.raises(spmd.TraceError, match=r"SGD\(..., fused=True\)"):
        step()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)  # the trace that failed has left nothing in the scaler
    assert_same(weight, torch.full((2,), 0.9))

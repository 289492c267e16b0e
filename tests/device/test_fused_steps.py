"""GradScaler and fused optimizers leave parameters, gradients and state as on the CPU."""

from typing import Any

import pytest
import torch

import spmd  # noqa: F401  # pyright: ignore[reportUnusedImport]
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

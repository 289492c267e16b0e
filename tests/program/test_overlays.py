"""Two hundred training steps of five kinds of model, each with other habits, laid over the same steps of CPU torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd.demo import GPT, GPTConfig
from tests.models import LSTMLanguageModel, ResNet18, UNet
from tests.oracle import batch, on_device, twins

STEPS = 200
optim, schedules, clip = torch.optim, torch.optim.lr_scheduler, torch.nn.utils


@dataclass(frozen=True)
class Recipe:
    """How one model is trained.

    Attributes:
        model: makes it.
        loss: of the model and one (micro-)batch.
        data: the batch of step i, tensors with a first dim of `rounds` if that is not None.
        optimizer, schedule: make them; a schedule is told the loss if it asks for it.
        clip: bounds the gradients.
        rounds: micro-batches per step; `as_scan`: on the device by `spmd.accumulate`, else by a Python loop.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any, Any], torch.Tensor]
    data: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    schedule: Callable[[torch.optim.Optimizer], Any]
    clip: Callable[[Any], Any]
    rounds: int | None = None
    as_scan: bool = False


def language(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def classes(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, label_smoothing=0.1)


def picture(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def sentences(i: int, rounds: int = 2, size: int = 4, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy counting: most ids follow from the one before."""
    generator = torch.Generator().manual_seed(i)
    starts = torch.randint(24, (rounds, size, 1), generator=generator)
    ids = (starts + 5 * torch.arange(length + 1)) % 24
    noise = torch.randint(24, ids.shape, generator=generator)
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, noise, ids)
    return ids[..., :-1], ids[..., 1:]


def photos(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One of eight batches."""
    x = batch(16, 3, 8, 8, seed=i % 8)
    return x, (x.mean((2, 3)).argmax(1) + (x[:, 0, 0, 0] > 1).long()) % 4


def volumes(dims: int, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = batch(2, 1, *(8,) * dims, seed=i)
    return x, x.roll(1, 2) * 0.5 + 0.3 * batch(*x.shape, seed=i + 1000)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) is large], "weight_decay": d} for large, d in ((True, 0.1), (False, 0.0))
    ]
    return optim.AdamW(groups, lr=1e-3)


RECIPES = {
    "gpt2": Recipe(
        functools.partial(GPT, GPTConfig(24, 16, width=16, layers=2, heads=2, dropout=0.0)), language, sentences, two_groups,
        lambda o: schedules.OneCycleLR(o, max_lr=3e-3, total_steps=STEPS + 1),
        lambda ps: clip.clip_grad_norm_(ps, 1.0), rounds=2,
    ),
    "resnet18": Recipe(
        ResNet18, classes, photos,
        lambda m: optim.SGD(m.parameters(), lr=5e-4, momentum=0.9, nesterov=True, weight_decay=1e-3),
        lambda o: schedules.CosineAnnealingWarmRestarts(o, 50),
        lambda ps: clip.clip_grad_value_(ps, 0.5),
    ),
    "lstm": Recipe(
        LSTMLanguageModel, language, sentences,
        lambda m: optim.RMSprop(m.parameters(), lr=3e-3, momentum=0.5, centered=True),
        lambda o: schedules.ReduceLROnPlateau(o, patience=10),
        lambda ps: clip.clip_grad_norm_(ps, 0.5, norm_type=float("inf")), rounds=2, as_scan=True,
    ),
    "unet2d": Recipe(
        functools.partial(UNet, 2), picture, functools.partial(volumes, 2),
        lambda m: optim.NAdam(m.parameters(), lr=1e-3, weight_decay=0.01, decoupled_weight_decay=True),
        lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o, 0.1, total_iters=20), schedules.PolynomialLR(o, STEPS, 2.0)], [20]),
        lambda ps: clip.clip_grad_norm_(ps, 1.0, foreach=False),
    ),
    "unet3d": Recipe(
        functools.partial(UNet, 3), picture, functools.partial(volumes, 3),
        lambda m: optim.Adagrad(m.parameters(), lr=0.01, lr_decay=1e-3),
        lambda o: schedules.CyclicLR(o, 0.002, 0.02, step_size_up=15, cycle_momentum=False),
        lambda ps: None,
    ),
}  # fmt: skip


def step_of(recipe: Recipe, model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One step as people write it; the mean loss of its micro-batches."""
    optimizer.zero_grad()
    rounds = recipe.rounds or 1

    def micro(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = recipe.loss(model, x, y) / rounds
        loss.backward()
        return loss.detach()

    if recipe.rounds is None:
        loss = micro(x, y)
    elif recipe.as_scan and x.device.type == "jax":
        loss = spmd.accumulate(rounds)(micro)(x, y).sum()
    else:
        loss = sum(micro(x[i], y[i]) for i in range(rounds))
    recipe.clip(model.parameters())
    optimizer.step()
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RECIPES))
def test_two_hundred_steps_lie_over_those_of_cpu_torch(name: str) -> None:
    losses = check_steps(RECIPES[name], STEPS)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in ("gpt2", "lstm") else [pytest.mark.slow]) for n in RECIPES])
def test_fifteen_steps_lie_over_those_of_cpu_torch(name: str) -> None:
    check_steps(RECIPES[name], 15)


def check_steps(recipe: Recipe, count: int) -> list[float]:
    """The losses on the CPU, of which those on the device are a hair's breadth off, in one program."""
    host, device = twins(recipe.model)
    optimizers = [recipe.optimizer(m) for m in (host, device)]
    plans = [recipe.schedule(o) for o in optimizers]
    step = spmd.compile(functools.partial(step_of, recipe, device, optimizers[1]))
    ours, theirs = [], []
    for i in range(count):
        x, y = recipe.data(i)
        theirs.append(step_of(recipe, host, optimizers[0], x, y).item())
        ours.append(step(*on_device((x, y))).item())
        for plan, losses in zip(plans, (theirs, ours), strict=True):
            plan.step(*([losses[-1]] if isinstance(plan, schedules.ReduceLROnPlateau) else []))
    assert ours[-1] == pytest.approx(theirs[-1], rel=1e-4)
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert (step.num_executables, step.num_traces, step.retraces) == (1, 1, [])
    return theirs

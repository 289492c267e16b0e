"""Averages of weights (`torch.optim.swa_utils`) and of statistics, eager and inside a compiled step: equal to CPU torch."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

import mesh
import spmd
from spmd.device._storage import buffer_of
from tests.oracle import assert_same, assert_same_model, batch, train, twins

ema = swa_utils.get_ema_multi_avg_fn(0.9)
AVERAGES: dict[str, Callable[[nn.Module], AveragedModel]] = {
    "swa": AveragedModel,
    "swa_of_buffers": lambda m: AveragedModel(m, use_buffers=True),
    "swa_multi": lambda m: AveragedModel(m, multi_avg_fn=swa_utils.get_swa_multi_avg_fn()),
    "ema": lambda m: AveragedModel(m, multi_avg_fn=ema),
    "ema_of_buffers": lambda m: AveragedModel(m, multi_avg_fn=ema, use_buffers=True),
    "ema_one_by_one": lambda m: AveragedModel(m, avg_fn=swa_utils.get_ema_avg_fn(0.9)),
    "own_by_count": lambda m: AveragedModel(m, avg_fn=lambda average, p, count: average + (p - average) / (count + 2)),
}


def network(momentum: float | None = 0.1) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=momentum), nn.Linear(8, 8))


def averaging_step(model: nn.Module, average: AveragedModel, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = train(model, optimizer, x, y)
    average.update_parameters(model)
    return loss


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", list(AVERAGES))
def test_averages_equal_cpu_torch(name: str, compiled: bool, mesh_4x2: mesh.Mesh) -> None:
    pair = twins(network)
    if compiled:
        spmd.mark_sharding(pair[1][0].weight, mesh_4x2, ("model", None))
    averages = [AVERAGES[name](m) for m in pair]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in pair]
    host, device = (functools.partial(averaging_step, *parts) for parts in zip(pair, averages, optimizers, strict=True))
    step: Any = spmd.compile(device) if compiled else device
    for i in range(4):
        x, y = batch(4, 8, seed=i), batch(4, 8, seed=i + 50)
        assert_same(step(x.to("jax"), y.to("jax")), host(x, y))
    assert_same_model(averages[1], averages[0])
    assert_same(averages[1].eval()(x.to("jax")), averages[0].eval()(x))
    if compiled:
        assert (step.num_executables, step.retraces) == (1, [])
        weight, mine = pair[1][0].weight, averages[1].module[0].weight
        assert buffer_of(mine).value.sharding.is_equivalent_to(buffer_of(weight).value.sharding, 2)


def test_an_average_that_began_eagerly_goes_on_compiled() -> None:
    pair = twins(network)
    averages = [AveragedModel(m) for m in pair]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in pair]
    host, device = (functools.partial(averaging_step, *parts) for parts in zip(pair, averages, optimizers, strict=True))
    compiled = spmd.compile(device)
    for i in range(6):
        x, y = batch(4, 8, seed=i), batch(4, 8, seed=i + 50)
        run = compiled if i in (2, 3, 4) else device
        assert_same(run(x.to("jax"), y.to("jax")), host(x, y))
    assert_same_model(averages[1], averages[0])
    assert averages[1].n_averaged.item() == 6


def test_swalr_anneals_without_a_retrace() -> None:
    pair = twins()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in pair]
    schedules = [swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=5) for o in optimizers]
    step = spmd.compile(functools.partial(train, pair[1], optimizers[1]))
    for i in range(8):
        x, y = batch(4, 8, seed=i), batch(4, 8, seed=i + 50)
        assert_same(step(x.to("jax"), y.to("jax")), train(pair[0], optimizers[0], x, y))
        for schedule in schedules:
            schedule.step()
    assert_same_model(pair[1], pair[0])
    assert step.num_traces == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_update_bn_recomputes_the_statistics(compiled: bool) -> None:
    host, device = twins(network)
    batches = [batch(4, 8, seed=i) for i in range(3)]
    swa_utils.update_bn(batches, host)
    run: Any = lambda *xs: swa_utils.update_bn(xs, device)  # noqa: E731
    run = spmd.compile(run) if compiled else run
    for _ in range(2):
        run(*(x.to("jax") for x in batches))
        assert_same_model(device, host)
    assert device[1].momentum == 0.1


def test_a_cumulative_batch_norm_has_one_program() -> None:
    host, device = twins(functools.partial(network, None))
    step = spmd.compile(lambda x: device(x))
    for i in range(4):
        assert_same(step(batch(4, 8, seed=i).to("jax")), host(batch(4, 8, seed=i)))
    assert_same_model(device, host)
    assert (step.num_executables, step.retraces) == (1, [])
    for model in (host, device):
        model.eval()
    assert_same(step(batch(4, 8).to("jax")), host(batch(4, 8)))


def test_a_cumulative_batch_norm_that_gets_a_momentum_or_stops_tracking_is_traced_again() -> None:
    ours, host = (nn.BatchNorm1d(2, momentum=None).to(device) for device in ("jax", "cpu"))
    step = spmd.compile(lambda x: ours(x))
    for k in range(5):
        ours.momentum = host.momentum = None if k in (0, 3, 4) else 0.3
        ours.track_running_stats = host.track_running_stats = k < 4
        x = torch.tensor([[1.0, 2.0], [3.0, float(k)]])
        step(x.to("jax"))
        host(x)
        torch.testing.assert_close(ours.running_mean.cpu(), host.running_mean)
    assert step.num_traces == 3

"""`spmd.accumulate(k)` means a loop over k micro-batches; compiled it is one scan."""

import collections
import heapq
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mesh
import spmd
from tests.oracle import assert_same, assert_same_model, batch, twins

ROUNDS = 4


def make(device: str, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(dropout), nn.GELU(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def micro(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y) / ROUNDS
        loss.backward()
        return loss

    return model, optimizer, micro


def scan_step(optimizer: Any, micro: Any) -> Any:
    def step(xs: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        losses = spmd.accumulate(ROUNDS)(micro)(xs, ys)
        optimizer.step()
        return losses

    return step


@pytest.mark.parametrize("compiled", [False, True])
def test_equals_a_python_loop_on_the_cpu(compiled: bool, mesh_4x2: mesh.Mesh) -> None:
    xs, ys = torch.randn(ROUNDS, 16, 8), torch.randn(ROUNDS, 16, 4)
    host, host_optimizer, host_micro = make("cpu")
    model, optimizer, micro = make("jax")
    x, y = xs.to("jax"), ys.to("jax")
    if compiled:
        spmd.mark_sharding(model[0].weight, mesh_4x2, ("model", None))
        x = spmd.mark_sharding(x, mesh_4x2, (None, "data", None))
    step: Any = scan_step(optimizer, micro)
    step = spmd.compile(step) if compiled else step
    for _ in range(3):
        host_optimizer.zero_grad()
        expected = [host_micro(xs[i], ys[i]).item() for i in range(ROUNDS)]
        host_optimizer.step()
        assert step(x, y).tolist() == pytest.approx(expected, rel=1e-6)
    assert_same_model(model, host)
    if compiled:
        assert (step.num_executables, step.retraces) == (1, [])


def test_every_round_draws_its_own_dropout_mask_as_the_unrolled_loop_does() -> None:
    xs, ys = torch.randn(ROUNDS, 16, 8).to("jax"), torch.randn(ROUNDS, 16, 4).to("jax")
    losses = []
    for unrolled in (False, True):
        _, optimizer, micro = make("jax", dropout=0.5)

        def loop(x: torch.Tensor, y: torch.Tensor, optimizer: Any = optimizer, micro: Any = micro) -> torch.Tensor:
            optimizer.zero_grad()
            each = [micro(x[i], y[i]) for i in range(ROUNDS)]
            optimizer.step()
            return torch.stack(each)

        step = spmd.compile(loop if unrolled else scan_step(optimizer, micro))
        torch.manual_seed(3)
        losses.append([*step(xs, ys).tolist(), *step(xs, ys).tolist()])
    assert losses[0] == losses[1]


def test_the_program_does_not_grow_with_the_number_of_rounds() -> None:
    sizes = []
    for rounds in (4, 16):
        model, _, micro = make("jax")
        step = spmd.compile(lambda xs, ys, rounds=rounds, micro=micro: spmd.accumulate(rounds)(micro)(xs, ys))
        step(torch.randn(rounds, 4, 8).to("jax"), torch.randn(rounds, 4, 4).to("jax"))
        sizes.append(step.hlo().count(" dot("))
        model.zero_grad()
    assert sizes[0] == sizes[1]


def test_arguments_must_be_stacked() -> None:
    with pytest.raises(spmd.SpmdError, match=r"first dim of 4.*\n.*\(3, 8\)"):
        spmd.accumulate(4)(lambda x: x)(torch.ones(3, 8).to("jax"))


@pytest.mark.multidevice(num=8)
def test_running_averages_that_are_split_unevenly_are_written_by_every_round() -> None:
    host, device = twins(lambda: torch.nn.BatchNorm1d(7))
    grid = mesh.Mesh(range(8), (8,), ("x",))
    for tensor in (*device.parameters(), device.running_mean, device.running_var):
        spmd.mark_sharding(tensor, grid, ("x",))

    def step(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        def one(x: torch.Tensor) -> torch.Tensor:
            loss = (module(x) - 1).square().mean()
            loss.backward()
            return loss

        return spmd.accumulate(3)(one)(x)

    x = batch(3, 8, 7)
    compiled = spmd.compile(lambda x: step(device, x), keep_grads=True)
    assert_same(compiled(x.to("jax")), step(host, x))
    assert_same_model(device, host)
    assert_same([p.grad for p in device.parameters()], [p.grad for p in host.parameters()])


def _grow(held: Any) -> int:
    held.log.append(len(held.log))
    return len(held.log)


def _count_item(held: Any) -> int:
    held.counts[0] += 1
    return held.counts[0]


def _count_in_tuple(held: Any) -> int:
    held.pair = (held.pair[0] + 1, 0)
    return held.pair[0]


def _count(held: Any) -> int:
    held.number += 1
    return held.number


def _fill_window(held: Any) -> int:
    held.window.append(held.window[0] + 1)
    return held.window[0]


def _add_to_set(held: Any) -> int:
    held.names.add(len(held.names))
    return len(held.names)


def _switch_flag(held: Any) -> int:
    held.flag = None if held.flag else True
    return 2 if held.flag else 1


def _reverse(held: Any) -> int:
    held.order.reverse()
    return held.order[0]


def _switch_function(held: Any) -> int:
    held.fn = abs if held.fn is not abs else max
    return 2 if held.fn is abs else 1


def _swap_objects(held: Any) -> int:
    held.front, held.back = held.back, held.front
    return held.front.number


def _count_in_array(held: Any) -> int:
    held.histogram[0] += 1
    return int(held.histogram[0])


def _sort_by_library(held: Any) -> int:
    heapq.heappush(held.heap, -len(held.heap))
    return held.heap[0]


def _held() -> Any:
    plain = {"number": 0, "pair": (0, 0), "flag": None, "fn": max}
    containers = {"log": [], "counts": [0], "order": [1, 2], "names": set[int](), "window": collections.deque([0], maxlen=1), "heap": [0]}
    objects = {"front": SimpleNamespace(number=1), "back": SimpleNamespace(number=2)}
    return SimpleNamespace(**plain, **containers, **objects, histogram=np.zeros(2))


CHANGES = (
    *(_count, _grow, _count_item, _count_in_tuple, _fill_window, _add_to_set, _switch_flag, _reverse, _switch_function, _swap_objects),
    *(_count_in_array, _sort_by_library),
)


@pytest.mark.parametrize("change", CHANGES)
def test_python_that_each_micro_batch_changes_is_refused(change: Callable[[Any], int]) -> None:
    held = _held()
    step = spmd.compile(lambda xs: spmd.accumulate(4)(lambda x: x.sum() * change(held))(xs))
    with pytest.raises(spmd.TraceError, match=r"(?s)every micro-batch changes .*fix: change it once, after accumulate"):
        step(torch.ones(4, 2).to("jax"))
    assert held.histogram.tolist() == [0, 0]
    held.histogram = None
    assert held == SimpleNamespace(**{**vars(_held()), "histogram": None})


def test_python_that_each_micro_batch_leaves_alike_is_written() -> None:
    held: dict[str, Any] = {}

    def one(x: torch.Tensor) -> torch.Tensor:
        held["last"] = tuple(x.shape)
        held["name"] = "one"
        held["made"] = SimpleNamespace(sizes=[1])
        return x.sum()

    step = spmd.compile(lambda xs: spmd.accumulate(4)(one)(xs))
    assert step(torch.ones(4, 2).to("jax")).tolist() == [2.0] * 4
    assert (held["last"], held["name"], held["made"].sizes) == ((2,), "one", [1])

"""Unedited torch_xla loops without a compiled function: what lies between two step boundaries is one program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spmd.compat.torch_xla import _step_ends

pytestmark = pytest.mark.multidevice(num=8)


def loop(steps: int, end: str) -> list[float]:
    """A sharded training loop as torch_xla's users write it; `end`: how its steps end."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.parallel_loader as pl
    import torch_xla.distributed.spmd as xs

    device = torch_xla.device()
    grid = xs.Mesh(range(8), (2, 4), ("data", "model"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to(device)
    xs.mark_sharding(model[0].weight, grid, ("model", None))
    xs.mark_sharding(model[2].weight, grid, (None, "model"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches: Any = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(steps)]
    if end == "loader":
        batches = pl.MpDeviceLoader(batches, device, input_sharding=xs.ShardingSpec(grid, ("data", None)))
    losses = []
    for x, y in batches:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if end == "optimizer":
            xm.optimizer_step(optimizer, barrier=True)
        else:
            optimizer.step()
        if end == "mark_step":
            xm.mark_step()
        elif end == "sync":
            torch_xla.sync()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("end", ["mark_step", "sync", "optimizer", "loader"])
def test_a_loop_is_two_programs_with_eagers_values(end: str) -> None:
    import torch_xla.experimental as experimental

    torch.manual_seed(1)
    lazily = loop(6, end)
    (lazy,) = _step_ends._lazy
    assert lazy.num_executables == 2  # the first creates the optimizer's state
    experimental.eager_mode(True)
    try:
        assert not _step_ends._lazy
        torch.manual_seed(1)
        assert loop(6, end) == pytest.approx(lazily, rel=1e-6)
    finally:
        experimental.eager_mode(False)


def test_a_loop_that_never_ends_a_step_runs_when_it_is_read() -> None:
    assert all(loss > 0 for loss in loop(3, "never"))

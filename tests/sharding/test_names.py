"""A tensor's name is found in the modules that live, and only when somebody reads it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.distributed.tensor.placement_types import Shard

import spmd
from spmd.sharding._names import name_of
from tests.grids import line


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("table", torch.zeros(3))


def test_parameters_and_buffers_are_named_from_the_outermost_module() -> None:
    model = nn.Sequential(Holder())
    assert name_of(model[0].blocks[1].weight) == "parameter '0.blocks.1.weight'"
    assert name_of(model[0].table) == "buffer '0.table'"
    assert name_of(torch.zeros(2, 3, dtype=torch.int64)) == "tensor int64[2, 3]"


def test_a_shared_module_that_holds_itself_ends() -> None:
    model = nn.Linear(2, 2)
    model.__dict__["_modules"]["me"] = model
    assert name_of(model.weight).endswith("me.weight'")


def test_layouts_that_fit_ask_for_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = line("fsdp")
    model = Holder().to("jax")
    monkeypatch.setattr(gc, "get_objects", lambda *_: pytest.fail("the heap was walked"))
    spmd.fully_shard(model.blocks[0], grid, shard_placement_fn=lambda p: Shard(0))
    spmd.xla_distribute_tensor(model.blocks[1].weight, grid, [Shard(0)])
    spmd.mark_sharding(model.blocks[1].bias, grid, (None,))
    with pytest.raises(pytest.fail.Exception, match="the heap was walked"):
        spmd.mark_sharding(model.blocks[1].bias, grid, ("data",))

"""Batches: each sample goes once to the devices that compute it, whatever the mesh, and a pass goes on anywhere."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import mesh
from spmd.train import RecipeError
from spmd.train._feed import GlobalOrder, PlacedFeed, rows_here


@pytest.mark.parametrize("num_samples", [40, 45])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_every_batch(processes: int, num_samples: int) -> None:
    whole = list(GlobalOrder(num_samples, 8, list(range(8)), True, 3, whole=True))
    each = 8 // processes
    parts = [list(GlobalOrder(num_samples, 8, list(range(p * each, (p + 1) * each)), True, 3, whole=True)) for p in range(processes)]
    assert len(whole) == num_samples // 8
    for number, batch in enumerate(whole):
        assert [sample for part in parts for sample in part[number]] == batch
    assert len({sample for batch in whole for sample in batch}) == 8 * len(whole)


def test_a_last_uneven_batch_is_left_out_or_short() -> None:
    assert [len(batch) for batch in GlobalOrder(20, 8, list(range(8)), False, 0, whole=True)] == [8, 8]
    assert [len(batch) for batch in GlobalOrder(20, 8, list(range(8)), False, 0, whole=False)] == [8, 8, 4]
    assert [len(batch) for batch in GlobalOrder(20, 8, [4, 5, 6, 7], False, 0, whole=False)] == [4, 4]


def feed(batch: int = 4) -> PlacedFeed:
    return PlacedFeed(TensorDataset(torch.arange(22)), GlobalOrder(22, batch, list(range(batch)), True, 0, whole=True), 0, 0)


@pytest.mark.parametrize("batch", [4, 2])
def test_a_pass_goes_on_after_its_place(batch: int) -> None:
    before = feed()
    source = iter(before)
    taken = [next(source)[0] for _ in range(2)]
    later = feed(batch)
    later.load_state_dict(before.state_dict())
    rest = torch.cat([part[0] for part in later])
    whole = torch.cat([part[0] for part in feed(batch)])
    assert torch.equal(torch.cat([*taken, rest]), whole)
    assert torch.equal(torch.cat([part[0] for part in later]), whole)  # the next pass is whole again


def test_a_place_inside_a_batch_is_told() -> None:
    with pytest.raises(RecipeError, match="position is sample 6 of an epoch, not a multiple of the batch size 4"):
        feed().load_state_dict({"samples": 6})


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_process_holds_all_rows(accumulate: int, mesh_4x2: mesh.Mesh) -> None:
    assert rows_here(mesh_4x2, ("data",), 8, accumulate) == list(range(8))
    assert rows_here(mesh_4x2, (), 8, accumulate) == list(range(8))
    with pytest.raises(RecipeError, match="does not divide over the 4 devices along"):
        rows_here(mesh_4x2, ("data",), 6 * accumulate, accumulate)

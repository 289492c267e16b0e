"""torch's distributed checkpoints of sharded tensors by torch_xla's planners, its manager, and its files of references."""

# pyright: reportMissingImports=false
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from torch import nn

import mesh as mesh_
from spmd import CheckpointError
from tests.oracle import assert_same


def sharded(spec: Any, seed: int) -> nn.Linear:
    import torch_xla.distributed.spmd as xs

    torch.manual_seed(seed)
    model = nn.Linear(13, 11).to("xla")  # neither is divided by the devices
    if spec is not None:
        xs.mark_sharding(model.weight, xs.get_1d_mesh("data"), spec)
    return model


@pytest.fixture
def group() -> Any:
    dist.init_process_group("gloo", init_method="xla://")
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("after", [("data", None), (None, "data"), None], ids=str)
@pytest.mark.parametrize("before", [("data", None), (None, "data"), None], ids=str)
def test_what_is_saved_in_one_layout_is_loaded_into_another(before: Any, after: Any, on_host: bool, group: Any, tmp_path: Path) -> None:
    from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner, SPMDSavePlanner
    from torch_xla.experimental.distributed_checkpoint._helpers import _sharded_cpu_state_dict

    source, target = sharded(before, 0), sharded(after, 1)
    state = {"model": source.state_dict(), "step": 3}
    saved = _sharded_cpu_state_dict(state) if on_host else state
    dist_cp.save(saved, storage_writer=dist_cp.FileSystemWriter(tmp_path, per_thread_copy_ahead=0), planner=SPMDSavePlanner())
    into = {"model": target.state_dict(), "step": 0}
    dist_cp.load(into, storage_reader=dist_cp.FileSystemReader(tmp_path), planner=SPMDLoadPlanner())
    assert into["step"] == 3
    assert_same([p.detach().cpu() for p in target.parameters()], [p.detach().cpu() for p in source.parameters()])


def test_each_piece_is_planned_once_and_what_is_whole_is_not_cut() -> None:
    import torch_xla.distributed.spmd as xs
    from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner

    model, count = nn.Linear(16, 8).to("xla"), mesh_.device_count()
    xs.mark_sharding(model.weight, xs.get_1d_mesh("data"), ("data", None))
    xs.mark_sharding(model.bias, xs.get_1d_mesh("data"), (None,))
    planner = SPMDSavePlanner()
    planner.set_up_planner(model.state_dict(), True)
    assert list(planner.sharded_state_dict) == (["weight"] if count > 1 else [])
    items = [item for item in planner.create_local_plan().items if item.index.fqn == "weight"]
    assert len(items) == count
    for item in items if count > 1 else ():
        shard = xs.wrap_if_sharded(model.weight).local_shards[item.index.index]
        assert_same(planner.resolve_data(item), shard.data)


def test_a_manager_keeps_the_last_steps_and_restores_one_of_them(group: Any, tmp_path: Path) -> None:
    from torch_xla.experimental.distributed_checkpoint import CheckpointManager

    manager = CheckpointManager(str(tmp_path / "run"), save_interval=10, max_to_keep=2, chkpt_on_preemption=False)
    model = sharded(("data", None), 0)
    expected = {}
    for step in range(0, 31):
        with torch.no_grad():
            model.weight.add_(1.0)
        save = manager.save_async if step % 20 else manager.save
        assert save(step, model.state_dict()) == (step % 10 == 0)
        expected[step] = model.weight.detach().cpu()
    manager.join()
    assert manager.all_steps() == [20, 30]
    again = CheckpointManager(str(tmp_path / "run"), save_interval=10, chkpt_on_preemption=False)
    assert again.all_steps() == [20, 30]
    again.restore(20, state := model.state_dict())
    assert_same(model.weight.detach().cpu(), expected[20])
    with pytest.raises(CheckpointError, match="step 0 is not tracked"):
        again.restore(0, state)
    with pytest.raises(CheckpointError, match="does not watch for preemption"):
        again.reached_preemption(1)


def test_a_signal_asks_for_a_checkpoint(group: Any, tmp_path: Path) -> None:
    import torch_xla
    from torch_xla.experimental.distributed_checkpoint import CheckpointManager

    before = signal.getsignal(signal.SIGTERM)
    manager = CheckpointManager(str(tmp_path), save_interval=100)
    try:
        assert not manager.should_save(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.should_save(2) and manager.reached_preemption(2)
    finally:
        torch_xla._XLAC._deactivate_preemption_sync_manager()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_manager_without_a_process_group_says_how_to_make_one(tmp_path: Path) -> None:
    from torch_xla.experimental.distributed_checkpoint import CheckpointManager

    with pytest.raises(CheckpointError, match=r"needs a process group\n  fix: (?s:.*)xla://"):
        CheckpointManager(str(tmp_path), 1)


def test_a_group_that_reduces_over_replicas_is_refused() -> None:
    with pytest.raises(AssertionError, match="reduces over replicas, but SPMD has none"):
        dist.init_process_group("xla", init_method="xla://")
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad], ids=lambda kind: kind.__name__)
def test_a_primed_optimizer_has_its_state_and_changes_nothing(kind: Any) -> None:
    from torch_xla.experimental.distributed_checkpoint import prime_optimizer

    model = sharded(("data", None), 0)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    values = [p.detach().cpu() for p in model.parameters()]
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.1, **options)
    assert prime_optimizer(optimizer) is optimizer and all(optimizer.state[p] for p in model.parameters())
    assert_same([p.detach().cpu() for p in model.parameters()], values)
    assert all(p.grad is None for p in model.parameters())


def test_a_file_of_references_holds_its_tensors_beside_it(tmp_path: Path) -> None:
    import torch_xla.utils.serialization as xser

    path = str(tmp_path / "state")
    data = {"a": torch.arange(3.0).to("xla"), "list": [torch.ones(2).to("xla"), 5], "host": torch.zeros(1)}
    xser.save(data, path)
    assert sorted(os.listdir(path + ".tensors")) == ["tensor_0.pt", "tensor_1.pt"]
    loaded = xser.load(path)
    assert_same((loaded["a"], loaded["list"][0], loaded["host"]), (torch.arange(3.0), torch.ones(2), torch.zeros(1)))
    assert loaded["list"][1] == 5

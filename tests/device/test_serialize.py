"""Files hold plain CPU tensors; copies and loads on the device keep values, aliasing and shardings."""

import copy
import io
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mesh
import spmd
from mesh import PartitionSpec
from spmd.base import _counters
from tests.oracle import descend


class Tied(nn.Module):
    """Two linears with one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8, bias=False)
        self.down.weight = self.up.weight
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))) * self.scale


@pytest.fixture
def marked(mesh_4x2: mesh.Mesh) -> Tied:
    torch.manual_seed(0)
    model = Tied().to("jax")
    spmd.mark_sharding(model.up.weight, mesh_4x2, ("model", None))
    return model


class Mine(torch.Tensor):
    """A tensor class that nobody told how to be saved."""


def saved_and_loaded(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


VALUES: dict[str, torch.Tensor] = {
    "float32": torch.randn(3, 4),
    "bfloat16": torch.randn(3, 4).bfloat16(),
    "bool": torch.tensor([True, False]),
    "int64": torch.tensor(7),
    "complex64": torch.randn(4, dtype=torch.complex64),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(3, 4).t(),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("is_uploaded", [False, True])
def test_a_saved_tensor_loads_as_the_same_cpu_tensor(name: str, is_uploaded: bool) -> None:
    host = VALUES[name]
    tensor = host.to("jax")
    if is_uploaded:
        tensor = tensor.clone() if tensor.numel() == 0 else tensor[...].clone()
    for loaded in (saved_and_loaded(tensor), pickle.loads(pickle.dumps(tensor))):
        assert type(loaded) is torch.Tensor
        assert loaded.device.type == "cpu"
        assert loaded.dtype == host.dtype
        assert loaded.stride() == host.stride()
        assert torch.equal(loaded, host)


@pytest.mark.parametrize("name", VALUES)
def test_map_location_jax_loads_onto_the_device(name: str) -> None:
    loaded = saved_and_loaded(VALUES[name], map_location="jax")
    assert loaded.device.type == "jax"
    assert torch.equal(loaded.cpu(), VALUES[name])


def test_a_loaded_tensor_uploads_nothing_until_it_is_marked(mesh_4x2: mesh.Mesh) -> None:
    before = _counters.snapshot()
    loaded = saved_and_loaded(torch.arange(32.0).reshape(8, 4), map_location="jax")
    assert _counters.snapshot() == before
    marked = spmd.mark_sharding(loaded, mesh_4x2, ("data", "model"))
    assert {shard.data.shape for shard in marked.local_shards} == {(2, 2)}
    assert _counters.snapshot()["upload_bytes"] - before.get("upload_bytes", 0) == loaded.nbytes


def test_flags_attributes_and_pending_conjugation_are_kept() -> None:
    tensor = torch.randn(3, dtype=torch.complex64).to("jax").requires_grad_()
    tensor.note = "mine"  # pyright: ignore[reportAttributeAccessIssue]
    loaded = saved_and_loaded(tensor, weights_only=False)
    assert loaded.requires_grad
    assert loaded.note == "mine"
    conjugated = tensor.detach().conj()
    assert torch.equal(saved_and_loaded(conjugated), conjugated.cpu())


def test_tensors_that_share_a_storage_share_it_in_the_file() -> None:
    whole = torch.arange(12.0).reshape(3, 4).to("jax")
    loaded = saved_and_loaded({"whole": whole, "row": whole[1], "columns": whole.t()})
    loaded["whole"][1, 0] = -1
    assert loaded["row"][0] == -1
    assert loaded["columns"][0, 1] == -1


def test_a_file_holds_the_value_at_the_time_of_saving() -> None:
    tensor = torch.zeros(3).to("jax")
    kept = io.BytesIO()
    pickler = pickle.Pickler(kept)
    pickler.dump(tensor)  # the pickler lives on, and with it the host copy
    tensor += 1
    pickler.memo.clear()
    pickler.dump(tensor)
    kept.seek(0)
    assert torch.equal(pickle.load(kept), torch.zeros(3))
    assert torch.equal(pickle.load(kept), torch.ones(3))


def test_a_state_dict_of_a_marked_model_is_plain(marked: Tied) -> None:
    loaded = saved_and_loaded(marked.state_dict())
    assert {type(value) for value in loaded.values()} == {torch.Tensor}
    assert {value.device.type for value in loaded.values()} == {"cpu"}
    assert loaded["up.weight"].data_ptr() == loaded["down.weight"].data_ptr()
    host = Tied()
    host.load_state_dict(loaded)
    x = torch.randn(4, 8)
    torch.testing.assert_close(host(x), marked(x.to("jax")).cpu())


def test_a_file_needs_nothing_of_ours(marked: Tied, tmp_path: Path) -> None:
    torch.save({"model": marked.state_dict(), "parameter": marked.up.weight}, tmp_path / "model.pt")
    code = "import sys, torch; print(sorted(torch.load(sys.argv[1]))); assert not {'spmd', 'mesh', 'jax'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "model.pt"], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "['model', 'parameter']", done.stderr


def test_a_pickled_module_comes_back_on_the_host(marked: Tied) -> None:
    loaded = pickle.loads(pickle.dumps(marked))
    assert {type(parameter) for parameter in loaded.parameters()} == {nn.Parameter}
    assert loaded.up.weight is loaded.down.weight
    assert torch.equal(loaded.up.weight, marked.up.weight.cpu())


def test_load_state_dict_keeps_the_sharding_and_the_tensor(marked: Tied) -> None:
    weight, host = marked.up.weight, Tied()
    marked.load_state_dict(host.state_dict())
    assert marked.up.weight is weight
    assert weight.partition_spec == PartitionSpec("model", None)
    assert {shard.data.shape for shard in weight.local_shards} == {(4, 8)}
    assert torch.equal(weight.cpu(), host.up.weight)
    back = Tied()
    back.load_state_dict(marked.state_dict())
    assert torch.equal(back.up.weight, host.up.weight)


def test_a_deep_copy_keeps_marks_ties_and_values_and_shares_nothing(marked: Tied) -> None:
    other = copy.deepcopy(marked)
    assert other.up.weight.partition_spec == PartitionSpec("model", None)
    assert other.up.weight is other.down.weight
    assert isinstance(other.up.weight, nn.Parameter)
    with torch.no_grad():
        for mine, its in zip((*marked.parameters(), *marked.buffers()), (*other.parameters(), *other.buffers()), strict=True):
            assert torch.equal(mine, its)
            its += 1
            assert not torch.equal(mine, its)


def test_a_deep_copy_of_a_host_side_model_uploads_nothing() -> None:
    model = nn.Linear(3, 3).to("jax")
    before = _counters.snapshot()
    copy.deepcopy(model)
    assert _counters.snapshot() == before


def test_deep_copies_of_tensors_that_share_a_storage_share_one(mesh_4x2: mesh.Mesh) -> None:
    whole = spmd.mark_sharding(torch.arange(8.0).to("jax"), mesh_4x2, ("data",))
    plain = torch.arange(4.0).to("jax")
    copies = copy.deepcopy([whole, whole, plain, plain[1:]])
    assert copies[0] is copies[1]
    assert copies[0].partition_spec == PartitionSpec("data")
    copies[2][1] = -1
    assert copies[3][0].item() == -1
    assert plain[1].item() == 1


def test_a_shallow_copy_shares_the_storage(mesh_4x2: mesh.Mesh) -> None:
    plain = torch.zeros(4).to("jax")
    marked = spmd.mark_sharding(torch.zeros(4).to("jax"), mesh_4x2, ("data",))
    parameter = spmd.mark_sharding(nn.Parameter(torch.zeros(4).to("jax")), mesh_4x2, ("data",))
    for tensor in (plain, marked, parameter):
        other = copy.copy(tensor)
        assert type(other) is type(tensor)
        with torch.no_grad():
            other += 1
        assert torch.equal(tensor.cpu(), torch.ones(4))


def test_a_class_of_its_own_is_refused_with_a_way_out() -> None:
    with pytest.raises(spmd.SpmdError, match="cannot be saved\n.*\n  fix: save tensor.cpu()"):
        torch.save(torch.ones(2).to("jax").as_subclass(Mine), io.BytesIO())


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, num: int, *, is_compiled: bool) -> list[float]:
    step = partial(descend, model, optimizer)
    run = spmd.compile(step) if is_compiled else step
    return [run(x).item() for _ in range(num)]


@pytest.mark.parametrize("through_a_file", [False, True])
def test_training_moves_from_the_device_to_cpu_and_back(marked: Tied, through_a_file: bool) -> None:
    def moved(state: Any) -> Any:
        return saved_and_loaded(state) if through_a_file else state

    x = torch.randn(4, 8)
    twin = Tied()
    twin.load_state_dict(marked.state_dict())
    expected = steps(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), x, 9, is_compiled=False)

    optimizer = torch.optim.AdamW(marked.parameters(), lr=1e-2)
    losses = steps(marked, optimizer, x.to("jax"), 3, is_compiled=True)
    host = Tied()
    host.load_state_dict(moved(marked.state_dict()))
    host_optimizer = torch.optim.AdamW(host.parameters(), lr=1e-2)
    host_optimizer.load_state_dict(moved(optimizer.state_dict()))
    losses += steps(host, host_optimizer, x, 3, is_compiled=False)
    marked.load_state_dict(moved(host.state_dict()))
    optimizer.load_state_dict(moved(host_optimizer.state_dict()))
    losses += steps(marked, optimizer, x.to("jax"), 3, is_compiled=True)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert marked.up.weight.partition_spec == PartitionSpec("model", None)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)).to("jax")], ids=["copied", "pickled"])
def test_a_copy_made_in_a_program_has_the_values_of_each_call(copied: Any) -> None:
    """Also of a tensor that was still on the host when the function was traced."""
    tensor = torch.tensor([1.0, 2.0]).to("jax")
    step = spmd.compile(lambda: copied(tensor) * 1)
    for factor in (1.0, 2.0):
        tensor.mul_(factor)
        try:
            torch.testing.assert_close(step().cpu(), torch.tensor([1.0, 2.0]) * factor)
        except spmd.TraceError as error:
            assert copied is not copy.deepcopy and "needs a value that only the compiled program will have" in str(error)

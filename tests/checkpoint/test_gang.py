"""Several processes: each writes and reads its own shards, and a run goes on with another number of them."""

import json
from pathlib import Path

import pytest
import safetensors.torch

import spmd
from spmd import checkpoint
from spmd.checkpoint import _coordination
from tests.launched import launch
from tests.oracle import assert_reordered


def run(processes: int, devices: int, folder: Path, steps: int) -> list[float]:
    """The losses of a job up to step `steps`."""
    losses = folder.with_name("losses.json")
    program = Path(__file__).with_name("job.py")
    done = launch("-n", processes, "--devices-per-process", devices, program=program, arguments=(folder, losses, steps))
    assert done.code == 0, done.out + done.err
    return json.loads(losses.read_text())


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    unbroken = run(2, 2, tmp_path / "unbroken", 3)
    assert run(2, 2, tmp_path / "run", 1) == unbroken[:1]
    found = checkpoint.steps(tmp_path / "run")[0].manifest
    assert found is not None and {file.name[:10] for file in found.files} == {"data-00000", "data-00001"}
    assert run(2, 2, tmp_path / "run", 2) == unbroken[1:2]
    assert_reordered(run(1, 4, tmp_path / "run", 3), unbroken[2:])
    whole = checkpoint.restore(tmp_path / "unbroken").state["model"]
    exported = safetensors.torch.load_file(tmp_path / "unbroken-safetensors-3" / "model.safetensors")
    assert {name: value.tolist() for name, value in exported.items()} == {name: value.cpu().tolist() for name, value in whole.items()}


class Service:
    """The job's key-value store, in this process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str, timeout_s: float) -> str | None:
        return self.values.get(key)

    def delete(self, key: str) -> None:
        for name in [name for name in self.values if name.startswith(key)]:
            del self.values[name]


def members(count: int) -> list[_coordination.Coordinated]:
    service, found = Service(), []
    for index in range(count):
        member = _coordination.Coordinated()
        member.index, member.size, member._service, member._scope = index, count, service, "test"  # type: ignore[assignment]
        found.append(member)
    return found


def test_everybody_hears_what_everybody_said() -> None:
    for round_number in range(4):
        gang = members(3)
        for member in gang:
            member._number = round_number
            member._service.set(f"test/{round_number}/{member.index}", f"from {member.index}")
        assert gang[0].exchange("said", "from 0") == ["from 0", "from 1", "from 2"]


def test_who_does_not_come_is_named_to_all() -> None:
    first, second, _ = members(3)
    second._service.set("test/0/1", "here")
    with pytest.raises(spmd.CheckpointError, match="process 2 did not arrive at 'written' within 600 s"):
        first.exchange("written", "here")
    with pytest.raises(spmd.CheckpointError, match="process 2 did not arrive at 'written'"):
        second.exchange("written", "here")

"""`shard_loader`: batches of any loader come laid out, ahead of time, and go on exactly where a checkpoint was made."""

import random
from collections import UserDict, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import mesh
import spmd
from spmd import checkpoint
from tests.noisy import Noisy
from tests.oracle import array_of

Pair = namedtuple("Pair", "x y")


def drained(batches: Any) -> list[Any]:
    return [(batch["x"].cpu().as_subclass(torch.Tensor), batch["name"]) for batch in batches]


def require_equal(found: list[Any], expected: list[Any]) -> None:
    assert [names for _, names in found] == [names for _, names in expected]
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(found, expected, strict=True))


@pytest.mark.parametrize("spec", [("data", None), (None, "model"), (("data", "model"), None), ("model", "data"), (), None])
def test_every_device_gets_its_part_for_any_spec(spec: Any, mesh_4x2: mesh.Mesh) -> None:
    host = torch.arange(64.0).reshape(8, 8)
    (batch,) = spmd.shard_loader([host], mesh_4x2, spec)
    expected = spmd.mark_sharding(host.clone().to("jax"), mesh_4x2, (*(spec or ()), None, None)[:2])
    assert batch.partition_spec == expected.partition_spec
    for one, other in zip(batch.local_shards, expected.local_shards, strict=True):
        assert one.device == other.device and torch.equal(one.data, other.data)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(8, 2), "deep": [torch.ones(8, dtype=torch.int64), {"z": np.ones((8, 3), np.float16)}], "note": "kept"},
        (torch.ones(8), torch.ones(8, 2, 2, dtype=torch.bfloat16), 5),
        Pair(torch.ones(8), np.float32(2)),
        UserDict(x=torch.ones(8, 2)),
    ],
    ids=["dict", "tuple", "namedtuple", "mapping"],
)
def test_containers_keep_their_form_and_arrays_their_dtypes(batch: Any, mesh_4x2: mesh.Mesh) -> None:
    (found,) = spmd.shard_loader([batch], mesh_4x2, ("data", None))
    assert type(found) is (dict if isinstance(batch, UserDict) else type(batch))

    def compare(one: Any, other: Any) -> None:
        if isinstance(other, torch.Tensor | np.ndarray):
            assert isinstance(one, spmd.XLAShardedTensor) and next(iter(one.partition_spec)) == "data"
            expected = torch.as_tensor(other)
            assert one.dtype == expected.dtype and torch.equal(one.cpu().as_subclass(torch.Tensor), expected)
        elif isinstance(other, dict | UserDict):
            for key in other:
                compare(one[key], other[key])
        elif isinstance(other, list | tuple):
            for a, b in zip(one, other, strict=True):
                compare(a, b)
        else:
            assert one == other

    compare(found, batch)


def test_a_spec_may_mirror_the_batch(mesh_4x2: mesh.Mesh) -> None:
    batch = {"x": torch.ones(8, 4), "both": (torch.ones(4), torch.ones(2, 8))}
    (found,) = spmd.shard_loader([batch], mesh_4x2, {"x": ("data", "model"), "both": [("data",), (None, "model")]})
    assert [tuple(t.partition_spec) for t in (found["x"], *found["both"])] == [("data", "model"), ("data",), (None, "model")]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_are_taken_ahead_but_no_further(prefetch: int, mesh_4x2: mesh.Mesh) -> None:
    taken: list[int] = []

    def source() -> Iterator[torch.Tensor]:
        for number in range(6):
            taken.append(number)
            yield torch.full((4,), number)

    for number, batch in enumerate(spmd.shard_loader(source(), mesh_4x2, ("data",), prefetch)):
        assert batch.cpu().tolist() == [number] * 4
        assert len(taken) == min(6, number + 1 + prefetch)


@pytest.mark.parametrize(("num_workers", "prefetch", "again", "at"), [(0, 2, 0, 3), (0, 2, 0, 8), (0, 0, 3, 3), (0, 2, 2, 5), (1, 2, 2, 3)])
def test_a_resumed_loader_yields_the_rest_exactly(
    num_workers: int, prefetch: int, again: int, at: int, mesh_4x2: mesh.Mesh, tmp_path: Path
) -> None:
    def made(ahead: int) -> Any:
        workers: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True} if num_workers else {}
        loader = DataLoader(Noisy(), 8, shuffle=True, **workers)
        return spmd.shard_loader(loader, mesh_4x2, ("data", None), ahead)

    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    batches, expected, count = made(prefetch), [], 0
    for _ in range(2):  # five batches each
        for batch in batches:
            count += 1
            torch.rand(3), random.random()  # the program draws too, and the loader does not notice
            if count > at:
                expected.append((batch["x"].cpu().as_subclass(torch.Tensor), batch["name"]))
            elif count == at:
                checkpoint.save(tmp_path, count, {"batches": batches}, wait=True)
    torch.manual_seed(9), random.seed(9)
    twin = made(again)
    checkpoint.restore(tmp_path, {"batches": twin})
    found: list[Any] = []
    while len(found) < len(expected):
        found += drained(twin)
    require_equal(found, expected)


def test_the_program_draws_the_same_numbers_with_any_prefetch(mesh_4x2: mesh.Mesh) -> None:
    def drawn(prefetch: int) -> list[float]:
        torch.manual_seed(0)
        return [torch.rand(()).item() for _ in spmd.shard_loader(DataLoader(Noisy(), 8, True), mesh_4x2, ("data", None), prefetch)]

    assert drawn(0) == drawn(3)


class Stateful:
    """A loader that knows its place, as torchdata's and datasets' do."""

    def __init__(self) -> None:
        self.at, self.produced = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 6:
            self.at, self.produced = self.at + 1, self.produced + 1
            yield torch.full((4,), self.at)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Grain:
    """A loader whose iterator knows its place, as grain's does."""

    produced = 0

    def __iter__(self) -> "GrainIterator":
        return GrainIterator(self)


class GrainIterator:
    def __init__(self, owner: Grain) -> None:
        self.owner, self.at = owner, 0

    def __iter__(self) -> "GrainIterator":
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == 6:
            raise StopIteration
        self.at, self.owner.produced = self.at + 1, self.owner.produced + 1
        return torch.full((4,), self.at)

    def get_state(self) -> bytes:
        return bytes([self.at])

    def set_state(self, state: bytes) -> None:
        self.at = state[0]


@pytest.mark.parametrize("kind", [Stateful, Grain])
def test_a_loader_that_knows_its_place_is_not_run_through_again(kind: Any, mesh_4x2: mesh.Mesh) -> None:
    batches = iter(loader := spmd.shard_loader(kind(), mesh_4x2, ("data",)))
    assert [next(batches)[0].item() for _ in range(3)] == [1, 2, 3]
    source = kind()
    twin = spmd.shard_loader(source, mesh_4x2, ("data",))
    twin.load_state_dict(loader.state_dict())
    assert [batch[0].item() for batch in twin] == [4, 5, 6]
    assert source.produced == 3


RAGGED = TensorDataset(torch.arange(1.0, 21.0), torch.ones(20, 3))


def test_a_ragged_batch_is_an_error_unless_something_is_asked_for(mesh_4x2: mesh.Mesh) -> None:
    with pytest.raises(spmd.SpmdError, match=r"the last batch has 4 elements, all others have 8(.|\n)*ragged=\"drop\""):
        list(spmd.shard_loader(DataLoader(RAGGED, 8), mesh_4x2, ("data", None)))


def test_a_ragged_batch_is_dropped(mesh_4x2: mesh.Mesh) -> None:
    found = list(spmd.shard_loader(DataLoader(RAGGED, 8), mesh_4x2, ("data", None), ragged="drop"))
    assert [x.shape[0] for x, _ in found] == [8, 8]


@pytest.mark.parametrize("size", [8, 6])
def test_a_ragged_batch_is_padded_and_masked(size: int, mesh_4x2: mesh.Mesh) -> None:
    found = list(spmd.shard_loader(DataLoader(RAGGED, size), mesh_4x2, ("data", None), ragged="pad"))
    assert {(x.shape[0], mask.shape[0]) for (x, _), mask in found} == {(8, 8)}  # 6 do not divide over 4 devices
    assert all(tuple(mask.partition_spec) == ("data",) and mask.dtype == torch.bool for _, mask in found)
    kept = torch.cat([x.cpu().as_subclass(torch.Tensor)[mask.cpu().as_subclass(torch.Tensor)] for (x, _), mask in found])
    assert kept.tolist() == list(range(1, 21))


def test_one_program_serves_all_batches(mesh_4x2: mesh.Mesh) -> None:
    @spmd.compile
    def total(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask).sum()

    batches = spmd.shard_loader(DataLoader(RAGGED, 8), mesh_4x2, ("data", None), ragged="pad")
    assert sum(total(x, mask).item() for (x, _), mask in batches) == 210
    assert total.num_executables == 1


@pytest.mark.parametrize(
    ("batches", "spec", "text"),
    [
        ([torch.ones(8)], (None, "data"), "cannot be laid out"),
        ([{"x": torch.ones(8)}], {"y": None}, "that the spec lacks"),
        (["text"], ("data",), "yields str without an array"),
        ([torch.tensor(3.0)], ("data",), "yields Tensor whose arrays have 0 dims"),
        ([{"x": np.array(3), "y": torch.tensor(3)}], ("data",), "yields dict whose arrays have 0 dims"),
        ([torch.ones(8), torch.ones(12)], ("data",), "but earlier ones had 8"),
    ],
)
def test_batches_that_do_not_fit_are_named(batches: Any, spec: Any, text: str, mesh_4x2: mesh.Mesh) -> None:
    with pytest.raises((spmd.SpmdError, mesh.SpecError), match=text):
        list(spmd.shard_loader(batches, mesh_4x2, spec))


def test_a_shorter_dataset_is_noticed_on_resume(mesh_4x2: mesh.Mesh) -> None:
    batches = spmd.shard_loader([torch.ones(4)] * 3, mesh_4x2, ("data",))
    place = [batches.state_dict() for _ in batches][-1]
    twin = spmd.shard_loader([torch.ones(4)], mesh_4x2, ("data",))
    twin.load_state_dict(place)
    with pytest.raises(spmd.SpmdError, match="the loader ended after 1 batches"):
        list(twin)


def test_a_sampler_is_told_the_epoch(mesh_4x2: mesh.Mesh) -> None:
    loader = DataLoader(RAGGED, 4)
    told: list[int] = []
    loader.sampler.set_epoch = told.append  # type: ignore[attr-defined]
    batches = spmd.shard_loader(loader, mesh_4x2, ("data", None))
    for _ in range(2):
        list(batches)
    assert told == [0, 1] and len(batches) == 5


class Peers:
    """Two processes, of which this test is the first and the other says what it is told to."""

    index, size = 0, 2

    def __init__(self, other: str) -> None:
        self.other = other

    def exchange(self, name: str, text: str) -> list[str]:
        return [text, self.other.replace("same", text.split("|")[1])]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ("8|same|elsewhere", "feeds the same data as process 0"),
        ("8|5|[(None, None)]", "feeds different data from process 0"),
        ("3|5|x", "process 1's last"),
    ],
)
def test_a_process_that_feeds_wrongly_is_named(other: str, text: str, mesh_4x2: mesh.Mesh) -> None:
    batches = spmd.shard_loader([torch.arange(8.0)], mesh_4x2, (None,), gang=Peers(other))
    with pytest.raises(spmd.SpmdError, match=text):
        list(batches)


def test_no_value_waits_on_the_host(mesh_4x2: mesh.Mesh) -> None:
    (batch,) = spmd.shard_loader([torch.ones(8)], mesh_4x2, ("data",))
    assert isinstance(array_of(batch), jax.Array)


def test_a_place_holds_for_another_number_of_processes(mesh_4x2: mesh.Mesh) -> None:
    """Two processes with 4 rows each are one with 8; `full` is the job's."""
    batches = iter(
        pair := spmd.shard_loader([torch.arange(4.0)] * 3, mesh_4x2, (None,), gang=Peers("4|same|[(None, None)]"), feeds="slice")
    )
    next(batches)
    alone = spmd.shard_loader([torch.arange(8.0)] * 3, mesh_4x2, (None,))
    alone.load_state_dict(pair.state_dict())
    assert [batch.shape[0] for batch in alone] == [8, 8]


def test_a_batch_that_does_not_divide_keeps_its_shape(mesh_4x2: mesh.Mesh) -> None:
    (batch,) = spmd.shard_loader([torch.arange(6.0)], mesh_4x2, ("data",))
    assert batch.shape == (6,) and batch.cpu().tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.sum().item() == 15


def test_a_loader_may_reuse_its_memory(mesh_4x2: mesh.Mesh) -> None:
    def source() -> Iterator[np.ndarray[Any, Any]]:
        memory = np.zeros(64)
        for number in range(4):
            memory[:] = number
            yield memory

    assert [batch[0].item() for batch in spmd.shard_loader(source(), mesh_4x2, ("data",))] == [0, 1, 2, 3]


@pytest.mark.parametrize("loader", [5, None, list], ids=str)
def test_what_is_not_iterable_is_refused(loader: Any, mesh_4x2: mesh.Mesh) -> None:
    with pytest.raises(spmd.SpmdError, match="shard_loader takes an iterable of batches, got (5|None|the class list)\n"):
        spmd.shard_loader(loader, mesh_4x2, ("data",))


WRONG_STATES: list[tuple[Any, str]] = [
    ({"foo": 1}, "lacks 'epoch', 'batch', 'full', 'streams', 'source'\n  it has 'foo'"),
    ({}, "lacks 'epoch', 'batch', 'full', 'streams', 'source'\n  it has no entries"),
    (None, "the state of a loader is a dict, got None"),
    ([1], "the state of a loader is a dict, got a list"),
    ({"epoch": 0, "batch": "1", "full": None, "streams": None, "source": None}, "has an invalid entry 'batch': '1'"),
    ({"epoch": 0, "batch": 1, "full": 2.0, "streams": None, "source": None}, "has an invalid entry 'full': 2.0"),
    ({"epoch": 0, "batch": 1, "full": 2, "streams": 5, "source": None}, "has an invalid entry 'streams': 5"),
]


@pytest.mark.parametrize(("state", "text"), WRONG_STATES, ids=str)
def test_a_wrong_position_is_refused_and_changes_nothing(state: Any, text: str, mesh_4x2: mesh.Mesh) -> None:
    loader = spmd.shard_loader([torch.full((8,), float(n)) for n in range(4)], mesh_4x2, ("data",), prefetch=0)
    passing = iter(loader)
    next(passing)
    before = loader.state_dict()
    with pytest.raises(spmd.SpmdError) as raised:
        loader.load_state_dict(state)
    assert text in str(raised.value) and "fix: saved = loader.state_dict()" in str(raised.value)
    assert {**loader.state_dict(), "streams": None} == {**before, "streams": None}
    assert next(passing).cpu()[0] == 1

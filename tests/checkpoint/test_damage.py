"""Checkpoints that were damaged, or made to do harm, are never taken for whole ones."""

import json
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import spmd
from spmd import checkpoint
from spmd.checkpoint import _manifest
from spmd.checkpoint._boxes import Box, box_of, grid, tile, whole
from spmd.checkpoint._files import StepName, parse_name
from tests import launched


def run(script: str, *args: str) -> dict[str, Any]:
    """A benchmark in a process of its own; its report."""
    out = next(Path(arg) for arg, before in zip(args[1:], args, strict=False) if before == "--json")
    done = launched.run(launched.ROOT / "benchmarks" / script, *args)
    assert done.code == 0, done.out + done.err
    return json.loads(out.read_text())


def test_no_damage_loads_silently_and_no_hostile_input_does_harm(tmp_path: Path) -> None:
    report = run("damage.py", "--damaged", "108", "--hostile", "250", "--json", str(tmp_path / "report.json"))
    assert (report["damaged"]["cases"], report["damaged"]["wrong"]) == (108, 0)
    assert (report["hostile"]["cases"], report["hostile"]["wrong"]) == (250, 0)
    assert report["memory_grown_mib"] < 500


def test_an_interrupted_save_keeps_the_acknowledged_step(tmp_path: Path) -> None:
    report = run("interrupted.py", "--cases", "24", "--json", str(tmp_path / "report.json"))
    assert report["cases"]["all"] == [24, 24]
    assert report["cases"]["kill"][1] >= 6


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A checkpoint, and its manifest's bytes."""
    path = tmp_path_factory.mktemp("sound")
    checkpoint.save(path, 7, {"a": np.arange(40, dtype=np.float32).reshape(5, 8), "b": [np.ones(3), 0.5]}, wait=True)
    return path, (path / "step_00000007" / _manifest.NAME).read_bytes()


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=300)
def test_every_changed_byte_of_a_manifest_is_seen(sound: tuple[Path, bytes], data: st.DataObject) -> None:
    content = bytearray(sound[1])
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(spmd.CheckpointError, match="the manifest is malformed"):
        _manifest.parse(bytes(content))


def test_every_byte_of_the_data_belongs_to_a_checksum(sound: tuple[Path, bytes]) -> None:
    path = sound[0] / "step_00000007" / "data-00000-000000.bin"
    before = path.read_bytes()
    for at in range(len(before)):
        path.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
        verdict = checkpoint.verify(sound[0])
        assert len(verdict.problems) == 1 and "is damaged (data-00000-000000.bin" in verdict.problems[0]
    path.write_bytes(before)
    assert checkpoint.verify(sound[0]).problems == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@hypothesis.given(
    content=JSON,
    key=st.sampled_from(["step", "files", "arrays", "tree", "local", "about", ""]),
)
@hypothesis.settings(max_examples=300)
def test_a_manifest_that_says_anything_is_read_or_refused(sound: tuple[Path, bytes], content: Any, key: str) -> None:
    whole_one = json.loads(sound[1].partition(b"\n")[2])
    try:
        _manifest.from_json({**whole_one, key: content} if key else content)
    except spmd.CheckpointError as error:
        assert "fix:" in str(error)


def test_restoring_a_damaged_step_by_name_does_not_fall_back(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"x": np.full(5, step)}, wait=True)
    (tmp_path / "step_00000002" / "data-00000-000000.bin").write_bytes(bytes(40))
    with pytest.raises(spmd.CheckpointError, match=r"has no valid step(.|\n)*'x'\[0:5\] is damaged"):
        checkpoint.restore(tmp_path, step=2)
    with pytest.warns(UserWarning, match="step 1 is restored; newer steps that are damaged .* program: 1"):
        found = checkpoint.restore(tmp_path)
    assert found.step == 1 and "is damaged" in found.skipped[0]


@pytest.mark.parametrize("name", [".metadata", "_CHECKPOINT_METADATA"])
def test_checkpoints_of_other_libraries_are_refused_unread(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(spmd.CheckpointError, match="is a checkpoint of a different library"):
        checkpoint.restore(tmp_path)


@pytest.mark.parametrize("name", ["step_1", "step_000000001", "step_00000001.0", "step_00000001.01", "step_0000000a", "xstep_00000001", ""])
def test_only_names_as_they_are_written_are_steps(name: str) -> None:
    assert parse_name(name) is None


@hypothesis.given(step=st.integers(0, 10**17), attempt=st.integers(0, 99_999))
def test_a_name_is_read_as_it_was_written(step: int, attempt: int) -> None:
    assert parse_name(StepName(step, attempt).folder) == (step, attempt)


@hypothesis.given(parts=st.lists(st.sampled_from([1, 2, 3]), max_size=4), limit=st.integers(1, 50))
def test_shards_and_their_pieces_tile_an_array(parts: list[int], limit: int) -> None:
    shape = tuple(6 for _ in parts)
    boxes = [piece for box in grid(shape, parts) for piece in box.pieces(limit)]
    assert all(box.size <= limit for box in boxes)
    assert tile(boxes, shape)
    assert not tile(boxes[1:], shape) and not tile([*boxes, boxes[0]], shape)


def test_boxes_that_no_straight_cut_separates_are_told_from_overlapping_ones() -> None:
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 3)), Box((2, 1), (3, 3)), Box((1, 0), (3, 1)), Box((1, 1), (2, 2))]
    assert tile(pinwheel, (3, 3))
    assert not tile([*pinwheel[:4], Box((0, 0), (1, 1))], (3, 3))


def test_a_box_is_the_index_that_jax_gives() -> None:
    assert box_of((slice(None), slice(2, 4)), (3, 8)) == Box((0, 2), (3, 4))
    assert whole(()) == Box((), ()) and whole(()).size == 1

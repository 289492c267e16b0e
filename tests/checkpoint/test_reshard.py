"""`spmd ckpt`: steps listed, checked and cut for another mesh, without devices."""

from pathlib import Path

import numpy as np
import pytest
import torch

import mesh
import spmd
from spmd import checkpoint, cli


@pytest.fixture
def saved(tmp_path: Path, mesh_4x2: mesh.Mesh) -> Path:
    x = spmd.mark_sharding(torch.arange(64.0).reshape(8, 8).to("jax"), mesh_4x2, ("data", "model"))
    checkpoint.save(tmp_path / "run", 5, {"x": x, "y": np.arange(5), "note": "kept"}, wait=True)
    return tmp_path / "run"


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(["ckpt", *map(str, arguments)])
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    ("axes", "pieces"), [("data=8", 8), ("data=1,model=1", 1), ("model=4", 4), ("other=2", 1), ("data=2,model=4", 8), ("data=3", 3)]
)
def test_arrays_are_cut_as_the_mesh_would(saved: Path, axes: str, pieces: int, tmp_path: Path) -> None:
    assert command("reshard", saved, tmp_path / "new", "--mesh", axes) == 0
    found = checkpoint.steps(tmp_path / "new")[0].manifest
    assert found is not None and len(found.arrays[0].pieces) == pieces
    one, other = checkpoint.restore(saved).state, checkpoint.restore(tmp_path / "new").state
    assert torch.equal(one["x"].cpu(), other["x"].cpu()) and one["y"].tolist() == other["y"].tolist() and other["note"] == "kept"


@pytest.mark.parametrize(("axes", "text"), [("data", "is not a mesh"), ("data=0", "is not a mesh")])
def test_a_mesh_that_does_not_fit_is_explained(
    saved: Path, axes: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("reshard", saved, tmp_path / "new", "--mesh", axes) == 2
    assert text in capsys.readouterr().err
    with pytest.raises(spmd.CheckpointError):
        checkpoint.reshard(saved, tmp_path / "new", axes)
    assert not checkpoint.has_step(tmp_path / "new")


def test_a_damaged_step_is_shown_and_not_cut(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("ls", saved) == 0 and command("verify", saved) == 0
    assert "all checksums match" in capsys.readouterr().out
    path = saved / "step_00000005" / "data-00000-000000.bin"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    assert command("ls", saved) == 0  # sizes are right
    assert command("verify", saved) == 1
    assert "'x'[0:2, 0:4] is damaged" in capsys.readouterr().out
    assert command("reshard", saved, tmp_path / "new", "--mesh", "data=1") == 1
    path.write_bytes(b"")
    assert command("ls", saved) == 1
    assert "has 0 bytes" in capsys.readouterr().out
    assert command("ls", tmp_path / "nothing") == 2

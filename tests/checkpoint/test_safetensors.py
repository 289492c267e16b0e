"""Safetensors in and out: what Hugging Face's library writes is read by byte ranges, what is written it reads."""

import json
import os
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import strategies as st

import mesh
import spmd
from spmd import checkpoint
from spmd.checkpoint._boxes import Box
from spmd.checkpoint._safetensors import runs


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.up = torch.nn.Linear(8, 32)
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight


def values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().as_subclass(torch.Tensor) for name, value in module.state_dict().items()}


def require_equal(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for (name, a), b in zip(values(one).items(), values(other).values(), strict=True):
        assert torch.equal(a, b), name


def test_a_file_of_the_library_is_read_into_shards(tmp_path: Path, mesh_4x2: mesh.Mesh) -> None:
    source, target = Tied(), Tied().to("jax")
    safetensors.torch.save_model(source, str(tmp_path / "model.safetensors"))
    spmd.mark_sharding(target.up.weight, mesh_4x2, ("data", "model"))
    loaded = checkpoint.load_safetensors(tmp_path, target)
    require_equal(source, target)
    assert target.head.weight is target.embed.weight
    assert tuple(target.up.weight.partition_spec) == ("data", "model")
    assert loaded.bytes_read == sum(p.numel() * 4 for p in source.parameters())


def test_only_the_bytes_of_the_shards_are_read(tmp_path: Path) -> None:
    source, target = torch.nn.Linear(16, 8, bias=False), torch.nn.Linear(16, 8, bias=False).to("jax")
    checkpoint.save_safetensors(tmp_path / "model", source)
    spmd.mark_sharding(target.weight, mesh.Mesh([0], (1,), ("model",)), (None, "model"))
    file = checkpoint._safetensors.SafetensorsFile(tmp_path / "model" / "model.safetensors")
    part = file.read("weight", Box((2, 4), (6, 8)))
    file.close()
    assert np.array_equal(part, source.weight.detach().numpy()[2:6, 4:8]) and file.bytes_read == 64
    assert checkpoint.load_safetensors(tmp_path / "model", target).bytes_read == 512


@hypothesis.given(data=st.data(), shape=st.lists(st.integers(1, 5), max_size=4))
def test_runs_are_the_bytes_of_a_box(data: Any, shape: list[int]) -> None:
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    box = Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
    array = np.arange(int(np.prod(shape)), dtype=np.int16).reshape(shape)
    octets = array.tobytes()
    found = b"".join(octets[start : start + nbytes] for start, nbytes in runs(tuple(shape), box, 2))
    assert found == array[tuple(slice(a, b) for a, b in bounds)].tobytes()


@pytest.mark.parametrize("limit", [10**9, 1500])
def test_what_is_written_the_library_reads(tmp_path: Path, limit: int, mesh_4x2: mesh.Mesh) -> None:
    model = Tied().to("jax")
    spmd.mark_sharding(model.up.weight, mesh_4x2, ("data", "model"))
    files = checkpoint.save_safetensors(tmp_path / "out", model, max_file_bytes=limit)
    found: dict[str, torch.Tensor] = {}
    for name in files:
        found |= safetensors.torch.load_file(str(tmp_path / "out" / name))
    assert set(found) == {"embed.weight", "up.weight", "up.bias"}
    for name, value in found.items():
        assert torch.equal(value, values(model)[name])
    if limit == 1500:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        assert {name: index["weight_map"][name] for name in found}["up.bias"] == files[1]
    twin = Tied().to("jax")
    checkpoint.load_safetensors(tmp_path / "out", twin)
    require_equal(model, twin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_values_are_rounded_as_torch_rounds_them_only_when_asked(tmp_path: Path, dtype: torch.dtype) -> None:
    source = Tied()
    safetensors.torch.save_model(source, str(tmp_path / "model.safetensors"))
    with pytest.raises(spmd.CheckpointError, match="the module's dtype is"):
        checkpoint.load_safetensors(tmp_path, Tied().to("jax", dtype))
    target = Tied().to("jax")
    checkpoint.load_safetensors(tmp_path, target, dtype=dtype)
    require_equal(source.to(dtype), target)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"up.bias": None}, "not in the files: 'up.bias'"),
        ({"more": torch.ones(1)}, "not in the module: 'more'"),
        ({"up.bias": torch.ones(3)}, r"the file's is \(3,\)"),
        ({"head.weight": torch.ones(16, 8)}, "different values for the two"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    tensors = {k: v.clone() for k, v in Tied().state_dict().items() if k != "head.weight"} | changes
    safetensors.torch.save_file({k: v for k, v in tensors.items() if v is not None}, str(tmp_path / "model.safetensors"))
    module = Tied().to("jax")
    before = {name: (value.dtype, value.tolist()) for name, value in module.state_dict().items()}
    for dtype in (None, torch.bfloat16):
        with pytest.raises(spmd.CheckpointError, match=text):
            checkpoint.load_safetensors(tmp_path, module, dtype=dtype)
        assert {name: (value.dtype, value.tolist()) for name, value in module.state_dict().items()} == before


def test_other_names_are_renamed_or_left_out(tmp_path: Path) -> None:
    source = torch.nn.Linear(2, 2)
    safetensors.torch.save_file({f"model.{k}": v for k, v in source.state_dict().items()}, str(tmp_path / "m.safetensors"))
    target = torch.nn.Linear(2, 2).to("jax")
    checkpoint.load_safetensors(tmp_path / "m.safetensors", target, rename=lambda name: name.removeprefix("model."))
    require_equal(source, target)
    loaded = checkpoint.load_safetensors(tmp_path, target, strict=False)
    assert (loaded.bytes_read, sorted(loaded.unused), loaded.missing) == (0, ["model.bias", "model.weight"], ("weight", "bias"))


@pytest.mark.parametrize("name", ["../m.safetensors", "/m.safetensors", "a/m.safetensors", "..\\m.safetensors", "m.bin", "", 3, None])
def test_an_index_that_climbs_out_is_refused(tmp_path: Path, name: Any) -> None:
    safetensors.torch.save_file(torch.nn.Linear(2, 2).state_dict(), str(tmp_path / "m.safetensors"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name, "bias": name}}))
    with pytest.raises(spmd.CheckpointError, match="the index names"):
        checkpoint.load_safetensors(folder, torch.nn.Linear(2, 2))


def test_an_existing_folder_is_not_overwritten_and_a_pipe_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(spmd.CheckpointError, match="nothing is overwritten"):
        checkpoint.save_safetensors(tmp_path, torch.nn.Linear(2, 2))
    os.mkfifo(tmp_path / "m.safetensors")
    with pytest.raises(spmd.CheckpointError, match="not a regular file"):
        checkpoint.load_safetensors(tmp_path, torch.nn.Linear(2, 2))

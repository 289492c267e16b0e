"""Pictures: which devices a tile names, for tensors of any rank, strings, meshes and modules; in the terminal, as SVG and HTML."""

import io
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import mesh
import spmd
from spmd.draw._picture import Picture
from spmd.draw._tiling import Tiling, device_text
from tests.oracle import MLP

pytestmark = pytest.mark.multidevice(num=8)
CUBE = ((2, 2, 2), ("a", "b", "c"))
SPECS: list[tuple[tuple[int, ...], Any, tuple[int, ...], Any]] = [
    ((8,), ("a",), *CUBE),
    ((8,), (("c", "a", "b"),), *CUBE),
    ((8, 4), (None, "b"), *CUBE),
    ((8, 4), (("b", "a"), "c"), *CUBE),
    ((4, 4, 4), ("c", None, "a"), *CUBE),
    ((4, 4, 4), ("a", "b", "c"), *CUBE),
    ((2, 4, 2, 4), ("b", "a", None, "c"), *CUBE),
    ((2, 2, 2, 2, 2), (None, "a", "b", None, "c"), *CUBE),
    ((), (), *CUBE),
]


@pytest.mark.parametrize(("shape", "spec", "grid", "names"), SPECS, ids=str)
@pytest.mark.parametrize("order", [range(8), [3, 1, 4, 0, 5, 2, 6, 7]], ids=["in order", "another order"])
def test_a_tile_names_the_devices_that_hold_it(shape: Any, spec: Any, grid: Any, names: Any, order: Any) -> None:
    sharding = mesh.ShardingSpec(mesh.Mesh(list(order), grid, names), spec)
    tiling = Tiling.of_spec(sharding, shape)
    for held in sharding.shard_slices(shape):
        tile = tuple(
            0 if s.start is None else s.start // (n // count) for s, n, count in zip(held.slices, shape, tiling.tiles, strict=True)
        )
        assert mesh.devices().index(held.device) in tiling.devices[tile]
    assert sorted(tiling.devices.ravel()) == list(range(8))


STRINGS = [
    ("{devices=[2,2]0,1,2,3}", [[[0], [1]], [[2], [3]]]),
    ("{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}", [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]),
    ("{devices=[2,2]<=[4]}", [[[0], [1]], [[2], [3]]]),
    ("{devices=[2,2]<=[2,2]T(1,0)}", [[[0], [2]], [[1], [3]]]),
    ("{devices=[2,1,2]<=[4] last_tile_dims={replicated}}", [[[0, 1]], [[2, 3]]]),
    ("{maximal device=3}", [[3]]),
    ("{replicated}", [list(range(8))]),
    ("{manual}", [list(range(8))]),
]


@pytest.mark.parametrize(("text", "devices"), STRINGS, ids=[t for t, _ in STRINGS])
def test_a_sharding_string_is_read(text: str, devices: Any) -> None:
    picture = spmd.visualize_sharding(text, 8)
    assert np.array_equal(picture.tiling.devices, np.array(devices))
    assert text in repr(spmd.visualize(text))


@pytest.mark.parametrize("spec", [("data", "model"), ("data", None), (None, ("model", "data")), (None, None)], ids=str)
def test_strings_that_jax_writes_are_the_tiles_of_the_spec(spec: Any, mesh_4x2: mesh.Mesh) -> None:
    sharding = mesh.ShardingSpec(mesh_4x2, spec)
    written = str(sharding.to_jax()._to_xla_hlo_sharding(2))
    read, own = spmd.visualize_sharding(written, 8).tiling, Tiling.of_spec(sharding, (8, 8))
    assert np.array_equal(read.devices.reshape(own.devices.shape), own.devices)


@pytest.mark.parametrize("text", ["", "{devices=[2,2]0,1,2}", "{devices=[2,x]0}", "devices=[2]0,1", "{tiled}"])
def test_what_is_no_sharding_is_refused(text: str) -> None:
    if not text:
        assert spmd.visualize_sharding(text, 4).tiling.copies == 4
        return
    with pytest.raises(spmd.SpmdError, match="fix: "):
        spmd.visualize_sharding(text)


def shown(thing: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(thing)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_terminal_shows_ranges_devices_and_bytes(mesh_4x2: mesh.Mesh) -> None:
    model = MLP(16, 64).to("jax")
    spmd.mark_sharding(model.up.weight, mesh_4x2, ("data", "model"))
    text = shown(spmd.visualize(model.up.weight))
    assert "parameter 'up.weight'  64×16  ('data', 'model')" in text
    assert "dim 0 over data ↓  dim 1 over model →" in text
    assert "16:32" in text and "8:16" in text and "│ 3 │" in text.replace("  ", " ")
    assert "shards of 16×8, 512 bytes per device" in text
    assert repr(spmd.visualize(model.up.weight)).split() == text.split()


def test_a_mesh_of_jax_or_torch_is_drawn_as_ours(mesh_4x2: mesh.Mesh) -> None:
    torchs = spmd.mark_sharding(torch.zeros(8).to("jax"), mesh_4x2, ("data",)).device_mesh
    for foreign in (mesh_4x2.to_jax(), torchs):
        assert shown(spmd.visualize(foreign)) == shown(spmd.visualize(mesh_4x2))


def test_dims_beyond_two_become_panels() -> None:
    grid = mesh.Mesh(range(8), *CUBE)
    text = shown(spmd.visualize(spmd.mark_sharding(torch.zeros(4, 6, 8).to("jax"), grid, ("a", "b", "c"))))
    assert "dim 0 over a = 0:2" in text and "dim 0 over a = 2:4" in text and "dim 1 over b ↓  dim 2 over c →" in text


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_a_tensor_marked_before_its_move_is_drawn_too(place: str, mesh_4x2: mesh.Mesh) -> None:
    marked = spmd.mark_sharding(torch.zeros(8, 8, device=place), mesh_4x2, ("data", None))
    assert "0:2" in shown(spmd.visualize(marked)) and "2 copies" in shown(spmd.visualize(marked))


def test_results_are_drawn_by_their_own_layout(mesh_4x2: mesh.Mesh) -> None:
    x = spmd.mark_sharding(torch.ones(8, 8).to("jax"), mesh_4x2, ("data", "model"))
    picture = spmd.visualize(torch.tanh(x).global_tensor)  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(picture, Picture) and picture.tiling.tiles == (4, 2)


@pytest.mark.parametrize("kind", ["ours", "jax"])
def test_a_mesh_is_a_map_of_its_devices(kind: str, mesh_4x2: mesh.Mesh) -> None:
    picture = spmd.visualize(mesh_4x2 if kind == "ours" else mesh_4x2.to_jax())
    assert isinstance(picture, Picture)
    assert np.array_equal(picture.tiling.devices[..., 0], mesh_4x2.get_logical_mesh())
    assert "data ↓  model →" in shown(picture)


def test_a_module_is_a_table_of_what_is_marked(mesh_4x2: mesh.Mesh) -> None:
    model = MLP(16, 64).to("jax")
    spmd.mark_sharding(model.up.weight, mesh_4x2, ("model", None))
    report = spmd.visualize(model)
    assert isinstance(report, mesh.RulesReport)
    assert report.bytes_per_device == sum(p.nbytes for p in model.parameters()) - model.up.weight.nbytes // 2
    text = shown(report)
    assert "up.weight" in text and "(model, None)" in text and "unmarked" in text
    assert shown(spmd.visualize(report)) == text


def test_svg_is_well_formed_and_has_a_cell_per_tile_in_a_colour_per_set_of_devices(mesh_4x2: mesh.Mesh) -> None:
    marked = spmd.mark_sharding(torch.zeros(8, 8).to("jax"), mesh_4x2, ("data", None))
    picture = spmd.visualize(marked)
    assert isinstance(picture, Picture)
    root = ElementTree.fromstring(picture.to_svg())
    cells = [e for e in root if e.tag.endswith("rect") and e.get("fill") != "white"]
    assert len(cells) == 4 and len({e.get("fill") for e in cells}) == 4
    words = {e.text for e in root if e.tag.endswith("text")}
    assert {"0:2", "6:8", "0 1", "6 7"} <= words
    assert picture.to_svg() in picture.to_html() == picture._repr_html_()


def test_a_large_mesh_is_drawn_short() -> None:
    text = "{devices=[256,1]" + ",".join(map(str, range(256))) + "}"
    words = shown(spmd.visualize_sharding(text))
    assert "…" in words and "255" in words and len(words.splitlines()) < 40


@pytest.mark.parametrize(("ids", "text"), [([3], "3"), ([0, 4], "0 4"), ([2, 3, 4], "2-4"), ([0, 8, 16, 24, 32], "0 8 … 32")])
def test_device_ids_are_written_short(ids: list[int], text: str) -> None:
    assert device_text(np.array(ids)) == text


def test_what_lies_nowhere_is_refused() -> None:
    with pytest.raises(spmd.SpmdError, match="is not on a mesh: it is on device 'cpu'(?s:.*)mark_sharding"):
        spmd.visualize(torch.zeros(2))
    with pytest.raises(spmd.SpmdError, match="MLP is on no mesh"):
        spmd.visualize(MLP())
    with pytest.raises(spmd.SpmdError, match="dict cannot be drawn"):
        spmd.visualize({})

"""What programs written for torch_xla rely on of `torch_xla.distributed.spmd`; the same on 1, 4 and 8 devices."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn

import mesh as mesh_
import spmd
from tests.oracle import assert_same, batch

NUM = "all devices"


def xs() -> Any:
    import torch_xla.distributed.spmd as names  # pyright: ignore

    return names


def xlac() -> Any:
    import torch_xla  # pyright: ignore

    return torch_xla._XLAC


def spec_of(t: Any) -> str:
    return xlac()._get_xla_sharding_spec(t)


def device_list(ids: Any = None) -> str:
    return ",".join(map(str, range(mesh_.device_count()) if ids is None else ids))


def sizes(shape: Any) -> tuple[int, ...]:
    """A mesh shape in which `NUM` stands for all devices and 2 for two of them where there are four or more."""
    count = mesh_.device_count()
    two = 2 if count >= 4 else 1
    split = 2 in shape
    return tuple(two if s == 2 else count // two if s == NUM and split else count if s == NUM else s for s in shape)


def make_mesh(shape: Any, names: Any = None, ids: Any = None) -> Any:
    return xs().Mesh(np.arange(mesh_.device_count()) if ids is None else ids, sizes(shape), names)


CASES: list[tuple[tuple[int, ...], Any, Any]] = [
    ((16,), (NUM,), (0,)),
    ((16,), (NUM,), (None,)),
    ((16,), (2, NUM), ((0, 1),)),
    ((16,), (2, NUM), ((1, 0),)),
    ((8, 16), (1, NUM), (0, 1)),
    ((8, 16), (1, NUM), (1, 0)),
    ((8, 16), (2, NUM), (0, None)),
    ((8, 16), (2, NUM), (None, 0)),
    ((8, 16), (2, NUM), (1, 0)),
    ((8, 16), (2, NUM), (None, None)),
    ((8, 16), (2, NUM), (None, (0, 1))),
    ((8, 16), (2, NUM, 1), (2, 1)),
    ((4, 8, 16), (2, 1, NUM), (1, 2, 0)),
    ((4, 8, 16), (2, NUM), (None, 0, 1)),
    ((2, 4, 8, 16), (1, 1, 2, NUM), (0, 1, 2, 3)),
    ((32, 4, 8, 16), (2, 1, 1, NUM), (3, 1, 2, 0)),
    ((2, 2, 2, 2, 2, 8), (2, NUM), (None, None, None, None, 0, 1)),
]
each_case = pytest.mark.parametrize(("shape", "mesh_shape", "spec"), CASES, ids=[f"{c[0]}-{c[1]}-{c[2]}" for c in CASES])


def expected_text(grid: Any, spec: Any) -> str:
    """The text by torch_xla's documented rule: permute the mesh, tiled axes first, merge tuples; the rest are copies."""
    tiled = [axis for entry in spec if entry is not None for axis in (entry if isinstance(entry, tuple) else (entry,))]
    rest = [axis for axis in range(len(grid.mesh_shape)) if axis not in tiled]
    dims = [1 if e is None else int(np.prod([grid.mesh_shape[a] for a in (e if isinstance(e, tuple) else (e,))])) for e in spec]
    if int(np.prod(dims)) == 1:
        return "{replicated}"
    order = grid.get_logical_mesh().transpose(tiled + rest).ravel()
    copies = mesh_.device_count() // int(np.prod(dims))
    if copies == 1:
        return f"{{devices=[{','.join(map(str, dims))}]{device_list(order)}}}"
    return f"{{devices=[{','.join(map(str, [*dims, copies]))}]{device_list(order)} last_tile_dim_replicate}}"


@each_case
def test_marking_gives_the_sharding_that_torch_xla_prints(shape: Any, mesh_shape: Any, spec: Any) -> None:
    host = batch(*shape)
    t = host.to("xla")
    assert spec_of(t) == "" and xlac()._get_xla_sharding_type(t) is None
    grid = make_mesh(mesh_shape)
    marked = xs().mark_sharding(t, grid, spec)
    assert marked is t and isinstance(marked, xs().XLAShardedTensor) and marked.device == torch.device("xla:0")
    assert spec_of(t) == spec_of(marked.global_tensor) == marked.sharding_spec == expected_text(grid, spec)
    assert marked.partition_spec == spec
    assert torch.equal(t.cpu(), host)
    assert_same((t + t).cpu(), host + host)


@each_case
def test_shards_hold_their_part_and_their_copy_number(shape: Any, mesh_shape: Any, spec: Any) -> None:
    host = batch(*shape)
    marked = xs().mark_sharding(host.to("xla"), make_mesh(mesh_shape), spec)
    shards = marked.local_shards
    assert len(shards) == mesh_.device_count()
    is_whole = marked.sharding_spec == "{replicated}"
    copies: dict[str, list[int]] = {}
    for position, shard in enumerate(shards):
        assert shard.data.device == torch.device("cpu")
        if is_whole:
            assert shard.indices is ... and shard.replica_id == position
        else:
            assert isinstance(shard.indices, list) and all(s.step == 1 for s in shard.indices)
            copies.setdefault(str(shard.indices), []).append(shard.replica_id)
        assert torch.equal(shard.data, host[tuple(shard.indices) if isinstance(shard.indices, list) else ...])
        assert torch.equal(shard.unpadded_data, shard.data)
        assert shard.shard_device == f"CPU:{position}"
    assert all(sorted(ids) == list(range(len(ids))) for ids in copies.values())


@each_case
def test_the_kind_of_sharding_is_told(shape: Any, mesh_shape: Any, spec: Any) -> None:
    t = batch(*shape).to("xla")
    marked = xs().mark_sharding(t, make_mesh(mesh_shape), spec)
    text, kinds = marked.sharding_spec, xs().ShardingType
    want = kinds.REPLICATED if text == "{replicated}" else kinds.PARTIAL if "last_tile" in text else kinds.TILED
    assert marked.sharding_type == xlac()._get_xla_sharding_type(t) == want
    info = xlac()._get_xla_tensor_debug_info(t)
    assert "XLAShardedData" in info and "Data Device: SPMD:0" in info and f"OpSharding: {text}" in info
    assert f"NumShards: {mesh_.device_count()}" in info


@each_case
@pytest.mark.parametrize("how", ["deepcopy", "clone", "detach", "in place", "step", "zeros_like"])
def test_a_sharding_survives(how: str, shape: Any, mesh_shape: Any, spec: Any) -> None:
    import torch_xla.core.xla_model as xm  # pyright: ignore

    host = batch(*shape)
    t = xs().mark_sharding(host.to("xla"), make_mesh(mesh_shape), spec)
    before = spec_of(t)
    if how == "in place":
        t.add_(1).mul_(2)
        t += 1
        host = (host + 1) * 2 + 1
        other = t
    elif how == "step":
        xm.mark_step()
        other = t
    else:
        other = {"deepcopy": copy.deepcopy, "clone": torch.clone, "detach": torch.detach, "zeros_like": torch.zeros_like}[how](t)
    assert_same(other.cpu(), host * 0 if how == "zeros_like" else host)
    if before != "{replicated}":
        assert spec_of(other) == before
    assert isinstance(other, xs().XLAShardedTensor)


ORDERS = {
    "ascending": lambda n: range(n),
    "descending": lambda n: range(n)[::-1],
    "odd first": lambda n: [*range(1, n, 2), *range(0, n, 2)],
}


@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize("spec", [(0, 1), (1, 0), ((0, 1), None), (None, (1, 0))], ids=str)
def test_a_device_order_decides_which_device_holds_what(order: str, spec: Any) -> None:
    ids = np.array(list(ORDERS[order](mesh_.device_count())))
    grid = make_mesh((2, NUM), ids=ids)
    host = batch(8, 16)
    marked = xs().mark_sharding(host.to("xla"), grid, spec)
    assert marked.sharding_spec == expected_text(grid, spec)
    for device, held in zip(grid.device_ids, mesh_.ShardingSpec(grid, spec).shard_slices((8, 16)), strict=True):
        shard = next(s for s in marked.local_shards if s.shard_device == f"CPU:{device}")
        assert torch.equal(shard.data, host[held.slices])


NAMED = [
    (("r", "b", "m"), (1, 2, NUM), (("r", "b"), None)),
    (("r", "b", "m"), (1, 2, NUM), (None, ("b", "m"))),
    (("r", "b", "m"), (1, 2, NUM), (None, ("r", "m"))),
    (("r", "b", "m"), (1, 2, NUM), (None, ("m", "b"))),
    (("r", "b", "m"), (1, 2, NUM), ("m", "b")),
    (("data", "model"), (1, NUM), ("model", "data")),
]


@pytest.mark.parametrize(("names", "mesh_shape", "spec"), NAMED, ids=[str(n[2]) for n in NAMED])
def test_named_axes_mean_the_same_as_their_indices(names: Any, mesh_shape: Any, spec: Any) -> None:
    grid = make_mesh(mesh_shape, names)
    by_index = tuple(tuple(names.index(a) for a in e) if isinstance(e, tuple) else None if e is None else names.index(e) for e in spec)
    one = xs().mark_sharding(batch(16, 16).to("xla"), grid, spec)
    other = xs().mark_sharding(batch(16, 16).to("xla"), grid, by_index)
    assert one.sharding_spec == other.sharding_spec == expected_text(grid, by_index)
    assert one.partition_spec == other.partition_spec == spec
    from torch.distributed.tensor import Replicate, Shard

    dim_of = {a: d for d, e in enumerate(spec) for a in (e if isinstance(e, tuple) else (e,))}
    assert one.placements == tuple(Shard(dim_of[a]) if a in dim_of else Replicate() for a in names)


WRONG: list[tuple[Any, Any, Any, type[Exception]]] = [
    ((8, 16), (2, NUM), (0,), AssertionError),
    ((8, 16), (2, NUM), (0, 1, None), AssertionError),
    ((8, 16), (2, NUM), (0, 2), AssertionError),
    ((8, 16), (2, NUM), (0, 0), AssertionError),
    ((8, 16), (2, NUM), ("q", None), ValueError),
    ((8, 16), (2, NUM), (0.5, None), ValueError),
]


@pytest.mark.parametrize(("shape", "mesh_shape", "spec", "error"), WRONG, ids=[str(w[2]) for w in WRONG])
def test_a_wrong_spec_raises_what_torch_xla_raises(shape: Any, mesh_shape: Any, spec: Any, error: type[Exception]) -> None:
    t = batch(*shape).to("xla")
    with pytest.raises(error):
        xs().mark_sharding(t, make_mesh(mesh_shape), spec)
    assert spec_of(t) == ""


BAD_MESHES: list[Any] = [
    lambda n: ([0] * n + [1], (n + 1,), None),
    lambda n: (range(n + 1), (n + 1,), None),
    lambda n: (range(n), (n, 2), None),
    lambda n: (range(n), (n,), ("a", "b")),
    lambda n: (range(n), (1, n), ("a", "a")),
]


@pytest.mark.parametrize("arguments", BAD_MESHES)
def test_a_wrong_mesh_raises_an_assertion_error(arguments: Any) -> None:
    with pytest.raises(AssertionError):
        xs().Mesh(*arguments(mesh_.device_count()))


@pytest.mark.multidevice(num=2)
def test_another_annotation_of_the_same_data_wants_the_first_cleared() -> None:
    grid = make_mesh((1, NUM))
    t = batch(8, 16).to("xla")
    xs().mark_sharding(t, grid, (0, 1))
    xs().mark_sharding(t, grid, (0, 1))
    with pytest.raises(RuntimeError, match="Existing annotation must be cleared first"):
        xs().mark_sharding(t, grid, (1, 0))
    cleared = xs().clear_sharding(t)
    assert cleared is t and not spec_of(t) and not isinstance(t, xs().XLAShardedTensor)
    assert xs().mark_sharding(t, grid, (1, 0)).sharding_spec == f"{{devices=[{mesh_.device_count()},1]{device_list()}}}"
    replicated = batch(8, 16).to("xla")
    xs().mark_sharding(replicated, grid, (None, None))
    assert "replicated" not in xs().mark_sharding(replicated, grid, (0, 1)).sharding_spec
    result = batch(8, 16).to("xla") + 1
    xs().mark_sharding(result, grid, (0, 1))
    xs().mark_sharding(result, grid, (1, 0))
    assert spmd.mark_sharding(t, grid, (0, 1)).sharding_spec == f"{{devices=[1,{mesh_.device_count()}]{device_list()}}}"


def test_results_of_sharded_tensors_are_sharded_and_of_plain_ones_plain() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).to("xla")
    x = batch(8, 16).to("xla")
    assert not isinstance(model(x), xs().XLAShardedTensor) and "XLAShardedTensor" not in str(model(x))
    marked = xs().mark_sharding(x.clone(), make_mesh((1, NUM)), (0, 1))
    assert isinstance(model(marked), xs().XLAShardedTensor) and "XLAShardedTensor" in str(model(marked))
    assert isinstance(xs().wrap_if_sharded(marked.global_tensor), xs().XLAShardedTensor)
    assert type(xs().wrap_if_sharded(x)) is torch.Tensor
    assert xs().unwrap_sharded_tensor(x) is x and isinstance(xs().wrap_as_sharded_tensor(x), xs().XLAShardedTensor)


def test_one_of_several_results_may_be_marked() -> None:
    values, indices = torch.max(batch(8, 8).to("xla"), 1)
    xs().mark_sharding(values, make_mesh((NUM,)), (0,))
    assert spec_of(values) != "" and spec_of(indices) == ""
    assert_same((values, indices), tuple(torch.max(batch(8, 8), 1)))


def test_a_scalar_is_replicated() -> None:
    t = torch.tensor(1.0).to("xla")
    marked = xs().mark_sharding(t, make_mesh((1, NUM)), ())
    assert marked == t and marked.sharding_spec == "{replicated}" and marked.sharding_type == xs().ShardingType.REPLICATED
    assert [s.replica_id for s in marked.local_shards] == list(range(mesh_.device_count()))
    assert all(s.indices is ... and s.data == 1 for s in marked.local_shards)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("spec", [(0, 1), (1, 0)], ids=str)
def test_training_keeps_the_sharding_of_parameters_gradients_and_state(optimizer: str, spec: Any) -> None:
    import torch_xla.core.xla_model as xm  # pyright: ignore

    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    model = copy.deepcopy(host).to("xla")
    xs().mark_sharding(model[0].weight, make_mesh((1, NUM)), spec)
    before = spec_of(model[0].weight)
    pairs = [(m, getattr(torch.optim, optimizer)(m.parameters(), lr=0.05)) for m in (host, model)]
    data, target = batch(8, 16), torch.arange(8)
    for _ in range(3):
        for m, opt in pairs:
            opt.zero_grad()
            where = "cpu" if m is host else "xla"
            loss = nn.functional.cross_entropy(m(data.to(where)), target.to(where))
            loss.backward()
            opt.step()
            xm.mark_step()
        assert spec_of(model[0].weight) == spec_of(model[0].weight.grad) == before
        for value in pairs[1][1].state[model[0].weight].values():
            if isinstance(value, torch.Tensor) and value.dim() == 2:
                assert spec_of(value) in (before, "" if before == "{replicated}" else before)
    assert_same([p.detach().cpu() for p in model.parameters()], [p.detach() for p in host.parameters()], (1e-4, 1e-5))


def test_copying_keeps_the_destinations_sharding() -> None:
    a = xs().mark_sharding(batch(8, 16).to("xla"), make_mesh((1, NUM)), (0, 1))
    before = spec_of(a)
    for source in (batch(8, 16, seed=3), batch(8, 16, seed=3).to("xla")):
        a.copy_(source)
        assert spec_of(a) == before
        assert_same(a.cpu(), batch(8, 16, seed=3))


def test_shards_are_changed_and_loaded() -> None:
    host = torch.arange(8.0) + 1
    t = xs().mark_sharding(host.to("xla"), make_mesh((NUM,)), (0,))
    shards = t.local_shards
    if mesh_.device_count() > 1:
        for shard in shards:
            shard.data *= -1
        t.load_local_shards_(shards)
        assert torch.equal(t.cpu(), -host)
    with pytest.raises(RuntimeError):
        t.load_local_shards_(shards[:-1])
    for shard in shards:
        shard.data = torch.randn(3)
    with pytest.raises(RuntimeError):
        t.load_local_shards_(shards)
    whole = xs().mark_sharding(host.to("xla"), make_mesh((NUM,)), (None,))
    with pytest.raises(RuntimeError):
        whole.load_local_shards_(whole.local_shards)


def test_manual_sharding_as_its_documentation_has_it() -> None:
    xs().set_global_mesh(make_mesh((1, NUM)))
    x = torch.zeros(8, 8).to("xla")
    part = xs().enable_manual_sharding(x, (0, 1))
    assert part.shape == (8, 8 // mesh_.device_count()) and spec_of(part) == "{manual}"
    assert part.sharding_type == xs().ShardingType.MANUAL
    whole = xs().disable_manual_sharding(part + 1, (0, 1), x.shape)
    assert torch.equal(whole.cpu(), torch.ones(8, 8))
    marked = xs().mark_sharding(x, make_mesh((1, NUM)), (0, 1))
    part = xlac()._spmd_full_to_shard_shape(marked)
    assert spec_of(part) == "{manual}" and xs()._mark_manual_sharding(part) is part
    full = xlac()._spmd_shard_to_full_shape(part * 2 + 1, make_mesh((1, NUM)).get_op_sharding((0, 1)), x.shape, x.dtype)
    assert torch.equal(full.cpu(), torch.ones(8, 8))
    for wrong in (lambda: xlac()._spmd_full_to_shard_shape(torch.zeros(2, device="xla")), lambda: xs()._mark_manual_sharding(x)):
        with pytest.raises(RuntimeError):
            wrong()
    xs().get_global_mesh()
    from spmd.xla_names import _global_mesh

    _global_mesh._current.clear()


def test_meshes_answer_as_torch_xlas() -> None:
    count = mesh_.device_count()
    grid = xs().get_1d_mesh("data")
    assert (grid.mesh_shape, grid.axis_names, grid.size()) == ((count,), ("data",), count)
    assert grid.get_logical_mesh().tolist() == list(range(count)) and dict(grid.shape()) == {"data": count}
    assert xs().get_1d_mesh().mesh_shape == (count,)
    assert grid.get_axis_name_idx("data") == 0 and grid.get_axis_name_idx("x") is None
    assert grid.get_jax_mesh() == grid.to_jax()
    assert grid.get_op_sharding(("data",)).to_xla() == ("{replicated}" if count == 1 else f"{{devices=[{count}]{device_list()}}}")
    hybrid = xs().HybridMesh(ici_mesh_shape=(1, count), dcn_mesh_shape=(1, 1), axis_names=("data", "model"))
    assert isinstance(hybrid, xs().Mesh) and dict(hybrid.shape()) == {"data": 1, "model": count}


@pytest.mark.parametrize("name", ["annotate_custom_sharding", "mark_sharding_with_gradients"])
def test_functional_annotations_by_name(name: str) -> None:
    x = batch(8, 16).to("xla").requires_grad_()
    out = getattr(xs(), name)(x, make_mesh((1, NUM)), (0, 1))
    assert out is not x and out.sharding_spec == expected_text(make_mesh((1, NUM)), (0, 1))
    out.sum().backward()
    assert_same(x.grad.cpu(), torch.ones(8, 16))


def test_every_name_is_there_and_a_star_import_works() -> None:
    space: dict[str, Any] = {}
    exec("from torch_xla.distributed.spmd import *", space)
    wanted = {
        "HybridMesh Mesh ShardingSpec ShardingType XLAShard XLAShardedTensor XLAPatchedLinear mark_sharding clear_sharding get_1d_mesh",
        "mark_sharding_with_gradients shard_as annotate_custom_sharding wrap_if_sharded set_global_mesh get_global_mesh auto_policy",
        "enable_manual_sharding disable_manual_sharding xla_distribute_tensor xla_distribute_module apply_backward_optimization_barrier",
        "xla_patched_nn_linear_forward",
    }
    for name in " ".join(wanted).split():
        assert name in space and (hasattr(spmd, name)), name
    a, b = space["shard_as"](torch.ones(4, device="xla"), torch.zeros(4, device="xla"))
    assert torch.equal((a + b).cpu(), torch.ones(4))
    assert list(space["ShardingType"]) == list(mesh_.ShardingType)


def test_a_dim_that_the_devices_do_not_divide_is_padded_in_its_last_shards() -> None:
    import torch_xla.distributed.parallel_loader as pl  # pyright: ignore

    count = mesh_.device_count()
    host, grid = torch.arange(count + 1.0), xs().get_1d_mesh("data")
    t = xs().mark_sharding(host.to("xla"), grid, ("data",))
    piece = -(-(count + 1) // count)
    for position, shard in enumerate(t.local_shards):
        start, end = (min(i * piece, count + 1) for i in (position, position + 1))
        if count > 1:
            assert shard.data.shape == (piece,) and shard.indices == [slice(start, end, 1)]
            assert torch.equal(shard.unpadded_data, host[start:end])
            assert shard.data[end - start :].abs().sum() == 0
    assert torch.equal(t.cpu(), host) and t.shape == (count + 1,)
    for name in ("annotate_custom_sharding", "mark_sharding_with_gradients"):
        x = host.to("xla").requires_grad_()
        (getattr(xs(), name)(x, grid, ("data",)) * 2).sum().backward()
        assert torch.equal(x.grad.cpu(), torch.full((count + 1,), 2.0))
    rows = batch(count + 1, 3)
    (loaded,) = list(pl.MpDeviceLoader([rows], "xla", input_sharding=xs().ShardingSpec(grid, ("data", None))))
    assert loaded.shape == rows.shape and loaded.sharding_spec == xs().ShardingSpec(grid, ("data", None)).to_xla()
    assert torch.equal(loaded.cpu(), rows)


@pytest.mark.parametrize("spec", [(0, 1), (None, 1), (None, None)], ids=str)
def test_a_tensors_layout_is_printed_and_returned(spec: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from torch_xla.distributed.spmd.debugging import visualize_sharding, visualize_tensor_sharding  # pyright: ignore

    t = xs().mark_sharding(batch(8, 16).to("xla"), make_mesh((1, NUM)), spec)
    picture = visualize_tensor_sharding(t, use_color=False, max_width=100)
    printed = capsys.readouterr().out
    assert "float32[8, 16]" in printed and str(mesh_.device_count() - 1) in printed and "\x1b" not in printed
    assert (picture.tiling.devices == spmd.visualize(t).tiling.devices).all()
    if mesh_.device_count() > 1:
        assert (visualize_sharding(spec_of(t)).tiling.devices.ravel() == picture.tiling.devices.ravel()).all()
        assert spec_of(t) in capsys.readouterr().out


def test_the_layout_of_pieces_is_manual_and_a_tensor_without_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from torch_xla.distributed.spmd.debugging import visualize_sharding, visualize_tensor_sharding  # pyright: ignore

    part = xs().enable_manual_sharding(torch.ones(8, 8, device="xla"), (0, None), mesh=make_mesh((NUM, 1)))
    visualize_tensor_sharding(part)
    assert "{manual}" in capsys.readouterr().out
    for refused in (lambda: visualize_tensor_sharding(torch.ones(2, device="xla")), lambda: visualize_sharding("")):
        with pytest.raises(ValueError, match="no sharding to draw"):
            refused()

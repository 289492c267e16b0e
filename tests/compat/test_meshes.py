"""Meshes, DTensor's words for layouts, and sharding operators, as torch_xla's programs meet them."""

# pyright: reportMissingImports=false
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

import mesh as mesh_
from tests.oracle import assert_same, batch

COUNT = mesh_.device_count


def xs() -> Any:
    import torch_xla.distributed.spmd as module

    return module


def test_a_mesh_without_names_has_none_and_its_text_is_read_back() -> None:
    plain, named = xs().Mesh(range(COUNT()), (1, COUNT())), xs().Mesh(np.arange(COUNT()), (COUNT(),), ("data",))
    assert plain.axis_names is None and named.axis_names == ("data",) and xs().get_1d_mesh().axis_names is None
    assert xs().Mesh.from_str(named.to_string()) == named and xs().Mesh.from_str("nothing") is None
    assert xs().Mesh.from_str(str({"device_ids": list(range(COUNT())), "mesh_shape": (COUNT(),), "axis_names": ("data",)})) == named
    assert isinstance(xs().HybridMesh(ici_mesh_shape=(1, COUNT()), axis_names=("a", "b")), xs().Mesh)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda n: xs().Mesh(range(n), (1, n), ("a", "b", "c")), "Number of axis names (3) must match mesh dimensions (2)"),
        (lambda n: xs().Mesh(range(n), (1, n), ("a", "a")), "Axis names must be unique"),
        (lambda n: xs().Mesh(range(n), (2, n)), "Number of device IDs"),
        (lambda n: xs().Mesh([0] * (n + 1), (1, n + 1)), "Device IDs must be unique"),
        (lambda n: xs().Mesh(range(n + 1, 2 * n + 1), (1, n)), "Device IDs must be less than mesh size"),
    ],
)
def test_a_wrong_mesh_is_refused_in_torch_xlas_words(make: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(said) + r"(?s:.*)fix:"):
        make(COUNT())


def test_a_layout_is_made_and_counted_once_per_mesh_and_spec() -> None:
    import torch_xla.debug.metrics as met

    met.clear_all()
    grid = xs().Mesh(range(COUNT()), (1, COUNT()))
    for _ in range(2):
        xs().mark_sharding(torch.ones(8, 8, device="xla"), grid, (0, 1))
    assert met.counter_value("CreateOpSharding") == 1
    xs().mark_sharding(torch.ones(8, 8, device="xla"), grid, (0, None))
    assert met.counter_value("CreateOpSharding") == 2


@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)], [Replicate()]], ids=str)
def test_a_tensor_says_its_layout_as_dtensor_does(placements: Any) -> None:
    t = distribute_tensor(batch(8, 16), DeviceMesh("xla", list(range(COUNT()))), placements)
    assert t._cached_spec is None
    spec = t._spec
    assert t._cached_spec is spec is t._spec and spec.placements == t.placements == tuple(placements)
    assert spec.mesh.device_type == "xla" and tuple(spec.mesh.shape) == t.mesh_shape == (COUNT(),)
    assert spec.tensor_meta.shape == (8, 16) and spec.tensor_meta.dtype == torch.float32
    t.invalidate_spec_cache()
    assert t._cached_spec is None and t.placements == tuple(placements)


def test_a_layout_that_changed_is_said_anew_and_a_tensor_without_one_says_so() -> None:
    t = xs().wrap_as_sharded_tensor(batch(8, 16).to("xla"), mesh_shape=(COUNT(),), partition_spec=(0, None))
    first = t._spec
    again = xs().wrap_as_sharded_tensor(t, partition_spec=(None, 0))
    assert again is t and t._spec is not first and t.placements == (Shard(1),) and t.partition_spec == (None, 0)
    for unmarked in (t + t, xs().XLAShardedTensor(batch(2, 2))):
        with pytest.raises(ValueError, match="mesh_shape and partition_spec must be specified"):
            unmarked._spec  # noqa: B018
        with pytest.raises(ValueError, match="Placements not available"):
            unmarked.placements  # noqa: B018
    leaf = xs().XLAShardedTensor(batch(2, 2).to("xla"), requires_grad=True)
    leaf.sum().backward()
    assert_same(leaf.grad.cpu(), torch.ones(2, 2))


def test_an_operator_lays_a_value_and_its_gradient_out_also_in_a_graph() -> None:
    import torch_xla
    from functorch.compile import aot_function, nop
    from torch_xla.distributed.spmd.xla_sharding import MarkShardingFunction

    spec_of, grid = torch_xla._XLAC._get_xla_sharding_spec, xs().get_1d_mesh("data")
    expected = grid.get_op_sharding(("data", None)).to_xla()

    def run(x: torch.Tensor) -> torch.Tensor:
        return MarkShardingFunction.apply(x * 2, grid, ("data", None)) * 3

    for fn in (run, aot_function(run, nop)):
        x = batch(8, 4).to("xla").requires_grad_()
        out = fn(x)
        out.sum().backward()
        assert_same((out.detach().cpu(), x.grad.cpu()), (batch(8, 4) * 6, torch.full((8, 4), 6.0)))
    x = batch(8, 4).to("xla").requires_grad_()
    (slope,) = torch.autograd.grad(MarkShardingFunction.apply(x * x, grid, ("data", None)).square().sum(), x, create_graph=True)
    assert_same(torch.autograd.grad(slope.sum(), x)[0].cpu(), 12 * batch(8, 4).square())  # of x**4, twice
    marked = MarkShardingFunction.apply(batch(8, 4).to("xla"), grid, ("data", None))
    assert spec_of(marked) == expected
    x = batch(8, 4).to("xla")
    torch.ops.xla.dynamo_mark_sharding(x, list(range(COUNT())), [COUNT()], "('data',)", "('data', None)")
    assert spec_of(x) == expected


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16], ids=str)
def test_a_tensor_is_made_of_pieces_on_the_host(dtype: torch.dtype) -> None:
    import torch_xla

    make, grid, n = torch_xla._XLAC._global_tensor_from_cpu_shards, xs().get_1d_mesh("data"), COUNT()
    pieces = list(torch.arange(2 * n).to(dtype).split(2))
    whole = make(pieces, grid.get_op_sharding((0,)))
    assert_same(whole.cpu(), torch.arange(2 * n).to(dtype))
    if n > 1:
        assert_same(make(pieces, grid.get_op_sharding((0,)), (2 * n - 1,)).cpu(), torch.arange(2 * n - 1).to(dtype))
    for wrong in ((2 * n + 1,), (1, 2 * n), (n if n > 1 else 1,)):
        with pytest.raises(RuntimeError, match="the shards do not make up a tensor"):
            make(pieces, grid.get_op_sharding((0,)), wrong)
    with pytest.raises(RuntimeError, match="the shards do not make up a tensor"):
        make(pieces[:-1], grid.get_op_sharding((0,)))
    same = make([torch.ones(3).to(dtype)] * n, grid.get_op_sharding((None,)))
    assert_same(same.cpu(), torch.ones(3).to(dtype))

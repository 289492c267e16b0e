"""`mark_sharding`: what it accepts, what it sends where, what it refuses and how it says so."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn as nn

import mesh
import spmd
from spmd.base import _counters
from spmd.sharding._annotate import as_mesh
from tests.oracle import MLP, array_of, arrays_born, assert_same, batch, twins

pytestmark = pytest.mark.multidevice(num=8)
SPECS: list[tuple[Any, tuple[Any, ...], tuple[int, int]]] = [
    (("data", "model"), ("data", "model"), (2, 8)),
    (("model", None), ("model", None), (4, 16)),
    ((None, ("data", "model")), (None, ("data", "model")), (8, 2)),
    ((("model", "data"), None), (("model", "data"), None), (1, 16)),
    ((None, None), (None, None), (8, 16)),
    ((0, 1), ("data", "model"), (2, 8)),
    ((-1, None), ("model", None), (4, 16)),
    (((0, -1), None), (("data", "model"), None), (1, 16)),
    (["data", None], ("data", None), (2, 16)),
    (mesh.PartitionSpec("data", None), ("data", None), (2, 16)),
    (jax.sharding.PartitionSpec(None, "model"), (None, "model"), (8, 8)),
]


@pytest.mark.parametrize(("spec", "resolved", "shard"), SPECS, ids=str)
@pytest.mark.parametrize("uploaded", [False, True])
def test_a_spec_in_any_form_splits_the_tensor(spec: Any, resolved: Any, shard: Any, uploaded: bool, mesh_4x2: mesh.Mesh) -> None:
    host = batch(8, 16)
    tensor = host.to("jax")
    if uploaded:
        tensor = tensor + 0
    marked = spmd.mark_sharding(tensor, mesh_4x2, spec)
    assert marked is tensor
    assert isinstance(marked, spmd.XLAShardedTensor)
    assert tuple(marked.partition_spec) == resolved
    assert {s.data.shape for s in array_of(marked).addressable_shards} == {shard}
    assert torch.equal(marked.cpu(), host)


@pytest.mark.parametrize("spec", [("data", "model"), ("model", None), (None, None), (("data", "model"), None)], ids=str)
def test_each_shard_is_uploaded_to_its_own_device_and_nothing_else(spec: Any, mesh_4x2: mesh.Mesh) -> None:
    tensor = batch(64, 32).to("jax")
    _counters.reset()
    marked = spmd.mark_sharding(tensor, mesh_4x2, spec)
    shard = mesh.ShardingSpec(mesh_4x2, spec).shard_shape((64, 32))
    assert _counters.snapshot() == {"upload_bytes": 8 * shard[0] * shard[1] * 4, "uploads": 1}
    shapes = [s.data.shape for s in array_of(marked).addressable_shards]
    assert shapes == [shard] * 8
    assert ((64, 32) in shapes) == (spec == (None, None))


def test_no_device_ever_holds_the_full_tensor(mesh_4x2: mesh.Mesh) -> None:
    newborn = arrays_born()
    marked = spmd.mark_sharding(batch(72, 40).to("jax"), mesh_4x2, ("data", "model"))
    born = [a for a in newborn() if a.size >= marked.numel()]
    assert [a.sharding.shard_shape(a.shape) for a in born] == [(18, 20)]


def test_marking_anew_moves_between_devices_and_never_through_the_host(mesh_4x2: mesh.Mesh) -> None:
    host = batch(8, 16)
    tensor = spmd.mark_sharding(host.to("jax"), mesh_4x2, ("data", "model"))
    alias, view = tensor.detach(), tensor[2:4]
    _counters.reset()
    for spec in ((None, "model"), ("model", "data"), (None, None)):
        spmd.mark_sharding(tensor, mesh_4x2, spec)
        assert array_of(tensor).sharding == mesh.ShardingSpec(mesh_4x2, spec).to_jax()
    other = mesh.Mesh(list(reversed(range(8))), (2, 4), ("a", "b"))
    spmd.mark_sharding(tensor, other, ("a", "b"))
    assert _counters.snapshot() == {}
    assert tensor.mesh == other
    assert torch.equal(alias.cpu(), host) and torch.equal(view.cpu(), host[2:4])


def test_a_marked_parameter_is_the_same_parameter(mesh_4x2: mesh.Mesh) -> None:
    model = MLP().to("jax")
    weight, key = model.up.weight, id(model.up.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    marked = spmd.mark_sharding(weight, mesh_4x2, ("model", None))
    assert marked is model.up.weight and id(marked) == key
    assert isinstance(marked, nn.Parameter) and isinstance(marked, spmd.XLAShardedTensor)
    assert marked.requires_grad and marked.is_leaf
    assert any(p is marked for p in model.parameters())
    assert any(p is marked for p in optimizer.param_groups[0]["params"])
    assert list(model.state_dict()) == ["up.weight", "up.bias", "down.weight", "down.bias"]


def test_a_buffer_and_an_integer_tensor_can_be_marked(mesh_4x2: mesh.Mesh) -> None:
    norm = nn.BatchNorm1d(8).to("jax")
    assert norm.running_mean is not None
    marked = spmd.mark_sharding(norm.running_mean, mesh_4x2, ("model",))
    assert norm.running_mean is marked and not isinstance(marked, nn.Parameter)
    ids = spmd.mark_sharding(torch.arange(16).reshape(8, 2).to("jax"), mesh_4x2, ("data", None))
    assert ids.dtype == torch.int64 and ids.sum().item() == 120


def test_a_scalar_can_be_marked(mesh_4x2: mesh.Mesh) -> None:
    marked = spmd.mark_sharding(torch.tensor(3.0).to("jax"), mesh_4x2, ())
    assert (marked + 1).item() == 4.0
    assert array_of(marked).sharding.is_fully_replicated


def test_operations_keep_the_layout(mesh_4x2: mesh.Mesh) -> None:
    x = spmd.mark_sharding(batch(8, 16).to("jax"), mesh_4x2, ("data", "model"))
    y = torch.tanh(x) * 2
    assert isinstance(y, spmd.XLAShardedTensor)
    assert tuple(y.partition_spec) == ("data", "model")
    x.mul_(2)
    x.copy_(batch(8, 16, seed=3))
    assert tuple(x.partition_spec) == ("data", "model")
    assert array_of(x).sharding == mesh.ShardingSpec(mesh_4x2, ("data", "model")).to_jax()


def test_gradients_flow_through_a_marked_activation(mesh_4x2: mesh.Mesh) -> None:
    host, device = twins()
    x = batch(8, 8)

    def loss(model: Any, x: torch.Tensor, mark: bool) -> torch.Tensor:
        hidden = torch.tanh(model.up(x))
        if mark:
            spmd.mark_sharding(hidden, mesh_4x2, ("data", "model"))
        return model.down(hidden).square().sum()

    loss(host, x, False).backward()
    loss(device, x.to("jax"), True).backward()
    torch.testing.assert_close(device.up.weight.grad.cpu(), host.up.weight.grad)


def test_a_constraint_inside_a_compiled_function_shapes_the_program(mesh_4x2: mesh.Mesh) -> None:
    x = spmd.mark_sharding(batch(8, 16).to("jax"), mesh_4x2, ("data", None))

    def run(x: torch.Tensor, spec: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(x)
        marked = spmd.mark_sharding(hidden, mesh_4x2, spec)
        assert marked is hidden
        return hidden, hidden * 2

    step = spmd.compile(run)
    for spec in (("data", "model"), (None, "model"), (None, None)):
        out = step(x, spec)
        assert_same(out, (torch.tanh(batch(8, 16)), torch.tanh(batch(8, 16)) * 2))
        for tensor in out:
            assert array_of(tensor).sharding.is_equivalent_to(mesh.ShardingSpec(mesh_4x2, spec).to_jax(), 2)


def test_a_jax_mesh_is_taken_with_its_axes_made_auto() -> None:
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    grid = jax.sharding.Mesh(np.array(mesh.devices()[:8]).reshape(4, 2), ("x", "y"), axis_types=explicit)
    marked = spmd.mark_sharding(batch(8, 2).to("jax"), grid, ("x", "y"))
    assert marked.mesh == mesh.Mesh(range(8), (4, 2), ("x", "y"))
    assert set(array_of(marked).sharding.mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert (marked @ torch.ones(2, 3).to("jax")).shape == (8, 3)


def test_a_torch_device_mesh_is_taken_by_its_ranks_and_names() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    grid = DeviceMesh("cpu", torch.arange(8).reshape(4, 2), mesh_dim_names=("data", "model"), _init_backend=False, _rank=0)
    assert as_mesh(grid) == mesh.Mesh(range(8), (4, 2), ("data", "model"))
    assert tuple(spmd.mark_sharding(batch(8, 2).to("jax"), grid, ("data", "model")).partition_spec) == ("data", "model")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP(6, 10)
        self.register_buffer("table", torch.zeros(6))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])


def marking_fails(tensor: Any, grid: Any, spec: Any, error: type[Exception] = mesh.SpecError) -> str:
    before = type(tensor)
    with pytest.raises(error) as raised:
        spmd.mark_sharding(tensor, grid, spec)
    text = str(raised.value)
    assert "fix: " in text
    assert type(tensor) is before
    return text


REFUSED = [
    (("model",), ["'layers.1.mlp.up.weight'", "(10, 6)", "1", "2"]),
    (("model", None, None), ["'layers.1.mlp.up.weight'", "(10, 6)"]),
    (("tensor", None), ["'layers.1.mlp.up.weight'", "'tensor'", "'data', 'model'"]),
    ((2, None), ["'layers.1.mlp.up.weight'", "axis 2", "'data', 'model'"]),
    (("model", "model"), ["'layers.1.mlp.up.weight'", "uses axis 'model' more than once"]),
    (("model", 1), ["'layers.1.mlp.up.weight'", "more than once"]),
    (("model", 1.5), ["'layers.1.mlp.up.weight'", "1.5", "float"]),
    (None, ["None is not a partition spec"]),
]


@pytest.mark.parametrize(("spec", "parts"), REFUSED, ids=[str(s) for s, _ in REFUSED])
def test_a_wrong_spec_is_refused_with_the_parameters_name(spec: Any, parts: list[str], mesh_4x2: mesh.Mesh) -> None:
    model = Model().to("jax")
    text = marking_fails(model.layers[1].mlp.up.weight, mesh_4x2, spec)
    assert all(part in text for part in parts), text


def test_other_tensors_are_named_by_what_they_are(mesh_4x2: mesh.Mesh) -> None:
    model = Model().to("jax")
    assert "buffer 'layers.0.table'" in marking_fails(model.layers[0].table, mesh_4x2, ("date",))
    assert "tensor float32[3, 2]" in marking_fails(batch(3, 2).to("jax"), mesh_4x2, ("data",))


def test_a_mesh_larger_than_the_devices_is_refused() -> None:
    with pytest.raises(mesh.DeviceError, match=r"names devices that do not exist(?s:.*)16 devices, \d+ exist"):
        spmd.mark_sharding(batch(16).to("jax"), mesh.Mesh(range(16), (16,), ("data",)), ("data",))


def test_what_is_no_mesh_is_refused() -> None:
    assert "a mesh was expected, got a dict" in marking_fails(batch(8).to("jax"), {"data": 8}, ("data",), spmd.SpmdError)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_wrong_spec_is_refused_with_the_parameters_name_before_the_move_too(device: str, mesh_4x2: mesh.Mesh) -> None:
    with torch.device(device):
        model = Model()
    assert "'layers.1.mlp.up.weight'" in marking_fails(model.layers[1].mlp.up.weight, mesh_4x2, ("tensor", None))


@pytest.mark.parametrize("view", [lambda t: t.T, lambda t: t[2:], lambda t: t.reshape(-1)], ids=["transpose", "slice", "reshape"])
def test_a_view_is_refused(view: Any, mesh_4x2: mesh.Mesh) -> None:
    taken = view(batch(8, 16).to("jax"))
    text = marking_fails(taken, mesh_4x2, (None,) * taken.dim(), spmd.SpmdError)
    assert "is a view into a tensor of shape (8, 16)" in text and "or a copy, which no longer shares its memory: mark_sharding(" in text
    parameter = torch.nn.Parameter(taken)
    assert "p.data = p.data.clone(memory_format=torch.contiguous_format)" in marking_fails(
        parameter, mesh_4x2, (None,) * taken.dim(), spmd.SpmdError
    )
    parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    assert_same(spmd.mark_sharding(parameter, mesh_4x2, (None,) * taken.dim()), view(batch(8, 16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 8), (4, 8)])
def test_a_host_tensor_that_is_no_row_major_one_is_split_as_marked(shape: tuple[int, int], dtype: torch.dtype, mesh_4x2: mesh.Mesh) -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.arange(32.0 if shape == (4, 8) else 64.0).reshape(shape).t())
    spmd.mark_sharding(module.weight, mesh_4x2, ("model", None))
    expected = module.weight.detach().to(dtype)
    module.to("jax", dtype)
    assert isinstance(module.weight, spmd.XLAShardedTensor) and tuple(module.weight.partition_spec or ()) == ("model", None)
    assert {s.data.shape for s in array_of(module.weight).addressable_shards} == {(4, shape[0])}
    assert torch.equal(module.weight.detach().cpu(), expected)


def test_a_sparse_tensor_is_refused(mesh_4x2: mesh.Mesh) -> None:
    with pytest.raises(spmd.SpmdError, match=r"cannot be marked: its layout is sparse_coo, (.|\n)*fix: mark_sharding\(x.to_dense\(\)"):
        spmd.mark_sharding(torch.eye(8).to_sparse(), mesh_4x2, ("data", None))


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "got 3"), ("w", "got 'w'"), (torch.nn.Linear(2, 2), "got the module Linear(?s:.*)fix: spmd.shard_module")],
)
def test_what_is_no_tensor_is_refused(value: Any, text: str, mesh_4x2: mesh.Mesh) -> None:
    with pytest.raises(spmd.SpmdError, match=f"mark_sharding takes a tensor, {text}"):
        spmd.mark_sharding(value, mesh_4x2, ("data",))


TRANSFORMS: list[Any] = [
    lambda fn, x: torch.func.grad(lambda v: fn(v).sum())(x),
    lambda fn, x: torch.func.vmap(fn)(x),
    lambda fn, x: torch.func.vjp(fn, x)[1](x)[0],
]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_tensor_of_torch_func_is_refused_and_a_constraint_of_jax_taken(transform: Any, is_compiled: bool, mesh_4x2: mesh.Mesh) -> None:
    sharding = mesh.ShardingSpec(mesh_4x2, ("data",)).to_jax()

    def marked(x: torch.Tensor) -> torch.Tensor:
        return spmd.mark_sharding(x * 2, mesh_4x2, ("data", "model")[: x.dim()]).sin()

    def constrained(x: torch.Tensor) -> torch.Tensor:
        return spmd.call_jax(lambda v: jax.lax.with_sharding_constraint(v, sharding), (x * 2,)).sin()

    def run(fn: Any, x: torch.Tensor) -> Any:
        return (spmd.compile(lambda x: transform(fn, x)) if is_compiled else lambda x: transform(fn, x))(x)

    x = batch(8, 4)
    with pytest.raises(spmd.SpmdError, match=r"(?s)mark_sharding was given a tensor of torch.func.*fix: x = spmd.call_jax\("):
        run(marked, x.to("jax"))
    assert_same(run(constrained, x.to("jax")), transform(lambda x: (x * 2).sin(), x))

"""Annotations that return a new tensor, taking one off, and tensors made like a marked one; on any number of devices."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import mesh
import spmd
from spmd.base import _counters
from tests.grids import grid, line
from tests.oracle import MLP, array_of, assert_same, batch

SPECS = [("data", "model"), ("model", "data"), ("data", None), (None, "model"), (("data", "model"), None), (None, None)]
each_spec = pytest.mark.parametrize("spec", SPECS, ids=str)


@each_spec
def test_a_new_tensor_and_its_gradient_are_laid_out(spec: Any) -> None:
    host = batch(8, 16).requires_grad_()
    x = host.detach().to("jax").requires_grad_()
    marked = spmd.mark_sharding_with_gradients(x, grid(), spec)
    assert type(x) is torch.Tensor and isinstance(marked, spmd.XLAShardedTensor)
    assert marked.partition_spec == mesh.ShardingSpec(grid(), spec).partition_spec
    seen: list[Any] = []
    marked.register_hook(lambda g: seen.append(g))
    (marked.sin().square().sum()).backward()
    host.sin().square().sum().backward()
    assert_same(x.grad, host.grad)
    wrapped: Any = spmd.wrap_if_sharded(x.grad)
    assert mesh.ShardingSpec(grid(), spec).is_replicated or wrapped.partition_spec == marked.partition_spec


def test_a_view_gets_a_layout_of_its_own() -> None:
    host = batch(16, 8).requires_grad_()
    x = host.detach().to("jax").requires_grad_()
    marked = spmd.mark_sharding_with_gradients(x.t(), grid(), ("data", "model"))
    assert marked.partition_spec == ("data", "model")
    marked.square().sum().backward()
    host.square().sum().backward()
    assert_same((marked.detach(), x.grad), (host.detach().t().contiguous(), host.grad))


@each_spec
def test_a_custom_annotation_leaves_where_the_tensor_lies(spec: Any) -> None:
    weight = nn.Parameter(batch(8, 16).to("jax"))
    spmd.mark_sharding(weight, grid(), ("data", None))
    before = array_of(weight).sharding
    seen = spmd.annotate_custom_sharding(weight, grid(), spec)
    assert seen is not weight and isinstance(seen, spmd.XLAShardedTensor)
    assert array_of(weight).sharding == before and weight.partition_spec == ("data", None)
    assert array_of(seen).sharding == mesh.ShardingSpec(grid(), spec).to_jax()
    (seen * 3).sum().backward()
    assert_same(weight.grad, torch.full((8, 16), 3.0))


def test_a_custom_annotation_is_a_constraint_of_the_program() -> None:
    weight = spmd.mark_sharding(nn.Parameter(batch(8, 16).to("jax")), grid(), ("data", None))

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return x @ spmd.annotate_custom_sharding(weight, grid(), (None, None))

    x = batch(4, 8)
    assert_same(step(x.to("jax")), x @ weight.detach().cpu())
    assert weight.partition_spec == ("data", None)
    kinds = step.collectives().counts()
    assert set(kinds) <= {"all-gather"} and (mesh.device_count() < 4 or kinds == {"all-gather": 1})


def test_tensors_are_laid_out_as_each_other() -> None:
    a = spmd.mark_sharding(batch(8, 16).to("jax"), grid(), ("data", "model"))
    b = batch(8, 16, seed=2).to("jax").requires_grad_()
    (x, none), (y, _) = spmd.shard_as((a, None), (b, None))
    assert none is None
    assert_same((x, y), (a, b.detach()))
    if mesh.device_count() > 1:
        assert array_of(x).sharding.is_equivalent_to(array_of(y).sharding, 2) and not array_of(y).sharding.is_fully_replicated
    (y * 2).sum().backward()
    assert_same(b.grad, torch.full((8, 16), 2.0))


def test_shard_as_inside_a_program_and_refused_structures() -> None:
    a = spmd.mark_sharding(batch(8, 16).to("jax"), grid(), ("data", "model"))
    step = spmd.compile(lambda a, b: spmd.shard_as(a, b * 2)[1])
    out = step(a, batch(8, 16, seed=2).to("jax"))
    assert_same(out, batch(8, 16, seed=2) * 2)
    with pytest.raises(spmd.SpmdError, match="two pytrees of the same structure"):
        spmd.shard_as([a], (a,))


@each_spec
def test_a_cleared_tensor_is_plain_and_whole_everywhere(spec: Any) -> None:
    host = batch(8, 16)
    tensor = spmd.mark_sharding(host.to("jax"), grid(), spec)
    _counters.reset()
    assert spmd.clear_sharding(tensor) is tensor and type(tensor) is torch.Tensor
    assert _counters.snapshot() == {}
    assert_same(tensor, host)
    assert spmd.wrap_if_sharded(tensor) is tensor
    again = spmd.mark_sharding(tensor, grid(), ("model", None))
    assert again is tensor and again.partition_spec == ("model", None)


def test_a_cleared_parameter_is_still_that_parameter() -> None:
    model = MLP().to("jax")
    weight = model.up.weight
    spmd.mark_sharding(weight, line(), ("data", None))
    spmd.clear_sharding(weight)
    assert model.up.weight is weight and type(weight) is nn.Parameter and weight.requires_grad
    assert spmd.clear_sharding(batch(2)).device.type == "cpu"


def test_wrapping_asks_whether_the_value_lies_in_pieces() -> None:
    tensor = spmd.mark_sharding(batch(8, 16).to("jax"), line(), ("data", None))
    plain = tensor.global_tensor
    wrapped = spmd.wrap_if_sharded(plain)
    assert isinstance(wrapped, spmd.XLAShardedTensor) and wrapped.partition_spec == ("data", None)
    derived = plain * 2
    assert type(derived) is torch.Tensor
    assert isinstance(spmd.wrap_if_sharded(derived), spmd.XLAShardedTensor) == (mesh.device_count() > 1)
    for other in (batch(2), batch(2).to("jax"), tensor, None, "text"):
        assert spmd.wrap_if_sharded(other) is other


@each_spec
@pytest.mark.parametrize("make", [torch.zeros_like, torch.ones_like, torch.empty_like, lambda t: torch.full_like(t, 3.0)])
def test_a_tensor_like_a_marked_one_lies_like_it(make: Any, spec: Any) -> None:
    tensor = nn.Parameter(batch(8, 16).to("jax"))
    spmd.mark_sharding(tensor, grid(), spec)
    like = make(tensor)
    value = array_of(spmd.XLAShardedTensor(like))
    assert value.sharding == mesh.ShardingSpec(grid(), spec).to_jax()
    if make is not torch.empty_like:
        assert_same(like, make(batch(8, 16)))
    assert torch.zeros_like(tensor, device="cpu").device.type == "cpu"
    assert torch.zeros_like(tensor, dtype=torch.int64).dtype == torch.int64


@pytest.mark.parametrize("make", [lambda p: torch.optim.Adam(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_gradients_and_optimizer_state_lie_as_their_parameter_eagerly(make: Any) -> None:
    host, device = MLP(), MLP()
    device.load_state_dict(host.state_dict())
    device.to("jax")
    spec = ("data", None)
    for weight in (device.up.weight, device.down.weight):
        spmd.mark_sharding(weight, line(), spec)
    biases = [p for p in device.parameters() if p.dim() == 1]
    x = batch(8, 8)
    optimizers = make(host.parameters()), make(device.parameters())
    for _ in range(2):
        for model, optimizer, data in ((host, optimizers[0], x), (device, optimizers[1], x.to("jax"))):
            optimizer.zero_grad()
            model(data).square().sum().backward()
            optimizer.step()
        for weight in (device.up.weight, device.down.weight):
            want = mesh.ShardingSpec(line(), spec).to_jax()
            assert array_of(weight.grad).sharding == want and array_of(weight).sharding == want
            for value in optimizers[1].state[weight].values():
                if value.dim() == 2:
                    assert array_of(spmd.wrap_if_sharded(value)).sharding.is_equivalent_to(want, 2)
        assert all(array_of(spmd.XLAShardedTensor(bias)).sharding.is_fully_replicated for bias in biases)
    assert_same(dict(device.state_dict()), dict(host.state_dict()))


def test_one_program_and_biases_that_stay_where_they_are() -> None:
    model = MLP().to("jax")
    spmd.mark_sharding(model.up.weight, line(), ("data", None))
    spmd.mark_sharding(model.down.weight, line(), (None, "data"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    layouts = []
    for _ in range(3):
        step(spmd.mark_sharding(batch(8, 8).to("jax"), line(), ("data", None)))
        layouts.append([array_of(spmd.XLAShardedTensor(p)).sharding for p in model.parameters()])
    assert layouts[0] == layouts[1] == layouts[2]
    assert all(layout.is_fully_replicated for p, layout in zip(model.parameters(), layouts[0], strict=True) if p.dim() == 1)
    assert (step.num_traces, step.num_executables) == (1, 1)


@each_spec
@pytest.mark.parametrize("source", ["host", "device", "sharded"])
def test_copying_into_a_marked_tensor_keeps_its_layout(spec: Any, source: str) -> None:
    tensor = spmd.mark_sharding(batch(8, 16).to("jax"), grid(), spec)
    new = batch(8, 16, seed=5)
    given = new if source == "host" else new.to("jax")
    if source == "sharded":
        spmd.mark_sharding(given, grid(), (None, "model"))
    before = array_of(tensor).sharding
    tensor.copy_(given)
    tensor.add_(1).mul_(given.to("jax"))
    assert array_of(tensor).sharding == before and tensor.partition_spec == mesh.ShardingSpec(grid(), spec).partition_spec
    assert_same(tensor, (new + 1) * new)


@each_spec
def test_values_leave_a_sharded_tensor_in_every_form(spec: Any, tmp_path: Any) -> None:
    host = batch(4, 8)
    tensor = spmd.mark_sharding(batch(8, 16).to("jax"), grid(), spec)
    host = batch(8, 16)
    assert tensor.tolist() == host.tolist()
    assert (tensor.numpy() == host.numpy()).all()
    assert float(tensor[0, 0]) == float(host[0, 0])
    torch.save(tensor, tmp_path / "t.pt")
    assert torch.equal(torch.load(tmp_path / "t.pt", weights_only=True), host)
    with pytest.raises(RuntimeError, match="requires grad"):
        spmd.mark_sharding(nn.Parameter(host.to("jax")), grid(), spec).numpy()


def test_marking_anew_over_other_meshes_and_ranks() -> None:
    host = batch(8, 2, 2, 2, 2, 2, 2)
    tensor = host.to("jax")
    meshes = [(line(), ("data", *[None] * 6)), (grid(reverse=True), ("data", "model", *[None] * 5)), (line("x"), (None, *[None] * 6))]
    _counters.reset()
    spmd.mark_sharding(tensor, *meshes[0])
    first = _counters.snapshot()
    for where, spec in meshes:
        spmd.mark_sharding(tensor, where, spec)
        assert tensor.mesh == where
        assert array_of(tensor).sharding == mesh.ShardingSpec(where, spec).to_jax()
    assert _counters.snapshot() == first
    assert_same(tensor, host)


@pytest.mark.multidevice(num=4)
def test_part_of_the_devices_may_form_a_mesh_of_their_own() -> None:
    part = mesh.Mesh([mesh.device_count() - 1, 0], (2,), ("data",))
    tensor = spmd.mark_sharding(batch(8, 2).to("jax"), part, ("data", None))
    assert [d.id for d in array_of(tensor).sharding.mesh.devices.ravel()] == [mesh.device_count() - 1, 0]
    assert_same(tensor * 2, batch(8, 2) * 2)


def test_the_global_mesh_is_kept_and_falls_in_where_none_is_given() -> None:
    kept = spmd.get_global_mesh()
    try:
        where = spmd.get_1d_mesh("fsdp")
        assert (where.mesh_shape, where.axis_names) == ((mesh.device_count(),), ("fsdp",))
        assert spmd.get_1d_mesh().axis_names == ("0",)
        spmd.set_global_mesh(where)
        assert spmd.get_global_mesh() is where
        assert spmd.SpmdFullyShardedDataParallel(nn.Linear(8, 8))(batch(8, 8).to("jax")).shape == (8, 8)
    finally:
        from spmd.xla_names import _global_mesh

        _global_mesh._current[:] = [] if kept is None else [kept]
    if kept is None:
        with pytest.raises(spmd.SpmdError, match="no global mesh is set"):
            spmd.SpmdFullyShardedDataParallel(nn.Linear(8, 8))


def test_use_spmd_may_be_called_at_any_time() -> None:
    tensor = batch(2).to("jax") + 1
    spmd.use_spmd()
    assert_same(tensor, batch(2) + 1)
    with pytest.raises(spmd.SpmdError, match="auto_policy"):
        spmd.use_spmd(auto=True)


def test_the_patched_linear_is_the_plain_one() -> None:
    layer = nn.Linear(8, 4).to("jax")
    x = batch(2, 3, 8).to("jax")
    assert torch.equal(spmd.xla_patched_nn_linear_forward(layer, x), layer(x))
    assert torch.equal(spmd.XLAPatchedLinear.apply(x, layer.weight, layer.bias), layer(x))
    assert torch.equal(spmd.XLAPatchedLinear.apply(x, layer.weight), nn.functional.linear(x, layer.weight))


def test_a_barrier_stands_behind_the_backward_pass() -> None:
    model = MLP().to("jax")
    for layer in (model, model.down):  # the model's own input takes no gradient: its backward pass is the last
        spmd.apply_backward_optimization_barrier(layer)

    def run(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    host = MLP()
    host.load_state_dict({k: v.cpu() for k, v in model.state_dict().items()})
    x = batch(4, 8)
    host(x).square().sum().backward()
    step = spmd.compile(run, keep_grads=True)
    step(x.to("jax"))
    assert_same([p.grad for p in model.parameters()], [p.grad for p in host.parameters()])
    text = str(step._program.captured.jaxpr)
    assert text.count("optimization_barrier") == 1
    model.zero_grad()
    run(x.to("jax"))
    assert_same([p.grad for p in model.parameters()], [p.grad for p in host.parameters()])


def test_a_constructed_tensor_shares_the_storage_and_stays_a_leaf() -> None:
    plain = batch(8, 2).to("jax").requires_grad_()
    wrapped = spmd.XLAShardedTensor(plain)
    assert wrapped.is_leaf and wrapped.requires_grad and wrapped is not plain
    spmd.mark_sharding(wrapped, line(), ("data", None))
    assert spmd.wrap_if_sharded(plain).partition_spec == ("data", None)
    assert spmd.XLAShardedTensor(batch(8, 2)).device.type == "jax"
    assert spmd.XLAShardedTensor(plain * 2).grad_fn is not None


def test_a_constructed_tensor_may_be_given_its_layout() -> None:
    from torch.distributed.tensor import Replicate, Shard

    count = mesh.device_count()
    for where in (line(None), (count,)):
        assert spmd.XLAShardedTensor(batch(8, 2), where, ("0", None)).partition_spec == ("0", None)
        assert spmd.XLAShardedTensor(batch(8, 2), where, [Shard(0)]).placements == (Shard(0),)
    made = spmd.XLAShardedTensor(batch(8, 2).requires_grad_(), line(), [Replicate()])
    assert made.partition_spec == (None, None) and made.requires_grad
    made.sum().backward()
    assert_same(made.grad, torch.ones(8, 2))


NO_TENSOR: list[tuple[Callable[..., Any], Any, str]] = [
    (spmd.clear_sharding, 3, "clear_sharding takes a tensor, got 3"),
    (spmd.clear_sharding, [torch.zeros(2)], "clear_sharding takes a tensor, got a list"),
    (spmd.clear_sharding, nn.Linear(2, 2), "got the module Linear(?s:.*)fix: for p in module.parameters"),
    (lambda value: spmd.annotate_custom_sharding(value, line(), ("data",)), 3, "a sharding takes a tensor, got 3"),
    (lambda value: spmd.mark_sharding_with_gradients(value, line(), ("data",)), "x", "a sharding takes a tensor, got 'x'"),
]


@pytest.mark.parametrize(("annotate", "value", "text"), NO_TENSOR)
def test_what_is_no_tensor_is_refused(annotate: Callable[..., Any], value: Any, text: str) -> None:
    with pytest.raises(spmd.SpmdError, match=text):
        annotate(value)


def test_a_global_mesh_is_a_mesh() -> None:
    before, text = spmd.get_global_mesh(), "foo"
    with pytest.raises(spmd.SpmdError, match="a mesh was expected, got a str"):
        spmd.set_global_mesh(text)
    assert spmd.get_global_mesh() is before

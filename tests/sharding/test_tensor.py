"""`XLAShardedTensor`: what it says about its layout, and that it is otherwise an ordinary tensor."""

import copy
import io
import pickle
from typing import Any

import jax
import pytest
import torch
import torch.nn as nn

import mesh
import spmd
from spmd.base import _counters
from tests.oracle import MLP, array_of, batch

pytestmark = pytest.mark.multidevice(num=8)


@pytest.fixture
def host() -> torch.Tensor:
    return batch(8, 4)


@pytest.fixture
def marked(host: torch.Tensor, mesh_4x2: mesh.Mesh) -> spmd.XLAShardedTensor:
    return spmd.mark_sharding(host.to("jax"), mesh_4x2, ("data", None))


def test_the_layout_is_told_by_its_properties(marked: spmd.XLAShardedTensor, mesh_4x2: mesh.Mesh) -> None:
    assert marked.mesh == mesh_4x2
    assert marked.partition_spec == mesh.PartitionSpec("data", None)
    assert marked.sharding_spec == mesh.ShardingSpec(mesh_4x2, ("data", None))
    assert marked.sharding_type == mesh.ShardingType.PARTIAL
    assert isinstance(array_of(marked), jax.Array)
    assert array_of(marked).sharding == marked.sharding_spec.to_jax()


KINDS = [((None, None), "REPLICATED"), (("data", "model"), "OTHER"), (("model", None), "PARTIAL")]


@pytest.mark.parametrize(("spec", "kind"), KINDS, ids=[k for _, k in KINDS])
def test_sharding_type_follows_the_number_of_pieces(spec: Any, kind: str, mesh_4x2: mesh.Mesh) -> None:
    assert spmd.mark_sharding(batch(8, 4).to("jax"), mesh_4x2, spec).sharding_type == mesh.ShardingType[kind]


def test_global_tensor_is_the_same_tensor_without_the_class(marked: spmd.XLAShardedTensor, host: torch.Tensor) -> None:
    plain = marked.global_tensor
    assert type(plain) is torch.Tensor
    plain.mul_(2)
    assert torch.equal(marked.cpu(), host * 2)
    weight = nn.Parameter(host.to("jax"))
    spmd.mark_sharding(weight, marked.mesh, ("data", None))
    assert isinstance(weight, spmd.XLAShardedTensor)
    (weight.global_tensor * 3).sum().backward()
    assert weight.grad is not None and weight.grad.sum().item() == 96.0


@pytest.mark.parametrize("spec", [("data", None), ("data", "model"), (None, None)], ids=str)
def test_local_shards_are_the_pieces_of_the_tensor(spec: Any, host: torch.Tensor, mesh_4x2: mesh.Mesh) -> None:
    marked = spmd.mark_sharding(host.to("jax"), mesh_4x2, spec)
    held = marked.sharding_spec.shard_slices((8, 4))
    shards = marked.local_shards
    assert [s.device for s in shards] == [s.device for s in held]
    assert [s.replica_id for s in shards] == [s.replica_id for s in held]
    for shard in shards:
        assert isinstance(shard, spmd.XLAShard)
        assert shard.data.device.type == "cpu"
        assert torch.equal(shard.data, host[shard.indices])
    rebuilt = torch.zeros(8, 4)
    for shard in shards:
        if shard.replica_id == 0:
            rebuilt[shard.indices] += shard.data
    assert torch.equal(rebuilt, host)


def test_a_shards_data_is_a_copy_and_counted(marked: spmd.XLAShardedTensor, host: torch.Tensor) -> None:
    _counters.reset()
    shard = marked.local_shards[0]
    assert _counters.snapshot() == {}
    shard.data.zero_()
    assert _counters.snapshot() == {"host_reads": 1}
    assert torch.equal(marked.cpu(), host)
    assert repr(shard) == f"XLAShard([0:2, full], replica_id=0, device={shard.device})"


def test_repr_shows_values_layout_and_gradient_flag(mesh_4x2: mesh.Mesh) -> None:
    small = spmd.mark_sharding(torch.arange(4.0).to("jax"), mesh_4x2, ("data",))
    assert repr(small) == "XLAShardedTensor([0., 1., 2., 3.], spec=('data',), mesh=Mesh(data=4, model=2))"
    big = nn.Parameter(torch.zeros(64, 32).to("jax"))
    spmd.mark_sharding(big, mesh_4x2, ("data", None))
    _counters.reset()
    want = "XLAShardedParameter(float32[64, 32], spec=('data', None), mesh=Mesh(data=4, model=2), requires_grad=True)"
    assert repr(big) == want
    assert _counters.snapshot() == {}


@pytest.mark.parametrize("show", [repr, str, print, "{}".format])
def test_a_text_of_a_traced_tensor_is_refused_as_that_of_a_tensor_without_a_layout(show: Any, mesh_4x2: mesh.Mesh) -> None:
    marked = spmd.mark_sharding(torch.arange(4.0).to("jax"), mesh_4x2, ("data",))
    with pytest.raises(spmd.TraceError, match=r"a tensor of the traced program, float32\[4\], was printed or made a string"):
        spmd.compile(lambda x: (show(x), x * 2)[1])(marked)


def test_an_f_string_of_a_traced_number_is_made_when_the_call_ends(mesh_4x2: mesh.Mesh) -> None:
    texts: list[str] = []
    step = spmd.compile(lambda x: (texts.append(f"loss {x.mean():.3f}, {x.sum()}"), x * 2)[1])
    for k in range(3):
        step(spmd.mark_sharding(torch.full((4,), k + 0.5).to("jax"), mesh_4x2, ("data",)))
    assert texts == [f"loss {k + 0.5:.3f}, {4 * (k + 0.5)}" for k in range(3)]
    assert step.num_traces == 1


def test_a_result_on_one_device_has_no_layout() -> None:
    plain = torch.ones(3).to("jax").as_subclass(spmd.XLAShardedTensor)
    assert (plain.mesh, plain.partition_spec, plain.sharding_spec) == (None, None, None)
    assert plain.sharding_type == mesh.ShardingType.UNKNOWN


def test_views_tell_their_own_layout(marked: spmd.XLAShardedTensor) -> None:
    turned = marked.T
    assert isinstance(turned, spmd.XLAShardedTensor)
    assert tuple(turned.partition_spec or ()) == (None, "data")
    alias = marked.detach()
    assert tuple(alias.partition_spec or ()) == ("data", None)


@pytest.mark.parametrize(
    "operation", [lambda t: t + 1, lambda t: t.sum(), lambda t: t.clone(), lambda t: t @ t.T, lambda t: t.to(torch.float64)]
)
def test_the_class_passes_through_operations(operation: Any, marked: spmd.XLAShardedTensor, host: torch.Tensor) -> None:
    out = operation(marked)
    assert isinstance(out, spmd.XLAShardedTensor)
    torch.testing.assert_close(out.cpu().as_subclass(torch.Tensor), operation(host))


def test_a_copy_keeps_class_layout_and_gradient_flag(mesh_4x2: mesh.Mesh) -> None:
    model = MLP().to("jax")
    spmd.mark_sharding(model.up.weight, mesh_4x2, ("model", None))
    model.up.weight.requires_grad_(False)
    twin = copy.deepcopy(model)
    weight = twin.up.weight
    assert isinstance(weight, spmd.XLAShardedTensor) and isinstance(weight, nn.Parameter)
    assert tuple(weight.partition_spec) == ("model", None)
    assert not weight.requires_grad
    with torch.no_grad():
        weight.zero_()
    assert model.up.weight.abs().sum().item() > 0


def test_a_parameter_of_a_marked_tensor_is_one_and_so_are_its_copies(mesh_4x2: mesh.Mesh) -> None:
    marked = spmd.mark_sharding(batch(8, 4).to("jax"), mesh_4x2, ("data", None))
    module = nn.Module()
    module.weight = nn.Parameter(marked)
    made = (copy.copy(module.weight), copy.deepcopy(module.weight), copy.deepcopy(module).weight)
    for parameter in (module.weight, *made):
        assert type(parameter) is type(spmd.mark_sharding(nn.Parameter(batch(8, 4).to("jax")), mesh_4x2, ("data", None)))
        assert isinstance(parameter, nn.Parameter) and parameter.is_leaf and parameter.requires_grad
        assert tuple(parameter.partition_spec) == ("data", None)
        assert torch.equal(parameter.detach().cpu(), batch(8, 4))
    assert isinstance(pickle.loads(pickle.dumps(module.weight)), nn.Parameter)
    module.weight = made[1]
    with torch.no_grad():
        nn.Parameter(marked, requires_grad=False).mul_(2)
    assert torch.equal(marked.cpu(), batch(8, 4) * 2)


def test_a_saved_state_loads_on_the_cpu(mesh_4x2: mesh.Mesh) -> None:
    model = MLP().to("jax")
    spmd.mark_sharding(model.up.weight, mesh_4x2, ("model", None))
    held = io.BytesIO()
    torch.save({k: v.cpu() for k, v in model.state_dict().items()}, held)
    held.seek(0)
    twin = MLP()
    twin.load_state_dict(torch.load(held, weights_only=True))
    assert torch.equal(twin.up.weight, model.up.weight.detach().cpu())


def test_a_copy_on_the_cpu_shows_its_values_and_has_no_layout(mesh_4x2: mesh.Mesh) -> None:
    marked = spmd.mark_sharding(torch.arange(8).to("jax"), mesh_4x2, ("data",))
    copied = marked.cpu()
    assert repr(copied) == repr(torch.arange(8))
    assert isinstance(copied, spmd.XLAShardedTensor) and copied.sharding_spec is None


@pytest.mark.parametrize("text", ["{:.4f}", "{}", "{:10.3e}", "{:>12}"])
def test_a_number_is_formatted_as_torch_formats_it(text: str, mesh_4x2: mesh.Mesh) -> None:
    host = torch.arange(-12.0, 20.0).reshape(8, 4) / 8  # sums are exact in any order
    marked = spmd.mark_sharding(host.to("jax"), mesh_4x2, ("data", None))
    for of in (lambda x: x.sum(), lambda x: (x > 0).sum(), lambda x: x[0, 1], lambda x: (x > 9).any().int()):
        if ("f" not in text and "e" not in text) or of(host).is_floating_point():
            assert text.format(of(marked)) == text.format(of(host))
    assert f"{(marked > 9).any()}" == f"{(host > 9).any()}" == "False"
    assert "%.3f" % marked[0, 1] == "%.3f" % host[0, 1]  # noqa: UP031 - old code formats like this


def test_a_new_tensor_is_no_view(marked: spmd.XLAShardedTensor, host: torch.Tensor) -> None:
    for made in (marked.clone(), marked * 2, torch.cat([marked, marked]), marked.split(2)[0].clone(), marked.max(0).values):
        assert isinstance(made, spmd.XLAShardedTensor) and made._base is None
    weight = marked.clone().requires_grad_()
    detached = (weight * 2).detach_()
    assert detached.is_leaf and not detached.requires_grad and torch.equal(detached.cpu(), host * 2)
    assert marked.clone().detach_().requires_grad_().is_leaf
    with pytest.raises(RuntimeError, match="Can't detach views"):
        (weight * 2)[0].detach_()


def test_what_a_function_returns_of_its_arguments_keeps_its_class(marked: spmd.XLAShardedTensor) -> None:
    plain = torch.zeros(8, 4, device="jax")
    added = plain.add_(marked)
    assert type(plain) is torch.Tensor and isinstance(added, spmd.XLAShardedTensor)
    added.mul_(0)
    assert plain.abs().sum().item() == 0


class Rotation(nn.Parameter):
    """A parameter of a class of one's own, as of geoopt."""

    kind: str

    def unit(self) -> torch.Tensor:
        return self / self.norm()


class Image(torch.Tensor):
    """A tensor of a class of one's own."""

    def brightest(self) -> torch.Tensor:
        return self.amax()


def test_a_tensor_of_ones_own_class_keeps_it_when_it_is_marked(mesh_4x2: mesh.Mesh) -> None:
    class Turn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Rotation(batch(8, 4))
            self.weight.kind = "sphere"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight.unit().t()).square().sum()

    def steps(model: nn.Module, device: str, run: Any = lambda fn: fn) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
            return loss

        step = run(step)
        return [step(spmd.mark_sharding(batch(8, 4, seed=i).to(device), mesh_4x2, ("data", None))).item() for i in range(3)]

    early, late, expected = Turn(), Turn().to("jax"), Turn()
    spmd.mark_sharding(early.weight, mesh_4x2, ("data", None))
    spmd.mark_sharding(late.weight, mesh_4x2, ("data", None))
    early = copy.deepcopy(early).to("jax")
    assert steps(late, "jax", spmd.compile) == pytest.approx(losses := steps(expected, "cpu"), rel=1e-5)
    assert steps(early, "jax") == pytest.approx(losses, rel=1e-5)
    for weight in (early.weight, late.weight, copy.deepcopy(late).weight):
        assert type(weight) is Rotation and spmd.wrap_if_sharded(weight).partition_spec == mesh.PartitionSpec("data", None)
    assert late.weight.kind == "sphere"
    image = spmd.mark_sharding(batch(8, 4).to("jax").as_subclass(Image), mesh_4x2, ("data", None))
    assert type(image) is Image and image.brightest().item() == batch(8, 4).amax().item()
    assert type(spmd.clear_sharding(image)) is Image


def marked_linear(grid: mesh.Mesh) -> nn.Linear:
    linear = nn.Linear(8, 8).to("jax")
    spmd.mark_sharding(linear.weight, grid, ("data", "model"))
    return linear


def double_data(linear: nn.Linear) -> None:
    for p in linear.parameters():
        p.data = p.data * 2


def double_as_vector(linear: nn.Linear) -> None:
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(linear.parameters())
        nn.utils.vector_to_parameters(vector * 2, linear.parameters())


def double_on_one_device(linear: nn.Linear) -> None:
    linear.weight.data = (linear.weight.detach().cpu() * 2).to("jax")


ASSIGNMENTS = [
    (double_data, False),
    (double_data, True),
    (double_as_vector, False),
    (double_as_vector, True),
    (double_on_one_device, False),
]


@pytest.mark.parametrize(("assign", "compiled"), ASSIGNMENTS)
def test_assigned_data_gets_the_layout_of_its_parameter(assign: Any, compiled: bool, mesh_4x2: mesh.Mesh) -> None:
    linear = marked_linear(mesh_4x2)
    parameter, before = linear.weight, linear.weight.detach().cpu()
    (spmd.compile(lambda: assign(linear)) if compiled else lambda: assign(linear))()
    assert linear.weight is parameter and isinstance(parameter, spmd.XLAShardedTensor) and isinstance(parameter, nn.Parameter)
    assert tuple(parameter.partition_spec) == ("data", "model")
    assert array_of(parameter).sharding.shard_shape((8, 8)) == (2, 4)
    assert torch.equal(parameter.detach().cpu(), before * 2)


def test_assigned_data_with_a_layout_or_another_shape_keeps_its_own(mesh_4x2: mesh.Mesh) -> None:
    weight = marked_linear(mesh_4x2).weight
    weight.data = spmd.mark_sharding(batch(8, 8).to("jax"), mesh_4x2, ("model", None))
    assert tuple(weight.partition_spec) == ("model", None)
    weight.data = batch(4, 8).to("jax")
    assert weight.partition_spec is None and weight.shape == (4, 8)


def test_assigned_data_that_is_whole_is_shared(mesh_4x2: mesh.Mesh) -> None:
    weight, kept = marked_linear(mesh_4x2).weight, batch(8, 8).to("jax")
    before = weight.data
    weight.data = kept
    kept.mul_(2)
    assert torch.equal(weight.detach().cpu(), batch(8, 8) * 2)
    weight.data = before
    assert tuple(weight.partition_spec) == ("data", "model") and not torch.equal(weight.detach().cpu(), kept.cpu())

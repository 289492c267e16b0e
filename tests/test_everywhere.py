"""One `mark_sharding`, the same for a tensor on 'meta', on the host, on the device, in a trace and under torch.compile; for
parameters, buffers, activations, outputs and optimizer state; before and after a move."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import mesh
import spmd
from tests import launched
from tests.oracle import array_of, arrays_born, assert_same, assert_same_model, batch, descend

pytestmark = pytest.mark.multidevice(num=8)
SPEC = ("model", None)


class Net(nn.Module):
    """A parameter, a buffer, an activation and an output that can be marked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)
        self.register_buffer("scale", torch.full((8, 16), 0.5))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()
        nn.init.constant_(self.scale, 0.5)  # pyright: ignore[reportArgumentType]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) @ self.scale


def made_on(place: str) -> Net:
    """The same numbers on the host and on the device."""
    torch.manual_seed(0)
    with torch.device("cpu" if place == "jax" else place):
        model = Net()
    return model.to("jax") if place == "jax" else model


def moved(model: nn.Module, place: str) -> Any:
    """The model on the device, its values those of a host model with the same seed."""
    if place == "meta":
        model.to_empty(device="jax")
        torch.manual_seed(0)
        for module in model.modules():
            getattr(module, "reset_parameters", lambda: None)()
        return model
    return model.to("jax")


PLACES = ["meta", "cpu", "jax"]
TENSORS: dict[str, Callable[[Any], torch.Tensor]] = {"parameter": lambda m: m.linear.weight, "buffer": lambda m: m.scale}


@pytest.mark.parametrize("which", TENSORS)
@pytest.mark.parametrize("place", PLACES)
def test_a_mark_is_the_same_before_and_after_the_move(place: str, which: str, mesh_4x2: mesh.Mesh) -> None:
    model, tensor_of = made_on(place), TENSORS[which]
    tensor = tensor_of(model)
    marked = spmd.mark_sharding(tensor, mesh_4x2, SPEC)
    assert marked is tensor and isinstance(marked, spmd.XLAShardedTensor)
    for _ in ("before", "after"):
        held: Any = tensor_of(model)
        assert isinstance(held, nn.Parameter) == (which == "parameter")
        assert held.sharding_spec == mesh.ShardingSpec(mesh_4x2, SPEC)
        assert (held.mesh, tuple(held.partition_spec), held.sharding_type) == (mesh_4x2, SPEC, mesh.ShardingType.PARTIAL)
        assert "spec=('model', None)" in repr(held)
        model = moved(model, place)
    held = tensor_of(model)
    assert array_of(held).sharding == mesh.ShardingSpec(mesh_4x2, SPEC).to_jax()
    if which == "parameter":
        assert held is tensor
    x = batch(4, 16)
    if place != "meta":
        assert_same(model(x.to("jax")).detach(), made_on("cpu")(x).detach())


@pytest.mark.parametrize("place", ["cpu", "jax"])
def test_an_activation_is_marked_where_it_is_made(place: str, mesh_4x2: mesh.Mesh) -> None:
    model, x = made_on("cpu").to(place), batch(8, 16).to(place)
    out = spmd.mark_sharding(model(x), mesh_4x2, ("data", None))
    assert tuple(out.partition_spec) == ("data", None)
    on_device = out.to("jax")
    assert array_of(on_device).sharding.shard_shape((8, 16)) == (2, 16)
    assert_same(on_device.detach(), made_on("cpu")(batch(8, 16)).detach())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_gradients_and_optimizer_state_follow_the_parameter(place: str, optimizer: Any, compiled: bool, mesh_4x2: mesh.Mesh) -> None:
    model = made_on(place)
    spmd.mark_sharding(model.linear.weight, mesh_4x2, SPEC)
    model = moved(model, place)
    opt = optimizer(model.parameters())
    x = spmd.mark_sharding(batch(8, 16).to("jax"), mesh_4x2, ("data", None))

    step = partial(descend, model, opt)
    run = spmd.compile(step, keep_grads=True) if compiled else step
    for _ in range(2):
        run(x)
    weight = model.linear.weight
    state = [t for t in opt.state[weight].values() if isinstance(t, torch.Tensor) and t.dim()]
    assert state
    for tensor in (weight, weight.grad, *state):
        assert array_of(tensor.as_subclass(spmd.XLAShardedTensor)).sharding.shard_shape((8, 16)) == (4, 16)


# Dynamo asks every tensor that enters a graph for .grad; of a subclass also when it is no leaf
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_under_torch_compile_a_mark_is_what_it_is_without(mesh_4x2: mesh.Mesh) -> None:
    model = made_on("cpu").to("jax")
    spmd.mark_sharding(model.linear.weight, mesh_4x2, SPEC)

    def run(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(model.linear(x))
        spmd.mark_sharding(hidden, mesh_4x2, ("data", "model"))
        return hidden * 2

    expected = torch.tanh(made_on("cpu").linear(batch(8, 16))) * 2
    compiled = torch.compile(run, backend="eager")
    out: Any = compiled(batch(8, 16).to("jax"))
    assert_same(out.detach(), expected.detach())
    assert array_of(out).sharding.shard_shape((8, 8)) == (2, 4)
    assert tuple(model.linear.weight.partition_spec) == SPEC
    stepped: Any = spmd.compile(compiled)(batch(8, 16).to("jax"))
    assert_same(stepped.detach(), expected.detach())


def marked_net(place: str, grid: mesh.Mesh) -> Net:
    model = made_on(place)
    spmd.shard_module(model, grid, [("linear.weight", SPEC), ("linear.bias", ("model",)), ("scale", (None, "model"))])
    return model


def specs(model: Any) -> dict[str, Any]:
    return {name: tuple(t.partition_spec) for name, t in (*model.named_parameters(), *model.named_buffers())}


LAID = {"linear.weight": SPEC, "linear.bias": ("model",), "scale": (None, "model")}


@pytest.mark.parametrize("place", PLACES)
def test_a_deep_copy_is_marked_too_and_shares_nothing(place: str, mesh_4x2: mesh.Mesh) -> None:
    model = marked_net(place, mesh_4x2)
    twin = copy.deepcopy(model)
    assert specs(twin) == LAID
    twin, model = moved(twin, place), moved(model, place)
    assert specs(twin) == specs(model) == LAID
    assert_same_model(twin, model)
    with torch.no_grad():
        twin.linear.weight.zero_()
    assert model.linear.weight.abs().sum().item() > 0


@pytest.mark.parametrize("place", PLACES)
def test_a_pickle_remembers_the_layout_until_it_is_moved(place: str, mesh_4x2: mesh.Mesh) -> None:
    model = marked_net(place, mesh_4x2)
    twin = pickle.loads(pickle.dumps(model))
    twin = moved(twin, "meta" if place == "meta" else "cpu")
    assert specs(twin) == LAID
    assert array_of(twin.linear.weight).sharding.shard_shape((8, 16)) == (4, 16)
    if place != "meta":
        assert_same_model(twin, made_on("cpu"))


@pytest.mark.parametrize("place", ["cpu", "jax"])
def test_a_state_dict_goes_through_a_file_and_back_and_moves_no_layout(place: str, mesh_4x2: mesh.Mesh) -> None:
    model, kept = marked_net(place, mesh_4x2), io.BytesIO()
    torch.save(model.state_dict(), kept)
    kept.seek(0)
    loaded = torch.load(kept, weights_only=True)
    assert {type(t) for t in loaded.values()} == {torch.Tensor}
    other = marked_net("jax", mesh_4x2)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(loaded)
    assert specs(other) == LAID
    assert_same_model(other, made_on("cpu"))
    assigned = marked_net("meta", mesh_4x2)
    assigned.load_state_dict(loaded, assign=True)
    assert_same_model(assigned.to("jax"), made_on("cpu"))


@pytest.mark.parametrize("place", ["cpu", "jax"])
def test_functional_call_takes_marked_tensors(place: str, mesh_4x2: mesh.Mesh) -> None:
    model = marked_net(place, mesh_4x2)
    parameters = {name: (p * 2).detach() for name, p in model.named_parameters()}
    host = made_on("cpu")
    expected = functional_call(host, {name: p * 2 for name, p in host.named_parameters()}, (batch(4, 16),))
    assert_same(functional_call(model, parameters, (batch(4, 16).to(place),)).detach(), expected.detach())
    assert specs(model) == LAID


def test_back_on_the_host_a_parameter_is_ordinary_and_remembers(mesh_4x2: mesh.Mesh) -> None:
    model = marked_net("jax", mesh_4x2)
    weight = model.linear.weight
    model.cpu()
    assert model.linear.weight is weight and type(weight) is nn.Parameter
    assert specs(model.to("jax")) == LAID


def test_a_layout_over_devices_that_are_not_here_is_forgotten(mesh_4x2: mesh.Mesh) -> None:
    tensor = torch.zeros(16)
    spmd.mark_sharding(tensor, mesh_4x2, ("data",))
    vars(tensor)["spmd_sharding"]["mesh"] |= {"device_ids": list(range(64)), "mesh_shape": [32, 2]}
    assert tensor.partition_spec is None  # pyright: ignore[reportAttributeAccessIssue]
    assert tensor.to("jax").shape == (16,)


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_what_is_uploaded_is_every_shard_once(place: str, mesh_4x2: mesh.Mesh) -> None:
    model = made_on(place)
    report = spmd.shard_module(model, mesh_4x2, [("linear.weight", ("data", "model")), ("linear.bias", None), ("scale", (None, "model"))])
    spmd.metrics.reset()
    model = moved(model, place)
    torch.jax.synchronize()  # pyright: ignore[reportAttributeAccessIssue]
    for tensor in (*model.parameters(), *model.buffers()):
        array_of(tensor.as_subclass(spmd.XLAShardedTensor)).block_until_ready()
    uploaded = spmd.metrics.counters().get("upload_bytes", 0)
    assert uploaded == (8 * report.bytes_per_device if place == "cpu" else 0)


INITS = {
    "normal_": lambda w: nn.init.normal_(w),
    "uniform_": lambda w: nn.init.uniform_(w),
    "kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(w),
    "xavier_normal_": lambda w: nn.init.xavier_normal_(w),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w),
    "constant_": lambda w: nn.init.constant_(w, 3.0),
    "zeros_": lambda w: nn.init.zeros_(w),
    "ones_": lambda w: nn.init.ones_(w),
    "data.normal_": lambda w: w.data.normal_(0, 0.02),
    "a row": lambda w: w.data[1].zero_(),
}


@pytest.mark.parametrize("init", INITS)
def test_no_device_holds_more_than_its_shard_while_a_tensor_is_initialised(init: str, mesh_4x2: mesh.Mesh) -> None:
    with torch.device("meta"):
        model = nn.Linear(64, 32, bias=False)
    spmd.mark_sharding(model.weight, mesh_4x2, ("data", "model"))
    newborn = arrays_born()
    model.to_empty(device="jax")
    assert not [a for a in newborn() if a.size >= 64]  # no memory yet
    torch.manual_seed(0)
    with torch.no_grad():
        INITS[init](model.weight)
    born = [a for a in newborn() if a.size > 64]
    assert born and {a.sharding.shard_shape(a.shape) for a in born} == {(8, 32)}
    assert array_of(model.weight).sharding == mesh.ShardingSpec(mesh_4x2, ("data", "model")).to_jax()
    whole = torch.zeros(32, 64).to("jax")
    torch.manual_seed(0)
    INITS[init](whole)
    assert torch.equal(model.weight.detach().cpu(), whole.cpu())  # the same numbers, however the tensor is split


PEAK = """
import re, sys, warnings
import torch, mesh
warnings.simplefilter("ignore")
mesh.virtual_devices(8)
import spmd
from spmd.device._storage import load

def peak():  # most resident bytes so far
    status = open("/proc/self/status").read()  # getrusage would begin with what the parent had
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024

split, fill, rows = sys.argv[1] == "split", sys.argv[2], int(sys.argv[3])
grid = mesh.Mesh(range(8), (8,), ("fsdp",))
def build(rows):
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Embedding(rows, 1024), torch.nn.Linear(1024, 1024))
    spmd.shard_module(model, grid, [("0.weight", ("fsdp", None) if split else None), ("**", None)])
    model.to_empty(device="jax")
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.normal_() if fill == "normal" else parameter.fill_(0.5)
        load(parameter).block_until_ready()
    return model
build(1024)                      # what jax, torch and the compiler need themselves
before = peak()
spmd.metrics.reset()
model = build(rows)
crossed = spmd.metrics.counters()
print(peak() - before, model[0].weight.nbytes, crossed.get("upload_bytes", 0) + crossed.get("host_reads", 0))
"""


def grown_tables(how: str, fill: str, rows: int) -> float:
    """Growth of the peak memory of a process with 8 virtual devices that materialises and fills a table, in sizes of that table."""
    done = launched.run(PEAK, how, fill, rows)
    assert done.code == 0, done.err
    growth, table, crossed = map(int, done.out.split())
    assert not crossed
    return growth / table


def test_materialising_a_meta_model_needs_its_shards_and_no_whole_tensor() -> None:
    # All eight devices' shards together are one table, and nothing else may live beside them: a whole copy anywhere would be a second.
    assert 0.9 <= grown_tables("split", "constant", 160 * 1024) < 1.5
    assert grown_tables("whole", "constant", 32 * 1024) > 7  # the measure does see whole copies


@pytest.mark.slow
def test_random_numbers_of_a_meta_model_are_drawn_shard_by_shard() -> None:
    # XLA's counter-based bits, their halves and the numbers made of them: up to four tables over all devices, as the devices happen
    # to overlap. A whole draw on every device would be eight for its result alone.
    assert 0.9 <= grown_tables("split", "normal", 64 * 1024) < 6

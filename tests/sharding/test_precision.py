"""`spmd.mixed_precision`: master weights keep their dtype, products and sums over devices have the dtypes that were asked for."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mesh
import spmd
from tests.oracle import assert_same, batch

BF16, F32 = torch.bfloat16, torch.float32


class Net(nn.Module):
    """Embedding, a layer, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.up, self.norm = nn.Embedding(16, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.tokens(ids)
        return self.head(self.norm(h + torch.tanh(self.up(h))))


def pair(policy: spmd.MixedPrecisionPolicy) -> tuple[Any, Any]:
    """A model in CPU torch cast as the policy says by hand, and one on the device that follows it."""
    torch.manual_seed(0)
    host = Net()
    device = copy.deepcopy(host).to("jax")
    return host, spmd.mixed_precision(device, policy)


def by_hand(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The model with all parameters cast to bfloat16, differentiably."""
    cast = {name: p.to(BF16) for name, p in model.named_parameters()}
    return torch.func.functional_call(model, cast, (ids,))


def step_of(run: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(run(ids).float().flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    return loss


IDS = torch.arange(32).reshape(4, 8) % 16


@pytest.mark.parametrize("compiled", [False, True])
def test_masters_and_optimizer_state_keep_their_dtype_and_the_loss_is_torchs(compiled: bool) -> None:
    host, device = pair(spmd.MixedPrecisionPolicy(BF16, reduce_dtype=F32))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (host, device)]
    step: Any = lambda ids: step_of(device, optimizers[1], ids)  # noqa: E731
    step = spmd.compile(step) if compiled else step
    for _ in range(5):
        want = step_of(lambda ids: by_hand(host, ids), optimizers[0], IDS)
        got = step(IDS.to("jax"))
        assert_same(got, want, (5e-3, 1e-3))
    assert {p.dtype for p in device.parameters()} == {F32}
    assert {v.dtype for s in optimizers[1].state.values() for v in s.values()} == {F32}
    assert list(device.state_dict()) == list(host.state_dict())
    assert device.head.weight is device.tokens.weight
    assert device(IDS.to("jax")).dtype == BF16
    if compiled:
        assert step.num_executables == 1


def test_output_dtype_inputs_and_a_policy_of_its_own_inside() -> None:
    seen: list[Any] = []
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).to("jax")
    for layer in model:
        layer.register_forward_pre_hook(lambda m, args: seen.append((args[0].dtype, m.weight.dtype)))
    spmd.mixed_precision(model[1], spmd.MixedPrecisionPolicy(F32, output_dtype=BF16))
    spmd.mixed_precision(model, spmd.MixedPrecisionPolicy(BF16, output_dtype=F32))
    assert model(batch(4, 8).to("jax")).dtype == F32
    assert seen == [(BF16, BF16), (BF16, F32), (BF16, BF16)]
    kept = spmd.mixed_precision(nn.Linear(8, 8).to("jax"), spmd.MixedPrecisionPolicy(cast_forward_inputs=True))
    assert kept(batch(4, 8).to("jax")).dtype == F32


def test_another_policy_is_another_program() -> None:
    model = spmd.mixed_precision(nn.Linear(8, 8).to("jax"), spmd.MixedPrecisionPolicy(BF16))
    step = spmd.compile(lambda x: model(x))
    x = batch(4, 8).to("jax")
    assert step(x).dtype == BF16
    spmd.mixed_precision(model, spmd.MixedPrecisionPolicy(torch.float16, output_dtype=torch.float16))
    assert step(x).dtype == torch.float16
    assert len(step.retraces) == 1


@pytest.mark.parametrize("how", ["remat", "checkpoint"])
def test_a_recomputation_has_the_policy_of_the_first_time(how: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to("jax")
    layer = model[0]
    want = torch.autograd.grad(
        F.linear(
            torch.tanh(F.linear(batch(4, 8).to(BF16).to("jax"), layer.weight.to(BF16), layer.bias.to(BF16))), model[2].weight.to(BF16)
        ).sum(),
        layer.weight,
    )[0]
    if how == "remat":
        spmd.remat("nothing")(layer)
    else:
        forward = layer.forward
        layer.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    spmd.mixed_precision(model, spmd.MixedPrecisionPolicy(BF16))
    for run in (model, spmd.compile(lambda x: torch.autograd.grad(model(x).sum(), layer.weight)[0])):
        out = run(batch(4, 8).to("jax"))
        got = out if out.shape == (8, 8) and run is not model else torch.autograd.grad(out.sum(), layer.weight)[0]
        assert got.dtype == F32
        assert_same(got, want.cpu(), (2e-2, 1e-2))


class Deep(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize(("reduce_dtype", "expected"), [(F32, "f32"), (None, "bf16")])
def test_products_are_bf16_and_sums_over_devices_have_the_asked_dtype(reduce_dtype: Any, expected: str) -> None:
    pytest.importorskip("libtpu", reason="XLA:CPU computes bfloat16 in float32, so only the TPU compiler shows it")
    grid = mesh.Mesh(range(8), (8,), ("data",), topology="v5e:2x4")
    with torch.device("meta"):
        model = Deep(512)
    spmd.mixed_precision(model.to_empty(device="jax"), spmd.MixedPrecisionPolicy(BF16, reduce_dtype=reduce_dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @spmd.compile
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()

    program = step.program(spmd.mark_sharding(torch.empty(1024, 512, device="jax"), grid, ("data", None)))
    text = program.hlo()
    dtypes = dict(re.findall(r"%([\w.\-]+) = (\w+)\[", text))
    products = re.findall(r" (?:convolution|dot)\(%([\w.\-]+), %([\w.\-]+)\)", text)
    assert len(products) == 5
    assert {dtypes[name] for pair in products for name in pair} == {"bf16"}
    sums = [c for c in program.collectives() if c.kind in ("all-reduce", "reduce-scatter") and c.num_bytes > 4]
    assert {c.dtype for c in sums} == {expected}


def test_a_dtype_that_is_not_floating_is_refused() -> None:
    with pytest.raises(spmd.SpmdError, match="reduce_dtype of a MixedPrecisionPolicy is torch.int8"):
        spmd.MixedPrecisionPolicy(BF16, reduce_dtype=torch.int8)

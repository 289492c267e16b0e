"""`scan_layers`: layers of a model as it is as one loop, with all that layers called one by one may have; else an error that says why."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch import nn
from torch.utils.checkpoint import checkpoint

import mesh
import spmd
from spmd.program.xla import _hlo
from tests.later import transformers as hf
from tests.oracle import assert_same

WIDTH, LAYERS = 8, 5


class Block(nn.Module):
    """Takes and returns two values; has a number, a buffer that it counts in, dropout."""

    def __init__(self, index: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.index, self.up, self.down, self.drop = index, nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Dropout(dropout)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: torch.Tensor, total: torch.Tensor, mask: torch.Tensor, *, scale: torch.Tensor) -> Any:
        self.runs += 1
        x = x + self.drop(self.down(torch.tanh(self.up(x * scale)))) * mask / (1 + self.index)
        return x, total + x.sum(-1)


class Again(Block):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)


class Stack(nn.Module):
    def __init__(self, kind: type[Block], *, scanned: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.scanned, self.first = scanned, nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind(i, dropout) for i in range(LAYERS))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        pair, scale = (self.first(x), x.sum(-1)), torch.full((), 0.5, device=x.device)
        if self.scanned:
            pair = spmd.scan_layers(self.blocks, pair, mask, scale=scale)
        else:
            for block in self.blocks:
                pair = block(*pair, mask, scale=scale)
        return pair[0].square().mean() + pair[1].square().mean()


def trained(model: nn.Module, *batch: torch.Tensor, **options: Any) -> tuple[list[float], spmd.Step[Any, Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    @spmd.compile(**options)
    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        return loss

    return [step(*batch).item() for _ in range(4)], step


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(4, WIDTH, generator=draw), (torch.rand(4, 1, generator=draw) > 0.3).float()


def halved(model: Stack) -> None:
    spmd.mixed_precision(model, spmd.MixedPrecisionPolicy(torch.bfloat16))


def hooked(model: Stack) -> None:
    for block in model.blocks:
        block.up.register_forward_hook(lambda _, __, out: out * 1.5)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        block.down.weight.register_hook(lambda grad: grad * 0.5)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]


CASES: dict[str, tuple[type[Block], dict[str, Any], Callable[[Stack], None] | None]] = {
    "plain": (Block, {}, None),
    "dropout": (Block, {"dropout": 0.3}, None),
    "computed again": (Again, {"dropout": 0.3}, None),
    "hooks": (Block, {}, hooked),
    "bfloat16": (Block, {}, halved),
}


@pytest.mark.parametrize("name", CASES)
def test_they_train_as_layers_that_are_called_one_by_one(name: str) -> None:
    kind, options, change = CASES[name]
    found = []
    for scanned in (True, False):
        torch.manual_seed(0)
        model = Stack(kind, scanned=scanned, **options).to("jax")
        if change is not None:
            change(model)
        losses, step = trained(model, *(t.to("jax") for t in batch()))
        found.append((losses, [t.detach().float().cpu() for t in (*model.parameters(), *model.buffers())]))
        if scanned:
            assert {loop.passes for loop in step.rolled if loop.why_not is None} >= {LAYERS}
    tolerance = 1e-2 if name == "bfloat16" else 1e-6  # other fusions round a bfloat16 elsewhere
    assert found[0][0] == pytest.approx(found[1][0], rel=tolerance)
    if name != "bfloat16":
        assert_same(found[0][1], found[1][1], (1e-4, 1e-5))


def test_layers_of_hugging_face_with_masks_positions_and_a_cache_are_scanned() -> None:
    config = hf.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, vocab_size=64
    )

    def logits(scanned: bool) -> tuple[torch.Tensor, list[Any]]:
        torch.manual_seed(0)
        model = hf.LlamaForCausalLM(config).to("jax").eval()
        inner = model.model

        @spmd.compile
        def run(ids: torch.Tensor) -> torch.Tensor:
            x, cache = inner.embed_tokens(ids), hf.DynamicCache(config=config)
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            given = {
                "attention_mask": torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril(),
                "position_embeddings": inner.rotary_emb(x, positions),
                "past_key_values": cache,
                "use_cache": True,
            }
            if scanned:
                x = spmd.scan_layers(inner.layers, x, **given)
            else:
                for layer in inner.layers:
                    x = layer(x, **given)
            return model.lm_head(inner.norm(x)) + sum(layer.keys.mean() for layer in cache.layers)

        ids = torch.arange(12).reshape(2, 6).to("jax")
        with torch.no_grad():
            return run(ids).cpu(), run.rolled

    (given, loops), (wanted, _) = logits(True), logits(False)
    assert_same(given, wanted)
    assert max(loop.passes for loop in loops if loop.why_not is None) >= LAYERS - 1


class Odd(Block):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, total = super().forward(*args, **kwargs)
        return (x.cos() if self.index == 3 else x.sin()), total


class Longer(Block):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, total = super().forward(*args, **kwargs)
        return (x.sin().sin() if self.index == 3 else x.sin()), total


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            Odd,
            r"layers 1 and 3 cannot be a loop: (.*)\n  layer 1: sin of float32\[4,8\] in model/blocks/1\n  layer 3: cos",
        ),
        (Longer, r"layers 1 and 3 cannot be a loop: (they differ in an operation|layer 3 has \d more operations)"),
    ],
)
def test_layers_that_can_be_no_loop_are_an_error_that_names_layer_and_operation(kind: type[Block], text: str) -> None:
    torch.manual_seed(0)
    model = Stack(kind, scanned=True).to("jax")
    with pytest.raises(spmd.SpmdError, match=text):
        trained(model, *(t.to("jax") for t in batch()))
    with torch.no_grad():
        model(*(t.to("jax") for t in batch()))  # eagerly they are what Python says


def test_layers_whose_jax_functions_have_different_constants_are_an_error_that_says_so() -> None:
    def layer(factor: float) -> nn.Module:
        table = np.full(4, factor, np.float32)
        return Calling(jax.jit(lambda x: x * table))

    layers = nn.ModuleList(layer(i + 1.0) for i in range(5)).to("jax")
    with pytest.raises(spmd.SpmdError, match=r"layers 1 and 2 cannot be a loop(?s:.*)other arrays in each.*\n  fix: pass the arrays"):
        spmd.compile(lambda x: spmd.scan_layers(layers, x))(torch.ones(2, 4).to("jax"))


class Calling(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return spmd.call_jax(self.fn, (x,)) + 1


class Residual(nn.Module):
    """Without biases, so that the same in JAX is short."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


SPECS: dict[str, tuple[Any, Any]] = {  # of up [16, 8] and down [8, 16]
    "tensor parallel": (("model", None), (None, "model")),
    "fully sharded": (("data", None), ("data", None)),
    "both": (("model", "data"), ("data", "model")),
}


def ours(grid: mesh.Mesh, specs: tuple[Any, Any], x: torch.Tensor) -> tuple[float, Any]:
    torch.manual_seed(0)
    layers, scale = nn.ModuleList(Residual() for _ in range(6)).to("jax"), nn.Parameter(torch.ones(WIDTH, device="jax"))
    spmd.mark_sharding(scale, grid, (None,))
    spmd.shard_module(layers, grid, [("*.up.weight", specs[0]), ("*.down.weight", specs[1])])
    for layer in layers:
        layer.register_forward_hook(lambda _, __, out: spmd.mark_sharding(out, grid, ("data", None)))
    optimizer = torch.optim.SGD([*layers.parameters(), scale], 0.1)

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = spmd.scan_layers(layers, spmd.mark_sharding(x * scale, grid, ("data", None))).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    given = spmd.mark_sharding(x.to("jax"), grid, ("data", None))
    return step(given).item(), step.program(given).compiled


def by_hand(grid: mesh.Mesh, specs: tuple[Any, Any], x: torch.Tensor) -> tuple[float, Any]:
    """The same with the weights stacked, as `lax.scan`."""
    torch.manual_seed(0)
    layers = [Residual() for _ in range(6)]
    devices = grid.to_jax()

    def placed(value: Any, *spec: str | None) -> jax.Array:
        return jax.device_put(jnp.asarray(value), NamedSharding(devices, PartitionSpec(*spec)))

    ups, downs = (torch.stack([getattr(layer, name).weight.detach() for layer in layers]).numpy() for name in ("up", "down"))
    weights = placed(ups, None, *specs[0]), placed(downs, None, *specs[1]), placed(torch.ones(WIDTH).numpy(), None)
    rows = NamedSharding(devices, PartitionSpec("data", None))

    def loss_of(weights: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
            return jax.lax.with_sharding_constraint(x + jnp.tanh(x @ own[0].T) @ own[1].T, rows), None

        first = jax.lax.with_sharding_constraint(x * weights[2], rows)
        return jnp.mean(jnp.square(jax.lax.scan(layer, first, weights[:2])[0]))

    def step(weights: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    given = placed(x.numpy(), "data", None)
    shardings = tuple(w.sharding for w in weights)
    compiled = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)).lower(weights, given).compile()
    return float(compiled(weights, given)[1]), compiled


@pytest.mark.multidevice(num=8)
@pytest.mark.optimized
@pytest.mark.parametrize("how", SPECS)
def test_collectives_are_those_of_a_scan_by_hand(how: str, mesh_4x2: mesh.Mesh) -> None:
    """Bytes by kind and axes."""
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(2))
    losses, found = [], []
    for make in (ours, by_hand):
        loss, compiled = make(mesh_4x2, SPECS[how], x)
        losses.append(loss)
        traffic: dict[Any, int] = {}
        for item in _hlo.collectives(compiled.as_text(), tuple(mesh_4x2.axis_names), tuple(mesh_4x2.mesh_shape)):
            traffic[item.kind, str(item.axes)] = traffic.get((item.kind, str(item.axes)), 0) + item.count * item.num_bytes
        found.append(traffic)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert found[0] == found[1] != {}


class Scaled(nn.Module):
    """Has numbers that differ from layer to layer: a scale, an `eps`, a drop rate that decides something in the first layer."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.scale, self.rate, self.norm, self.inner = 0.05 * (index + 1), 0.05 * index, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm.eps = 1e-3 * (index + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.norm(x)) * self.scale
        return x + (y if self.rate == 0.0 else y / (1 - self.rate))


class OfItsBias(nn.Module):
    """An operation of a parameter alone, which differs if the parameter needs a gradient."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) * nn.functional.layer_norm(self.inner.bias, (WIDTH,))


def trained_layers(kind: Callable[[int], nn.Module], frozen: Callable[[nn.ModuleList], object], count: int, device: str) -> Any:
    """Losses and parameters of three steps, and the passes of the loops."""
    torch.manual_seed(0)
    layers = nn.ModuleList(map(kind, range(count)))
    frozen(layers)
    layers.to(device)
    optimizer = torch.optim.SGD([p for p in layers.parameters() if p.requires_grad], 0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = spmd.scan_layers(layers, x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run = step if device == "cpu" else spmd.compile(step)
    losses = [run(batch()[0].to(device)).detach().cpu() for _ in range(3)]
    loops = [loop.passes for loop in run.rolled] if isinstance(run, spmd.Step) else []
    return (losses, [p.detach().cpu() for p in layers.parameters()]), loops


FROZEN: dict[str, Callable[[nn.ModuleList], object]] = {
    "none": lambda layers: None,
    "the first four": lambda layers: layers[:4].requires_grad_(False),
    "all but the last": lambda layers: layers[:-1].requires_grad_(False),
    "all but the biases of the last five": lambda layers: [
        p.requires_grad_(i >= len(layers) - 5 and name.endswith("bias"))
        for i, layer in enumerate(layers)
        for name, p in layer.named_parameters()
    ],
    "every second": lambda layers: [layer.requires_grad_(i % 2 == 1) for i, layer in enumerate(layers)],
}


@pytest.mark.parametrize("how", FROZEN)
def test_frozen_layers_before_trained_ones_are_a_loop_of_their_own_and_floats_differ(how: str) -> None:
    (wanted, _), (found, loops) = (trained_layers(Scaled, FROZEN[how], 10, device) for device in ("cpu", "jax"))
    assert_same(found, wanted)
    assert sum(loops[:2]) >= 10 - 2


def test_requires_grad_is_named_where_it_is_the_difference() -> None:
    def frozen(layers: nn.ModuleList) -> None:
        layers[4].inner.bias.requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]

    with pytest.raises(
        spmd.SpmdError, match=r"layers 1 and 4 cannot.*(.|\n)*requires_grad of inner.bias: True in layer 1 and False in layer 4"
    ):
        trained_layers(OfItsBias, frozen, 6, "jax")


def test_a_number_of_one_layer_that_changes_between_calls_is_named() -> None:
    layers = nn.ModuleList(map(Scaled, range(5))).to("jax")
    run, x = spmd.compile(lambda x: spmd.scan_layers(layers, x)), batch()[0].to("jax")
    run(x)
    layers[2].scale = 3.0  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(spmd.SpmdError, match=r"a number of its layer that has changed between calls.*\n  fix: .*register_buffer"):
        run(x)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ("blocks", r"takes a list of modules, got 'blocks'"),
        (None, "got None"),
        (nn.Linear(2, 2), r"got the module Linear\n.*\n  fix: x = layer\(x\)"),
        ({0: nn.Linear(2, 2)}, r"got a dict\n.*\n  fix: spmd.scan_layers\(layers.values\(\), x\)"),
        (nn.ModuleDict({"a": nn.Linear(2, 2)}), r"got the module ModuleDict\n.*\n  fix: spmd.scan_layers\(layers.values\(\), x\)"),
        ([1, 2, 3, 4], "item 0 is 1"),
        ([nn.Linear(2, 2), torch.tanh], "item 1 is a builtin_function_or_method"),
        ([nn.Linear] * 4, "item 0 is the class Linear"),
    ],
)
@pytest.mark.parametrize("compiled", [True, False])
def test_layers_that_are_no_modules_are_refused(layers: Any, text: str, compiled: bool) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return spmd.scan_layers(layers, x)

    with pytest.raises(spmd.SpmdError, match=text):
        (spmd.compile(run) if compiled else run)(torch.ones(2, 2, device="jax"))


def test_the_values_of_a_module_dict_are_layers() -> None:
    layers = nn.ModuleDict({str(i): nn.Linear(WIDTH, WIDTH) for i in range(5)})
    wanted = nn.Sequential(*layers.values())(batch()[0])
    layers.to("jax")
    found = spmd.compile(lambda x: spmd.scan_layers(layers.values(), x))(batch()[0].to("jax"))
    assert_same(found.detach().cpu(), wanted.detach())

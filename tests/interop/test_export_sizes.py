"""`spmd.export(dynamic=...)`: one file for all sizes, with CPU torch's numbers; what is refused, and what the loader says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd.demo._gpt2 import GPT, SHARDINGS, GPTConfig
from spmd.interop import _exported_program
from tests.grids import grid
from tests.oracle import MLP, TOLERANCE, assert_same, batch, twins
from tests.without_torch import without_torch

BATCH, SEQ = spmd.Dim("batch", max=64), spmd.Dim("seq", min=3, max=16)
ROWS: dict[str, Any] = {"x": {0: BATCH}, "y": {0: "batch"}}
CLOSE = TOLERANCE[torch.float32]


def load(path: Path) -> Any:
    return _exported_program.load(str(path))


def assert_close(got: Any, want: torch.Tensor) -> None:
    assert tuple(got.shape) == tuple(want.shape)
    np.testing.assert_allclose(np.asarray(got), want.detach().numpy(), *CLOSE)


def stepping(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y, label_smoothing=0.1) + torch.softmax(out, 0).var(0, correction=0).mean()
        loss.backward()
        optimizer.step()
        return loss, out

    return train_step


def test_a_training_step_is_one_file_for_every_batch(tmp_path: Path) -> None:
    host, device = twins(lambda: nn.Sequential(MLP(), nn.LayerNorm(8)))
    path = spmd.export(stepping(device), (batch(5, 8), torch.arange(5) % 8), tmp_path / "step.spmd", dynamic=ROWS)
    expected = stepping(host)
    xs = [batch(size, 8, seed=size) for size in (5, 1, 17)]
    code = """
for x in inputs:
    state, (loss, out) = program(state, x, np.arange(len(x)) % 8)
    results.append([float(loss), np.asarray(out).tolist()])
print(json.dumps([results, np.asarray(state["0.up.weight"]).tolist()]))
"""
    results, weight = without_torch(code, path, *xs, num_devices=1)
    for x, (loss, out) in zip(xs, results, strict=True):
        want_loss, want = expected(x, torch.arange(len(x)) % 8)
        np.testing.assert_allclose(loss, want_loss.item(), *CLOSE)
        assert_close(np.array(out), want)
    assert_close(np.array(weight), host[0].up.weight)


def test_dropout_draws_what_the_step_draws(tmp_path: Path) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + torch.rand_like(x)

    torch.manual_seed(3)
    program = load(spmd.export(forward, (batch(4, 6),), tmp_path / "draws.spmd", dynamic={"x": {0: BATCH}}))
    state = program.state()
    for size in (4, 7, 1):
        state, out = program(state, batch(size, 6).numpy())
        assert_close(out, forward(batch(size, 6).to("jax")).cpu())


def language(p: float = 0.0) -> nn.Module:
    return GPT(GPTConfig(vocabulary=32, seq=16, width=16, layers=1, heads=2, dropout=p))


def language_step(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss

    return train_step


@pytest.mark.parametrize("is_sharded", [pytest.param(False, marks=pytest.mark.slow), True], ids=["one device", "sharded"])
def test_a_language_model_with_batch_and_sequence_at_once(is_sharded: bool, tmp_path: Path, num_devices: int) -> None:
    host, device = twins(language)
    ids = (torch.arange(4 * 9) * 7 % 32).view(4, 9)
    given = ids.to("jax")
    if is_sharded:
        m = grid()
        spmd.shard_module(device, m, SHARDINGS)
        given = spmd.mark_sharding(given, m, ("data", None))
    dims = {"ids": {0: spmd.Dim("batch", max=32), 1: SEQ}}
    program = load(spmd.export(language_step(device), (given,), tmp_path / "lm.spmd", dynamic=dims))
    expected, state = language_step(host), program.state()
    least = program.manifest["sizes"]["batch"][0]
    for B, T in ((8, 16), (least, 4)):
        ids = (torch.arange(B * T) * 5 % 32).view(B, T)
        state, loss = program(state, ids.numpy())
        assert_close(loss, expected(ids))
    assert_close(state["blocks.0.mlp.up.weight"], host.get_parameter("blocks.0.mlp.up.weight"))
    if is_sharded and num_devices > 1:
        with pytest.raises(ValueError, match=r"batch is 3 in args\[0\], but the program takes \d to 32 in multiples of \d"):
            program(state, np.zeros((3, 9), np.int64))


def heads(x: torch.Tensor, i: torch.Tensor) -> Any:
    """What no bucket could have: a problem of linear algebra, max pooling, along the dim that varies."""
    pooled = F.max_pool1d(x.t()[None], 3, 1, 1)
    return (
        torch.linalg.svdvals(x @ x.t() + torch.eye(x.shape[0], device=x.device)),
        pooled,
        x.sort(0),
        x[i].cumsum(0),
        x.index_add(0, i, x[i]),
    )


def rows(x: torch.Tensor, i: torch.Tensor) -> Any:
    B = x.shape[0]
    return F.pad(x, (0, 0, 1, 2)).roll(1, 0), x.view(B, 2, 3).flip(0).reshape(B * 2, 3), x - x.mean(0), torch.cat([x, x[1:]]), x.argmax(0)


def attention(x: torch.Tensor, i: torch.Tensor) -> Any:
    q = x.view(1, -1, 2, 3).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True), torch.softmax(x @ x.t(), -1), F.one_hot(i, 7)


def steps(x: torch.Tensor, i: torch.Tensor) -> Any:
    """Windows with a stride, and what is computed step after step."""
    y = x.t()[None]
    return (
        x[::2],
        F.conv1d(y, torch.ones(2, 6, 3, device=x.device), stride=2, padding=1).mean(),
        F.max_pool1d(y, 3, 2, 1, ceil_mode=True),
        F.avg_pool1d(y, 2, 2, 1, ceil_mode=True),
        F.adaptive_avg_pool1d(y, 3),
        x.logcumsumexp(0),
        x.cummin(0).indices,
    )


def slopes(x: torch.Tensor, i: torch.Tensor) -> Any:
    """Gradients of the same: what is around an element has another remainder for each size."""
    x = x.detach().requires_grad_()
    y = x.t()[None]
    sums = (
        F.conv1d(y, torch.ones(2, 6, 3, device=x.device), stride=2, padding=1).square().mean(),
        F.max_pool1d(y, 3, 2, 1, ceil_mode=True).sin().sum(),
        F.avg_pool1d(y, 3, 2, 1).sin().sum(),
        F.pad(y, (2, 3), mode="replicate").softmax(-1).sin().sum(),
        x[::2].sin().sum(),
    )
    return [torch.autograd.grad(value, x, retain_graph=True)[0] for value in sums]


@pytest.mark.parametrize("fn", [heads, rows, attention, steps, slopes])
def test_operations_along_a_dim_that_varies(fn: Callable[..., Any], tmp_path: Path) -> None:
    def values(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch(size, 6, seed=size), torch.arange(size) * 3 % min(size, 7)

    dims = {"x": {0: BATCH}, "i": {0: "batch"}}
    program = load(spmd.export(fn, values(5), tmp_path / "fn.spmd", dynamic=dims))
    state = program.state()
    for size in (1, 2, 3, 9, 64):
        x, i = values(size)
        found = program(state, x.numpy(), i.numpy())[1]
        flat = [leaf for part in found for leaf in (part if isinstance(part, (tuple, list)) else (part,))]
        want = [leaf for part in fn(x, i) for leaf in (part if isinstance(part, tuple) else (part,))]
        for one, other in zip(flat, want, strict=True):
            assert_close(one, other)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).amax((2, 3))


def test_images_of_any_height(tmp_path: Path) -> None:
    host, device = twins(lambda: Pooled().eval())
    dims = {"x": {0: BATCH, 2: spmd.Dim("height", min=4, max=37)}}
    program = load(spmd.export(device, (batch(2, 3, 8, 8),), tmp_path / "image.spmd", dynamic=dims))
    for B, H in ((2, 8), (1, 5), (3, 31), (4, 4)):
        x = batch(B, 3, H, 8, seed=H)
        assert_close(program(program.state(), x.numpy())[1], host(x))


class Positions(nn.Module):
    """Its largest size is that of a buffer, which it then takes whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.register_buffer("positions", torch.arange(16)[None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.embed(self.get_buffer("positions")[:, : x.shape[1]])


def test_the_largest_size_is_one_of_the_model_s_own(tmp_path: Path) -> None:
    host, device = twins(Positions)
    dims = {"x": {1: spmd.Dim("seq", max=16)}}
    program = load(spmd.export(device, (batch(2, 7, 4),), tmp_path / "positions.spmd", dynamic=dims))
    for size in (1, 2, 16):
        assert_close(program(program.state(), batch(2, size, 4).numpy())[1], host(batch(2, size, 4)))


def halves(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[0] // 2
    return torch.cat([x[half:] * 2, x[:half] - x.shape[0] % 4])


@pytest.mark.parametrize("is_sharded", [False, True], ids=["one device", "sharded"])
def test_sizes_that_python_divides_have_a_program_for_each_remainder(is_sharded: bool, tmp_path: Path) -> None:
    given = spmd.mark_sharding(batch(8, 3).to("jax"), grid(), ("data", None)) if is_sharded else batch(8, 3)
    program = load(spmd.export(halves, (given,), tmp_path / "halves.spmd", dynamic={"x": {0: BATCH}}))
    multiple = program.manifest["sizes"]["batch"][2]
    for size in range(multiple, 65, multiple):
        assert_close(program({}, batch(size, 3).numpy())[1], halves(batch(size, 3)))


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 64, "bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False)).eval()


def bert() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=64)).eval()


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt2, bert])
def test_models_of_hugging_face_with_masks(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    host, device = twins(make)

    def logits(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return device(input_ids=ids, attention_mask=mask).logits

    def values(size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.ones(size, length, dtype=torch.int64)
        mask[0, -1] = 0
        return torch.arange(size * length).view(size, length) % 64, mask

    dims = {"ids": {0: BATCH, 1: spmd.Dim("seq", min=2, max=64)}, "mask": {0: "batch", 1: "seq"}}
    program = load(spmd.export(logits, values(3, 7), tmp_path / "model.spmd", dynamic=dims))
    for size, length in ((1, 9), (5, 2), (2, 64)):
        ids, mask = values(size, length)
        assert_close(program(program.state(), ids.numpy(), mask.numpy())[1], host(input_ids=ids, attention_mask=mask).logits)


def test_numbers_made_of_sizes_are_those_of_the_call(tmp_path: Path) -> None:
    def count(batches: dict[str, torch.Tensor], scale: float) -> dict[str, Any]:
        n = batches["x"].shape[0]
        return {"n": n * 2 - 1, "root": n**0.5, "x": batches["x"] * n * scale}

    dims = {"batches": {"x": {0: BATCH}}}
    program = load(spmd.export(count, ({"x": batch(4, 2)}, 0.5), tmp_path / "count.spmd", dynamic=dims))
    for size in (1, 3, 50):
        found, want = program({}, {"x": batch(size, 2).numpy()}, 0.5)[1], count({"x": batch(size, 2)}, 0.5)
        assert (found["n"], found["root"]) == (want["n"], want["root"])
        assert_close(found["x"], want["x"])


def test_a_step_that_was_compiled_with_sizes_has_them_in_its_file(tmp_path: Path) -> None:
    step = spmd.compile(lambda x: x - x.mean(0), dynamic={"x": {0: BATCH}})
    program = load(spmd.export(step, (batch(4, 3),), tmp_path / "step.spmd"))
    assert_close(program({}, batch(9, 3).numpy())[1], batch(9, 3) - batch(9, 3).mean(0))
    assert "sizes: batch 1 to 64" in str(program)
    assert "args[0]: float32[batch, 3]" in str(program)
    fixed = load(spmd.export(step, (batch(4, 3),), tmp_path / "fixed.spmd", dynamic={}))
    with pytest.raises(ValueError, match=r"args\[0\] is float32\[4, 3\]"):
        fixed({}, batch(9, 3).numpy())


def test_other_values_vary_in_size_too(tmp_path: Path) -> None:
    def scaled(x: torch.Tensor, is_doubled: bool) -> torch.Tensor:
        return x * 2 if is_doubled else x

    calls = [(batch(4, 3), True), (batch(4, 3), False)]
    program = load(spmd.export(scaled, calls[0], tmp_path / "two.spmd", also=calls[1:], dynamic={"x": {0: BATCH}}))
    for is_doubled in (True, False):
        assert_close(program({}, batch(6, 3).numpy(), is_doubled)[1], scaled(batch(6, 3), is_doubled))


def branch(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] > 10 else x


def cut(x: torch.Tensor) -> torch.Tensor:
    return x[:12] * 2


def equals(x: torch.Tensor) -> torch.Tensor:
    return x * (2 if True in [x.shape[0] == n for n in range(25, 32)] else 1)


def noted(x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, training=True)


def most(x: torch.Tensor) -> torch.Tensor:
    return torch.topk(x, 6, dim=0)[0]


def spectrum(x: torch.Tensor) -> torch.Tensor:
    return torch.fft.rfft(x, dim=0).abs()


def highest(x: torch.Tensor) -> torch.Tensor:
    return F.adaptive_max_pool1d(x.t()[None], 2)


X: dict[str, Any] = {"x": {0: BATCH}}
REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "a branch": (
        branch,
        X,
        r"branch is not one program for all sizes(?s:.*)different results for different sizes(?s:.*)at test_export_sizes.py:\d+ in branch",
    ),
    "no form in JAX": (spectrum, X, r"spectrum cannot be exported for sizes that vary(?s:.*)FFT(?s:.*)also="),
    "another way": (
        highest,
        X,
        r"highest is not one program for all sizes(?s:.*)operation \w+ of(?s:.*)in highest(?s:.*)fix: narrow the sizes",
    ),
    "a slice": (cut, X, r"cut is not one program for all sizes(?s:.*)operation slice of(?s:.*)in cut(?s:.*)fix: narrow the sizes"),
    "questions": (equals, X, r"for all sizes of dim 'batch'(?s:.*)batch = 2 to 24 and 32 to 64(?s:.*)spmd.Dim\('batch', min=32, max=64\)"),
    "a size of 1": (noted, X, r"noted cannot be traced for batch = 1(?s:.*)more than 1 value(?s:.*)spmd.Dim\('batch', min=2, max=64\)"),
    "an error": (most, X, r"most cannot be traced for batch = \d, a size(?s:.*)selected index k(?s:.*)spmd.Dim\('batch', min=\d, max=64\)"),
    "too few sizes": (branch, {"x": {0: spmd.Dim("batch", min=4, max=6)}}, r"varies from 4 to 6(?s:.*)too few sizes(?s:.*)also="),
    "a size of the example": (
        branch,
        {"x": {0: spmd.Dim("batch", min=6, max=64)}},
        r"dim 'batch' has size 5, which is not between 6 and 64",
    ),
    "an argument": (branch, {"z": {0: BATCH}}, r"names an argument 'z' that the function does not have"),
}


@pytest.mark.parametrize(("fn", "dynamic", "text"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_one_program_is_refused(fn: Callable[..., Any], dynamic: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(spmd.SpmdError, match=text):
        spmd.export(fn, (batch(5, 3),), tmp_path / "no.spmd", dynamic=dynamic)
    assert not (tmp_path / "no.spmd").exists()


@pytest.mark.parametrize(("fn", "least"), [(branch, 11), (cut, 12), (equals, 32), (noted, 2), (most, 6)])
def test_narrower_sizes_are_one_program(fn: Callable[..., Any], least: int, tmp_path: Path) -> None:
    dims = {"x": {0: spmd.Dim("batch", min=least, max=64)}}
    program = load(spmd.export(fn, (batch(40, 3),), tmp_path / "yes.spmd", dynamic=dims))
    for size in (least, 41, 64):
        assert_close(program({}, batch(size, 3).numpy())[1], fn(batch(size, 3)))
    with pytest.raises(ValueError, match=rf"batch is {least - 1} in args\[0\], but the program takes {least} to 64"):
        program({}, batch(least - 1, 3).numpy())


def pairs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sum() * (3 if x.shape[0] == y.shape[0] else 2) + y.sum()


def test_sizes_for_which_python_would_do_something_else_are_refused_by_the_loader(tmp_path: Path) -> None:
    dims = {"x": {0: BATCH}, "y": {0: spmd.Dim("other", max=64)}}
    program = load(spmd.export(pairs, (batch(4, 3), batch(5, 3)), tmp_path / "pairs.spmd", dynamic=dims))
    assert_close(program({}, batch(9, 3).numpy(), batch(8, 3).numpy())[1], pairs(batch(9, 3), batch(8, 3)))
    with pytest.raises(ValueError, match=r"no program in this file covers batch = 9, other = 9(?s:.*)other outcomes"):
        program({}, batch(9, 3).numpy(), batch(9, 3).numpy())


NOT_CALLED: dict[str, tuple[tuple[int, ...], tuple[int, ...], str]] = {
    "too many": ((65, 8), (65,), r"batch is 65 in args\[0\], but the program takes 1 to 64"),
    "none": ((0, 8), (0,), r"batch is 0 in args\[0\]"),
    "two sizes": ((4, 8), (5,), r"batch has two sizes: 4 in args\[0\], 5 in args\[1\]"),
    "another dim": ((4, 9), (4,), r"args\[0\] is float32\[batch, 8\] in this program, but the value is float32\[4, 9\]"),
    "a rank": ((4, 8, 1), (4,), r"args\[0\] is float32\[batch, 8\] in this program, but the value is float32\[4, 8, 1\]"),
}


@pytest.fixture(scope="module")
def step_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arguments = batch(5, 8), torch.arange(5)
    return spmd.export(stepping(MLP().to("jax")), arguments, tmp_path_factory.mktemp("sizes") / "step.spmd", dynamic=ROWS)


@pytest.mark.parametrize(("x", "y", "text"), NOT_CALLED.values(), ids=NOT_CALLED)
def test_sizes_outside_are_clear_errors(x: tuple[int, ...], y: tuple[int, ...], text: str, step_file: Path) -> None:
    program = load(step_file)
    with pytest.raises(_exported_program.ExportedProgramError, match=text):
        program(program.state(), np.zeros(x, np.float32), np.zeros(y, np.int64))


def test_the_smallest_size_is_one_that_a_compiled_step_has_too() -> None:
    step = spmd.compile(most, dynamic={"x": {0: spmd.Dim("batch", min=6, max=32)}})
    for size in (7, 6, 32):
        assert_same(step(batch(size, 3).to("jax")), most(batch(size, 3)))
    assert step.num_traces == 4  # none of a size that has no six largest
    with pytest.raises(spmd.SpmdError, match=r"dim 'batch' has size 5, which is not between 6 and 32"):
        step(batch(5, 3).to("jax"))
    with pytest.raises(spmd.SpmdError, match=r"the minimum of dim 'batch' must be between 1 and its maximum(?s:.*)min=9, max=8"):
        spmd.Dim("batch", min=9, max=8)


def test_the_file_says_what_it_holds_for(step_file: Path) -> None:
    manifest = load(step_file).manifest
    assert manifest["sizes"] == {"batch": [1, 64, 1]}
    assert [part["sizes"] for part in manifest["programs"]] == [{}, {"batch": [2, 64, 1, 0]}]
    assert json.loads(json.dumps(manifest)) == manifest

"""Sizes that vary under torch.compile(backend="spmd"): one program for many where that is exact, one for each where it is not proved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mesh
import spmd
import spmd.dynamo._compile_graph as backend
from spmd.dynamo import graphs
from tests.oracle import assert_same, assert_same_model, batch, twins

SIZES = (3, 70, 64, 5, 100)
LOOSE = (2e-5, 2e-5)  # sums over a hundred rows, in another order


class Net(nn.Module):
    """Rows that have no part in each other, and a table of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.table = nn.Embedding(5, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.norm(self.up(x + self.table((x[:, 0] > 0).long())))))


Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], Any]
CASES: dict[str, Loss] = {
    "rows": lambda net, x, y: net(x),
    "mean": lambda net, x, y: F.mse_loss(net(x), y),
    "sum": lambda net, x, y: (net(x) * y).sum(),
    "cross entropy": lambda net, x, y: F.cross_entropy(net(x), y.argmax(1)),
    "log softmax": lambda net, x, y: (F.log_softmax(net(x), -1) * y).sum(1).mean(),
    "size": lambda net, x, y: net(x).sum(0) / x.shape[0] + x.shape[0],
    "maximum": lambda net, x, y: net(x).amax(0),
    "minimum": lambda net, x, y: (net(x) + 10).amin(0),
    "product over rows": lambda net, x, y: net(x).t() @ y,
    "reshaped": lambda net, x, y: net(x).reshape(-1, 4).softmax(-1).sum(0),
    "attention": lambda net, x, y: F.scaled_dot_product_attention(*[net(x).view(-1, 4, 2)] * 3).sum(),
    "attention over rows": lambda net, x, y: F.scaled_dot_product_attention(*[net(x).view(1, -1, 8)] * 3, is_causal=True).sum(0),
    "split": lambda net, x, y: torch.cat(net(x).chunk(2, 1)[::-1], 1),
    "frobenius": lambda net, x, y: net(x).square().sum().sqrt(),
    "positions": lambda net, x, y: net(x) * (torch.arange(x.shape[0], device=x.device) / x.shape[0])[:, None],
    "logarithm": lambda net, x, y: (net(x).square() + 1e-3).log().mean(),
    "deviation": lambda net, x, y: net(x).std(0),
    "variance and mean": lambda net, x, y: torch.cat(torch.var_mean(net(x), 0)),
    "running sum": lambda net, x, y: net(x).cumsum(0),
    "softmax over rows": lambda net, x, y: (net(x) * y).softmax(0).cumsum(0),
    "flipped": lambda net, x, y: net(x).flip(0),
    "rolled": lambda net, x, y: net(x).roll(1, 0),
    "one after the other": lambda net, x, y: net(x)[1:] - net(x)[:-1],
    "each with each": lambda net, x, y: net(x) @ net(x).t(),
    "transposed and flat": lambda net, x, y: net(x).t().reshape(-1),
    "transposed": lambda net, x, y: net(x).t(),
    "last row": lambda net, x, y: net(x)[-1],
    "square of the size": lambda net, x, y: net(x).sum() / x.shape[0] ** 2,
    "positions to the last": lambda net, x, y: net(x) * (torch.arange(x.shape[0], device=x.device) / (x.shape[0] - 1))[:, None],
    "sorted": lambda net, x, y: net(x).sort(0).values,
    "product": lambda net, x, y: net(x).prod(0),
    "views": lambda net, x, y: (net(x), x.view(-1), x[1:], net(x).t(), x.shape[0] * 2),
    "two of three outputs": lambda net, x, y: (net(x).mean(), net.get_parameter("table.weight") * 2, net(x).std(0)),
}
BY_SIZE: dict[str, Loss] = {
    "spectrum": lambda net, x, y: torch.fft.rfft(net(x), dim=0).abs(),
    "distances": lambda net, x, y: torch.linalg.cholesky(net(x) @ net(x).t() + 9 * torch.eye(x.shape[0], device=x.device)),
}


def _some(cases: dict[str, Loss], *quick: str) -> list[Any]:
    """All of them, those that are not `quick` in the whole sweep alone."""
    return [pytest.param(fn, id=name, marks=() if name in quick else pytest.mark.slow) for name, fn in cases.items()]


@pytest.fixture(autouse=True)
def _count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_made", type(backend._made)())


def _first(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


def _compare(fn: Loss, sizes: tuple[int, ...], dynamic: bool | None = True) -> None:
    """Values and gradients are CPU torch's at each size."""
    host, model = twins(Net)
    fast = torch.compile(fn, backend="spmd", fullgraph=True, dynamic=dynamic)
    for i, size in enumerate(sizes):
        x, y = batch(size, 8, seed=i), batch(size, 8, seed=i + 50)
        given, here = x.to("jax").requires_grad_(), x.clone().requires_grad_()
        got, want = fast(model, given, y.to("jax")), fn(host, here, y)
        assert_same(got, want, LOOSE)
        for result in (got, want):
            _first(result).square().sum().backward()
        want_grads: list[Any] = [here.grad, *(p.grad for p in host.parameters())]
        got_grads: list[Any] = [given.grad, *(p.grad for p in model.parameters())]
        for g, w in zip(got_grads, want_grads, strict=True):
            assert (g is None) == (w is None)
            scale = 1.0 if w is None else max(1.0, float(w.abs().max()))
            if w is not None:
                assert_same(g.cpu() / scale, w / scale, LOOSE)
        host.zero_grad()
        model.zero_grad()


def num_programs() -> int:
    return sum(graph.num_programs for graph in graphs())


QUICK = ("rows", "cross entropy", "deviation", "softmax over rows", "views", "last row", "one after the other")


@pytest.mark.parametrize("fn", _some(CASES, *QUICK))
def test_rows_that_are_padding_have_no_part(fn: Loss) -> None:
    _compare(fn, SIZES)
    assert [graph.sizes for graph in graphs()] == [None]
    assert num_programs() == 3  # of 8, 64 and 128 rows


@pytest.mark.parametrize("fn", _some(BY_SIZE, "spectrum"))
def test_what_is_not_proved_to_be_exact_is_compiled_for_each_size(fn: Loss) -> None:
    _compare(fn, (20, 30))
    assert all(graph.sizes is not None for graph in graphs())
    assert num_programs() == 2


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[1, 8, rows]: a sequence as long as there are rows."""
    return x.t()[None]


class Strided(nn.Module):
    """Halves an image at each layer, whatever its sides are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Conv2d(4, 3, 3, stride=2)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.max_pool2d(self.norm(self.first(x)).relu(), 3, 2, 1)).mean((2, 3))


STRIDED: dict[str, Loss] = {
    "convolution": lambda net, x, y: F.conv1d(_rows(net(x)), net.get_parameter("up.weight")[:, :, None].expand(-1, -1, 3), None, 2, 1),
    "steps of three": lambda net, x, y: F.conv1d(_rows(net(x)), net.get_parameter("up.weight")[:, :, None], None, 3),
    "max": lambda net, x, y: F.max_pool2d(_rows(net(x)), (1, 3), (1, 2), (0, 1)),
    "mean": lambda net, x, y: F.avg_pool1d(_rows(net(x)), 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "every other row": lambda net, x, y: net(x)[::2],
    "a few means": lambda net, x, y: F.adaptive_avg_pool1d(_rows(net(x)), 3),
}


@pytest.mark.parametrize("fn", _some(STRIDED, "convolution", "max", "every other row"))
def test_windows_with_steps_have_a_program_for_each_bucket(fn: Loss) -> None:
    _compare(fn, (7, 70, 64, 12, 100, 9, 91))
    assert [graph.sizes for graph in graphs()] == [None]
    assert num_programs() <= 4  # of 8, 16, 64 and 128 rows


def test_images_of_any_sides() -> None:
    host, model = twins(Strided)
    fast = torch.compile(model, backend="spmd", fullgraph=True, dynamic=True)
    for height, width in ((17, 20), (18, 23), (31, 30), (24, 17), (29, 32), (20, 26)):
        x = batch(2, 1, height, width, seed=height)
        got, want = fast(x.to("jax")), host(x)
        assert_same(got, want, LOOSE)
        got.square().sum().backward()
        want.square().sum().backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in host.parameters()], LOOSE)
    assert [graph.sizes for graph in graphs()] == [None]
    assert num_programs() == 2  # the first sizes, then 32 x 32


def test_sizes_are_found_by_their_second_value() -> None:
    _compare(CASES["deviation"], (6, 30, 27, 19, 17), dynamic=None)
    assert num_programs() == 2  # Dynamo's first graph has the size 6


class Attention(nn.Module):
    """Causal attention over positions with embeddings, dropout and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.norm = nn.Embedding(11, 8), nn.Embedding(600, 8), nn.LayerNorm(8)
        self.mix, self.head = nn.Linear(8, 24), nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        q, k, v = self.mix(self.norm(x)).view(*ids.shape, 2, 12).transpose(1, 2).split(4, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(*ids.shape, 8)
        return F.cross_entropy(self.head(x + y).flatten(0, 1), ids.flatten())


def test_batch_and_sequence_vary_together() -> None:
    host, model = twins(Attention)
    fast = torch.compile(model, backend="spmd", fullgraph=True, dynamic=True)
    for rows, length in ((4, 12), (5, 9), (3, 16), (8, 13), (2, 10), (7, 31), (6, 20)):
        ids = torch.randint(11, (rows, length), generator=torch.Generator().manual_seed(rows))
        got, want = fast(ids.to("jax")), host(ids)
        got.backward()
        want.backward()
        assert_same(got, want)
        assert_same([p.grad for p in model.parameters()], [p.grad for p in host.parameters()], LOOSE)
    assert num_programs() == 3  # the first sizes, then 8 x 16 and 8 x 32
    assert [graph.sizes for graph in graphs()] == [None]


class Normed(nn.Module):
    """Statistics over rows, kept from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x))


def test_statistics_over_rows_are_written() -> None:
    host, model = twins(Normed)
    fast = torch.compile(model, backend="spmd", fullgraph=True, dynamic=True)
    for size in SIZES:
        assert_same(fast(batch(size, 8).to("jax")), host(batch(size, 8)), LOOSE)
        assert_same_model(model, host, LOOSE)
    assert num_programs() == 3


def test_an_argument_whose_size_varies_is_written() -> None:
    fast = torch.compile(lambda x: x.add_(1).sum(0), backend="spmd", fullgraph=True, dynamic=True)
    for size in (5, 7, 6):
        x, given = batch(size, 8), batch(size, 8).to("jax")
        assert_same(fast(given), x.add_(1).sum(0))
        assert_same(given, x)


LAID: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1),
    "turned around": lambda x: x.permute(2, 1, 0),
    "last first": lambda x: x.permute(1, 2, 0),
    "of another shape": lambda x: x.view(-1, 3, 4),
    "flat": lambda x: x.view(-1),
    "a part": lambda x: x[1:, :, :2],
}


@pytest.mark.parametrize("lay", LAID.values(), ids=LAID)
def test_inputs_lie_in_their_storage_in_any_way(lay: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def fn(x: torch.Tensor) -> Any:
        return x.exp().softmax(-1), x[..., 1:], x.add_(1).sum(0)

    fast = torch.compile(fn, backend="spmd", fullgraph=True, dynamic=True)
    for size in (5, 7, 6):
        want, given = batch(size, 4, 3), batch(size, 4, 3).to("jax")
        got, wanted = fast(lay(given)), fn(lay(want))
        assert_same(got, wanted)
        assert [t.stride() for t in got] == [t.stride() for t in wanted]
        assert_same(given, want)
    assert not any(graph.sizes for graph in graphs())


def test_cpu_tensors_and_integers_vary_too() -> None:
    fast = torch.compile(lambda x, scale, n: (x * scale.to("jax")).sum(0) * n, backend="spmd", fullgraph=True, dynamic=True)
    for size in (5, 7, 6):
        x, scale = batch(size, 8), batch(size, 8, seed=3)
        assert_same(fast(x.to("jax"), scale, size + 1), (x * scale).sum(0) * (size + 1))
    assert num_programs() == 2


def test_what_dynamo_took_for_granted_of_a_size_holds_for_the_traces() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        pairs = x.view(-1, 4, 8)
        return pairs.std(1).softmax(0) if x.shape[0] > 10 else pairs.sum(0)

    fast = torch.compile(fn, backend="spmd", dynamic=True)
    for size in (8, 20, 28, 24, 16):
        assert_same(fast(batch(size, 8).to("jax")), fn(batch(size, 8)))
    assert not any(graph.sizes for graph in graphs())
    assert num_programs() == 3  # 8; 16 and 32


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("where", [("data", None), ("data", "model")])
def test_marked_batches_are_padded_to_what_their_shards_divide(mesh_4x2: mesh.Mesh, where: tuple[Any, ...]) -> None:
    host, model = twins()
    spmd.mark_sharding(model.up.weight, mesh_4x2, ("model", None))
    spmd.mark_sharding(model.down.weight, mesh_4x2, (None, "model"))
    fast = torch.compile(lambda net, x: net(x).softmax(0), backend="spmd", fullgraph=True, dynamic=True)
    for size in (3, 6, 30, 5, 19):
        x = batch(size, 8)
        got, want = fast(model, spmd.mark_sharding(x.to("jax"), mesh_4x2, where)), host(x).softmax(0)
        assert_same(got, want)
        got.square().sum().backward()
        want.square().sum().backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in host.parameters()])
    assert num_programs() == 2
    assert spmd.XLAShardedTensor(model.up.weight.grad).partition_spec == ("model", None)


def test_a_size_of_one_is_a_program_of_its_own() -> None:
    fast = torch.compile(lambda x: x - x.mean(0), backend="spmd", dynamic=True)
    for size in (5, 1, 3, 1):
        assert_same(fast(batch(size, 8).to("jax")), batch(size, 8) - batch(size, 8).mean(0))


def test_masks_are_not_kept_for_the_backward_pass() -> None:
    kept: list[int] = []
    for dynamic in (False, True):
        torch._dynamo.reset()
        _, model = twins(Net)
        shapes: list[int] = []
        fast = torch.compile(CASES["cross entropy"], backend="spmd", fullgraph=True, dynamic=dynamic)
        fast(model, batch(64, 8).to("jax"), batch(64, 8).to("jax"))
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=shapes: s.append(t.numel() * t.itemsize) or t, lambda t: t):
            fast(model, batch(64, 8).to("jax"), batch(64, 8).to("jax"))
        kept.append(sum(shapes))
    assert kept[1] <= kept[0] * 1.25  # with each mask once it were 1.8 times as much


def test_dropout_draws_as_many_numbers_as_the_eager_device() -> None:
    drop = torch.compile(lambda x: (F.dropout(x, 0.5), torch.rand_like(x)), backend="spmd", dynamic=True)
    for size in (3, 5, 7, 100):
        x = batch(size, 8).to("jax")
        torch.manual_seed(0)
        want = F.dropout(x, 0.5), torch.rand_like(x)
        torch.manual_seed(0)
        assert_same(drop(x), want)
    assert num_programs() == 3  # the first sizes; 8 and 128 rows


def test_values_that_are_not_finite_in_a_row_that_is_padding_do_not_spread() -> None:
    fast = torch.compile(lambda x, w: (x * w).log().sum(), backend="spmd", dynamic=True)
    for size in (3, 5):
        x, w, given = batch(size, 8).square() + 0.1, torch.ones(8, requires_grad=True), torch.ones(8).to("jax").requires_grad_()
        fast(x.to("jax"), given).backward()
        (x * w).log().sum().backward()
        assert_same(given.grad, w.grad)


def test_a_python_float_whose_value_torch_needs_is_a_constant_and_too_many_are_none(caplog: pytest.LogCaptureFixture) -> None:
    fast = torch.compile(lambda x, scale: x.add(x.abs(), alpha=scale), backend="spmd", dynamic=True)  # is it 1, asks the derivative
    for i in range(20):
        assert_same(fast(batch(3, 8).to("jax").requires_grad_(), i + 0.5), batch(3, 8) + batch(3, 8).abs() * (i + 0.5))
    assert "each with its own program" in caplog.text

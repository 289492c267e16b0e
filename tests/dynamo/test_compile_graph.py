"""torch.compile(backend="spmd"): values, gradients, writes, views, random numbers and modes are CPU torch's; programs are counted."""

import copy
import logging
import math
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mesh
import spmd
from spmd.dynamo import compile_graph, graphs
from tests.oracle import MLP, assert_same, assert_same_model, batch, descend, twins

COUNTERS = torch._dynamo.utils.counters
LOOSE = (2e-5, 2e-5)  # gradients of a bias before a batch norm are sums that cancel


def compiled(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, backend="spmd", **({"fullgraph": True} | options))  # pyright: ignore[reportCallIssue, reportArgumentType]


def num_programs() -> int:
    return sum(graph.num_programs for graph in graphs())


@pytest.fixture(autouse=True)
def _count(monkeypatch: pytest.MonkeyPatch) -> None:
    from spmd.dynamo import _compile_graph

    monkeypatch.setattr(_compile_graph, "_made", type(_compile_graph._made)())


class Shown(nn.Module):
    """Batch norm, and results that are views of each other and of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = F.gelu(self.norm(self.up(x)))
        return self.down(h), h, h.t(), h[:, :3], x.view(-1), x, (x * 2).detach(), h.detach()


def test_results_gradients_and_buffers_are_those_of_cpu_torch() -> None:
    host, model = twins(Shown)
    fast = compiled(model)
    for i in range(3):
        x, given = batch(6, 8, seed=i).requires_grad_(), batch(6, 8, seed=i).to("jax").requires_grad_()
        want, got = host(x), fast(given)
        assert_same(got, want, LOOSE)
        assert [t.stride() for t in got] == [t.stride() for t in want]
        assert [t.requires_grad for t in got] == [t.requires_grad for t in want]
        assert got[5] is given and got[2].untyped_storage()._cdata == got[1].untyped_storage()._cdata
        for results in (got, want):
            (results[0].square().sum() + results[2].sum() + results[3].sum() + results[4].sum()).backward()
        assert_same([given.grad, *(p.grad for p in model.parameters())], [x.grad, *(p.grad for p in host.parameters())], LOOSE)
        assert_same_model(model, host, LOOSE)
    assert num_programs() == COUNTERS["stats"]["unique_graphs"] == 1
    with torch.no_grad():
        assert_same(fast(batch(6, 8).to("jax")), host(batch(6, 8)), LOOSE)
    assert_same_model(model, host, LOOSE)
    assert num_programs() == 2


def test_recurrent_cells_are_captured_whole() -> None:
    """Torch has no shape function for the operator that a `GRUCell` calls on devices other than the CPU."""

    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.lstm, self.rnn = nn.GRUCell(4, 5), nn.LSTMCell(5, 6), nn.RNNCell(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(self.lstm(self.gru(x, self.gru(x)))[1])

    host, model = twins(Cells)
    want, got = host(batch(2, 4)), compiled(model)(batch(2, 4).to("jax"))
    assert_same(got, want)
    want.sum().backward()
    got.sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in host.parameters()])


@pytest.mark.parametrize(
    "results",
    [
        lambda y: (y.detach(), y),
        lambda y: (y.detach(), y[0], y),
        lambda y: (y.detach()[1], y.t()),
        lambda y: (y.detach(), y[:1]),
        lambda y: (y, y.detach(), y.detach()[0]),
    ],
)
def test_a_result_keeps_its_gradient_beside_its_detached_views(results: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
    host, model = twins()
    want, got = results(host(batch(2, 8))), compiled(lambda x: results(model(x)))(batch(2, 8).to("jax"))
    assert_same(got, want)
    assert [t.requires_grad for t in got] == [t.requires_grad for t in want]
    for found in (got, want):
        torch.stack([t.square().sum() for t in found if t.requires_grad]).sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in host.parameters()])


def test_a_training_loop_is_that_of_cpu_torch() -> None:
    host, model = twins()
    fast = compiled(model)
    theirs, ours = torch.optim.AdamW(host.parameters(), lr=1e-2), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(3):
        x = batch(4, 8, seed=i)
        assert_same(descend(fast, ours, x.to("jax")), descend(host, theirs, x))
    assert_same_model(model, host)
    assert num_programs() == 1


def test_dropout_draws_what_the_eager_device_draws_and_anew_in_each_call() -> None:
    model = MLP(p=0.5).to("jax")
    fast, x = compiled(model), batch(4, 8).to("jax")
    torch.manual_seed(3)
    want = [model(x).detach() for _ in range(3)]
    torch.manual_seed(3)
    got = [fast(x).detach() for _ in range(3)]
    assert_same(got, want)
    assert not torch.equal(got[0], got[1])
    assert num_programs() == 1


@pytest.mark.multidevice(num=8)
def test_marks_outside_and_inside_lay_out_values_and_gradients(mesh_4x2: mesh.Mesh) -> None:
    class Marked(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.up(x))
            return self.down(spmd.mark_sharding(h, mesh_4x2, ("data", "model")) if x.device.type == "jax" else h)

    host, model = twins(Marked)
    spmd.mark_sharding(model.up.weight, mesh_4x2, ("model", None))
    spmd.mark_sharding(model.down.weight, mesh_4x2, (None, "model"))
    fast, x = compiled(model), batch(8, 8)
    for _ in range(2):
        got, want = fast(spmd.mark_sharding(x.to("jax"), mesh_4x2, ("data", None))), host(x)
        assert_same(got, want)
        got.square().sum().backward()
        want.square().sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in host.parameters()])
    assert spmd.XLAShardedTensor(model.up.weight.grad).partition_spec == ("model", None)
    assert num_programs() == 1
    spmd.mark_sharding(model.up.weight, mesh_4x2, (None, None))
    assert_same(fast(x.to("jax")), host(x))
    assert num_programs() == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo asks an intermediate result for it
def test_a_graph_break_leaves_two_programs_and_the_same_numbers() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).exp()
        torch._dynamo.graph_break()
        return (y + x).sum()

    fast = compiled(fn, fullgraph=False)
    x, given = batch(4).requires_grad_(), batch(4).to("jax").requires_grad_()
    assert_same(fast(given), fn(x))
    fast(given).backward()
    fn(x).backward()
    assert_same(given.grad, x.grad)
    assert num_programs() == 2


@pytest.mark.parametrize("dynamic", [True, None])
def test_each_size_is_a_program_and_dynamo_captures_no_more_than_two_graphs(dynamic: bool | None) -> None:
    host, model = twins()
    fast = compiled(model, dynamic=dynamic)
    for size in (3, 5, 7, 5, 3):
        got, want = fast(batch(size, 8).to("jax")), host(batch(size, 8))
        assert_same(got, want)
        got.sum().backward()
        want.sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in host.parameters()])
    assert COUNTERS["stats"]["unique_graphs"] <= 2
    assert num_programs() <= 4


def test_a_marked_dim_is_one_graph() -> None:
    fast = compiled(lambda x: x.sum(0) * x.shape[0])
    for size in (3, 5, 7):
        x = batch(size, 2)
        given = x.to("jax")
        torch._dynamo.mark_dynamic(given, 0)
        assert_same(fast(given), x.sum(0) * size)
    assert COUNTERS["stats"]["unique_graphs"] == 1


def test_a_cpu_tensor_is_an_input() -> None:
    fast = compiled(lambda x, scale, table: x * scale + table.to("jax"))
    for number in (2.0, 3.0):
        scale, table = torch.tensor(number), torch.full((3,), number)
        assert_same(fast(batch(3).to("jax"), scale, table), batch(3) * number + number)
    assert num_programs() == 1


@pytest.mark.parametrize("number", [3, 2.5])
def test_python_numbers_that_change_are_todays(number: float) -> None:
    fast = compiled(lambda x, n: x * n)
    for n in (number, number + 1, number + 2):
        assert_same(fast(batch(3).to("jax"), n), batch(3) * n)


FLOATS: dict[str, Callable[..., torch.Tensor]] = {
    "factor": lambda x, n: x * n,
    "arithmetic": lambda x, n: x * (n * 2 + 1) - x / (n + 3),
    "bounds": lambda x, n: x.clamp(-n, n) + torch.full_like(x, n),
    "of Python's math": lambda x, n: x * math.sqrt(n) * (1 + math.cos(math.pi * n)) + math.log2(n) * math.tanh(n) - math.atan(n),
    "value": lambda x, n: x.addcmul(x, x, value=n),
    "integers": lambda x, n: (x * 10).long() * n,
}


@pytest.mark.parametrize("is_marked", [False, True], ids=["one device", "sharded"])
@pytest.mark.parametrize("case", FLOATS)
def test_floats_that_vary_are_inputs_of_one_program(case: str, is_marked: bool) -> None:
    fn, fast = FLOATS[case], compiled(FLOATS[case])
    leaf = batch(8, 3).requires_grad_()
    x = leaf.detach().to("jax").requires_grad_()
    if is_marked:
        spmd.mark_sharding(x, mesh.Mesh(range(8), (8,), ("data",)), ("data", None))
    for i in range(24):
        n = 0.5 + i * 0.37
        got, want = fast(x, n), fn(leaf, n)
        assert_same(got, want)
        if want.requires_grad:
            assert_same(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), leaf))
    assert num_programs() <= 3  # Dynamo's first graph has a constant
    assert not any(graph.refused for graph in graphs())


def test_a_float_whose_value_a_derivative_of_torch_needs_is_a_constant() -> None:
    fn = lambda x, n: x.add(x.abs(), alpha=n)  # noqa: E731 - is it 1?
    fast, x = compiled(fn), batch(3).to("jax").requires_grad_()
    for n in (0.25, 0.5, 0.75):
        assert_same(fast(x, n), fn(batch(3), n))
    assert num_programs() == 3 and not any(graph.refused for graph in graphs())


def _write(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    other[1:].mul_(2)
    return x * other


@pytest.mark.parametrize(
    "view", [lambda t: t, lambda t: t.t(), lambda t: t[:, 1:3], lambda t: t[0]], ids=["whole", "transposed", "window", "row"]
)
def test_arguments_are_written(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    fast = compiled(_write)
    want, got = [batch(4, 4), batch(4, 4, seed=2)], [batch(4, 4).to("jax"), batch(4, 4, seed=2).to("jax")]
    for i in range(2):
        versions = [t._version for t in got]
        assert_same(fast(*map(view, got)), _write(*map(view, want)))
        assert_same(got, want)
        assert all(t._version > v for t, v in zip(got, versions, strict=True)), i


def test_two_names_of_one_storage_see_each_others_writes() -> None:
    fast = compiled(_write)
    want, got = batch(4, 4), batch(4, 4).to("jax")
    assert_same(fast(got, got.t()), _write(want, want.t()))
    assert_same(got, want)


def _replaces(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    p.data = x * 2
    return p + 1


def _swaps(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    p.data, x.data = x.data, p.data
    return p - x


@pytest.mark.parametrize("fn", [_replaces, _swaps])
def test_an_input_gets_other_memory(fn: Callable[..., torch.Tensor]) -> None:
    fast = compiled(fn)
    for _ in range(2):
        want, got = [batch(3), batch(3, seed=2)], [batch(3).to("jax"), batch(3, seed=2).to("jax")]
        assert_same(fast(*got), fn(*want))
        assert_same(got, want)


def test_a_write_between_forward_and_backward_is_found() -> None:
    w = batch(3).to("jax").requires_grad_()
    x = batch(3).to("jax")
    y = compiled(lambda x, w: (x * w).sum())(x, w)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_write_that_makes_the_gradient_wrong_is_found_where_the_gradient_is_asked_for() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x * w).sum()
        x.add_(1)
        return y

    want, got = fn(batch(3), batch(3)), compiled(fn)(batch(3).to("jax"), batch(3).to("jax").requires_grad_())
    assert_same(got.detach(), want)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        got.backward()


def test_backward_twice_is_refused_as_by_torch_and_kept_where_asked() -> None:
    w = batch(3).to("jax").requires_grad_()
    y = compiled(lambda w: w.exp().sin().sum())(w)
    y.backward(retain_graph=True)
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("jax", torch.bfloat16)])
def test_under_modes(mode: Callable[[], Any]) -> None:
    model = MLP().to("jax")
    fast, x = compiled(model), batch(4, 8).to("jax")
    for _ in range(2):
        with mode():
            got, want = fast(x), model(x)
        assert got.requires_grad == want.requires_grad and got.is_inference() == want.is_inference()
        assert_same(got.detach(), want.detach())
    assert_same(fast(x), model(x))


@pytest.mark.parametrize("is_inside", [True, False])
def test_autocast_trains_as_eagerly(is_inside: bool) -> None:
    host, model = twins(lambda: MLP().to("jax"))

    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("jax", torch.bfloat16, enabled=is_inside):
            return net(x).float().square().sum()

    fast, x = compiled(loss), batch(4, 8).to("jax")
    with torch.autocast("jax", torch.bfloat16, enabled=not is_inside):
        got, want = fast(model, x), loss(host, x)
    got.backward()
    want.backward()
    assert_same([got, *(p.grad for p in model.parameters())], [want, *(p.grad for p in host.parameters())], (2e-2, 1e-2))


def test_hooks_run() -> None:
    host, model = twins()
    seen: list[Any] = []
    for net in (host, model):
        net.up.register_forward_hook(lambda module, args, out: out * 2)
        net.down.weight.register_hook(lambda grad: grad * 3)
        net.up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    fast = compiled(model)
    for net in (host, fast):
        net(batch(4, 8).to("cpu" if net is host else "jax")).sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in host.parameters()])
    assert len(seen) == 2


def test_saved_tensor_hooks_see_what_is_kept() -> None:
    packed: list[torch.Size] = []
    host, model = twins()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.cpu(), lambda t: t.to("jax")):
        got = compiled(model)(batch(4, 8).to("jax"))
    got.sum().backward()
    host(batch(4, 8)).sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in host.parameters()])
    assert torch.Size([4, 16]) in packed


def test_a_checkpoint_keeps_less_and_computes_the_same() -> None:
    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(torch.tanh(x @ w) @ w) @ w)

    def kept(fn: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[int, torch.Tensor | None]:
        shapes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.numel()) or t, lambda t: t):
            fn(x, w).sum().backward()
        return sum(shapes), w.grad

    x, w = batch(4, 8).double(), batch(8, 8).double().requires_grad_()
    block(x, w).sum().backward()
    plain, grad = kept(compiled(block), x.to("jax"), w.detach().to("jax").requires_grad_())
    torch._dynamo.reset()
    again = compiled(lambda x, w: checkpoint(block, x, w, use_reentrant=False))
    fewer, same = kept(again, x.to("jax"), w.detach().to("jax").requires_grad_())
    assert_same([grad, same], [w.grad, w.grad])
    assert fewer < plain


def test_inside_spmd_compile_it_is_part_of_the_program() -> None:
    host, model = twins()
    fast = compiled(model)
    ours, theirs = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(host.parameters(), lr=0.1)
    step = spmd.compile(lambda x: descend(fast, ours, x))
    for i in range(3):
        x = batch(4, 8, seed=i)
        assert_same(step(x.to("jax")), descend(host, theirs, x))
    assert step.num_traces == 1 and num_programs() == 0


def test_a_compiled_step_inside_it_ends_the_graph_and_runs() -> None:
    double = spmd.compile(lambda x: x * 2)
    fast = compiled(lambda x: double(x + 1) - 1, fullgraph=False)
    for _ in range(2):
        assert_same(fast(batch(3).to("jax")), (batch(3) + 1) * 2 - 1)
    assert double.num_traces == 1


def test_what_only_pytorch_can_do_runs_operation_by_operation_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    fast = compiled(lambda x, table: (x + (table * 2).to("jax"), table * 3))
    with caplog.at_level(logging.WARNING, "spmd.dynamo"):
        for number in (2.0, 3.0):
            assert_same(fast(batch(3).to("jax"), torch.full((3,), number)), (batch(3) + 2 * number, torch.full((3,), 3 * number)))
    assert "a result of the graph is on the CPU" in caplog.text and len(caplog.records) == 1
    assert graphs()[0].refused is not None


def test_what_a_graph_computes_of_a_cpu_tensor_is_computed_by_the_program() -> None:
    fast = compiled(lambda x, table: x + (table * 2).t().to("jax"))
    for number in (2.0, 3.0):
        table = batch(3, 4) * number
        assert_same(fast(batch(4, 3).to("jax"), table), batch(4, 3) + 2 * table.t())
    assert graphs()[0].refused is None


def test_a_write_to_a_cpu_tensor_is_made_once_in_each_call() -> None:
    def fn(x: torch.Tensor, counts: list[torch.Tensor]) -> torch.Tensor:
        torch._foreach_add_(counts, 1)  # pyright: ignore[reportPrivateImportUsage]
        return x * 2

    fast, counts = compiled(fn), [torch.zeros(()), torch.zeros(100)]
    for i in range(3):
        assert_same(fast(batch(3).to("jax"), counts), batch(3) * 2)
        assert [float(c.sum()) for c in counts] == [i + 1, 100 * (i + 1)]


def test_on_the_host_it_is_pytorchs_own() -> None:
    model = MLP()
    fast = compiled(model)
    assert_same(fast(batch(4, 8)), model(batch(4, 8)))
    assert graphs()[0].refused == "it has no tensor on the device"


def test_options_are_refused() -> None:
    with pytest.raises(Exception, match="backend='spmd' has no option 'max_autotune'"):
        compiled(lambda x: x + 1, options={"max_autotune": True})(batch(3).to("jax"))


def test_the_entry_point_is_the_backend() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"]["torch_dynamo_backends"]["spmd"].partition(":")
    assert getattr(import_module(module), name) is compile_graph


def test_the_device_has_an_interface() -> None:
    from torch._dynamo.device_interface import DeviceGuard, get_interface_for_device

    interface = get_interface_for_device("jax")
    assert interface.is_available() and interface.device_count() == 1 and interface.is_bf16_supported()
    assert interface.current_device() == 0 and interface.get_device_properties("jax").num_devices >= 1
    interface.synchronize()
    with DeviceGuard(interface, 0):
        pass


def test_a_copy_is_another_model() -> None:
    model = MLP().to("jax")
    fast = compiled(model)
    fast(batch(4, 8).to("jax"))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.up.weight.zero_()
    assert_same(compiled(other)(batch(4, 8).to("jax")), other(batch(4, 8).to("jax")))


def test_results_that_are_views_of_one_value_share_its_storage() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x * w
        y = h.sin() * x
        return h[:2], h[1:], y, h.t()

    fast = compiled(fn)
    w, given = batch(3, 4).requires_grad_(), batch(3, 4).to("jax").requires_grad_()
    want, got = fn(batch(3, 4, seed=2), w.clone()), fast(batch(3, 4, seed=2).to("jax"), given)
    assert_same([t.detach() for t in got], [t.detach() for t in want])
    assert len({t.untyped_storage()._cdata for t in (got[0], got[1], got[3])}) == 1
    plain = batch(3, 4, seed=2)
    (w * plain).sin().mul(plain).sum().backward()
    got[2].sum().backward()
    assert_same(given.grad, w.grad)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "transposed": lambda t: t.t(),
    "window": lambda t: t[:, 1:3],
    "row": lambda t: t[0],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_of_arguments_are_views_of_them(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[1:], x.unsqueeze(0), x[..., :2], x * 2

    want, got = batch(4, 4), batch(4, 4).to("jax")
    fast = compiled(fn)
    for _ in range(2):
        theirs, ours = fn(view(want)), fast(view(got))
        assert_same(ours, theirs)
        for results in (theirs, ours):
            results[0].add_(1)
        assert_same([*ours, got], [*theirs, want])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo asks an intermediate result for it
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_gradient_flows_through_a_view_of_an_argument(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[1:], x.unsqueeze(0), x[..., :2].detach(), x.sin()

    want, got = batch(4, 4).requires_grad_(), batch(4, 4).to("jax").requires_grad_()
    theirs, ours = fn(view(want * 2)), compiled(fn)(view(got * 2))
    assert [t.requires_grad for t in ours] == [t.requires_grad for t in theirs]
    for results in (theirs, ours):
        (results[0].square().sum() + results[1].exp().sum() + results[3].sum()).backward()
    assert_same(got.grad, want.grad)


def test_a_cotangent_has_the_shape_of_a_transposed_result() -> None:
    fast = compiled(lambda x: x.exp().t())
    x, given, weight = batch(3, 4).requires_grad_(), batch(3, 4).to("jax").requires_grad_(), batch(4, 3)
    (fast(given) * weight.to("jax")).sum().backward()
    (x.exp().t() * weight).sum().backward()
    assert_same(given.grad, x.grad)
    assert num_programs() == 1

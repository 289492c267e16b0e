"""The modules beside `torch_xla.distributed.spmd`: device, steps, runtime, metrics, loaders, compile, experimental."""

# pyright: reportMissingImports=false
import copy
import functools
import sys
import time
from typing import Any

import jax.numpy as jnp
import pytest
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import mesh as mesh_
import spmd
from tests.oracle import MLP, assert_same, batch

XLA = torch.device("xla:0")


def test_every_module_can_be_imported_by_either_form() -> None:
    import importlib

    from spmd.compat.torch_xla import _module_table

    for name in _module_table.contents():
        module = importlib.import_module(name)
        assert sys.modules[name] is module and module.__name__ == name
        parent, _, last = name.rpartition(".")
        if parent:
            assert getattr(sys.modules[parent], last) is module
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torch_xla.nothing")
    import torch_xla.core.xla_model as xm

    with pytest.raises(AttributeError, match=r"torch_xla.core.xla_model.send does not exist(?s:.*)docs/migration.md"):
        xm.send  # noqa: B018
    with pytest.raises(AttributeError, match="_XLAC._get_graph_hash does not exist"):
        importlib.import_module("torch_xla")._XLAC._get_graph_hash  # noqa: B018


def test_the_device_in_all_its_spellings() -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    assert torch_xla.device() == xm.xla_device() == xr.xla_device() == XLA == torch_xla.device(0)
    assert torch_xla.devices() == [XLA] and xm.get_xla_supported_devices() == ["xla:0"]
    assert torch_xla.device_count() == mesh_.device_count() == len(torch_xla.real_devices())
    with pytest.raises(IndexError):
        torch_xla.device(1)
    assert xm.is_xla_tensor(torch.ones(1, device=xm.xla_device())) and not xm.is_xla_tensor(torch.ones(1))
    assert xm.xla_device_hw(xm.xla_device()) == "CPU" and xm.xla_real_devices()[0] == "CPU:0"
    assert xm.parse_xla_device("TPU:3") == ("TPU", 3) and xm.parse_xla_device("xla") is None


def test_runtime_queries() -> None:
    import torch_xla.runtime as xr

    count = mesh_.device_count()
    xr.use_spmd()
    assert xr.is_spmd() and xr.using_pjrt() and xr.device_type() == "CPU" and xr.is_bf16_supported()
    assert xr.global_runtime_device_count() == xr.addressable_runtime_device_count() == count
    assert (xr.world_size(), xr.global_ordinal(), xr.local_ordinal(), xr.process_count(), xr.process_index()) == (1, 0, 0, 1, 0)
    attributes = xr.global_runtime_device_attributes()
    assert attributes == xr.global_device_attributes() and [a["name"] for a in attributes] == [f"CPU:{i}" for i in range(count)]
    assert xr.runtime_device_attributes("CPU:0") == attributes[0]
    with pytest.raises(mesh_.DeviceError, match="there is no device 'TPU:0'"):
        xr.runtime_device_attributes("TPU:0")
    with pytest.raises(spmd.SpmdError, match="automatic sharding"):
        xr.use_spmd(auto=True)


def test_step_closures_run_at_the_end_of_a_step_in_order() -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm

    seen: list[Any] = []
    xm.add_step_closure(lambda a, b: seen.append((a, b)), (1, 2))
    xm.add_step_closure(seen.append, args=(torch.ones(1, device="xla") * 3,))
    assert seen == []
    xm.mark_step()
    assert seen[0] == (1, 2) and seen[1].item() == 3
    torch_xla.sync(wait=True)
    xm.add_step_closure(seen.append, ("late",), run_async=True)
    xm.mark_step(wait=True)
    deadline = time.monotonic() + 30
    while len(seen) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen[2] == "late" and len(seen) == 3
    xm.wait_device_ops()

    xm.add_step_closure(lambda: 1 / 0, run_async=True)
    with pytest.raises(ZeroDivisionError):
        for _ in range(3000):
            xm.mark_step()
            time.sleep(0.01)
    xm.mark_step()

    def step(x: torch.Tensor) -> torch.Tensor:
        xm.add_step_closure(print, (x,))
        return x

    with pytest.raises(spmd.TraceError, match="would run only once, not in every step"):
        spmd.compile(step)(torch.ones(1, device="xla"))


def test_an_optimizer_step_is_the_optimizers() -> None:
    import torch_xla.core.xla_model as xm

    host = MLP()
    model = copy.deepcopy(host).to(xm.xla_device())
    for m, run in ((host, lambda o: o.step()), (model, functools.partial(xm.optimizer_step, barrier=True))):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        m(batch(4, 8).to(next(m.parameters()).device)).square().sum().backward()
        xm.reduce_gradients(optimizer)
        run(optimizer)
    assert_same([p.detach().cpu() for p in model.parameters()], [p.detach() for p in host.parameters()])
    loss = xm.optimizer_step(torch.optim.SGD(model.parameters(), lr=0.1), optimizer_args={"closure": lambda: torch.tensor(2.0)})
    assert loss == 2.0


def test_metrics_count_transfers_compilations_and_steps() -> None:
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met
    import torch_xla.distributed.spmd as xs

    met.clear_all()
    assert met.counter_value("MarkStep") is None and met.metric_data("OutboundData") is None and met.counter_names() == []
    x = xs.mark_sharding(batch(8, 5).to("xla"), xs.get_1d_mesh("data"), ("data", None))
    assert met.metric_data("OutboundData")[:2] == (1, 8 * 5 * 4) and met.metric_data("TransferToDeviceTime")[0] == 1
    (x * 1.2345).cpu()
    xm.mark_step()
    assert met.counter_value("MarkStep") == 1 and "MarkStep" in met.counter_names()
    assert met.metric_data("InboundData")[1] >= 8 * 5 * 4 and met.metric_data("CompileTime")[0] >= 1
    report = met.metrics_report()
    assert "Metric: CompileTime\n  TotalSamples: " in report and "Counter: MarkStep\n  Value: 1\n" in report
    assert "Counter: MarkStep\n  Value: 1\n" in met.short_metrics_report() and "Inbound" not in met.short_metrics_report()
    assert met.metric_data("Nothing") is None and "CompileTime" in met.metric_names()
    met.clear_counters()
    assert met.counter_value("MarkStep") is None


@pytest.mark.parametrize("sharded", [False, True])
def test_a_loader_gives_batches_on_the_device_and_ends_steps(sharded: bool) -> None:
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met
    import torch_xla.distributed.parallel_loader as pl
    import torch_xla.distributed.spmd as xs

    source = DataLoader(TensorDataset(batch(32, 4), torch.arange(32)), batch_size=8)
    spec = xs.ShardingSpec(xs.get_1d_mesh("data"), ("data", None)) if sharded else None
    loader = pl.MpDeviceLoader(source, xm.xla_device(), input_sharding=spec)
    assert len(loader) == 4
    met.clear_all()
    for (x, y), (want_x, want_y) in zip(loader, source, strict=True):
        assert x.device == y.device == XLA and isinstance(x, xs.XLAShardedTensor) == sharded
        assert_same((x.cpu(), y.cpu()), (want_x, want_y))
    assert met.counter_value("MarkStep") == 4
    (x, _), *_ = pl.ParallelLoader(source, [xm.xla_device()]).per_device_loader(xm.xla_device())
    assert x.device == XLA
    loader.close()


def test_a_loader_whose_code_says_xla_itself() -> None:
    import torch_xla.distributed.parallel_loader as pl

    class Source:
        def __iter__(self) -> Any:
            for i in range(2):
                yield torch.full((2,), float(i), device="xla")

    assert [x.tolist() for x in pl.MpDeviceLoader(Source(), "xla")] == [[0.0, 0.0], [1.0, 1.0]]


def test_data_is_sent_with_its_sharding() -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs
    import torch_xla.utils.utils as xu

    grid = xs.get_1d_mesh()
    x, y = xm.send_cpu_data_to_device([batch(8, 4), batch(3)], xm.xla_device(), input_sharding=xs.ShardingSpec(grid, (0, None)))
    assert torch_xla._XLAC._get_xla_sharding_spec(x) == xs.ShardingSpec(grid, (0, None)).to_xla()
    assert y.device == XLA and torch_xla._XLAC._get_xla_sharding_spec(y) == ""
    info = torch_xla._XLAC._get_xla_tensor_debug_info
    fresh = batch(5, 5).to("xla")
    assert "Tensor on host: with size [5, 5]" in info(fresh) and "XLAData: None" in info(fresh)
    after = fresh + 1
    torch_xla.sync()
    assert after.shape == (5, 5)
    assert "Tensor on host: None" in info(fresh) and "xla::device_data" in info(fresh)
    assert [s.tolist() for s in xu.SampleGenerator(torch.ones(1), 2)] == [[1.0], [1.0]] and len(xu.SampleGenerator(0, 5)) == 5


COLLECTIVES: list[Any] = [
    lambda xm, t: xm.all_reduce(xm.REDUCE_SUM, t),
    lambda xm, t: xm.all_reduce(xm.REDUCE_MAX, [t]),
    lambda xm, t: xm.all_gather(t),
    lambda xm, t: xm.reduce_scatter(xm.REDUCE_SUM, t, 1.0, 0, 2),
    lambda xm, t: xm.all_to_all(t, 0, 0, 2),
    lambda xm, t: xm.collective_permute(t, [[0, 1]]),
]


@pytest.mark.parametrize("call", COLLECTIVES)
def test_a_collective_of_a_global_tensor_is_refused_and_not_skipped(call: Any) -> None:
    import torch_xla.core.xla_model as xm

    with pytest.raises(NotImplementedError, match="of a global tensor: one process drives all devices"):
        call(xm, torch.ones(8, device="xla"))


def test_collectives_communicate_between_manual_tensors() -> None:
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs

    count = mesh_.device_count()
    grid = xs.get_1d_mesh("x")
    host = torch.arange(float(8 * 8)).reshape(8, 8)
    rows = host.reshape(count, 8 // count, 8)

    def run(fn: Any, full: Any, spec: Any = ("x", None)) -> torch.Tensor:
        part = xs.enable_manual_sharding(host.to("xla"), ("x", None), mesh=grid)
        return xs.disable_manual_sharding(fn(part), spec, full, mesh=grid).cpu()

    n = 8 // count
    for kind, want in (("sum", rows.sum(0)), ("max", rows.amax(0)), ("min", rows.amin(0))):
        assert torch.equal(run(lambda t, kind=kind: xm.all_reduce(kind, t), (n, 8), (None, None)), want)
    assert torch.equal(run(lambda t: xm.all_reduce("sum", t, scale=0.5), (n, 8), (None, None)), rows.sum(0) / 2)
    assert torch.equal(run(lambda t: xm.all_reduce("sum", t, groups=[list(range(count))]), (n, 8), (None, None)), rows.sum(0))
    assert torch.equal(run(lambda t: xm.all_gather(t, 0), (8, 8), (None, None)), host)
    assert torch.equal(run(lambda t: xm.reduce_scatter("sum", t, 1.0, 1, count), (n, 8), (None, "x")), rows.sum(0))
    assert torch.equal(run(lambda t: xm.all_to_all(t, 1, 0, count), (8, 8), (None, "x")), host)
    pairs = [[i, (i + 1) % count] for i in range(count)]
    assert torch.equal(run(lambda t: xm.collective_permute(t, pairs), (8, 8)), rows.roll(1, 0).reshape(8, 8))
    part = xs.enable_manual_sharding(host.to("xla"), ("x", None), mesh=grid)
    for wrong in (
        lambda: xm.all_reduce("mul", part),
        lambda: xm.all_reduce("sum", part, groups=[[0], [5, 6]]),
        lambda: xm.reduce_scatter("max", part, 1.0, 0, 2),
        lambda: xm.all_reduce("sum", xs.enable_manual_sharding(host.to("xla").requires_grad_(), ("x", None), mesh=grid)),
    ):
        with pytest.raises(NotImplementedError):
            wrong()


def test_a_collectives_output_argument_is_filled() -> None:
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs

    count = mesh_.device_count()
    part = xs.enable_manual_sharding(batch(8, 8).to("xla"), (None, "x"), mesh=xs.get_1d_mesh("x"))
    for run, shape in (
        (lambda out: xm.all_gather(part, 1, output=out), (8, 8)),
        (lambda out: xm.reduce_scatter("sum", part, 1.0, 0, count, output=out), (8 // count, 8 // count)),
    ):
        out = torch.zeros_like(part).new_zeros(shape)
        assert run(out) is out and out.shape == shape
        want = run(None)
        assert torch.equal(shown(out), shown(want)) and shown(out).any()
        with pytest.raises(NotImplementedError, match="output= of xm"):
            run(torch.zeros(shape, device="xla"))


def shown(part: Any) -> torch.Tensor:
    """A manual tensor's pieces, one behind the other."""
    import torch_xla.distributed.spmd as xs

    return xs.disable_manual_sharding(part, ("x", None), (part.shape[0] * mesh_.device_count(), part.shape[1]), mesh=part.manual_mesh).cpu()


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_and_and_or_are_bitwise_as_in_xla(dtype: torch.dtype) -> None:
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs

    count = mesh_.device_count()
    host = (torch.arange(8 * 3).reshape(8, 3) * 5 % 7).to(dtype)
    part = xs.enable_manual_sharding(host.to("xla"), ("x", None), mesh=xs.get_1d_mesh("x"))
    rows = host.reshape(count, 8 // count, 3)
    for kind, reduce_fn in ((xm.REDUCE_AND, torch.bitwise_and), (xm.REDUCE_OR, torch.bitwise_or)):
        want = functools.reduce(reduce_fn, rows)
        assert torch.equal(shown(xm.all_reduce(kind, part))[: 8 // count], want)


def test_a_permutation_names_devices_whatever_their_order_in_the_mesh() -> None:
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs

    count = mesh_.device_count()
    ids = list(reversed(range(count)))
    grid = xs.Mesh(ids, (count,), ("x",))
    host = torch.arange(8.0).reshape(8, 1)
    part = xs.enable_manual_sharding(host.to("xla"), ("x", None), mesh=grid)  # device i holds piece count - 1 - i
    sent = xm.collective_permute(part, [[ids[0], ids[-1]]])
    pieces = shown(sent).reshape(count, -1)
    assert torch.equal(pieces[-1], host.reshape(count, -1)[0]) and (count == 1 or not pieces[:-1].any())


def test_there_is_one_process() -> None:
    import torch_xla.core.xla_model as xm

    assert xm.xrt_world_size() == 1 and xm.get_ordinal() == xm.get_local_ordinal() == 0 and xm.is_master_ordinal()
    assert xm.rendezvous("done", b"x") == [b"x"]


def test_output_files_seeds_and_rates(capsys: Any, tmp_path: Any) -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm

    xm.master_print("a", 1, flush=True)
    assert capsys.readouterr().out == "a 1\n"
    xm.save({"x": torch.ones(2, device="xla"), "n": 1}, tmp_path / "f.pt")
    loaded = torch.load(tmp_path / "f.pt")
    assert loaded["x"].device.type == "cpu" and loaded["n"] == 1
    torch_xla.manual_seed(5)
    first = torch.rand(3, device="xla")
    xm.set_rng_state(5)
    assert xm.get_rng_state() == 5 and torch.equal(first, torch.rand(3, device="xla"))
    tracker = xm.RateTracker()
    tracker.add(10)
    assert tracker.rate() > 0 and tracker.global_rate() > 0
    assert set(xm.get_memory_info()) == {"bytes_used", "bytes_limit"}
    xm.unlazy([first])
    xm.check_view_sharing({})


@pytest.mark.parametrize("form", ["call", "decorator", "region"])
def test_compile_in_each_form_trains_the_same(form: str) -> None:
    import torch_xla

    host = MLP()
    model = copy.deepcopy(host).to("xla")
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (host, model)]
    x, y = batch(4, 8), batch(4, 8, seed=2)

    def step(m: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (m(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    device_step = lambda x, y: step(*pairs[1], x, y)  # noqa: E731
    run = torch_xla.compile(device_step) if form == "call" else torch_xla.compile()(device_step) if form == "decorator" else None
    for _ in range(3):
        want = step(*pairs[0], x, y)
        if run is None:
            with torch_xla.compile():
                got = device_step(x.to("xla"), y.to("xla"))
        else:
            got = run(x.to("xla"), y.to("xla"))
        assert_same(got.detach().cpu(), want.detach())
    if run is not None:
        assert run.spmd_step.num_traces == 1
        assert_same([p.grad.cpu() for p in model.parameters()], [p.grad for p in host.parameters()])


def test_compile_counts_graphs_and_takes_modules() -> None:
    import torch_xla

    run = torch_xla.compile(lambda x: x * 2, max_different_graphs=2, name="double")
    for n in (1, 2, 2):
        assert torch.equal(run(torch.ones(n, device="xla")).cpu(), torch.full((n,), 2.0))
    with pytest.raises(spmd.SpmdError, match="double needed 3 programs, but 2 are allowed"):
        run(torch.ones(3, device="xla"))
    once = torch_xla.compile(max_different_graphs=1, name="once")(lambda x: x * 2)
    once(torch.ones(1, device="xla"))
    with pytest.raises(spmd.SpmdError, match="once needed 2 programs, but 1 are allowed"):
        once(torch.ones(2, device="xla"))
    model = MLP().to("xla").eval()
    with torch.no_grad():
        assert_same(torch_xla.compile(model, full_graph=True)(batch(2, 8).to("xla")).cpu(), model(batch(2, 8).to("xla")).cpu())
    with torch_xla.step():
        pass


def test_experimental_modules() -> None:
    import torch_xla.core.xla_builder as xb
    from torch_xla.experimental import eager_mode
    from torch_xla.experimental.assume_pure import assume_pure
    from torch_xla.experimental.eager import is_eager_mode
    from torch_xla.experimental.gradient_accumulation import gradient_accumulation
    from torch_xla.experimental.scan import scan
    from torch_xla.experimental.scan_layers import scan_layers

    eager_mode(True)
    assert is_eager_mode()
    with torch.device("xla"):
        init = torch.tensor([0.0, 0.0], requires_grad=True)
        xs = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
        layers = [nn.Linear(4, 4) for _ in range(3)]
    carry, ys = scan(lambda c, x: (c + x, c + x), init, xs)
    assert carry.tolist() == [9.0, 12.0] and ys.tolist() == [[1.0, 2.0], [4.0, 6.0], [9.0, 12.0]]
    carry.sum().backward()
    assert xs.grad.tolist() == [[1.0, 1.0]] * 3
    x = torch.ones(4, device="xla")
    assert torch.equal(scan_layers(layers, x), nn.Sequential(*layers)(x))
    assert_same(assume_pure(layers[0])(x).detach().cpu(), layers[0](x).detach().cpu())
    assert_same(xb.call_jax(jnp.cumsum, (x,)).cpu(), torch.ones(4).cumsum(0))
    loss = gradient_accumulation(lambda x: layers[0](x).sum(), (torch.ones(3, 4, device="xla"),), layers[0])
    assert_same(layers[0].weight.grad.cpu(), torch.ones(4, 4)) and loss.device == XLA


def test_fsdp_as_its_documentation_has_it() -> None:
    import torch_xla.distributed.spmd as xs
    from torch_xla.distributed.fsdp import checkpoint_module
    from torch_xla.distributed.fsdp.utils import apply_xla_patch_to_nn_linear
    from torch_xla.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as FSDPv2

    grid = xs.Mesh(range(mesh_.device_count()), (mesh_.device_count(), 1), ("fsdp", "model"))
    host = nn.Sequential(MLP(), MLP())
    by_class = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={MLP})
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    x = batch(8, 8)
    for policy in (None, by_class, by_size):
        model = FSDPv2(apply_xla_patch_to_nn_linear(copy.deepcopy(host)), mesh=grid, auto_wrap_policy=policy)
        # by size: the layers, of 144 and 136 elements; once they are wrapped, nothing is left of the blocks around them
        assert sum(isinstance(m, FSDPv2) for m in model.modules()) == (1 if policy is None else 3 if policy is by_class else 5)
        out = model(xs.mark_sharding(x.to("xla"), grid, ("fsdp", None)))
        assert_same(out.detach().cpu(), host(x).detach())
        out.sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    assert_same(FSDPv2(checkpoint_module(copy.deepcopy(host)), grid)(x.to("xla")).detach().cpu(), host(x).detach())


def test_checkpointing_autocast_and_profiling_by_their_names() -> None:
    import torch_xla.debug.profiler as xp
    from torch_xla.amp import autocast
    from torch_xla.amp.syncfree import Adam
    from torch_xla.utils.checkpoint import checkpoint

    model = MLP().to("xla")
    x = batch(4, 8).to("xla").requires_grad_()
    with xp.StepTrace("step", step_num=1), xp.Trace("forward"):
        out = checkpoint(model, x)
    out.sum().backward()
    grad = x.grad.clone()
    x.grad = None
    model(x).sum().backward()
    assert_same(x.grad.cpu(), grad.cpu())
    with autocast(torch.device("xla")):
        assert model(x).dtype == torch.bfloat16
    assert Adam is torch.optim.Adam


@pytest.mark.parametrize("train", [False, True])
def test_torch_compile_with_backend_openxla(train: bool, monkeypatch: Any) -> None:
    import torch_xla.core.dynamo_bridge as bridge

    graphs: list[Any] = []
    extract = bridge.extract_compiled_graph
    monkeypatch.setattr(bridge, "extract_compiled_graph", lambda graph, args: (graphs.append(graph), extract(graph, args))[1])
    torch._dynamo.reset()
    host = MLP()
    model = copy.deepcopy(host).to("xla")
    compiled = torch.compile(model, backend="openxla")
    x = batch(4, 8)
    for _ in range(2):
        if not train:
            with torch.no_grad():
                assert_same(compiled(x.to("xla")).cpu(), host(x))
            continue
        got, want = compiled(x.to("xla")), host(x)
        got.square().sum().backward()
        want.square().sum().backward()
        assert_same(got.detach().cpu(), want.detach())
        assert_same([p.grad.cpu() for p in model.parameters()], [p.grad for p in host.parameters()])
        model.zero_grad()
        host.zero_grad()
    assert len(graphs) == (2 if train else 1)  # forward, and backward where there is one


def test_marks_stay_in_the_graph_that_backend_openxla_gets(monkeypatch: Any) -> None:
    import torch_xla.core.dynamo_bridge as bridge
    import torch_xla.distributed.spmd as xs

    grid = xs.Mesh(range(mesh_.device_count()), (mesh_.device_count(), 1), ("data", "model"))

    class Marked(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            xs.mark_sharding(x, grid, ("data", None))
            hidden = torch.relu(self.up(x))
            xs.mark_sharding(hidden, grid, ("data", "model"))
            return self.down(hidden)

    graphs: list[Any] = []
    extract = bridge.extract_compiled_graph
    monkeypatch.setattr(bridge, "extract_compiled_graph", lambda graph, args: (graphs.append(graph.code), extract(graph, args))[1])
    torch._dynamo.reset()
    model, host = Marked().to("xla"), MLP()
    host.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    got = torch.compile(model, backend="openxla", fullgraph=True)(batch(8, 8).to("xla"))
    want = host.down(torch.relu(host.up(batch(8, 8))))
    assert_same(got.detach().cpu(), want.detach())
    got.square().sum().backward()
    want.square().sum().backward()
    assert_same([p.grad.cpu() for p in model.parameters()], [p.grad for p in host.parameters()])
    assert [code.count("laid_out.default") for code in graphs] == [2, 1]


@pytest.mark.parametrize("where", ["cpu", "xla"])
def test_torchs_own_dtensor_functions_take_a_mesh_of_type_xla(where: str) -> None:
    import torch_xla
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
    from torch_xla.distributed.spmd import auto_policy

    count = mesh_.device_count()
    device_mesh = init_device_mesh("xla", mesh_shape=(count,))
    host = batch(3 * count, 8)
    t = distribute_tensor(host.to(where).requires_grad_(), device_mesh, [Shard(0)])
    assert type(t).__name__ == "XLAShardedTensor" and t.is_leaf and t.requires_grad and len(t.sharding_spec) > 0
    assert t.local_shards[0].data.shape == (3, 8) and t.partition_spec == (0, None) and t.placements == (Shard(0),)
    moved = t.redistribute(device_mesh, [Shard(1)])
    assert moved.partition_spec == (None, 0) and t.partition_spec == (0, None)
    assert t.redistribute(device_mesh, [Replicate()]).sharding_spec == "{replicated}"
    assert torch.equal(moved.full_tensor().cpu(), host) and torch.equal(t.to_local().cpu(), host)
    moved.full_tensor().sum().backward()
    assert_same(t.grad.cpu(), torch.ones(3 * count, 8))

    def shard(name: str, module: nn.Module, where: Any) -> None:
        if isinstance(module, nn.Linear):
            for parameter in module.parameters():
                distribute_tensor(parameter, device_mesh, [Shard(0)])

    for policy in (shard, auto_policy):
        plain = MLP()
        model = distribute_module(copy.deepcopy(plain), device_mesh, policy)
        assert torch_xla._XLAC._get_xla_sharding_spec(model.up.weight) != ""
        assert_same(model(batch(4, 8).to("xla")).detach().cpu(), plain(batch(4, 8)).detach())

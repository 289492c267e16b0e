"""Programs written for a process per device, kernels, scans and pure functions under torch_xla's names."""

# pyright: reportMissingImports=false
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import mesh as mesh_
import spmd
from spmd.compat.torch_xla import _partitioned_scan
from tests.oracle import assert_same, batch


def test_a_spawned_function_runs_once() -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.xla_multiprocessing as xmp

    seen: list[Any] = []
    xmp.spawn(lambda index, word: seen.append((index, word)), args=("a",))
    torch_xla.launch(lambda index: seen.append(index))
    assert seen == [(0, "a"), 0] and xmp.MpSerialExecutor().run(lambda: 5) == 5
    assert next(xmp.MpModelWrapper(nn.Linear(2, 2)).to(xm.xla_device()).parameters()).device == xm.xla_device()
    with pytest.raises(ValueError, match="cannot start 4 processes"):
        xmp.spawn(print, nprocs=4)


def test_what_every_process_has_is_what_the_one_has() -> None:
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    total = xm.mesh_reduce("tag", {"loss": torch.ones(2, device="xla")}, lambda held: (len(held), held[0]["loss"].device.type))
    assert total == (1, "cpu") and xm.rendezvous("tag", b"payload") == [b"payload"]
    assert xr.get_master_ip() and xm.xla_replication_devices()[0] == "CPU:0" and xm.xla_real_devices(["xla:0"]) == ["CPU:0"]


def test_the_stream_goes_on_where_its_state_was_taken() -> None:
    import torch_xla.core.xla_model as xm

    xm.set_rng_state(7)
    assert xm.get_rng_state() == 7
    first = torch.rand(3, device="xla")
    state = xm.get_rng_state()
    assert state != 7
    with xm.fork_rng():
        second = torch.rand(3, device="xla")
    assert xm.get_rng_state() == state
    assert_same(torch.rand(3, device="xla").cpu(), second.cpu())
    xm.set_rng_state(7)
    assert_same(torch.rand(3, device="xla").cpu(), first.cpu())


def test_a_scaler_takes_steps_that_are_finite() -> None:
    from torch_xla.amp import GradScaler, autocast

    model = nn.Linear(4, 4).to("xla")
    before, optimizer, scaler = model.weight.detach().cpu(), torch.optim.SGD(model.parameters(), lr=0.1), GradScaler()
    with autocast(torch.device("xla")):
        loss = model(batch(2, 4).to("xla")).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert loss.isfinite() and not torch.equal(model.weight.detach().cpu(), before)


def test_classes_written_as_floats_are_taken_as_torch_xla_takes_them() -> None:
    x, classes = batch(4, 3), torch.tensor([0, 2, 1, 1])
    for loss in (nn.CrossEntropyLoss(), lambda i, target: functional.nll_loss(i.log_softmax(1), target=target)):
        assert_same(loss(x.to("xla"), classes.float().to("xla")).cpu(), loss(x, classes))
    weights = batch(4, 3).softmax(1)
    assert_same(functional.cross_entropy(x.to("xla"), weights.to("xla")).cpu(), functional.cross_entropy(x, weights))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("extra", ["nothing", "segments", "numbers", "layout"])
def test_flash_attention_is_attention(causal: bool, extra: str) -> None:
    import torch_xla.distributed.spmd as xs
    from torch_xla.experimental.custom_kernel import FlashAttention, flash_attention

    host = [batch(8, 2, 6, 4, seed=i).requires_grad_() for i in range(3)]
    ids = torch.tensor([[0, 0, 1, 1, 1, 2]] * 8)
    mask = torch.zeros(8, 2, 6, 6)
    if extra == "segments":
        mask = mask.masked_fill(ids[:, None, :, None] != ids[:, None, None, :], float("-inf"))
    elif extra == "numbers":
        mask = batch(8, 2, 6, 6, seed=9)
    full = mask.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), float("-inf")) if causal else mask
    expected = functional.scaled_dot_product_attention(*host, attn_mask=full, scale=0.5)
    expected.square().sum().backward()
    device = [t.detach().to("xla").requires_grad_() for t in host]
    xs.set_global_mesh(xs.get_1d_mesh("data"))
    segments = ids.to("xla") if extra == "segments" else None
    ab = mask.to("xla") if extra == "numbers" else None
    layout = ("data", None, None, None) if extra == "layout" else None
    out = flash_attention(*device, causal, segments, segments, 0.5, ab=ab, partition_spec=layout)
    out.square().sum().backward()
    assert_same((out.detach().cpu(), *(t.grad.cpu() for t in device)), (expected.detach(), *(t.grad for t in host)), (1e-4, 1e-5))
    assert_same(FlashAttention.apply(*device, causal, segments, segments, 0.5, ab, layout, None).detach().cpu(), out.detach().cpu())
    with pytest.raises(AssertionError, match="segment ids for only one side"):
        flash_attention(*device, q_segment_ids=ids.to("xla"))


def test_paged_attention_reads_its_pages() -> None:
    from torch_xla.experimental.custom_kernel import paged_attention

    lengths, pages = torch.tensor([5, 3]), torch.tensor([[4, 1], [0, 2]])
    q, keys, values = batch(2, 4, 8), batch(2, 6, 4, 8, seed=1), batch(2, 6, 4, 8, seed=2)
    out = paged_attention(*(t.to("xla") for t in (q, keys, values, lengths, pages)), pages_per_compute_block=1)
    for i in range(2):
        k, v = (t[:, pages[i]].reshape(2, 8, 8)[:, : lengths[i]].repeat_interleave(2, 0) for t in (keys, values))
        expected = functional.scaled_dot_product_attention(q[i][:, None], k, v, scale=1.0)[:, 0]
        assert_same(out[i].cpu(), expected, (1e-4, 1e-5))


def test_fsdp_of_replicas_is_one_program_with_split_parameters() -> None:
    import torch_xla
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
    from torch_xla.distributed.fsdp.wrap import always_wrap_policy

    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    import copy

    model = FSDP(copy.deepcopy(host), auto_wrap_policy=always_wrap_policy, flatten_parameters=False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (host, model)]
    for m, optimizer, where in zip((host, model), optimizers, ("cpu", "xla"), strict=True):
        m(batch(8, 16).to(where)).square().mean().backward()
        nn.utils.clip_grad_norm_(m.parameters(), 0.5) if where == "cpu" else m.clip_grad_norm_(0.5)
        optimizer.step()
    assert_same([p.detach().cpu() for p in model.parameters()], [p.detach() for p in host.parameters()], (1e-4, 1e-5))
    if mesh_.device_count() > 1:
        assert all("devices=" in torch_xla._XLAC._get_xla_sharding_spec(p) for p in model.parameters() if p.dim() == 2)
    for options, said in (({"sharding_rank": 1}, "select a subset of replicas"), ({"nonsense": 1}, "has no option nonsense")):
        with pytest.raises(RuntimeError, match=said):
            FSDP(nn.Linear(2, 2), **options)
    with pytest.raises(RuntimeError, match="already wrapped"):
        FSDP(model)


@pytest.mark.parametrize("is_pure", [False, True])
def test_a_partitioned_scan_is_the_loop_and_its_gradient(is_pure: bool) -> None:
    from functorch.compile import min_cut_rematerialization_partition
    from torch_xla.experimental import scan as module

    module._SCAN_COMPUTATION_CACHE.clear()
    calls: list[int] = []

    def fn(carry: torch.Tensor, x: dict[str, torch.Tensor]) -> Any:
        calls.append(1)
        new = torch.sin(carry @ x["w"]) + x["b"]
        return new, (new * 2, None)

    tensors = [batch(2, 3), batch(4, 3, 3, seed=1), batch(4, 3, seed=2)]
    results = []
    for where in ("cpu", "xla"):
        init, w, b = (t.detach().to(where).requires_grad_() for t in tensors)
        if where == "cpu":
            carry, ys = spmd.scan(fn, init, {"w": w, "b": b})
        else:
            calls.clear()
            for _ in range(2):
                carry, ys = module.scan(fn, init, {"w": w, "b": b}, min_cut_rematerialization_partition, is_pure)
        (carry.sum() + ys[0].square().sum()).backward()
        results.append([t.detach().cpu() for t in (carry, ys[0], init.grad, w.grad, b.grad)])
    assert_same(results[1], results[0], (1e-4, 1e-5))
    assert len(calls) == (2 if is_pure else 4) and (fn in module._SCAN_COMPUTATION_CACHE) == is_pure
    with pytest.raises(ValueError, match="scan needs a function"):
        module.scan(5, init, w)
    with pytest.raises(ValueError, match="the same first dim"):
        module.scan(fn, init, (w, b[:2]))


def test_scanned_layers_pass_tuples_on_and_must_be_alike() -> None:
    from torch_xla.experimental.scan_layers import scan_layers

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return self.a(x).sin(), y + x

    layers = [Pair().to("xla") for _ in range(3)]
    given = (batch(2, 4).to("xla"), batch(2, 4, seed=1).to("xla"))
    expected: Any = given
    for layer in layers:
        expected = layer(*expected)
    for options in ({}, {"is_layer_pure": True}):
        assert_same([t.detach().cpu() for t in scan_layers(layers, given, **options)], [t.detach().cpu() for t in expected], (1e-4, 1e-5))
    compiled = spmd.compile(lambda a, b: spmd.scan_layers(layers, (a, b)))
    assert_same([t.cpu() for t in compiled(*given)], [t.detach().cpu() for t in expected], (1e-4, 1e-5))
    with pytest.raises(ValueError, match="Shape mismatch for 'weight' in layer 1"):
        scan_layers([nn.Linear(2, 2).to("xla"), nn.Linear(2, 3).to("xla")], given[0])


def test_a_pure_layer_is_remembered_while_it_is_there() -> None:
    class Times(nn.Module):
        def __init__(self, k: int) -> None:
            super().__init__()
            self.k = k

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.k

    for k in range(20):  # each where the last one was
        layer, partition = Times(k), object()
        fn = _partitioned_scan._one_layer(layer, partition, True)
        assert fn(torch.ones(()), {})[0].item() == k and _partitioned_scan._one_layer(layer, partition, True) is fn
        del layer, partition, fn
    assert not any(type(layer) is Times for layer in _partitioned_scan._ONE_LAYER_CACHE)


def test_pure_functions_with_a_seed_draw_by_it_alone() -> None:
    from torch_xla.experimental.assume_pure import PureModule, assume_pure, assume_pure_torch

    noisy = assume_pure(lambda t: t + torch.rand_like(t), add_rng_seed_argument=True)
    x = torch.zeros(4, device="xla")
    one, two, again = (noisy(x, rng_seed=seed).cpu() for seed in (1, 2, 1))
    assert torch.equal(one, again) and not torch.equal(one, two)
    with pytest.raises(AssertionError, match="needs a seed"):
        noisy(x)
    module = nn.Linear(4, 2).to("xla")
    out = PureModule(module)(x + 1)
    out.sum().backward()
    assert_same(out.detach().cpu(), module(x + 1).detach().cpu())
    assert_same(module.weight.grad.cpu(), torch.ones(2, 4))
    with pytest.raises(AssertionError, match="no gradients"):
        assume_pure_torch(lambda t: t)
    with torch.no_grad():
        assert_same(assume_pure_torch(lambda t: t * 2, use_cache=True)(x + 1).cpu(), torch.full((4,), 2.0))


def test_calls_of_jax_functions_are_counted_by_what_was_compiled() -> None:
    import torch_xla.core.xla_builder as xb

    xb._JAX_TO_XLA_COMPUTATION_CACHE.clear()
    double = lambda a, factor: a * factor  # noqa: E731
    for shape, factor in (((2,), 2.0), ((2,), 2.0), ((3,), 2.0), ((3,), 3.0)):
        assert_same(xb.call_jax(double, (torch.ones(shape, device="xla"), factor)).cpu(), torch.full(shape, factor))
    assert xb._jax_to_xla_computation_cache_elements() == 3


def test_micro_batches_give_the_loss_alone_or_with_what_is_carried() -> None:
    from torch_xla.experimental.gradient_accumulation import gradient_accumulation

    model = nn.Linear(3, 1).to("xla")
    data = batch(4, 2, 3).to("xla")
    loss = gradient_accumulation(lambda x: model(x).square().mean(), (data,), model)
    assert_same(loss.cpu(), model(data).square().mean().detach().cpu(), (1e-4, 1e-5))
    count = torch.zeros((), device="xla")
    loss, count = gradient_accumulation(lambda x, c: (model(x).sum(), c + 1), (data,), model, count)
    assert count.item() == 4
    with pytest.raises(ValueError, match="no iterable tensors"):
        gradient_accumulation(print, (), model)
    with pytest.raises(AssertionError, match="writes in place to its argument 1"):
        gradient_accumulation(lambda x, c: (model(x).sum(), c.add_(1)), (data,), model, count)


def test_batches_must_fit_the_shardings_by_key() -> None:
    import torch_xla.distributed.parallel_loader as pl
    import torch_xla.distributed.spmd as xs

    spec = xs.ShardingSpec(xs.get_1d_mesh("x"), ("x", None))
    for batches, error in (([batch(8, 2)], ValueError), ([{"x": batch(8, 2), "y": batch(8, 2)}], KeyError)):
        with pytest.raises(error, match=r"input_sharding (?s:.*)fix:"):
            next(iter(pl.MpDeviceLoader(batches, "xla", input_sharding={"x": spec})))
    loader = pl.MpDeviceLoader([{"x": batch(8, 2), "y": batch(3)}], "xla", input_sharding={"x": spec, "y": None})
    (found,) = list(loader)
    assert found["x"].sharding_spec == spec.to_xla() and found["y"].shape == (3,)


def test_libraries_find_nothing_left_to_reduce() -> None:
    import torch_xla.core.xla_model as xm

    gradients = xm._fetch_gradients(torch.optim.SGD([nn.Parameter(torch.ones(1, device="xla"))], lr=0.1))
    assert xm.all_reduce("sum", gradients, scale=1.0) == []


def test_a_profile_is_taken_while_the_program_goes_on(tmp_path: Any) -> None:
    import torch_xla.debug.profiler as xp

    if mesh_.has_topology():  # an earlier test of this process compiled for TPUs
        with pytest.raises(RuntimeError, match="in another process"):
            xp.trace_detached("localhost:9012", str(tmp_path), duration_ms=100)
        return
    thread = xp.trace_detached("localhost:9012", str(tmp_path), duration_ms=100)
    with xp.StepTrace("step"), xp.Trace("part"):
        (torch.ones(4, device="xla") * 2).cpu()
    thread.join()
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_the_program_that_is_pending_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_xla
    import torch_xla.distributed.spmd as xs

    hlo = torch_xla._XLAC._get_xla_tensors_hlo
    x = xs.mark_sharding(batch(8, 16).to("xla"), xs.get_1d_mesh("data"), (None, "data"))
    torch_xla.sync()
    y = x @ batch(16, 4).to("xla")
    assert "dot(" in hlo([y]) and "all-reduce" not in hlo([y])
    monkeypatch.setenv("XLA_DUMP_POST_OPTIMIZATIONS", "1")
    assert ("all-reduce" in hlo([y])) == (mesh_.device_count() > 1)
    assert_same(y.cpu(), batch(8, 16) @ batch(16, 4), (1e-4, 1e-5))
    assert "parameter(0)" in hlo([y]) and "dot(" not in hlo([y])


def test_executions_are_counted_by_torch_xlas_names() -> None:
    import torch_xla
    import torch_xla.debug.metrics as met

    x = torch.ones(4, 4, device="xla") * 2
    met.clear_all()
    assert met.counter_value("ExecuteReplicated") is None and met.metric_data("EagerOpExecuteTime") is None
    for _ in range(2):
        x = (x + 1) * 0.5
        torch_xla.sync()
    assert met.counter_value("ExecuteReplicated") == met.metric_data("ExecuteTime")[0] == 2
    assert met.metric_data("EagerOpExecuteTime") is None and met.counter_value("UncachedCompile") == 2 - (
        met.counter_value("CachedCompile") or 0
    )
    torch_xla.experimental.eager_mode(True)
    try:
        met.clear_all()
        x = x + 1
        assert met.metric_data("EagerOpExecuteTime")[0] == met.counter_value("ExecuteReplicated") == 1
    finally:
        torch_xla.experimental.eager_mode(False)
    compiled = torch_xla.compile(lambda t: (t * 3).sin())
    met.clear_all()
    compiled(x)
    assert met.metric_data("ExecuteTime")[0] == met.metric_data("ExecuteReplicatedTime")[0] == 1
    assert "EagerOpExecuteTime" not in met.metric_names() and met.counter_value("ExecuteComputation") is None

"""`spmd.lazy()`: what waits has eager's meaning, and a loop is as many programs as it has different steps."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mesh
import spmd
from spmd.base._torch import pytree
from spmd.device._storage import buffer_of
from spmd.program.lazy import _session
from tests import launched
from tests.oracle import assert_same

Case = Callable[[], Any]


def ramp(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape).to("jax")


def linear() -> nn.Linear:
    return nn.Linear(3, 3).to("jax")


def trained(optimizer: Callable[..., torch.optim.Optimizer], steps: int = 4, **options: Any) -> list[Any]:
    model = linear()
    made = optimizer(model.parameters(), lr=0.1, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made, 10)
    losses = []
    for i in range(steps):
        made.zero_grad()
        loss = model(ramp(2, 3) / (i + 1)).pow(2).mean()
        loss.backward()
        made.step()
        schedule.step()
        losses.append(loss.detach())
    return [losses, list(model.parameters())]


def views_are_written() -> Any:
    x = ramp(4, 4)
    y, z = x[1:3], x.t()[0]
    y.mul_(10)
    z.add_(1)
    x.view(-1)[3:5].zero_()
    return x, y, z


def a_result_is_read_after_its_operand_was_written() -> Any:
    x = ramp(4)
    y = x * 2
    x.add_(1)
    return x, y


def snapshots_outlive_the_state() -> Any:
    weight = ramp(4).requires_grad_()
    optimizer, seen = torch.optim.SGD([weight], lr=0.1), []
    for _ in range(4):
        seen.append(weight.detach().clone())
        optimizer.zero_grad()
        weight.pow(2).sum().backward()
        optimizer.step()
    return seen, weight


def values_are_read_on_the_way() -> Any:
    x, read = ramp(4), []
    for _ in range(3):
        x = x * 2 + 1
        read.append(x.sum().item())
        x = x - read[-1]
    return read, x


def a_branch_follows_a_value() -> Any:
    x = ramp(4)
    for _ in range(5):
        x = x / 3 if x.sum() > 20 else x * 2
    return x


def the_random_stream_is_set() -> Any:
    torch.manual_seed(3)
    first = torch.randn(3, device="jax"), torch.rand(3, device="jax")
    torch.manual_seed(5)
    again = torch.randn(3, device="jax")
    state = torch.jax.get_rng_state()  # pyright: ignore[reportAttributeAccessIssue]
    one = torch.randn(3, device="jax")
    torch.jax.set_rng_state(state)  # pyright: ignore[reportAttributeAccessIssue]
    return first, again, one, torch.randn(3, device="jax")


def dropout_draws_anew() -> Any:
    torch.manual_seed(0)
    return [F.dropout(torch.ones(100, device="jax")).sum() for _ in range(3)]


def an_operation_is_refused() -> Any:
    x = ramp(4)
    y = x + 1
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.matmul(y, ramp(3, 3))
    with pytest.raises(IndexError):
        ramp(3)[torch.tensor([4])]
    return y


def an_exception_comes_between() -> Any:
    x = ramp(4)
    try:
        x.mul_(2)
        raise ValueError
    except ValueError:
        pass
    return x


def shapes_depend_on_values() -> Any:
    x = ramp(6) - 2
    return x[x > 0], torch.nonzero(x), x.masked_select(x < 1), torch.unique(x)


def host_tensors_take_part() -> Any:
    x, number, buffer, seen = ramp(4), torch.tensor(3.0), torch.zeros(4, device="jax"), []
    for i in range(3):
        buffer.copy_(torch.full((4,), float(i)))
        seen.append(buffer * number)
    return x * number, x + number.double(), x[torch.tensor([1, 0])], seen


def numbers_change() -> Any:
    x, seen = ramp(4), []
    for i in range(5):
        seen.append(x * i + i * 0.5)
        x = x + 1 / (i + 1)
    return seen


def a_gradient_has_a_gradient() -> Any:
    x, w = ramp(3, 4).requires_grad_(), ramp(2, 4).requires_grad_()
    (grad,) = torch.autograd.grad(F.linear(x / 10, w / 10).tanh().sum(), w, create_graph=True)
    grad.pow(2).sum().backward()
    return x.grad, w.grad


def a_block_is_recomputed() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to("jax")
    x = ramp(3, 4).requires_grad_()
    out: Any = checkpoint(model, x, use_reentrant=False)
    out.sum().backward()
    return x.grad, [p.grad for p in model.parameters()]


def a_hook_reads_a_gradient() -> Any:
    x, seen = ramp(4).requires_grad_(), []
    y = x * 2
    y.register_hook(lambda grad: seen.append(grad.sum().item()))
    y.sum().backward()
    return x.grad, seen


def running_statistics_are_kept() -> Any:
    norm = nn.BatchNorm1d(4).to("jax")
    out = [norm(ramp(5, 4) * i) for i in range(3)]
    return out, norm.running_mean, norm.running_var, norm.num_batches_tracked


def gradients_accumulate() -> Any:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(6):
        (model(ramp(2, 3) + i).sum() / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def results_are_given() -> Any:
    x, out = ramp(4), torch.empty(4, device="jax")
    torch.add(x, 1, out=out)
    torch.mul(x, 2, out=out[:])
    grown = torch.empty(0, device="jax")
    torch.add(x, x, out=grown)
    return out, grown


def windows_of_another_dtype() -> Any:
    x = ramp(4, 2)
    z = torch.view_as_complex(x)
    return x.view(torch.int32) + 1, torch.view_as_real(z.conj() * z), z.imag


def objects_are_copied() -> Any:
    model = linear()
    with torch.no_grad():
        model.weight.copy_(model.weight + 1)
        twin = copy.deepcopy(model)
        model.weight.copy_(model.weight + 1)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return twin.weight, model.weight, torch.load(file)["weight"]


def data_is_replaced() -> Any:
    parameter = nn.Parameter(ramp(4))
    parameter.data = parameter.data * 2
    parameter.data.add_(1)
    return parameter


def averages_warm_up() -> Any:
    model = linear()
    averages = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(4):
        optimizer.zero_grad()
        model(ramp(2, 3)).sum().backward()
        optimizer.step()
        decay = min(0.9, (1 + i) / (10 + i))
        for average, parameter in zip(averages, model.parameters(), strict=True):
            average.mul_(decay).add_(parameter.detach(), alpha=1 - decay)
    return averages


def norms_are_clipped() -> Any:
    model, norms = linear(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(4):
        optimizer.zero_grad()
        (model(ramp(2, 3)) * (i + 1)).sum().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
    return norms, list(model.parameters())


def losses_are_scaled() -> Any:
    model = linear()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("jax")
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(ramp(2, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return list(model.parameters())


def another_thread_reads() -> Any:
    y, read = ramp(4) * 2, []
    thread = threading.Thread(target=lambda: read.append(y.cpu()))
    thread.start()
    thread.join()
    return y, read


def a_compiled_function_is_called() -> Any:
    step = spmd.compile(lambda a: a * 2 + 1)
    y = ramp(4) + 1
    return step(y) * 2, y


def functions_are_transformed() -> Any:
    return torch.func.grad(lambda x: (x * x).sum())(ramp(4)), torch.func.vmap(lambda x: x * 2)(ramp(3, 4))


def rows_are_looked_up() -> Any:
    table = nn.Embedding(10, 4).to("jax")
    optimizer = torch.optim.Adam(table.parameters(), 0.1)
    for i in range(3):
        optimizer.zero_grad()
        table(torch.tensor([1, 2, i], device="jax")).pow(2).sum().backward()
        optimizer.step()
    return table.weight


def elements_are_assigned() -> Any:
    x = ramp(5, 4)
    x[torch.tensor([0, 2])] = 7.0
    x[:, 1] = -1
    x[x > 5] = 0
    return x, x[torch.tensor([1, 0], device="jax")]


CASES: list[Case] = [
    views_are_written, a_result_is_read_after_its_operand_was_written, snapshots_outlive_the_state, values_are_read_on_the_way,
    a_branch_follows_a_value, the_random_stream_is_set, dropout_draws_anew, an_operation_is_refused, an_exception_comes_between,
    shapes_depend_on_values, host_tensors_take_part, numbers_change, a_gradient_has_a_gradient, a_block_is_recomputed,
    a_hook_reads_a_gradient, running_statistics_are_kept, gradients_accumulate, results_are_given, windows_of_another_dtype,
    objects_are_copied, data_is_replaced, averages_warm_up, norms_are_clipped, losses_are_scaled, another_thread_reads,
    a_compiled_function_is_called, functions_are_transformed, rows_are_looked_up, elements_are_assigned,
]  # fmt: skip


def values(result: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu().as_subclass(torch.Tensor), result)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_waits_has_eagers_values(case: Case) -> None:
    results = []
    for is_lazy in (False, True):
        torch.manual_seed(0)
        if is_lazy:
            with spmd.lazy(max_retraces=10**9):
                results.append(values(case()))
        else:
            results.append(values(case()))
    assert_same(results[1], results[0])


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW for each tensor": (torch.optim.AdamW, {"foreach": False}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "RMSprop": (torch.optim.RMSprop, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_is_two_programs(name: str) -> None:
    optimizer, options = OPTIMIZERS[name]
    torch.manual_seed(0)
    expected = values(trained(optimizer, 6, **options))
    torch.manual_seed(0)
    with spmd.lazy() as lazy:
        result = trained(optimizer, 6, **options)
    assert lazy.num_executables == 2 + ("each" in name)  # the first creates the state; some numbers there are no in-place operation's
    assert_same(values(result), expected)


def test_nothing_runs_before_the_step_ends() -> None:
    with spmd.lazy() as lazy:
        x = ramp(4)
        y = x * 2 + 1
        assert buffer_of(y).is_waiting and y.shape == (4,) and y.dtype == torch.float32
        assert lazy.num_executables == 0
        spmd.sync()
        assert not buffer_of(y).is_waiting and lazy.num_executables == 1
        z = ramp(4) * 2 + 1
        spmd.sync()
    assert lazy.num_executables == 1 and torch.equal(y, z)
    assert lazy.retraces == []


def test_a_second_step_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(ramp(2, 3)).sum().backward()
        optimizer.step()

    with spmd.lazy() as lazy:
        step()
        step()
        nodes = lazy.num_nodes
        monkeypatch.setattr(_session, "Region", None)  # no program is made
        for _ in range(5):
            step()
    assert lazy.num_nodes == nodes


def test_steps_that_keep_differing_say_in_what() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with spmd.lazy(max_retraces=3) as lazy:
            for size in range(2, 8):
                ramp(size).add_(1)
                kept = ramp(size) * 2
                spmd.sync()
                assert kept.shape == (size,)
    (warning,) = caught
    assert "keep differing" in str(warning.message)
    assert "shape" in lazy.retraces[-1] and "(7,)" in lazy.retraces[-1] and "test_lazy.py:" in lazy.retraces[-1]


def test_programs_are_bounded() -> None:
    with spmd.lazy(max_programs=2, max_retraces=10**9) as lazy:
        for size in range(2, 8):
            assert torch.equal((ramp(size) * 2).cpu(), torch.arange(float(size)) * 2)
    assert lazy.num_executables == 2


def test_inside_each_other_they_are_refused() -> None:
    with spmd.lazy(), pytest.raises(spmd.SpmdError, match="is already active"):
        spmd.lazy().__enter__()
    with pytest.raises(spmd.SpmdError, match="max_programs"):
        spmd.lazy(max_programs=0)
    with pytest.raises(spmd.SpmdError, match="nothing has run"):
        _ = spmd.lazy().program


def test_what_cannot_be_compiled_runs_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    torch.manual_seed(0)
    x = ramp(4)
    before = x + torch.randn(4, device="jax")
    torch.manual_seed(0)
    monkeypatch.setattr(_session, "Region", fail)
    with pytest.warns(UserWarning, match="one at a time"), spmd.lazy():
        after = x + torch.randn(4, device="jax")
        x.add_(1)
        assert torch.equal(after, before)
    assert torch.equal(x, ramp(4) + 1)


@pytest.mark.multidevice(num=8)
def test_a_result_on_a_mesh_meets_a_value_on_one_device(mesh_4x2: mesh.Mesh) -> None:
    def averages(device: str) -> list[float]:
        weight = ramp(8, 8).to(device)
        if device == "jax":
            weight = spmd.mark_sharding(weight, mesh_4x2, ("data", "model"))
        average, found = None, []
        for i in range(6):
            loss = (weight * i).sum()
            spmd.sync()
            average = loss.clone() if average is None else average * 0.5 + loss * 0.25
            spmd.sync()
            found.append(average.item())
            average = average.cpu() if i % 2 else average
        one, other = torch.ones((), device=device), weight.sum()
        for x, y in ((one, one), (one, other), (other, one), (other, other)):
            result = x * 0.5 - y
            spmd.sync()
            found.append(result.item())
        return found

    expected = averages("cpu")
    with spmd.lazy(max_retraces=20):
        assert averages("jax") == expected


@pytest.mark.multidevice(num=8)
def test_a_sharded_step_is_the_compiled_one(mesh_4x2: mesh.Mesh) -> None:
    def made() -> tuple[nn.Sequential, torch.optim.Optimizer, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to("jax")
        for name, spec in {"0.weight": ("model", None), "0.bias": ("model",), "2.weight": (None, "model")}.items():
            spmd.mark_sharding(model.get_parameter(name), mesh_4x2, spec)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), spmd.mark_sharding(ramp(8, 16) / 100, mesh_4x2, ("data", None))

    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        hidden = spmd.mark_sharding(model[0](x), mesh_4x2, ("data", "model"))
        loss = model[2](model[1](hidden)).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    one = made()
    with spmd.lazy() as lazy:
        losses = [step(*one) for _ in range(4)]
    assert lazy.num_executables == 1
    assert buffer_of(one[0].get_parameter("0.weight")).get().sharding.spec == mesh.PartitionSpec("model", None).to_jax()
    compiled, other = spmd.compile(step), made()
    expected = [compiled(*other) for _ in range(4)]
    assert [float(a) for a in losses] == [float(a) for a in expected]
    for a, b in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(a, b)
    assert lazy.program.collectives().counts() == compiled.collectives().counts()


LOOP = """
import torch

import mesh
import spmd

grid = mesh.Mesh(range(mesh.device_count()), (mesh.device_count(),), ("data",))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 8)).to("jax")
for parameter in model.parameters():
    spmd.mark_sharding(parameter, grid, (None,) * parameter.dim())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
with spmd.lazy() as lazy:
    for i in range(4):
        x = spmd.mark_sharding(torch.randn(8, 8, generator=torch.Generator().manual_seed(i)).to("jax"), grid, ("data", None))
        optimizer.zero_grad()
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
print("losses", [round(loss.item(), 5) for loss in losses], lazy.num_executables, flush=True)
"""


def test_two_processes_have_the_losses_of_one(tmp_path: Path) -> None:
    program = tmp_path / "loop.py"
    program.write_text(LOOP)
    said: list[str] = []
    for options in (("-n", 2, "--devices-per-process", 2), ("-n", 1, "--devices-per-process", 4)):
        done = launched.launch(*options, program=program)
        assert done.code == 0, done.err
        said.extend(line[line.index("losses") :] for line in (done.out + done.err).splitlines() if "losses" in line)
    assert len(said) == 3 and len(set(said)) == 1 and said[0].endswith("] 2")

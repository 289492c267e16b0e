"""Writes in a step to CPU tensors and arrays from before the call, held against eager code on the CPU."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mesh
import spmd


class Meter(nn.Module):
    """A model with what it has measured, on the CPU."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(3, 2).to(device)
        self.at = 0
        self.history, self.total, self.counts = torch.zeros(8), torch.zeros(()), torch.zeros(4, dtype=torch.int64)
        self.pairs, self.array, self.view = torch.zeros(2, 2, dtype=torch.int64), np.zeros(8), self.history[6:]
        self.by_name = {"last": torch.zeros(2)}

    def of_host(self) -> list[np.ndarray[Any, Any]]:
        tensors = (self.history, self.total, self.counts, self.pairs, self.view, self.by_name["last"])
        return [*(t.numpy().copy() for t in tensors), self.array.copy()]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).sum()

    def next(self) -> int:
        self.at += 1
        return self.at - 1


Fn = Callable[[Meter, torch.Tensor], Any]
WRITES: dict[str, tuple[Fn, int]] = {}  # by name: a step, and the number of its traces


def written(num_traces: int) -> Callable[[Fn], Fn]:
    def add(fn: Fn) -> Fn:
        WRITES[fn.__name__] = fn, num_traces
        return fn

    return add


@written(2)
def a_number_at_a_counter(m: Meter, x: torch.Tensor) -> Any:
    m.history[m.next()] = m.loss(x).item()


@written(2)
def a_copy_at_a_counter(m: Meter, x: torch.Tensor) -> Any:
    m.history[m.next()] = m.loss(x).detach().cpu()


@written(2)
def a_device_tensor_at_a_counter(m: Meter, x: torch.Tensor) -> Any:
    m.history[m.next()] = m.loss(x).detach()


@written(2)
def a_number_in_an_array(m: Meter, x: torch.Tensor) -> Any:
    m.array[m.next()] = m.loss(x).item()


@written(1)
def a_total(m: Meter, x: torch.Tensor) -> Any:
    m.total += m.loss(x).detach().cpu()


@written(1)
def a_moving_average(m: Meter, x: torch.Tensor) -> Any:
    m.total.mul_(0.9).add_(m.loss(x).item(), alpha=0.1)
    torch.Tensor.mul_(m.history, 0.5)
    m.history.__iadd__(m.loss(x).item())


@written(1)
def a_count_of_the_host(m: Meter, x: torch.Tensor) -> Any:
    m.counts[1] += 1
    m.counts += 2
    m.counts.add_(1)


@written(1)
def counts_by_class(m: Meter, x: torch.Tensor) -> Any:
    classes = m.lin(x).argmax(1)
    m.counts.index_add_(0, classes.cpu(), torch.ones(4, dtype=torch.int64))
    m.counts[classes[0].item()] += 1
    m.pairs[classes[:2].cpu(), torch.tensor([0, 1])] += 1
    np.add.at(m.array, [0, 0, 1], m.loss(x).item())


@written(2)
def a_window_of_a_buffer(m: Meter, x: torch.Tensor) -> Any:
    start = m.next()
    m.history[start : start + 2] = m.loss(x).item()
    m.array[start : start + 2] -= m.loss(x).item()


@written(1)
def all_of_them(m: Meter, x: torch.Tensor) -> Any:
    m.array.fill(m.loss(x).item())
    m.array[:2] = [m.loss(x).item(), 1.0]
    m.array *= 2
    np.multiply(m.array, m.loss(x).item(), out=m.array)
    m.by_name["last"].copy_(m.lin(x)[0].detach())
    m.by_name["last"].lerp_(m.lin(x)[1].detach().cpu(), 0.5)
    m.view[0] = m.loss(x).item()


@written(1)
def in_a_block_without_gradients(m: Meter, x: torch.Tensor) -> Any:
    with torch.no_grad():
        m.total += m.loss(x).cpu()
    with torch.inference_mode():
        m.history[0] = m.loss(x).cpu()


@written(2)
def by_functions(m: Meter, x: torch.Tensor) -> Any:
    operator.setitem(m.history, m.next(), m.loss(x).item())
    m.array.__setitem__(slice(2), m.loss(x).item())
    operator.iadd(m.counts, 1)
    [m.counts.__setitem__(i, 2) for i in range(2)]


@written(1)
def and_returned(m: Meter, x: torch.Tensor) -> Any:
    m.history[0] = m.loss(x).item()
    return m.history is m.history


@pytest.mark.parametrize("name", list(WRITES))
def test_every_call_writes_what_eager_code_writes(name: str) -> None:
    fn, num_traces = WRITES[name]
    ours, theirs = Meter("jax"), Meter("cpu")
    step = spmd.compile(fn)
    for seed in range(6):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        assert step(ours, x.to("jax")) == fn(theirs, x)
        for got, expected in zip(ours.of_host(), theirs.of_host(), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1.3e-6, atol=1e-6)  # sums in float32, in another order; some cancel
    assert step.num_traces == num_traces, step.retraces


def test_the_tensor_is_the_one_of_each_call() -> None:
    m = Meter("jax")
    step = spmd.compile(a_number_at_a_counter)
    x = torch.ones(4, 3, device="jax")
    step(m, x)
    before, m.history = m.history, torch.zeros(8)
    kept, loss = before.clone(), m.loss(x).item()
    step(m, x)
    assert torch.equal(before, kept) and m.history.tolist() == pytest.approx([0.0, loss, *[0.0] * 6])
    version = m.history._version
    step(m, x)
    assert m.history._version > version


def test_losses_of_a_sharded_model_are_kept_on_the_host() -> None:
    ours, theirs = Meter("jax"), Meter("cpu")
    devices = mesh.Mesh(range(8), (2, 4), ("data", "model"))
    spmd.mark_sharding(ours.lin.weight, devices, ("data", None))
    step = spmd.compile(a_number_at_a_counter)
    for seed in range(4):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
        step(ours, spmd.mark_sharding(x.to("jax"), devices, ("model", None)))
        a_number_at_a_counter(theirs, x)
    torch.testing.assert_close(ours.history, theirs.history)


def of_the_step(m: Meter, x: torch.Tensor) -> Any:
    made = torch.zeros(3)
    made[0] = 1.0
    made.add_(m.at)
    counts = vars(m).setdefault("hidden", [torch.zeros(2)])  # which is not found from outside
    counts[0][1] += 2
    return made, counts[0].clone() if m.at > 100 else None


def test_a_tensor_of_the_step_is_written_at_once_beside_one_that_waits() -> None:
    results: list[Any] = []
    for device, wrap in (("jax", spmd.compile), ("cpu", lambda fn: fn)):
        m = Meter(device)
        vars(m)["hidden"] = [torch.zeros(2)]
        step = wrap(of_the_step)
        results.append([(step(m, torch.ones(4, 3, device=device))[0].tolist(), m.hidden[0].tolist()) for _ in range(3)])
    assert results[0] == results[1]


REFUSED: dict[str, tuple[Fn, str]] = {
    "view": (lambda m, x: m.history[2:].add_(m.loss(x).item()), "writes to a view of a CPU tensor"),
    "detached": (lambda m, x: m.history.data.add_(1), "writes to a view of a CPU tensor"),
    "read_after": (lambda m, x: (m.total.add_(m.loss(x).item()), m.total * 2), "reads m.total after writing to it in place"),
    "memory_read_after": (lambda m, x: (m.view.fill_(m.loss(x).item()), m.history.sum()), "reads m.view after writing to it in place"),
    "branch_after": (lambda m, x: (m.total.add_(1), bool(m.total > 3)), "reads m.total after writing to it in place"),
    "made_in_the_step": (lambda m, x: torch.zeros(3).fill_(m.loss(x).item()), "into a CPU tensor that it has made"),
    "array_made_in_the_step": (lambda m, x: np.zeros(3).fill(m.loss(x).item()), "into an array that it has made"),
    "graph": (lambda m, x: m.total.copy_(m.loss(x)), "a copy to the host of a traced tensor with a graph"),
    "loop": (
        lambda m, x: spmd.scan(lambda c, v: (c + m.total.add_(1).dim(), v), x.sum(), x),
        "m.total, which is on the CPU, in the body of a branch or loop",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_no_call_can_do_is_refused_and_changes_nothing(name: str) -> None:
    fn, text = REFUSED[name]
    m = Meter("jax")
    before = m.of_host()
    with pytest.raises(spmd.SpmdError, match=f"(?s){text}.*fix: "):
        spmd.compile(fn)(m, torch.ones(4, 3, device="jax"))
    assert all(map(np.array_equal, m.of_host(), before))


def outside(m: Meter, x: torch.Tensor) -> Any:
    m.history[8] = m.loss(x).item()


def outside_by_copies(m: Meter, x: torch.Tensor) -> Any:
    m.history[m.lin(x).argmax(1).cpu()] = torch.ones(3)


ERRORS: dict[str, tuple[Fn, type[Exception], str]] = {
    "index": (outside, IndexError, "index 8 is out of bounds"),
    "indices": (outside_by_copies, RuntimeError, "shape mismatch"),
    "shape": (lambda m, x: m.history.add_(m.lin(x).detach().cpu()), RuntimeError, "size"),
    "dtype": (lambda m, x: m.counts.add_(m.loss(x).item()), RuntimeError, "can't be cast"),
    "device": (lambda m, x: m.history.add_(m.loss(x).detach()), RuntimeError, "same device|all tensors on device"),
}


@pytest.mark.parametrize("name", list(ERRORS))
def test_an_error_of_torch_is_torchs_and_comes_before_any_change(name: str) -> None:
    fn, kind, text = ERRORS[name]
    m = Meter("jax")
    before = m.of_host()
    with pytest.raises(kind, match=text):
        spmd.compile(fn)(m, torch.ones(4, 3, device="jax"))
    assert all(map(np.array_equal, m.of_host(), before))


def test_several_steps_in_one_call_refuse_it() -> None:
    m = Meter("jax")
    with pytest.raises(spmd.SpmdError, match=r"(?s)m.total, which is on the CPU, with steps_per_call.*fix: "):
        spmd.compile(lambda x: m.total.add_(m.loss(x).item()), steps_per_call=2)(torch.ones(2, 4, 3, device="jax"))


def test_an_index_that_is_out_of_bounds_in_a_later_call_raises_with_its_line() -> None:
    m = Meter("jax")
    step = spmd.compile(a_number_at_a_counter)
    for _ in range(8):
        step(m, torch.ones(4, 3, device="jax"))
    with pytest.raises(IndexError, match="index 8 is out of bounds") as error:
        step(m, torch.ones(4, 3, device="jax"))
    assert "a write to m.history at test_late_writes.py:" in error.value.__notes__[-1]

"""`step.prepare`: programs are traced in order, compiled side by side, and called once they are there."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

import mesh
import spmd
from spmd.program.xla._compilation import Compilation
from tests.oracle import descend


def steps(**options: Any) -> tuple[nn.Module, Any, Any]:
    """A model over a mesh, its training step and its evaluation."""
    torch.manual_seed(2)
    linear = nn.Linear(4, 4)
    model = nn.Sequential(linear, nn.Dropout(0.5), nn.BatchNorm1d(4)).to("jax")
    spmd.mark_sharding(linear.weight, mesh.Mesh(range(2), (2,), ("model",)), ("model", None))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    @spmd.compile(**options)
    def train_step(x: torch.Tensor) -> torch.Tensor:
        return descend(model, optimizer, x)

    @spmd.compile
    def eval_step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(x).sum()

    return model, train_step, eval_step


@pytest.mark.parametrize("options", [{}, {"roll": True}], ids=str)
def test_prepared_programs_are_those_of_the_calls(options: dict[str, Any]) -> None:
    x = torch.linspace(0, 1, 64, device="jax").reshape(16, 4)
    want = []
    for is_prepared in (False, True):
        model, train_step, eval_step = steps(**options)
        if is_prepared:
            train_step.prepare(x)
            eval_step.prepare(x)
            model.train()
        losses = [train_step(x).item(), train_step(x).item(), eval_step(x).item()]
        want.append((losses, {name: value.tolist() for name, value in model.state_dict().items()}))
        assert (train_step.num_traces, eval_step.num_traces) == (1, 1)
        assert train_step.timings.compile_s > 0
    assert want[0] == want[1]


def test_both_are_compiled_at_the_same_time_and_before_any_call(monkeypatch: pytest.MonkeyPatch) -> None:
    both, compiled, made = threading.Barrier(2, timeout=60), [], Compilation._compiled

    def together(self: Any) -> Any:
        both.wait()  # passes once two threads are here
        compiled.append(threading.current_thread().name)
        return made(self)

    monkeypatch.setattr(Compilation, "_compiled", together)
    x = torch.ones(16, 4, device="jax")
    _, train_step, eval_step = steps()
    train_step.prepare(x)
    eval_step.prepare(x)
    eval_step(x)
    assert len(compiled) == 2 and all(name.startswith("compiling") for name in compiled)
    assert (train_step.num_executables, eval_step.num_executables) == (1, 1)


def test_prepared_again_it_is_the_same_program_and_a_call_while_it_compiles_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, made = threading.Event(), Compilation._compiled
    monkeypatch.setattr(Compilation, "_compiled", lambda self: (may_end.wait(60), made(self))[1])
    step = spmd.compile(lambda x: x + 1)
    x = torch.zeros(3, device="jax")
    step.prepare(x)
    step.prepare(x)
    threading.Timer(0.1, may_end.set).start()
    assert step(x).tolist() == [1.0, 1.0, 1.0]
    assert (step.num_traces, step.num_executables) == (1, 1)


def test_what_the_compiler_raises_reaches_the_call_and_the_next_call_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    step = spmd.compile(lambda x: x + 2)
    x = torch.zeros(2, device="jax")
    with monkeypatch.context() as patch:
        patch.setattr(Compilation, "_compiled", fails)
        step.prepare(x)
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            step(x)
    assert step(x).tolist() == [2.0, 2.0]
    assert step.num_executables == 1


def test_an_error_of_the_trace_is_raised_at_once() -> None:
    step = spmd.compile(lambda x: x[: x.argmax().item()])
    with pytest.raises(spmd.TraceError):
        step.prepare(torch.ones(3, device="jax"))


def test_nothing_runs_and_no_random_number_is_drawn() -> None:
    model, train_step, _ = steps()
    x = torch.ones(16, 4, device="jax")
    before = {name: value.tolist() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    want = torch.rand(3, device="jax").tolist()
    torch.manual_seed(5)
    train_step.prepare(x)
    assert {name: value.tolist() for name, value in model.state_dict().items()} == before
    assert torch.rand(3, device="jax").tolist() == want
    train_step(x)  # waits for the thread that compiles; otherwise its progress lines would appear in the log of the next test

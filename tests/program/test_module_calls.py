"""What modules see, and are seen to do, while a compiled function is traced."""

import copy
import sys
from typing import Any

import pytest
import torch
import torch.nn as nn

import spmd
from spmd.program import _step
from spmd.program.trace._capture import capture
from tests.oracle import assert_same, batch, step_in_hooks, twins


class Careful(nn.Module):
    """Looks at values unless it is being compiled, as transformers does with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and bool((x > 0).all()):
            return x
        return torch.where((x > 0).all(), x, x * self.weight)


def test_a_module_that_asks_whether_it_is_compiled_does_not_look_at_values() -> None:
    model = Careful().to("jax")
    step = spmd.compile(lambda x: model(x))
    x = torch.tensor([1.0, -2.0, 3.0])
    torch.testing.assert_close(step(x.to("jax")).detach().cpu(), x)
    assert not torch.compiler.is_compiling()


def test_the_answer_is_as_before_after_a_module_that_raises() -> None:
    class Raises(Careful):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("not here")

    model = Raises().to("jax")
    with pytest.raises(KeyError, match="not here"):
        spmd.compile(lambda x: model(x))(torch.ones(3, device="jax"))
    assert not torch.compiler.is_compiling()


def test_a_module_that_raises_inside_another_leaves_no_name_behind() -> None:
    class Falls(Careful):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Falls(), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.first(x)
            except KeyError:
                return self.second(x)

    model = Outer().to("jax")
    step = spmd.compile(lambda x: model(x))
    step(torch.ones(3, device="jax"))
    assert "second" in step.hlo() and "first/second" not in step.hlo()


class Around(nn.Module):
    """Another module, and a parameter over memory that is there already."""

    def __init__(self, inner: nn.Module, scale: torch.Tensor) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(scale.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


@pytest.mark.parametrize("is_named", [True, False])
def test_a_module_made_inside_around_parameters_is_traced(is_named: bool) -> None:
    host, device = twins()
    scale = torch.ones(8, device="jax") * 2
    kept = [device, scale]
    held = sys.modules[__name__].__dict__
    held["_out_of_reach"] = lambda: kept
    find: Any = (lambda: kept) if is_named else (lambda: sys.modules["tests.program.test_module_calls"].__dict__["_out_of_reach"]())
    step = spmd.compile(lambda x: Around(*find())(x))
    for seed in (1, 2):
        assert_same(step(batch(4, 8, seed=seed).to("jax")), host(batch(4, 8, seed=seed)) * 2)
    assert step.num_traces == 1
    del held["_out_of_reach"]


def test_optimizers_that_step_in_hooks_are_found_by_one_more_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(model: nn.Module, wrap: Any, x: torch.Tensor) -> list[float]:
        step_in_hooks(model, lr=0.1, momentum=0.9)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss

        run = wrap(step)
        return [run(x).item() for _ in range(3)]

    traces: list[int] = []
    monkeypatch.setattr(_step, "capture", lambda *args, **kwargs: (traces.append(0), capture(*args, **kwargs))[1])
    host, device = twins()
    want = losses(host, lambda f: f, batch(4, 8))
    assert losses(device, spmd.compile, batch(4, 8).to("jax")) == pytest.approx(want, rel=1e-5)
    assert len(traces) <= 3


def test_an_optimizer_made_anew_by_each_trace_is_refused() -> None:
    _, device = twins()
    optimizer = torch.optim.SGD(device.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        device(x).square().mean().backward()
        copy.copy(optimizer).step()

    with pytest.raises(spmd.TraceError, match="creates its own SGD"):
        spmd.compile(step)(batch(4, 8).to("jax"))


def test_a_module_without_shapes_yet_is_refused_by_name_and_runs_when_it_has_them() -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.Tanh()).to("jax")
    x = torch.ones(3, 4, device="jax")
    step = spmd.compile(lambda x: model(x))
    with pytest.raises(spmd.TraceError, match="module '0', LazyLinear, has parameters without a shape"):
        step(x)
    assert type(model[0]) is nn.LazyLinear
    expected = model(x)
    torch.testing.assert_close(step(x).cpu(), expected.detach().cpu())


def test_a_module_without_shapes_that_does_not_run_is_left_alone() -> None:
    models = [nn.LazyLinear(2).to("jax"), nn.Identity()]
    assert spmd.compile(lambda x: models[1](x) * 2)(torch.ones(1, device="jax")).item() == 2


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 4, device="jax"))], ids=["script", "trace"])
def test_a_module_of_torchscript_is_refused_by_name_where_it_runs(make: Any) -> None:
    scripted: Any = make(nn.Linear(4, 4).to("jax"))
    models = [scripted, nn.Identity()]
    x = torch.ones(1, 4, device="jax")
    for fn in (lambda x: scripted(x), lambda x: models[0](x)):
        with pytest.raises(spmd.TraceError, match="the TorchScript module Linear runs in a compiled function"):
            spmd.compile(fn)(x)
    assert spmd.compile(lambda x: models[1](x) * 2)(x).sum().item() == 8
    assert scripted(x).shape == x.shape

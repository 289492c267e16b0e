"""torch.compile(backend="spmd"): what users' code does around computing: modes inside modes, writes to values with a gradient, branches."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spmd.dynamo import graphs
from tests.oracle import assert_same, batch


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from spmd.dynamo import _compile_graph

    torch._dynamo.reset()
    monkeypatch.setattr(_compile_graph, "_made", type(_compile_graph._made)())


def compiled(fn: Any) -> Any:
    return torch.compile(fn, backend="spmd", fullgraph=True)


def inner_modes(x: torch.Tensor) -> list[torch.Tensor]:
    before = x * 2
    with torch.enable_grad():
        inside, view = x.sin() * 3, x.view(-1)
        with torch.no_grad():
            innermost, hidden = x * 5, x[0]
    return [before, inside, view, innermost, hidden, before + 1]


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_mode_inside_decides_which_results_have_a_gradient(mode: Callable[[], Any]) -> None:
    found: list[Any] = []
    for device, fn in (("cpu", inner_modes), ("jax", compiled(inner_modes))):
        x = batch(2, 3).to(device).requires_grad_()
        with mode():
            results = fn(x)
        flags = [t.requires_grad for t in results]
        if mode is not torch.inference_mode:
            (results[1].sum() + results[2].square().sum()).backward()
        found.append((flags, [t.detach() for t in results], x.grad))
    assert found[0][0] == found[1][0] and found[0][0][1:4] == [mode is not torch.inference_mode, True, False]
    assert_same(found[1][1], found[0][1])
    assert_same(found[1][2], found[0][2])


def writes_all(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x.sin()


def writes_a_part(x: torch.Tensor) -> torch.Tensor:
    x[1:].mul_(3)
    x[0] = 4.0
    return x * x


def writes_another(x: torch.Tensor) -> torch.Tensor:
    y = F.relu(x, inplace=True)
    return y + 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo itself looks there
@pytest.mark.parametrize("fn", [writes_all, writes_a_part, writes_another])
@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[1], lambda x: x.t()], ids=["whole", "row", "transposed"])
def test_an_input_with_a_gradient_is_written_as_pytorch_does(fn: Any, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found: list[Any] = []
    for device, run in (("cpu", fn), ("jax", compiled(fn))):
        x = batch(3, 3).to(device).requires_grad_()
        y = x * 1.5
        result = run(part(y))
        (result.sum() + y.square().sum()).backward()
        found.append([result, y, x.grad])
    assert_same(found[1], found[0])
    assert [graph.refused is not None for graph in graphs()] == [True]


def test_a_leaf_that_is_written_is_pytorchs_error() -> None:
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
        compiled(writes_all)(batch(3).to("jax").requires_grad_())


@pytest.mark.parametrize("is_closed_over", [True, False])
def test_a_branch_on_a_value_with_a_gradient_is_one_program(is_closed_over: bool) -> None:
    found: list[Any] = []
    for device in ("cpu", "jax"):
        w = batch(3, seed=8).to(device).requires_grad_()

        def by_closure(x: torch.Tensor, w: torch.Tensor = w) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda: x * w, lambda: (x - w).cos())

        def by_operands(x: torch.Tensor, w: torch.Tensor = w) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x,)) * w

        fn: Any = by_closure if is_closed_over else by_operands
        results: list[torch.Tensor] = []
        run = fn if device == "cpu" else compiled(fn)
        for seed in range(4):
            x = batch(3, seed=seed).to(device).requires_grad_(not is_closed_over)
            result = run(x)
            result.sum().backward()
            results += [result] if x.grad is None else [result, x.grad]
        found.append([*results, w.grad])
    assert_same(found[1], found[0])
    assert [graph.num_programs for graph in graphs()] == [1]


def test_tensors_made_under_a_device_lie_there() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        with torch.device("jax"):
            return [x + torch.ones(3), torch.arange(3), torch.tensor([1, 2])]

    got = torch.compile(fn, backend="spmd")(batch(3).to("jax"))
    assert {t.device.type for t in got} == {"jax"}
    assert_same(got, [batch(3) + 1, torch.arange(3), torch.tensor([1, 2])])


def test_modes_of_decorators_hold() -> None:
    layer = nn.Linear(3, 3).to("jax")

    @torch.no_grad()
    def teacher(x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    @torch.enable_grad()
    def student(x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    fast = compiled(lambda x: (teacher(x), student(x)))
    with torch.no_grad():
        apart, learned = fast(batch(2, 3).to("jax"))
    assert not apart.requires_grad and learned.requires_grad
    learned.sum().backward()
    assert_same(layer.bias.grad, torch.full((3,), 2.0))

"""Results of a compiled call are what the function returned: one tensor twice, the caller's own tensor, a view of either."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import mesh
import spmd
from tests.oracle import batch, on_device

Fn = Callable[..., Any]

STATE = {"cpu": torch.zeros(2, 3), "jax": torch.zeros(2, 3).to("jax")}


def fresh_views(x: torch.Tensor) -> Any:
    y = x * 2
    return y, y[0], y.t(), y.view(-1)[2:]


def shared_inside(x: torch.Tensor) -> Any:
    y = x * 2
    return [y[:, :2], {"b": y[:, 1:]}, x + 1]


CASES: dict[str, Fn] = {
    "one tensor twice": lambda x: (lambda y: (y, [y, {"z": y}]))(x * 2),
    "the argument": lambda x: (x, x * 2),
    "the argument, written": lambda x: (x.add_(1), x),
    "a view of the argument": lambda x: (x[0], x.t(), x[:, 1:]),
    "a view of the written argument": lambda x: (x.mul_(3)[1], x.view(-1)),
    "views of a result": fresh_views,
    "overlapping views of what stays inside": shared_inside,
    "views that do not overlap": lambda x: (x * 2).unbind(0),
    "a transposed result": lambda x: (x * 2).t(),
    "an expanded result": lambda x: x.sum(0).expand(4, 3),
    "a detached result": lambda x: (lambda y: (y, y.detach()))(x * 2),
    "a view of another dtype": lambda x: (lambda y: (y, y.view(torch.int32)))(x * 2),
    "conjugate": lambda x: (lambda y: (y, y.conj(), y.real))(torch.complex(x, x)),
    "state": lambda x: (STATE[x.device.type], x),
    "a view of state": lambda x: (STATE[x.device.type][0], STATE[x.device.type].t(), STATE[x.device.type].detach()),
    "a view of written state": lambda x: STATE[x.device.type].add_(x)[1],
}


def relations(flat: list[torch.Tensor]) -> list[Any]:
    """What is one object, and what writing a one to each tensor makes of the others."""
    same = [[a is b for b in flat] for a in flat]
    strides = [(tuple(t.shape), t.stride(), t.dtype, t.is_conj()) for t in flat]
    seen: list[Any] = []
    for t in flat:
        try:
            t.fill_(1)
        except RuntimeError as error:
            seen.append(str(error)[:40])
        seen.append([other.clone().resolve_conj().cpu().tolist() for other in flat])
    return [same, strides, seen]


def called(fn: Fn, x: torch.Tensor, calls: int) -> Any:
    STATE[x.device.type].zero_()
    found = []
    for _ in range(calls):
        flat = [x, STATE[x.device.type], *pytree.tree_leaves(fn(x))]
        found.append(relations(flat))
    return found


@pytest.mark.parametrize("name", CASES)
def test_results_keep_identity_and_memory(name: str) -> None:
    fn = CASES[name]
    want = called(fn, batch(2, 3), 2)
    step = spmd.compile(fn)
    assert called(step, batch(2, 3).to("jax"), 2) == want
    assert step.num_traces == 1
    assert called(fn, batch(2, 3).to("jax"), 2) == want  # eager


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("name", ["the argument", "a view of the argument", "views of a result", "a view of written state"])
def test_so_they_do_on_eight_devices(name: str, mesh_4x2: mesh.Mesh) -> None:
    x = batch(8, 4)
    device = spmd.mark_sharding(x.to("jax"), mesh_4x2, ("data", "model"))
    fn = {
        "the argument": lambda x: (x, x * 2),
        "a view of the argument": lambda x: (x[0], x.t(), x[:, 1:]),
        "views of a result": fresh_views,
        "a view of written state": lambda x: x.add_(1)[1],
    }[name]
    step = spmd.compile(fn)
    for _ in range(2):
        got, want = [device, *pytree.tree_leaves(step(device))], [x, *pytree.tree_leaves(fn(x))]
        (same, _, seen), (same_here, _, seen_here) = relations(got), relations(want)
        assert (same, seen) == (same_here, seen_here)
    assert step.num_traces == 1


@pytest.mark.parametrize("view", ["x[1]", "x[:, 1]", "x.t()", "x[1:, ::2]"])
@pytest.mark.parametrize("given", ["x", "x.t()", "x[:, 1:]", "x[1:]"])
def test_a_view_of_an_argument_that_is_a_view_itself(view: str, given: str) -> None:
    def run(x: torch.Tensor, fn: Fn) -> Any:
        out = fn(eval(given, {"x": x}))
        strides = out.stride()
        out.fill_(7)
        return strides, x.cpu().tolist()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return eval(view, {"x": x})

    x = batch(4, 4)
    assert run(x.to("jax"), spmd.compile(fn)) == run(x, fn)


def test_an_object_that_is_no_tensor_is_the_callers_own() -> None:
    tag = frozenset({"a"})
    other = frozenset(list(tag))
    step = spmd.compile(lambda x, t: (x, t))
    x = batch(2).to("jax")
    assert step(x, tag)[1] is tag
    assert step(x, other)[1] is other
    assert step.num_traces == 1


def test_a_stacked_call_returns_stacks() -> None:
    step = spmd.compile(lambda x: (x, x * 2, (x * 2).t()), steps_per_call=2)
    x = batch(2, 3, 4)
    same, double, turned = step(x.to("jax"))
    assert torch.equal(same.cpu(), x)
    assert torch.equal(double.cpu(), x * 2)
    assert torch.equal(turned.cpu(), (x * 2).transpose(1, 2))


def generate(x: torch.Tensor) -> Any:
    yield x


async def later(x: torch.Tensor) -> Any:
    return x


class Streamed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        yield x


@pytest.mark.parametrize(("fn", "named"), [(generate, "'generate' is a generator function"), (later, "'later' is a coroutine function")])
def test_a_generator_function_is_refused_by_name(fn: Fn, named: str) -> None:
    with pytest.raises(spmd.TraceError, match=named):
        spmd.compile(fn)


@pytest.mark.parametrize("fn", [Streamed(), lambda x: generate(x), lambda x: map(torch.sin, [x])], ids=["module", "function", "map"])
def test_a_generator_as_result_is_refused(fn: Fn) -> None:
    with pytest.raises(spmd.TraceError, match="returns a (generator|map)"):
        spmd.compile(fn)(on_device(batch(2)))

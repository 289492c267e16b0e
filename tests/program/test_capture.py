"""One trace of a function: what it says was read, written, returned and left, and that nothing of the user's changes by it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import mesh
import spmd
from spmd.device._random_stream import default_stream
from spmd.device._storage import buffer_of, recording
from spmd.program.find._discover import reachable
from spmd.program.optim._preparation import prepare_state
from spmd.program.reads import NumbersNeeded
from spmd.program.trace import _capture
from spmd.program.trace._capture import UnequalCounters
from spmd.program.trace._captured import Captured
from spmd.program.trace._gradients import StaleGradients
from spmd.program.trace._trace_settings import TraceSettings
from spmd.program.trace._varying_inputs import VaryingInputs

OPTIONS: dict[str, Any] = dict(keep_grads=False, debug_nans=False, is_stacked=False, varying=VaryingInputs(), arguments={})


def capture(fn: Callable[..., Any], *args: Any, settings: TraceSettings = TraceSettings(), **options: Any) -> Captured:  # noqa: B008 - it is frozen
    """One trace, its optimizers prepared."""
    found = reachable(fn, args, {})
    for optimizer in found.optimizers:
        prepare_state(optimizer)
    return _capture.capture(fn, args, {}, found, settings, **{**OPTIONS, **options})


def ones(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.ones(shape, device="jax", requires_grad=grad)


def shapes(captured: Captured) -> list[tuple[int, ...]]:
    return [value.aval.shape for value in captured.jaxpr.jaxpr.outvars]


def test_what_is_read_is_a_constant_and_known_by_its_buffer() -> None:
    weight, unread, x = ones(3), ones(3), ones(3)
    captured = capture(lambda x: (x * weight, unread.shape), x)
    assert captured.inputs.arguments == [buffer_of(x)]
    assert [b for b in captured.state.consts if b is not None] == [buffer_of(weight)]
    assert captured.state.written == []


def test_what_is_read_twice_and_through_views_is_one_constant() -> None:
    weight = ones(2, 3)
    captured = capture(lambda: (weight.sum(), weight.t() + 1, weight[0] * 2))
    assert [b for b in captured.state.consts if b is not None] == [buffer_of(weight)]


def test_what_is_written_is_told_whether_state_or_argument_and_whether_or_not_it_was_read() -> None:
    state, filled, x, y = ones(3), ones(3), ones(3), ones(3)

    def fn(x: torch.Tensor, y: torch.Tensor) -> None:
        state.add_(1)
        filled.zero_()
        x[0] = 5

    captured = capture(fn, x, y)
    assert set(captured.state.written) == {buffer_of(state), buffer_of(filled), buffer_of(x)}
    assert captured.inputs.arguments == [buffer_of(x), buffer_of(y)]
    assert shapes(captured) == [(3,)] * 3


@pytest.mark.parametrize("is_failing", [False, True], ids=["returns", "raises"])
def test_nothing_of_the_user_changes_whatever_the_outcome(is_failing: bool) -> None:
    model = nn.Linear(2, 2).to("jax")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    history: list[float] = []
    x = ones(2, 2)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        history.append(1.0)
        x.mul_(torch.rand(2, 2, device="jax"))
        if is_failing:
            raise KeyError("mine")
        return x

    prepare_state(optimizer)
    tensors = {n: t for n, t in [*model.named_parameters(), ("x", x)]}
    tensors |= {f"{i}.{k}": v for i, s in enumerate(optimizer.state.values()) for k, v in s.items()}
    values = {n: t.detach().cpu() for n, t in tensors.items()}
    draws = default_stream.draws
    try:
        captured = capture(step, x)
        assert not is_failing and captured.inputs.draws == 1
    except KeyError:
        assert is_failing
    assert all(torch.equal(t.detach().cpu(), values[n]) for n, t in tensors.items())
    assert optimizer.param_groups[0]["lr"] == 0.1 and history == []
    assert all(p.grad is None for p in model.parameters())
    assert default_stream.draws == draws and recording.get() is None


def test_gradients_are_told_by_their_parameter_and_by_the_position_of_an_argument() -> None:
    weight, other, x = ones(3, grad=True), ones(3, grad=True), ones(3, grad=True)

    def fn(first: torch.Tensor, x: torch.Tensor) -> None:
        other.grad = None
        (x * weight).sum().backward()

    captured = capture(fn, ones(1), x)
    left = {p if isinstance(p, int) else id(p): grad for p, grad in captured.outputs.gradients}
    assert left.keys() == {id(weight), id(other), 1}
    assert left[id(other)] is None and left[1] is not None
    assert captured.outputs.kept_gradients == [] and shapes(captured) == []


def descend(weight: torch.Tensor) -> Callable[[], None]:
    def fn() -> None:
        weight.grad = None
        (weight * 2).sum().backward()

    return fn


def test_kept_gradients_are_outputs() -> None:
    captured = capture(descend(ones(3, grad=True)), keep_grads=True)
    assert [tuple(g.shape) for g in captured.outputs.kept_gradients] == [(3,)] and shapes(captured) == [(3,)]


def test_a_gradient_that_was_there_is_a_slot_and_can_be_let_go() -> None:
    weight = ones(3, grad=True)
    weight.grad = grad = ones(3)
    captured = capture(lambda: (weight * weight.grad).sum())
    assert captured.state.slots == {buffer_of(grad): weight}
    captured.let_go()
    (empty,) = captured.state.slots
    assert empty is not buffer_of(grad) and empty.shape == (3,) and captured.state.slots[empty] is weight
    assert buffer_of(grad) not in captured.state.consts and empty in captured.state.consts


def test_adding_to_a_gradient_that_no_call_kept_says_whose() -> None:
    weight = ones(3, grad=True)

    def fn() -> None:
        (weight * 2).sum().backward()
        assert weight.grad is not None
        weight.grad.norm()

    with pytest.raises(StaleGradients) as raised:
        capture(fn)
    assert raised.value.unzeroed == {id(weight)}
    assert capture(fn, settings=raised.value.other_settings(TraceSettings())).outputs.gradients[0][0] is weight


def test_state_that_the_step_creates_is_born_and_an_output() -> None:
    weight = ones(3, grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()

    found = reachable(step, (), {})
    captured = _capture.capture(step, (), {}, found, TraceSettings(), **OPTIONS)  # not prepared
    assert [(p is weight, tuple(t.shape)) for p, t in captured.state.born] == [(True, (3,))]
    assert captured.writes.stepped == [optimizer] and len(captured.writes.actions) == 1
    assert dict(optimizer.state) == {}


def test_an_optimizer_in_reach_that_does_not_step_is_not_told() -> None:
    weight = ones(3, grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    assert capture(lambda: optimizer and weight.sum()).writes.stepped == []


def test_a_kept_gradient_is_padded_as_its_parameter_is(mesh_4x2: mesh.Mesh) -> None:
    weight = ones(6, grad=True)
    spmd.mark_sharding(weight, mesh_4x2, ("data",))
    assert shapes(capture(descend(weight), keep_grads=True)) == [(8,)]


def test_equal_counters_are_read_as_one_and_copied() -> None:
    weights = [ones(3, grad=True), ones(4, grad=True)]
    optimizer = torch.optim.Adam(weights, lr=0.1, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        (weights[0].sum() + weights[1].sum()).backward()
        optimizer.step()

    captured = capture(step)
    first, second = (buffer_of(optimizer.state[w]["step"]) for w in weights)
    assert captured.state.copies in ({second: first}, {first: second})
    assert capture(step, settings=TraceSettings(share_counters=False)).state.copies == {}


def test_equal_counters_that_do_not_stay_equal_start_the_trace_again() -> None:
    weights = [ones(3, grad=True), ones(3, grad=True)]
    optimizer = torch.optim.Adam(weights, lr=0.1)
    prepare_state(optimizer)
    counters = [optimizer.state[w]["step"] for w in weights]

    def step() -> None:
        counters[0].add_(1)
        counters[1].add_(2)
        _ = optimizer

    with pytest.raises(UnequalCounters):
        capture(step)
    assert set(map(buffer_of, counters)) <= set(capture(step, settings=TraceSettings(share_counters=False)).state.written)


def test_arguments_that_the_function_also_reaches_are_shared() -> None:
    weight = ones(3)
    assert capture(lambda x: x + weight, weight).inputs.shared == [buffer_of(weight)]
    assert capture(lambda x: x + weight, ones(3)).inputs.shared == []


def test_tensors_of_the_host_among_the_arguments_are_counted() -> None:
    captured = capture(lambda x, y: x.to("jax") + y, torch.ones(3), ones(3))
    assert captured.inputs.num_hosts == 1 and len(captured.inputs.arguments) == 1
    assert len(captured.jaxpr.jaxpr.invars) - len(captured.inputs.arguments) == 3  # the host's, the numbers, the random words


def test_checks_and_modules_that_must_be_finite_are_outputs_behind_the_result() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).to("jax")

    def fn(x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            raise ValueError("negative")
        return model(x)

    captured = capture(fn, ones(2, 2), debug_nans=True)
    assert len(captured.outputs.checks) == 1 and {"0", "1"} <= set(captured.outputs.finite)
    assert shapes(captured)[:2] == [(2, 2), (1,)]
    assert len(shapes(captured)) == 2 + len(captured.outputs.finite)
    assert capture(fn, ones(2, 2)).outputs.finite == []


def test_what_is_written_to_python_objects_is_an_effect() -> None:
    log: dict[str, Any] = {}

    def fn(x: torch.Tensor) -> torch.Tensor:
        log["loss"] = x.sum()
        return x * 2

    captured = capture(fn, ones(3))
    assert len(captured.writes.effects) == 1 and len(captured.outputs.refs) == 2 and log == {}
    assert shapes(captured) == [(3,), ()]


def test_objects_among_the_arguments_are_counted() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys = ones(3)

    assert capture(lambda cache: cache.keys + 1, Cache()).outputs.num_objects == 1
    assert capture(lambda x: x + 1, ones(3)).outputs.num_objects == 0


def test_varying_numbers_that_unrecorded_code_needs_start_the_trace_again() -> None:
    x = ones(8)

    def reads(n: int) -> torch.Tensor:
        return x * (hash(n) + 1)

    with pytest.raises(NumbersNeeded):
        capture(reads, 3, arguments={0: 3})
    assert shapes(capture(reads, 3)) == [(8,)]


def test_an_optimizers_number_as_an_index_is_the_float_that_it_is_on_the_cpu() -> None:
    weight = ones(3, grad=True)
    optimizer = torch.optim.SGD([weight], lr=2.0)
    with pytest.raises(IndexError, match="only integers, slices"):
        capture(lambda: weight[optimizer.param_groups[0]["lr"]])


def test_a_value_that_only_the_program_has_is_refused() -> None:
    with pytest.raises(spmd.TraceError, match="a value that only the compiled program will have"):
        capture(lambda x: x.tolist(), ones(65))

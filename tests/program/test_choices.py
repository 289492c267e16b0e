"""A branch that only gives names new tensors is a choice on the device; one whose block does more takes one side (test_device_branches)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from tests.grids import line
from tests.oracle import assert_same, on_device
from tests.waits import waiting

FINITE, INFINITE = torch.tensor([1.0, -2.0, 3.0, 0.5]), torch.tensor([1.0, float("inf"), -2.0, float("-inf")])


def clamped(h: torch.Tensor) -> torch.Tensor:
    """As DETR's layers have it in training."""
    if not torch.isfinite(h).all():
        largest = torch.finfo(h.dtype).max - 1000
        h = torch.clamp(h, min=-largest, max=largest)
    return h * 2


def clamped_twice(h: torch.Tensor, is_half: bool = True) -> torch.Tensor:
    if is_half and torch.isinf(h).any():
        largest = 10.0
        h = torch.clamp(h, min=-largest, max=largest)
    h = h + 1
    if is_half and h.max() > 3:
        largest = 2.0
        h = torch.clamp(h, max=largest)
    return h


def both(h: torch.Tensor) -> torch.Tensor:
    scale = torch.ones_like(h)
    if h.sum().item() > 1:
        h = h / 2
        scale = scale * 3
    return h * scale


def positive(h: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        if h[0] > 0:
            h = h - 1
        h = h + 0.25
    return h


WORKS: list[Callable[[torch.Tensor], torch.Tensor]] = [clamped, clamped_twice, both, positive]


@pytest.mark.parametrize("fn", WORKS)
def test_a_branch_that_only_changes_names_is_a_choice_in_one_program(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    step = spmd.compile(fn)
    for x in (FINITE, INFINITE, -FINITE, FINITE * 4):
        assert_same(step(x.to("jax")), fn(x))
    assert step.num_traces == 1


def rooted(h: torch.Tensor) -> torch.Tensor:
    if h.sum() > 100:
        h = torch.sqrt(h - 100)
    return h


def scaled(h: torch.Tensor) -> torch.Tensor:
    large = h * float("inf")
    if h.sum() > 100:
        h = h * large
    return h


@pytest.mark.parametrize("fn", [rooted, scaled])
def test_a_side_whose_slope_may_be_infinite_is_no_choice_where_gradients_are_kept(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Zero times infinity: the side that is not taken would make the gradient NaN."""
    assert_same(spmd.compile(fn)(FINITE.to("jax")), fn(FINITE))

    def step(x: torch.Tensor) -> None:
        fn(x * 2).sum().backward()

    compiled = spmd.compile(step, keep_grads=True)
    for scale in (1.0, 101.0, 1.0):
        device, host = (FINITE.abs() * scale).to("jax").requires_grad_(), (FINITE.abs() * scale).requires_grad_()
        with waiting(compiled):
            compiled(device)
        step(host)
        assert_same(device.grad, host.grad)


def biased(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if h.sum() > 100:
        h = h + w
    return h


def replaced(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = torch.sqrt(h - 10)
    if torch.isnan(h).any():
        h = torch.zeros_like(h)
    return h + w


def taken_from(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if h.sum() < 100:
        h = torch.where(h > 0, w, w)
    return h


@pytest.mark.parametrize("fn", [biased, replaced, taken_from])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_a_side_that_reaches_other_tensors_is_no_choice_where_gradients_are_kept(fn: Callable[..., torch.Tensor], scale: float) -> None:
    """The side that is not taken would give them zeros, where PyTorch leaves `.grad` None."""
    x, w = (FINITE * scale).to("jax"), torch.ones(4, device="jax")
    assert_same(spmd.compile(fn)(x, w), fn(FINITE * scale, torch.ones(4)))

    def step(x: torch.Tensor, w: torch.Tensor) -> None:
        fn(x * 2, w).sum().backward()

    compiled, host = spmd.compile(step, keep_grads=True), ((FINITE * scale).requires_grad_(), torch.ones(4).requires_grad_())
    with waiting(compiled):
        compiled(x.requires_grad_(), w.requires_grad_())
    step(*host)
    for ours, theirs in zip((x, w), host, strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            assert_same(ours.grad, theirs.grad)


def shifted_leaf(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if h.sum() > 1:
        w = w - 1
    return h * w


def clamped_part(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    first, second = h.split(2)
    if second.sum() > 1:
        second = torch.clamp(second, max=1.5)
    return torch.cat([first + second, w])


@pytest.mark.parametrize("fn", [shifted_leaf, clamped_part])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_side_that_reaches_what_the_other_reaches_keeps_its_gradients(fn: Callable[..., torch.Tensor], sign: int) -> None:
    host, device = ((FINITE.clone().to(at).requires_grad_(), torch.full((4,), 2.0, device=at).requires_grad_()) for at in ("cpu", "jax"))

    def step(x: torch.Tensor, w: torch.Tensor) -> None:
        fn(x * sign, w).sum().backward()

    step(*host)
    spmd.compile(step, keep_grads=True)(*device)
    for ours, theirs in zip(device, host, strict=True):
        assert_same(ours.grad, theirs.grad)


@pytest.mark.parametrize("fn", WORKS)
@pytest.mark.parametrize("sign", [1, -1])
def test_gradients_are_those_of_the_side_that_is_taken(fn: Callable[[torch.Tensor], torch.Tensor], sign: int) -> None:
    def step(x: torch.Tensor) -> None:
        fn(x * x * sign).sum().backward()

    host, device = FINITE.clone().requires_grad_(), FINITE.to("jax").requires_grad_()
    step(host)
    spmd.compile(step, keep_grads=True)(device)
    assert_same(device.grad, host.grad)


@pytest.mark.multidevice
def test_a_condition_over_a_split_tensor_is_of_all_of_it() -> None:
    m = line()
    step = spmd.compile(clamped)
    for x in (torch.arange(16.0), torch.arange(16.0).index_fill(0, torch.tensor([13]), float("inf"))):
        assert_same(step(spmd.mark_sharding(x.to("jax"), m, ("data",))), clamped(x))


def test_what_the_host_knows_is_no_choice() -> None:
    def fn(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        if n > 2:
            x = x[:2]
        return x

    step = spmd.compile(fn)
    for n in (1, 3, 1):
        assert_same(step(*on_device((FINITE, torch.tensor(n)))), fn(FINITE, torch.tensor(n)))
    assert step.num_traces == 2


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return h * 2


COUNTER = Counter().to("jax")


def hooks(h: torch.Tensor) -> Any:
    if h.sum() > 1:
        h = h * 2
        _ = h.register_hook(print)
    return h


def told(h: torch.Tensor) -> torch.Tensor:
    print("told")
    return h


def writes(h: torch.Tensor) -> Any:
    h = h + 0
    if h.sum() > 1:
        h = h.mul_(2)
    return h


def writes_out(h: torch.Tensor) -> Any:
    h, to = h + 0, torch.zeros_like(h)
    if h.sum() > 1:
        h = torch.mul(h, 2, out=to)
    return h + to


def draws(h: torch.Tensor) -> Any:
    if h.sum() > 1:
        h = h + torch.rand_like(h)
    return h


def calls(h: torch.Tensor) -> Any:
    if h.sum() > 1:
        h = told(h)
    return h


def runs_a_module(h: torch.Tensor) -> Any:
    if h.sum() > 1:
        h = COUNTER(h)
    return h


def reshapes(h: torch.Tensor) -> Any:
    if h.sum() > 1:
        h = h[:1]
    return h


def becomes_a_number(h: torch.Tensor) -> Any:
    scale = 1.0
    if h.sum() > 1:
        scale = scale * 2
    return h * scale


def binds(h: torch.Tensor) -> Any:
    if h.sum() > 1:
        more, h = h * 2, h + 1
    return h + (more if "more" in locals() else 0)


def adds_in_place(h: torch.Tensor) -> Any:
    h = h + 0
    if h.sum() > 1:
        h += 1
    return h


@pytest.mark.parametrize("fn", [writes, writes_out, draws, calls, runs_a_module, reshapes, becomes_a_number, binds, adds_in_place])
def test_a_block_that_does_more_runs_only_where_its_side_is_taken(fn: Callable[[torch.Tensor], Any]) -> None:
    step, inputs = spmd.compile(fn), [FINITE * sign for sign in (1, -1, 2, -2)]
    COUNTER.count.zero_()
    torch.manual_seed(0)
    with waiting(step):
        ours = [step(x.to("jax")).cpu() for x in inputs]
    left = COUNTER.count.item()
    COUNTER.count.zero_()
    torch.manual_seed(0)
    for got, x in zip(ours, inputs, strict=True):
        assert_same(got, fn(x.to("jax")).cpu())
    assert COUNTER.count.item() == left
    assert step.num_traces == 2


def test_a_block_with_a_hook_runs_only_where_its_side_is_taken() -> None:
    step = spmd.compile(hooks)
    with waiting(step):
        assert_same(step(-FINITE.to("jax")), -FINITE)


def test_an_unbound_name_is_unbound_where_the_block_does_not_run() -> None:
    def fn(x: torch.Tensor, is_late: bool) -> torch.Tensor:
        if x.shape[0] > 99:
            late = x
        if is_late:
            late = late + 1
        return x

    assert_same(spmd.compile(fn)(FINITE.to("jax"), False), FINITE)
    with pytest.raises(UnboundLocalError, match="late"):
        spmd.compile(fn)(FINITE.to("jax"), True)

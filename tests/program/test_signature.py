"""Arguments of a compiled step: containers, keywords, static values, views, repeated tensors, and what comes back."""

from array import array
from collections import Counter, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import spmd
from tests.oracle import assert_same, batch, on_device, twins

Pair = namedtuple("Pair", "first second")


def test_containers_keywords_and_static_values_go_in_and_come_out() -> None:
    def tower(data: dict[str, Any], *, scale: float, names: tuple[str, ...], flag: bool = True) -> dict[str, Any]:
        a, (b, none) = data["a"], data["b"]
        out = a * scale + b if flag else a
        return {"out": [out, (out.sum(), none)], "pair": Pair(a - b, names), "n": a.shape[0], "text": names[0]}

    data = {"a": batch(3), "b": (batch(3, seed=2), None)}
    step = spmd.compile(tower)
    for scale, flag, traces in ((2.0, True, 1), (2.0, True, 1), (3.0, True, 2), (3.0, False, 3), (2.0, True, 3)):
        got = step(on_device(data), scale=scale, names=("p", "q"), flag=flag)
        assert_same(got, tower(data, scale=scale, names=("p", "q"), flag=flag))
        assert step.num_traces == traces


def test_a_static_value_of_another_type_is_another_program() -> None:
    step = spmd.compile(lambda x, k: x * k)
    x = torch.ones(2, dtype=torch.int64).to("jax")
    assert [step(x, k).dtype for k in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
    assert step.num_executables == 3


def test_values_that_say_to_be_equal_to_all_are_told_apart_by_their_hashes() -> None:
    class Expression:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def __eq__(self, other: object) -> bool:  # as symbols do, for which `==` makes an expression
            return True

        __hash__ = object.__hash__

    two, three = Expression(2.0), Expression(3.0)
    step = spmd.compile(lambda x, by: x * by.factor)
    x = torch.ones(1, device="jax")
    assert [step(x, by).item() for by in (two, three, two, three)] == [2.0, 3.0, 2.0, 3.0]
    assert step.num_traces == 2


def test_new_batch_shape_is_a_new_signature_with_its_reason() -> None:
    _, device = twins()
    step = spmd.compile(lambda x: device(x).sum())
    for size in (4, 8, 4, 8):
        step(batch(size, 8).to("jax"))
    assert step.num_executables == step.num_traces == 2
    assert "shape changed from (4, 8) to (8, 8)" in step.retraces[0]


def test_the_reason_for_another_gradient_is_in_torchs_words() -> None:
    def argument(requires_grad: bool, has_gradient: bool = False, has_hook: bool = False) -> torch.Tensor:
        x = torch.ones(3, device="jax", requires_grad=requires_grad)
        if has_gradient:
            x.grad = torch.ones(3, device="jax")
        if has_hook:
            x.register_hook(lambda gradient: gradient)
        return x

    step = spmd.compile(lambda x: x * 2)
    for given in (argument(True), argument(False), argument(True, True), argument(True, has_hook=True)):
        step(given)
    assert step.retraces == [
        "argument 0: requires_grad changed from True to False",
        "argument 0: requires_grad changed from False to True",
        "argument 0: requires_grad changed from True, with a gradient of shape [3] to True, without a gradient and with hooks",
    ]


@pytest.mark.parametrize("change", [lambda x: x.unsqueeze_(0), lambda x: x.t_(), lambda x: x.squeeze_(0), lambda x: x.resize_(7)])
def test_another_shape_in_place_is_refused_by_name(change: Any) -> None:
    with pytest.raises(spmd.TraceError, match="changes the shape of an argument in place") as raised:
        spmd.compile(change)(torch.ones(1, 3, device="jax"))
    assert "of shape (1, 3), and becomes" in str(raised.value) and "x = x.unsqueeze(0)" in str(raised.value)


def test_in_place_update_of_an_argument_is_seen_by_the_caller() -> None:
    def bump(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    step = spmd.compile(bump)
    for pattern in ("separate", "same", "separate"):
        host = [torch.zeros(3), torch.ones(3)]
        device = on_device(host)
        picks = (0, 0) if pattern == "same" else (0, 1)
        for _ in range(2):
            assert_same(step(*(device[i] for i in picks)), bump(*(host[i] for i in picks)))
        assert_same(device, host)
    assert step.num_executables == 2


def test_a_view_argument_costs_no_retrace_per_offset() -> None:
    data = batch(32, 8)
    _, device = twins()
    step = spmd.compile(lambda x: device(x))
    moved = data.to("jax")
    for i in range(0, 32, 8):
        assert_same(step(moved[i : i + 8]), step(data[i : i + 8].to("jax")))
    assert step.num_traces <= 2


@pytest.mark.parametrize("write_to", ["view", "whole"])
def test_writing_to_an_argument_that_has_a_view_among_the_arguments_is_refused(write_to: str) -> None:
    def bump(whole: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        (view if write_to == "view" else whole).add_(1)
        return whole.sum() + view.sum()

    step = spmd.compile(bump)
    x = torch.zeros(4).to("jax")
    step(x, torch.zeros(2).to("jax"))
    for _ in range(2):
        with pytest.raises(spmd.TraceError, match="an argument is a view of a tensor, and the compiled function writes in place"):
            step(x, x[:2])


def test_an_argument_that_comes_back_is_that_of_this_call() -> None:
    step = spmd.compile(lambda x: (x, x[:1], x * 2))
    for value in (1.0, 2.0):
        x = torch.full((2,), value)
        assert_same(step(x.to("jax")), (x, x[:1], x * 2))


def test_an_argument_that_is_also_state_is_not_taken_for_another_one() -> None:
    weight = torch.ones(2).to("jax")
    step = spmd.compile(lambda x: x - weight)
    assert step(weight).tolist() == [0.0, 0.0]
    assert step(torch.full((2,), 5.0).to("jax")).tolist() == [4.0, 4.0]
    assert step(weight).tolist() == [0.0, 0.0]

    @spmd.compile
    def grow(x: torch.Tensor) -> torch.Tensor:
        weight.add_(1)
        return x * 1

    other = torch.zeros(2).to("jax")
    assert [grow(t)[0].item() for t in (other, weight, other, weight)] == [0.0, 3.0, 0.0, 5.0]


@pytest.mark.parametrize("kind", ["ndarray", "graph"])
def test_what_would_go_stale_is_refused(kind: str) -> None:
    weight = torch.ones(2, requires_grad=True, device="jax")
    calls: dict[str, tuple[Callable[..., Any], Any, str]] = {
        "ndarray": (lambda x: torch.from_numpy(x).to("jax"), torch.ones(2).numpy(), "type ndarray can be neither traced nor compared"),
        "graph": (lambda x: x.sum().backward(), weight * 2, "was computed from tensors that require gradients"),
    }
    fn, argument, text = calls[kind]
    with pytest.raises(spmd.TraceError) as raised:
        spmd.compile(fn)(argument)
    assert text in str(raised.value) and "fix:" in str(raised.value)


def test_equal_keys_and_ranges_of_another_kind_are_not_the_same() -> None:
    kind = spmd.compile(lambda x, table: x * len(type(next(iter(table))).__name__))
    held = {"range": range(0)}
    start = spmd.compile(lambda x: x * (held["range"].start + 1))
    x = torch.ones(1, device="jax")
    assert [kind(x, {key: 1}).item() for key in (1, True, 1.0, 1)] == [3, 4, 5, 3]
    found = []
    for held["range"] in (range(0), range(5, 5), range(0)):
        found.append(start(x).item())
    assert found == [1, 6, 1]


def test_an_argument_that_contains_itself_is_refused_by_name() -> None:
    cyclic: list[Any] = [2.0]
    cyclic.append(cyclic)
    with pytest.raises(spmd.SpmdError, match="contains itself"):
        spmd.compile(lambda x, numbers: x * numbers[0])(batch(3), cyclic)


@dataclass
class Settings:
    scale: float
    name: str = ""


class ComparedByValue:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ComparedByValue) and other.scale == self.scale


@pytest.mark.parametrize("make", [Settings, ComparedByValue, lambda scale: SimpleNamespace(scale=scale)])
def test_an_object_that_cannot_be_hashed_is_guarded_by_what_is_read_of_it(make: Callable[[float], Any]) -> None:
    def scaled(x: torch.Tensor, settings: Any) -> torch.Tensor:
        settings.calls = getattr(settings, "calls", 0) + 1
        return x * settings.scale

    step, ours, torchs = spmd.compile(scaled), make(2.0), make(2.0)
    for scale in (2.0, 2.0, 3.0, 4.0):
        ours.scale = torchs.scale = scale
        assert_same(step(on_device(batch(3)), ours), scaled(batch(3), torchs))
        assert ours.calls == torchs.calls
    other = make(5.0)
    assert_same(step(on_device(batch(3)), other), batch(3) * 5.0)


def test_a_slice_is_an_argument_by_its_ends() -> None:
    step = spmd.compile(lambda x, rows: x[rows] * 2)
    for rows in (slice(0, 2), slice(0, 2), slice(1, None), slice(None, None, 2)):
        assert_same(step(on_device(batch(3)), rows), batch(3)[rows] * 2)
    assert step.num_traces == 3


def checkpointed(fn: Any, *args: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False)


@pytest.mark.parametrize("run", [lambda fn, *args: fn(*args), checkpointed])
def test_a_size_stays_a_size(run: Any) -> None:
    seen: list[Any] = []

    def scaled(x: torch.Tensor, size: torch.Size) -> torch.Tensor:
        seen.append((type(size), size.numel()))
        return x * size.numel()

    def step(x: torch.Tensor, size: torch.Size, kept: dict[str, Any]) -> tuple[Any, ...]:
        y = x.clone().requires_grad_()
        run(scaled, y, size).sum().backward()
        return y.grad, size, kept["size"], type(kept["sizes"][0]) is torch.Size

    compiled = spmd.compile(step)
    for size in (torch.Size([2, 3]), torch.Size([2, 3]), torch.Size([4])):
        given = size, {"size": size, "sizes": [size]}
        expected = step(torch.ones(2), *given)
        assert_same(compiled(torch.ones(2).to("jax"), *given), expected)
    assert set(seen) == {(torch.Size, 6), (torch.Size, 4)}
    assert compiled.num_traces == 2


@pytest.mark.parametrize(
    "argument, fix",
    [
        (Counter("ab"), "pass dict(d)"),
        (UserDict(a=1), "pass dict(d)"),
        ({1, 2}, "pass frozenset(s), or a list in a fixed order, sorted(s)"),
        ({1: 2}.keys(), "pass frozenset(s), or a list in a fixed order, sorted(s)"),
        (bytearray(b"ab"), "pass bytes(b), or a tensor, torch.frombuffer(b, dtype=torch.uint8).to('jax')"),
        (memoryview(bytearray(b"ab")), "pass bytes(b), or a tensor, torch.frombuffer(b, dtype=torch.uint8).to('jax')"),
        (array("d", [1.0]), "pass list(a), or a tensor, torch.tensor(list(a), device='jax')"),
        (np.ones(2), "pass a tensor, torch.from_numpy(a).to('jax'), or a list, a.tolist()"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_fix_is_for_the_class_of_the_argument(argument: Any, fix: str) -> None:
    step = spmd.compile(lambda x, a: x * len(a))
    x = torch.ones(2).to("jax")
    with pytest.raises(spmd.TraceError, match=f"type {type(argument).__name__} can be neither traced nor compared") as raised:
        step(x, argument)
    assert str(raised.value).endswith(f"fix: {fix}")
    code = fix.partition("pass ")[2].partition(", or ")[0].removeprefix("a tensor, ")
    value = eval(code, {"torch": torch, **dict.fromkeys("abds", argument)})
    assert step(x, value).tolist() == [float(len(argument))] * 2


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda k: make_function(k), "argument 1 is another function of the same name, make_function.<locals>.function"),
        (lambda k: Opaque(), "argument 1 is another Opaque"),
        (lambda k: "ab"[k], "argument 1 changed from 'a' to 'b'"),
    ],
    ids=["function", "object", "text"],
)
def test_a_reason_says_what_is_another_object(make: Callable[[int], Any], reason: str) -> None:
    step = spmd.compile(lambda x, value: x * 2)
    for k in range(2):
        step(torch.ones(2).to("jax"), make(k))
    assert step.retraces == [reason]


class Opaque:
    __slots__ = ()


def make_function(k: int) -> Callable[[], int]:
    def function() -> int:
        return k

    return function

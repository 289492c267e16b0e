"""Attributes that a function gives to tensors that it makes: each call gives them anew, as it returns values anew."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import spmd
from tests.oracle import batch


class Boxes(torch.Tensor):
    """A tensor that knows the size of its image."""


class Part:
    """An object with any attributes."""


class State:
    """What the functions below read and write: a counter, an object, a module and a parameter of the device."""

    def __init__(self, device: str) -> None:
        self.n = 1
        self.part: Any = Part()
        self.module: Any = nn.Module()
        self.weight: Any = nn.Parameter(torch.ones(2, 2, device=device))


STATE: Any = None


def with_attributes(tensor: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(tensor, name, value)
    return tensor


def a_shared_list(x: Any, held: Any, n: int) -> Any:
    items = [1]
    return with_attributes(x * 2, items=items), items


def each_other(x: Any, held: Any, n: int) -> Any:
    y, z = x * 2, x * 3
    y.other, z.other, y.items = z, y, [z, (y, n)]
    return [z]


def views(x: Any, held: Any, n: int) -> Any:
    y = x * 2
    row, turned = y[0], y.t()
    row.base, turned.row, row.n = y, row, n
    return y, row, turned


def a_copy_to_the_host(x: Any, held: Any, n: int) -> Any:
    y: Any = (x * 2).cpu()
    y.n, y.itself = n, y
    return y


def a_number_of_the_device(x: Any, held: Any, n: int) -> Any:
    y: Any = x * 2
    y.total = y.sum().item()
    y.text = f"{n} {y.total:.1f}"
    return y


def in_an_argument(x: Any, held: Any, n: int) -> Any:
    held["out"] = with_attributes(x * 2, n=n)
    return x + 1


def in_the_state(x: Any, held: Any, n: int) -> Any:
    STATE.part.t = with_attributes(x * STATE.n, step=STATE.n, before=n)
    STATE.module.new = with_attributes(nn.Parameter(x.detach() * n), step=n)
    return x + 1


CASES: dict[str, Callable[[Any, Any, int], Any]] = {
    "constants": lambda x, held, n: with_attributes(x * 2, a="s", b=1, c=None, d=True, e=2.5),
    "the argument": lambda x, held, n: with_attributes(x * 2, src=x, items=[1]),
    "a dict of the caller": lambda x, held, n: with_attributes(x * 2, held=held),
    "a list that is returned": a_shared_list,
    "a number that changes": lambda x, held, n: with_attributes(x * 2, n=STATE.n),
    "a number among the arguments": lambda x, held, n: with_attributes(x * 2, a="s", n=n, held={"n": n}, pair=("a", n)),
    "of a subclass": lambda x, held, n: with_attributes((x * 2).as_subclass(Boxes), n=n),
    "a number and a text of the device": a_number_of_the_device,
    "a tensor": lambda x, held, n: with_attributes(x * 2, triple=x * 3),
    "itself": lambda x, held, n: (lambda y: with_attributes(y, itself=y))(x * 2),
    "each other": each_other,
    "a function": lambda x, held, n: with_attributes(x * 2, fn=lambda: n),
    "a size": lambda x, held, n: with_attributes(x * 2, rows=x.shape[0]),
    "of views": views,
    "of a view of the argument": lambda x, held, n: with_attributes(x[0], n=n, c="a", src=x),
    "of an alias of state": lambda x, held, n: with_attributes(STATE.weight.detach(), n=n, c="a"),
    "a parameter with the memory of state": lambda x, held, n: with_attributes(nn.Parameter(STATE.weight), c="a"),
    "of a copy to the host": a_copy_to_the_host,
    "of what an argument holds": in_an_argument,
    "of what the state holds": in_the_state,
}


def shown(value: Any, seen: dict[int, str]) -> Any:
    """A value with the names of those that it holds again."""
    if isinstance(value, (torch.Tensor, list, dict, Part)) and id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = f"#{len(seen)}"
    if isinstance(value, torch.Tensor):
        plain = value.detach().as_subclass(torch.Tensor).tolist()
        return type(value), value.requires_grad, plain, shown(vars(value), seen)
    if isinstance(value, (list, tuple)):
        return type(value), [shown(part, seen) for part in value]
    if isinstance(value, dict):
        return [(key, shown(part, seen)) for key, part in value.items()]
    if isinstance(value, (Part, types.FunctionType)):
        return shown(vars(value), seen) if isinstance(value, Part) else value()
    return type(value), value


def called(run: Callable[..., Any], device: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What four calls return and leave."""
    state, found = State(device), []
    monkeypatch.setitem(globals(), "STATE", state)
    for i in range(4):
        state.n = i + 1
        given = (batch(2, 2) + i).to(device), {"x": 1}, i + 5
        result = run(*given)
        left = vars(state.part), state.module._parameters
        found.append(shown([given, result, left], {}))
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_call_gives_the_attributes_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = spmd.compile(CASES[name])
    assert called(step, "jax", monkeypatch) == called(CASES[name], "cpu", monkeypatch)
    assert step.num_traces == (3 if name in ("a number that changes", "of what the state holds") else 2)  # two numbers, one after another


def test_sizes_are_python_numbers_that_follow_the_call() -> None:
    def fn(x: Any) -> Any:
        return with_attributes(x * 2, rows=x.shape[0], pair=[x.shape[0] + 1], triple=x * 3)

    step = spmd.compile(fn, dynamic={"x": {0: spmd.Dim("rows", max=32)}})
    for rows in (5, 3, 17, 6, 30):
        y = step(torch.ones(rows, 2, device="jax"))
        assert (y.rows, y.pair, tuple(y.triple.shape)) == (rows, [rows + 1], (rows, 2))
    assert step.num_executables == 2  # 8 and 32 rows


def test_steps_of_one_call_have_stacks() -> None:
    step = spmd.compile(lambda x: with_attributes(x * 2, triple=x * 3, total=x.sum().item(), c="a"), steps_per_call=2)
    x = batch(2, 3)
    y = step(x.to("jax"))
    assert (y.triple.tolist(), y.c) == ((x * 3).tolist(), "a")
    assert y.total == [row.sum().item() for row in x]


def sets(x: Any, n: int) -> Any:
    STATE.weight.grad = None
    (x * STATE.weight).sum().backward()
    with_attributes(STATE.weight.grad, step=n, src=x)
    return x + 1


def sets_a_constant_of_a_result(x: Any, n: int) -> Any:
    STATE.weight.grad = None
    (x * STATE.weight).sum().backward()
    with_attributes(STATE.weight.grad, step="a")
    return STATE.weight.grad, n


def accumulates(x: Any, n: int) -> Any:
    (x * STATE.weight).sum().backward()
    STATE.weight.grad.step = n
    return x


def reads(x: Any, n: int) -> Any:
    (x * STATE.weight).sum().backward()
    return x * getattr(STATE.weight.grad, "step", 0)


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("fn", [sets, sets_a_constant_of_a_result, accumulates, reads])
def test_gradients_that_are_kept_have_their_attributes(fn: Any, is_replaced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(step: Any, device: str) -> list[Any]:
        state, found = State(device), []
        monkeypatch.setitem(globals(), "STATE", state)
        for i in range(4):
            if is_replaced and i:
                state.weight.grad = with_attributes(torch.ones(2, 2, device=device), step=10 * i)
            x = (batch(2, 2) + i).to(device)
            found.append(shown([x, step(x, i), state.weight.grad], {}))
        return found

    step: Any = spmd.compile(fn, keep_grads=True)
    assert run(step, "jax") == run(fn, "cpu")
    assert step.num_traces <= (4 if is_replaced else 3)

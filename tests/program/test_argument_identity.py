"""An object that is both an argument of a call and reached by name (from a closure, a global, `self`): reads and identity are Python's.

The trace has a copy of an argument, so a function that writes to such an object is refused.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import spmd


class Held:
    def __init__(self, device: str, value: float = 1.0) -> None:
        self.w = torch.full((2,), value, device=device)
        self.n = 1


class State:
    """What the function reaches by name; `given` is what the calls get as arguments, in order."""

    def __init__(self, device: str) -> None:
        self.t, self.other_t = torch.ones(2, device=device), torch.full((2,), 3.0, device=device)
        self.u, self.other = Held(device), Held(device, 2.0)
        self.d: dict[str, Any] = {"w": torch.ones(2, device=device), "n": 2}
        self.items: list[Any] = [torch.ones(2, device=device), 2]
        self.space = SimpleNamespace(w=torch.ones(2, device=device), n=3)
        self.linear = torch.nn.Linear(2, 2)  # so that this object is no container of its tensors
        self.calls = 0


def looked_at(s: State) -> Any:
    return s.u.n, s.other.n, s.d["n"], len(s.items), s.space.n, s.t.tolist(), s.u.w.tolist()


Use = Callable[[State, Any], Any]
Get = Callable[[State], Any]
THEN: dict[str, tuple[Get, Get]] = {  # what the first call gets, and what later calls get
    "it": (lambda s: s.u, lambda s: s.u),
    "it, then another": (lambda s: s.u, lambda s: s.other),
    "another, then it": (lambda s: s.other, lambda s: s.u),
}
IDENTITY: dict[str, Use] = {
    "is": lambda s, u: u.w * (2.0 if u is s.u else 3.0),
    "is, the other way": lambda s, u: u.w * (2.0 if s.u is u else 3.0),
    "is not": lambda s, u: u.w * (2.0 if u is not s.u else 3.0),
    "==": lambda s, u: u.w * (2.0 if u == s.u else 3.0),
    "in a list": lambda s, u: u.w * (2.0 if u in [s.u] else 3.0),
    "in a list of arguments": lambda s, u: u.w * (2.0 if s.u in (u,) else 3.0),
    "read": lambda s, u: u.w * s.u.n + s.u.w,
}
READS: dict[str, tuple[Get, Use]] = {
    "tensor": (lambda s: s.t, lambda s, t: t * 2 + s.t),
    "tensor is": (lambda s: s.t, lambda s, t: t * (2.0 if s.t is t else 3.0)),
    "another tensor, then it": (lambda s: s.t if s.calls else s.other_t, lambda s, t: t * (2.0 if s.t is t else 3.0)),
    "tensor, then another": (lambda s: s.other_t if s.calls else s.t, lambda s, t: t * (2.0 if s.t is t else 3.0)),
    "tensor in place": (lambda s: s.t, lambda s, t: (t.add_(1), s.t * 2)[1]),
    "dict": (lambda s: s.d, lambda s, d: d["w"] * s.d["n"]),
    "dict is": (lambda s: s.d, lambda s, d: d["w"] * (2.0 if d is s.d else 3.0)),
    "list": (lambda s: s.items, lambda s, items: items[0] * s.items[1]),
    "in a dict": (lambda s: {"u": s.u}, lambda s, d: d["u"].w * (2.0 if d["u"] is s.u else 3.0)),
    "namespace": (lambda s: s.space, lambda s, space: space.w * s.space.n),
    "tensor of an object in place": (lambda s: s.u, lambda s, u: (u.w.add_(1), s.u.w * 2)[1]),
    "an object that holds a module": (lambda s: s, lambda s, holder: s.u.w * holder.u.n + holder.t),
}
CASES = {
    **{f"{name}, {then}": (get, later, use) for name, use in IDENTITY.items() for then, (get, later) in THEN.items()},
    **{name: (get, get, use) for name, (get, use) in READS.items()},
}


@pytest.mark.parametrize("name", list(CASES))
def test_what_reads_it_or_asks_which_object_it_is_is_torchs(name: str) -> None:
    first, later, use = CASES[name]

    def run(wrap: Any, device: str) -> list[Any]:
        s, found = State(device), []
        step = wrap(lambda given: use(s, given))
        for call in range(4):
            s.calls = call
            found.append((step((later if call else first)(s)).tolist(), looked_at(s)))
            s.u.n += call == 1
        return found

    assert run(lambda fn: spmd.compile(fn, max_retraces=9), "jax") == run(lambda fn: fn, "cpu")


WRITES: dict[str, tuple[Get, Use]] = {
    "object by name": (lambda s: s.u, lambda s, u: (setattr(s.u, "n", s.u.n + 1), u.w * u.n)[1]),
    "object as argument": (lambda s: s.u, lambda s, u: (setattr(u, "n", u.n + 1), u.w * s.u.n)[1]),
    "tensor of it by name": (lambda s: s.u, lambda s, u: (setattr(s.u, "w", s.u.w + 1), u.w * 2)[1]),
    "tensor of it as argument": (lambda s: s.u, lambda s, u: (setattr(u, "w", u.w + 1), s.u.w * 2)[1]),
    "namespace": (lambda s: s.space, lambda s, space: (setattr(space, "n", space.n + 1), space.w * s.space.n)[1]),
    "dict": (lambda s: s.d, lambda s, d: (d.__setitem__("n", 3), d["w"] * s.d["n"])[1]),
    "list": (lambda s: s.items, lambda s, items: (s.items.append(1), items[0] * len(items))[1]),
    "in a later call only": (
        lambda s: s.u if s.calls else s.other,
        lambda s, u: (setattr(s.u, "n", s.u.n + 1), u.w * u.n)[1],
    ),
}


@pytest.mark.parametrize("name", list(WRITES))
def test_what_writes_to_it_is_refused(name: str) -> None:
    get, use = WRITES[name]
    s = State("jax")
    step = spmd.compile(lambda given: use(s, given))
    if name == "in a later call only":
        step(get(s))
    s.calls = 1
    before = looked_at(s)
    with pytest.raises(spmd.TraceError, match="among the arguments is also reached as s.*, and the function writes to it"):
        step(get(s))
    assert looked_at(s) == before


@pytest.mark.parametrize(
    "use",
    [
        lambda s, u: u.w * (id(u) % 2),
        lambda s, u: u.w * {s.u: 2.0}.get(u, 3.0),
        lambda s, u: u.w * (2.0 if u in {s.u} else 3.0),
        lambda s, u: u.w * {s.u: 2.0}[u],
        lambda s, u: u.w * (hash(u) % 2),
    ],
    ids=["id", "get", "in a set", "key", "hash"],
)
def test_an_argument_as_a_key_is_refused(use: Use) -> None:
    s = State("jax")
    with pytest.raises(spmd.TraceError, match=r"uses an argument of class Held as a key, or asks its id\(\)"):
        spmd.compile(lambda given: use(s, given))(s.u)


def test_a_tensor_on_the_cpu_that_is_compared_by_identity_is_refused() -> None:
    held, x = torch.ones(2), torch.ones(2, device="jax")
    with pytest.raises(spmd.TraceError, match="compares a tensor among its arguments .* by identity"):
        spmd.compile(lambda t: x * (2.0 if t is held else 3.0))(held)


def test_arguments_that_are_compared_with_each_other_may_be_other_tensors_in_each_call() -> None:
    step = spmd.compile(lambda q, k: q * 2 if q is k else q * k)
    for value in (1.0, 2.0, 3.0):
        x, other = torch.full((2,), value, device="jax"), torch.full((2,), 5.0, device="jax")
        assert (step(x, x).tolist(), step(x, other).tolist()) == ([2 * value] * 2, [5 * value] * 2)
    assert step.num_traces == 2


class Result(collections.OrderedDict[str, Any]):
    """As the results of Hugging Face's models: a field is also an item."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)


def test_an_argument_that_a_method_in_c_stores_is_the_callers() -> None:
    def filled(given: Held) -> Any:
        result: Any = Result()
        result.given, result.w = given, given.w * 2
        return result

    step, given = spmd.compile(filled), Held("jax")
    for _ in range(3):
        result = step(given)
        assert result.given is given and result["given"] is given and result.w.tolist() == [2.0, 2.0]


def gradients(x: torch.Tensor, y: torch.Tensor) -> Any:
    (x * 2 + y * 3).sum().backward()
    return x.grad, y.grad, x is y


def doubled(x: torch.Tensor, y: torch.Tensor) -> None:
    for tensor in [x] if x is y else [x, y]:
        tensor.detach().mul_(2)
    vars(y)["tag"] = 3


@pytest.mark.parametrize("fn", [gradients, doubled])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 3, 2), (3, 0, 1, 2)])
def test_two_arguments_that_share_memory_are_not_one_argument(fn: Callable[..., Any], order: tuple[int, ...]) -> None:
    def left(device: str) -> Any:
        step, found = fn if device == "cpu" else spmd.compile(fn), []
        a = torch.ones(2).to(device).requires_grad_()
        pairs = (a, a), (a, a.detach().requires_grad_()), (a.detach().requires_grad_(), a), (a, torch.nn.Parameter(a.data))
        for x, y in map(pairs.__getitem__, order):
            x.grad = y.grad = None
            result = step(x, y)
            found.append((result, a.tolist(), vars(x).pop("tag", None), vars(y).pop("tag", None)))
        return found

    torch.testing.assert_close(left("jax"), left("cpu"), check_device=False)


def test_an_argument_that_shares_the_memory_of_state_is_not_the_state() -> None:
    def left(device: str) -> Any:
        w = torch.ones(2).to(device).requires_grad_()

        def fn(x: torch.Tensor) -> Any:
            (x * 2 + w * 3).sum().backward()
            return x.grad, w.grad, x is w

        step, found = fn if device == "cpu" else spmd.compile(fn), []
        for make in (lambda: w, lambda: w.detach().requires_grad_(), lambda: w, lambda: torch.nn.Parameter(w.data)):
            x = make()
            x.grad = w.grad = None
            found.append(step(x))
        return found

    torch.testing.assert_close(left("jax"), left("cpu"), check_device=False)

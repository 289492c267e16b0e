"""Dicts among the arguments: after a call their entries are in the order in which the function left them."""

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from tests.oracle import assert_same

Case = tuple[Callable[[int, torch.Tensor], Any], Callable[[Any], Any]]  # the argument of a call, and what the function writes to it


def removed_and_set(d: Any) -> None:
    value = d["a"]
    del d["a"]
    d["a"] = value


def refilled(d: Any) -> None:
    items = sorted(d.items(), reverse=True)
    d.clear()
    d.update(items)


def last_first(d: Any) -> None:
    key, value = d.popitem()
    rest = dict(d)
    d.clear()
    d[key] = value
    d.update(rest)


def nested(d: Any) -> None:
    d["in"]["p"] = d["in"].pop("p")
    d["in"]["q"] = d["n"]
    d["in"] = d.pop("in")


def nested_under_another_key(d: Any) -> None:
    held = d.pop("in")
    d["out"] = held
    held["p"] = d["n"]
    held["z"] = held.pop("q")


def by_default(d: Any) -> None:
    d["new"].append(1)
    d["a"] = d.pop("a")
    d["b"].append(d["n"])


def by_value(d: Any) -> None:
    for key in sorted(d, key=lambda key: d[key], reverse=True):
        d.move_to_end(key)


def moved_by_parity(d: Any) -> None:
    d.move_to_end("a" if d["n"] % 2 else "n")


def each(ds: Any) -> None:
    for d in ds:
        d["a"] = d.pop("a")


def in_an_object(held: Any) -> None:
    held.d["a"] = held.d.pop("a") + 1
    held.x = held.x + 1
    value = held.n
    del held.n
    held.n = value


class Held:
    def __init__(self, n: int, x: torch.Tensor) -> None:
        self.n, self.d, self.x = n, {"a": n, "b": 2}, x


Ordered, Default = collections.OrderedDict, collections.defaultdict
CASES: dict[str, Case] = {
    "del and set": (lambda n, x: {"a": n, "b": x, "c": 3}, removed_and_set),
    "clear and update": (lambda n, x: {"a": n, "b": 2, "c": 3}, refilled),
    "popitem": (lambda n, x: {"a": n, "b": x, "c": 3}, last_first),
    "pop and set a tensor": (lambda n, x: {"a": x, "b": n}, lambda d: d.update(a=d.pop("a") * 2)),
    "move_to_end": (lambda n, x: Ordered(a=n, b=x), lambda d: d.move_to_end("a")),
    "move_to_end, first": (lambda n, x: Ordered(a=n, b=x, c=3), lambda d: d.move_to_end("c", last=False)),
    "popitem, first": (lambda n, x: Ordered(a=n, b=x), lambda d: d.__setitem__("new", d.popitem(last=False)[1])),
    "moved by its value": (lambda n, x: Ordered(n=n, a=1, b=2), moved_by_parity),
    "sorted": (lambda n, x: Ordered(a=n * 7 % 5, b=2), by_value),
    "in another dict": (lambda n, x: {"a": 1, "in": {"p": x, "q": n}, "n": n}, nested),
    "under another key": (lambda n, x: {"a": 1, "in": {"p": x, "q": n, "r": 3}, "n": n}, nested_under_another_key),
    "defaultdict": (lambda n, x: Default(list, {"a": n, "b": [1], "n": n}), by_default),
    "dicts in a list": (lambda n, x: [{"a": i, "b": n} for i in range(3)], each),
    "in an object": (Held, in_an_object),
    "keys that are equal": (lambda n, x: {1: n, "b": x}, lambda d: d.update({True: d.pop(1)})),
    "another order in every call": (lambda n, x: {"a": 1, "b": n} if n % 2 else {"b": n, "a": 1}, lambda d: d.update(b=d.pop("b"))),
}


@pytest.mark.parametrize("name", CASES)
def test_entries_are_in_the_order_in_which_the_function_left_them(name: str) -> None:
    make, write = CASES[name]
    ends: list[list[Any]] = []
    for device in ("cpu", "jax"):
        step = (spmd.compile if device == "jax" else lambda f: f)(lambda x, d: (write(d), x * 2)[1])
        found: list[Any] = []
        for n in range(1, 6):
            given = make(n, torch.full((2,), float(n), device=device))
            found.append([step(torch.ones(2, device=device) * n, given), shown(given)])
        ends.append(found)
    assert_same(ends[1], ends[0])


def shown(value: Any) -> Any:
    """The keys in their order, with their classes, and the values."""
    if isinstance(value, Held):
        value = vars(value)
    if isinstance(value, dict):
        return [[[type(key).__name__, str(key)], shown(item)] for key, item in value.items()]
    return list(map(shown, value)) if isinstance(value, list) else value


def test_a_cache_among_the_arguments_evicts_what_was_used_least_recently() -> None:
    class Cache:
        def __init__(self) -> None:
            self.held: collections.OrderedDict[str, torch.Tensor] = Ordered()

        def get(self, key: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
            if key in self.held:
                self.held.move_to_end(key)
            else:
                self.held[key] = make()
            if len(self.held) > 2:
                self.held.popitem(last=False)
            return self.held[key]

    ends: list[list[Any]] = []
    for device in ("cpu", "jax"):
        step, cache = (spmd.compile if device == "jax" else lambda f: f)(lambda x, cache, key: cache.get(key, lambda: x * 2)), Cache()
        keys = enumerate("abacabacb")
        ends.append([[step(torch.full((2,), float(n), device=device), cache, key), list(cache.held)] for n, key in keys])
    assert_same(ends[1], ends[0])


@pytest.mark.parametrize(
    "given, write, name",
    [
        (Ordered(a=1), lambda d: setattr(d, "note", 1), "note"),
        (Default(int, a=1), lambda d: setattr(d, "default_factory", list), "default_factory"),
    ],
    ids=["OrderedDict", "defaultdict"],
)
def test_an_attribute_of_a_dict_among_the_arguments_cannot_be_set(given: Any, write: Callable[[Any], None], name: str) -> None:
    step = spmd.compile(lambda x, d: (write(d), x * 2)[1])
    with pytest.raises(spmd.TraceError, match=f"sets the attribute '{name}' of {type(given).__name__} among its arguments"):
        step(torch.ones(2, device="jax"), given)
    assert not getattr(given, "note", 0) and getattr(given, "default_factory", int) is int

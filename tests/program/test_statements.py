"""Statements that read and write Python objects: after each call of a compiled function all is as on the CPU.

Each case is a text, since most methods and functions that stand for a statement (`setattr`, `list.__setitem__`) are recorded in other ways.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import dataclasses
import functools
import inspect
import operator
import textwrap
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import spmd

CONTAINERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [0, 1, 2, 3],
    "deque": lambda: collections.deque([0, 1, 2, 3]),
    "numpy": lambda: np.array([0.0, 1.0, 2.0, 3.0]),
    "view of numpy": lambda: np.arange(8.0)[::2],
    "array": lambda: array.array("d", [0, 1, 2, 3]),
    "bytearray": lambda: bytearray([0, 1, 2, 3]),
    "memoryview": lambda: memoryview(bytearray([0, 1, 2, 3])),
    "memoryview of numpy": lambda: memoryview(np.array([0.0, 1.0, 2.0, 3.0])),
    "user list": lambda: collections.UserList([0, 1, 2, 3]),
    "dict": lambda: {0: 0, 1: 1, 2: 2, 3: 3},
    "default dict": lambda: collections.defaultdict(int, {0: 0, 1: 1, 2: 2, 3: 3}),
    "counter": lambda: collections.Counter({0: 0, 1: 1, 2: 2, 3: 3}),
    "user dict": lambda: collections.UserDict({0: 0, 1: 1, 2: 2, 3: 3}),
}
WRITES = """
o[1] = o[1] + 1
o[1] += 2; x = x + float(o[1])
x = x + float(o[1]); o[1] += 1
o[1:3] = o[2:4]
o[0], o[1] = o[1], o[0]
for o[0] in (5, 6): pass
(o[0], (o[1], o[2])) = (7, (8, 9))
if o[1] < 3: o[1] += 1
else: o[0] += 5
while o[1] < 5: o[1] += 1
del o[1]
del o[1]; o[1] = 5
o += o
o *= 2
o += [1]
o |= {1: 9}
o += collections.Counter({1: 5})
operator.setitem(o, 1, o[1] + 1)
part = o[1:]; part[0] = 9
namespace = types.SimpleNamespace(o=o); namespace.o[1] += 1
exec('o[1] += 1')
o.T[1] += 8
o.flat[1] = 8
"""
HOLDERS: dict[str, Callable[[Callable[[], Any]], Any]] = {}
ATTRIBUTES = """
o.k += 1; x = x + o.k
x = x + o.k; o.k += 1
o.k, o.j = o.j, o.k
o.n = getattr(o, 'n', 0) + 1
del o.k
o.j = o.k; del o.k; o.k = o.j + 1
o.__dict__['k'] += 1
object.__setattr__(o, 'k', o.k + 1)
exec('o.k += 1')
for o.k in (o.k + 1, o.k + 2): pass
with contextlib.nullcontext(o.k + 1) as o.k: pass
o.t = o.t + x
o.d['a'] = o.d.get('a', 0) + 1; del o.d['q']; o.d['q'] = o.k
global o; o = make(); o.k += 1
"""


def holder(make: Callable[[Callable[[], Any]], Any]) -> Callable[[Callable[[], Any]], Any]:
    HOLDERS[make.__name__.replace("_", " ")] = make
    return make


def filled(o: Any, zeros: Callable[[], Any]) -> Any:
    o.k, o.j, o.d, o.t = 2, 3, {"q": 1}, zeros()
    return o


class Plain:
    pass


class Slotted:
    __slots__ = ("d", "j", "k", "n", "t")


class Counting:
    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        object.__setattr__(self, "count", getattr(self, "count", 0) + 1)


class WithProperty:
    @property
    def k(self) -> Any:
        return self._k

    @k.setter
    def k(self, value: Any) -> None:
        self._k = value


@dataclasses.dataclass
class Data:
    k: Any = 2
    j: Any = 3
    d: dict[str, Any] = dataclasses.field(default_factory=lambda: {"q": 1})
    t: Any = None


class OfList(list[Any]):
    pass


@holder
def an_object(zeros: Any) -> Any:
    return filled(Plain(), zeros)


@holder
def slots(zeros: Any) -> Any:
    return filled(Slotted(), zeros)


@holder
def an_own_setattr(zeros: Any) -> Any:
    return filled(Counting(), zeros)


@holder
def a_property(zeros: Any) -> Any:
    return filled(WithProperty(), zeros)


@holder
def a_dataclass(zeros: Any) -> Any:
    return Data(t=zeros())


@holder
def a_list_with_attributes(zeros: Any) -> Any:
    return filled(OfList([1]), zeros)


@holder
def a_function(zeros: Any) -> Any:
    def function() -> None: ...

    return filled(function, zeros)


@holder
def a_partial(zeros: Any) -> Any:
    return filled(functools.partial(max, 1), zeros)


@holder
def a_namespace(zeros: Any) -> Any:
    return filled(argparse.Namespace(), zeros)


@holder
def a_thread_local(zeros: Any) -> Any:
    return filled(threading.local(), zeros)


@holder
def a_module_of_torch(zeros: Any) -> Any:
    return filled(nn.Module(), zeros)


@holder
def a_tensor(zeros: Any) -> Any:
    return filled(zeros(), zeros)


def content(value: Any) -> Any:
    """What an object holds, as plain values."""
    if isinstance(value, torch.Tensor):
        return value.tolist(), content(vars(value))
    if isinstance(value, (dict, collections.UserDict)):
        return [(key, content(v)) for key, v in value.items()]
    if isinstance(value, (int, float, str, types.FunctionType, type(None))):
        return repr(value) if not callable(value) else content(vars(value))
    if isinstance(value, (np.ndarray, array.array, memoryview)):
        return value.tolist()
    if isinstance(value, Slotted):
        return [(name, content(getattr(value, name, None))) for name in value.__slots__]
    items = list(map(content, value)) if isinstance(value, (list, collections.UserList, collections.deque, bytearray)) else []
    return items, content({k: v for k, v in getattr(value, "__dict__", {}).items() if not k.startswith("_") or k == "_k"})


def after_calls(statement: str, make: Callable[[Callable[[], Any]], Any], device: str, wrap: Any) -> list[Any]:
    """Results and contents after four calls; it ends with the first exception, as what a call writes before one is undone."""
    space = {
        "collections": collections,
        "contextlib": contextlib,
        "operator": operator,
        "types": types,
        "make": lambda: make(lambda: torch.zeros(2, device=device)),
    }
    space["o"] = first = space["make"]()
    names = "" if statement.startswith("global") else "global o\n"
    exec(f"def step(x):\n{textwrap.indent(names + statement, '    ')}\n    return x * 2", space)
    step, found = wrap(space["step"]), list[Any]()
    for i in range(4):
        try:
            found.append(step(torch.full((2,), float(i), device=device)).tolist())
        except (AttributeError, BufferError, KeyError, IndexError, ValueError, TypeError, NameError) as error:
            return [*found, type(error)]
        found += content(space["o"]), space["o"] is first
    return found


def statements(text: str) -> list[str]:
    return inspect.cleandoc(text).replace("\nelse", "\0else").splitlines()


def require_same(text: str, make: Callable[[Callable[[], Any]], Any]) -> None:
    for statement in (line.replace("\0", "\n") for line in statements(text)):
        expected = after_calls(statement, make, "cpu", lambda fn: fn)
        if len(expected) > 1:  # the statement is possible
            found = after_calls(statement, make, "jax", lambda fn: spmd.compile(fn, max_retraces=50))
            assert found == expected, statement


@pytest.mark.parametrize("operator", ["+=", "-=", "*=", "/=", "//=", "%=", "**="])
def test_in_place_operators_with_a_number_that_varies(operator: str) -> None:
    text = f"""
        t = o.t; t {operator} o.n; o.n += 1
        t = o.t[:1]; t {operator} o.n * 0.5; o.n += 1
        before = o.t; o.t {operator} o.n; o.n += 1; x = x + before
        for t in (o.t, o.u): t {operator} o.n
        t = x.clone(); u = t; u {operator} o.n; o.n += 1; x = x + t
        a = o.a; a {operator} o.n; o.n += 1
    """

    def make(zeros: Callable[[], Any]) -> Any:
        return types.SimpleNamespace(n=2, t=zeros() + 3, u=zeros() + 5, a=np.array([3.0, 5.0]))

    require_same(text, make)


@pytest.mark.parametrize("name", CONTAINERS)
def test_writes_to_a_container(name: str) -> None:
    text = WRITES
    if name == "view of numpy":  # refused: the array that owns the memory was not read
        text = text.replace("part = o[1:]; part[0] = 9\n", "").replace("o.T[1] += 8\n", "")
    require_same(text, lambda zeros: CONTAINERS[name]())


@pytest.mark.parametrize("name", HOLDERS)
def test_writes_to_attributes(name: str) -> None:
    text = ATTRIBUTES
    if name in ("a thread local", "a tensor"):  # a new one cannot be made anew by every call
        text = text.replace("global o; o = make(); o.k += 1\n", "")
    require_same(text, HOLDERS[name])

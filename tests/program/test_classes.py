"""What Python looks up in classes by itself is expected in every call: special methods, bases, metaclasses, what C code keeps."""

import abc
import collections
import copy
import operator
import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pytest
import torch

import spmd
from spmd.program.reads import guard_places, recorded
from spmd.program.reuse._columns import Guards


class Held:
    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> bool:
        return True

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *error: Any) -> bool:
        return True

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        raise StopAsyncIteration


def enter(held: Any) -> Any:
    with held as found:
        return found


def leave(held: Any) -> Any:
    try:
        with held:
            raise ValueError
    except ValueError:
        return "raised"


def add_in_place(held: Any) -> Any:
    held += 1
    return held


def set_and_delete(held: Any) -> None:
    held.other = 2
    del held.other


def set_item(held: Any) -> None:
    held[0] = 1


def drive(coroutine: Any) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits for something")


async def wait(held: Any) -> Any:
    return await held


async def enter_later(held: Any) -> Any:
    async with held as found:
        return found


async def iterate_later(held: Any) -> Any:
    return [each async for each in held]


async def give(*given: Any) -> Any:
    return 1


async def give_nothing(*given: Any) -> Any:
    raise StopAsyncIteration


# by method: what it is at first, and what looks it up
METHODS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "add": (lambda s, o: 1, lambda a: a + 1),
    "radd": (lambda s, o: 1, lambda a: 1 + a),
    "iadd": (lambda s, o: s, add_in_place),
    "matmul": (lambda s, o: 1, lambda a: a @ a),
    "neg": (lambda s: 1, lambda a: -a),
    "abs": (lambda s: 1, abs),
    "round": (lambda s: 1, round),
    "int": (lambda s: 1, int),
    "float": (lambda s: 1.0, float),
    "index": (lambda s: 0, lambda a: [1, 2][a]),
    "bool": (lambda s: True, lambda a: 1 if a else 2),
    "len": (lambda s: 1, len),
    "iter": (lambda s: iter([1]), lambda a: [*a]),
    "reversed": (lambda s: iter([1]), lambda a: list(reversed(a))),
    "contains": (lambda s, o: True, lambda a: 3 in a),
    "getitem": (lambda s, k: 1, lambda a: a[3]),
    "setitem": (lambda s, k, v: None, set_item),
    "getattr": (lambda s, name: 1, lambda a: a.missing),
    "setattr": (object.__setattr__, set_and_delete),
    "delattr": (object.__delattr__, set_and_delete),
    "call": (lambda s: 1, lambda a: a()),
    "enter": (lambda s: 1, enter),
    "exit": (lambda s, *error: True, leave),
    "eq": (lambda s, o: True, lambda a: a == 1),
    "lt": (lambda s, o: True, lambda a: a < 1),
    "hash": (lambda s: 1, hash),
    "str": (lambda s: "a", str),
    "repr": (lambda s: "a", lambda a: f"{a!r}"),
    "format": (lambda s, how: "a", lambda a: f"{a}"),
    "dir": (lambda s: ["a"], dir),
    "copy": (lambda s: s, copy.copy),
    "deepcopy": (lambda s, memo: s, copy.deepcopy),
    "fspath": (lambda s: "a", os.fspath),
    "length_hint": (lambda s: 1, operator.length_hint),
    "torch_function": (classmethod(lambda cls, fn, kinds, args=(), kwargs=None: 1), lambda a: torch.add(a, 1)),
    "array": (lambda s, *how, **options: np.ones(1), np.asarray),
    "await": (lambda s: iter(()), lambda a: drive(wait(a))),
    "aenter": (give, lambda a: drive(enter_later(a))),
    "aexit": (give, lambda a: drive(enter_later(a))),
    "aiter": (lambda s: s, lambda a: drive(iterate_later(a))),
    "anext": (give_nothing, lambda a: drive(iterate_later(a))),
    "class_getitem": (classmethod(lambda cls, key: 1), lambda a: type(a)[int]),
    "init_subclass": (classmethod(lambda cls: None), lambda a: type("Other", (type(a),), {})),
    "instancecheck": (lambda s, o: True, lambda a: isinstance(1, a)),
}


@pytest.mark.parametrize("whose", ["its own", "of a base", "none yet"])
def test_a_special_method_that_becomes_another_is_seen(whose: str) -> None:
    for name, (method, look) in METHODS.items():
        base = type("Base", (Held,), {})
        cls: Any = type("Kind", (base,), {})
        its = cls if whose == "its own" else base
        if whose != "none yet":
            setattr(its, f"__{name}__", method)
        held, guards = cls(), Guards()

        def read(held: Any = held, look: Callable[[Any], Any] = look) -> None:
            try:
                look(held)
            except (TypeError, AttributeError):
                assert whose == "none yet"

        with recorded() as recording:
            recording.run(read)
            places = recording.settled(lambda holder, key, value: value)
        guard_places(guards, places)
        assert guards.reason() is None, name
        setattr(its, f"__{name}__", staticmethod(lambda *given: given))
        assert guards.reason() is not None, name


class Made(type):
    scale = 2.0

    @property
    def count(cls) -> int:
        return 2


class MadeBy(metaclass=Made):
    pass


class Fixed:
    def __get__(self, instance: Any, owner: Any = None) -> float:
        return 2.0


class Caller:
    def __call__(self) -> float:
        return 2.0


class Left:
    def told(self) -> float:
        return 2.0


class Right:
    def told(self) -> float:
        return 3.0


class Child(Left):
    fixed = Fixed()

    def told(self) -> float:
        return super().told()


class Abstract(abc.ABC):  # noqa: B024
    pass


@runtime_checkable
class Goes(Protocol):
    def go(self) -> None: ...


def told() -> None:
    """Told."""


def five(self: Any) -> float:
    return 5.0


def registry() -> Iterator[tuple[Callable[[], Any], Callable[[], Any]]]:
    """What is read, and a change of it."""
    child, counts, array = Child(), collections.defaultdict[str, float](lambda: 2.0), np.ones(4)
    child.__dict__["fixed"] = 7.0
    mask, numbers = np.array([True, False]), np.array([1.0, 2.0])
    yield lambda: MadeBy.scale, lambda: setattr(Made, "scale", 3.0)
    yield lambda: MadeBy.count, lambda: setattr(Made, "count", property(lambda cls: 4))
    yield lambda: child.fixed, lambda: setattr(Fixed, "__set__", lambda *given: None)
    yield Caller(), lambda: setattr(Caller.__call__, "__code__", five.__code__)
    yield child.told, lambda: setattr(Child, "__bases__", (Right,))
    yield lambda: float(isinstance(child, Abstract)), lambda: Abstract.register(Child)
    yield lambda: float(isinstance(child, Goes)), lambda: setattr(child, "go", five)
    yield lambda: float(len(Right.__subclasses__())), lambda: setattr(told, "kept", type("Other", (Right,), {}))
    yield lambda: float("other" in dir(child)), lambda: setattr(Child, "other", 1)
    yield lambda: counts.pop("a", counts["b"]) + counts.pop("b"), lambda: setattr(counts, "default_factory", lambda: 3.0)
    yield lambda: float(len(told.__name__ + (told.__doc__ or ""))), lambda: setattr(told, "__doc__", "Another.")
    yield lambda: float(array.shape[0]), lambda: setattr(array, "shape", (2, 2))
    yield lambda: float(numbers[mask].sum()), lambda: mask.__setitem__(1, True)


@pytest.mark.filterwarnings("ignore:Setting the shape on a NumPy array:DeprecationWarning")
def test_a_change_of_what_was_looked_up_is_used() -> None:
    reads, changes = zip(*registry(), strict=True)
    step = spmd.compile(lambda x: [x * read() for read in reads], max_retraces=100)
    x = torch.ones(1)
    for change in (lambda: None, lambda: None, *changes):
        change()
        ours = [float(found) for found in step(x.to("jax"))]
        assert ours == [read() for read in reads]
    assert step.num_traces <= 1 + len(changes)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_another_method_of_an_autograd_function_is_used() -> None:
    def gradient(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        y = Doubled.apply(x)
        return y.detach(), torch.autograd.grad(y.sum(), x)[0]

    step, x = spmd.compile(gradient), torch.ones(2)
    for name, method in {"": None, "backward": lambda ctx, grad: grad * 5, "forward": lambda ctx, x: x * 7}.items():
        if method is not None:
            setattr(Doubled, name, staticmethod(method))
        assert [found.tolist() for found in step(x.to("jax"))] == [found.tolist() for found in gradient(x)]

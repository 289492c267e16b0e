"""Functions in every form that Python's syntax has, for test_instrument: each is called with a list and gives a plain value.

Needs neither torch nor this package, so that it runs wherever Python does.
"""

import collections
import functools
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

GLOBAL = 3
FORMS: dict[str, Callable[[list[int]], Any]] = {}


def form(fn: Callable[[list[int]], Any]) -> Callable[[list[int]], Any]:
    FORMS[fn.__name__] = fn
    return fn


class Base:
    kind = 1
    __slots__ = ("a", "b")
    __match_args__ = ("a", "b")

    def __init__(self, a: int, b: int = 2) -> None:
        self.a, self.b = a, b

    def total(self, *more: int, scale: int = 1) -> int:
        return (self.a + self.b + sum(more)) * scale


class Derived(Base):
    def total(self, *more: int, scale: int = 1) -> int:
        return super().total(*more, scale=scale) + super().kind

    @property
    def double(self) -> int:
        return self.a * 2

    @classmethod
    def make(cls, a: int) -> "Derived":
        return cls(a, b=a + 1)

    @staticmethod
    def help(a: int) -> int:
        return a + 1


@form
def names(x: list[int]) -> Any:
    global GLOBAL
    GLOBAL += 1
    GLOBAL -= 1
    return GLOBAL, len(x), x is not None


@form
def attributes(x: list[int]) -> Any:
    d = Derived.make(x[0])
    d.a += 5
    d.b = d.double
    e = Derived(1)
    del e.b
    return d.a, d.b, d.total(1, 2, scale=3), d.help(4), hasattr(e, "b"), Derived.kind


@form
def items(x: list[int]) -> Any:
    y, d = list(x), {"a": 1, **{"b": 2}}
    y[0] += 2
    y[1:3] = [7, 8, 9]
    del y[-1], d["a"]
    d["c"] = y[::2]
    y[0], y[1] = y[1], y[0]
    return y, d, y[:2], y[-2:], {1, *x}, (*x, 1), [*x, *y]


@form
def calls(x: list[int]) -> Any:
    def inner(a: int, /, b: int, *c: int, d: int = 4, **e: int) -> Any:
        return a, b, c, d, e

    rest, named = [3, 4], {"f": 6}
    part = functools.partial(inner, 1, b=2)
    return (
        inner(1, 2),
        inner(1, b=2, d=3),
        inner(1, 2, *rest, **named),
        inner(*x, d=1, **named),
        inner(1, *rest, 5),
        part(d=9),
        max(x, key=lambda v: -v),
    )


@form
def closures(x: list[int]) -> Any:
    count = 0

    def up(by: int = 1) -> int:
        nonlocal count
        count += by
        return count

    return up(), up(by=x[1]), (lambda: count * x[0])(), [(lambda k=k: k + count)() for k in x]


@form
def comprehensions(x: list[int]) -> Any:
    return (
        [i * GLOBAL for i in x if i > 1],
        {i: j for i in x for j in (1, 2)},
        {i % 2 for i in x},
        sum(i for i in x),
        [[j for j in range(i)] for i in x],
    )


@form
def branches(x: list[int]) -> Any:
    n = 0
    while n < 10:
        n += 1
        if n == 3 or (n > 4 and not n % 2):
            continue
        elif n > 7:
            break
    else:
        n = -1
    return n, x[0] if x else None, 1 < n <= 9, x or 1, x and 2, n in x, 99 not in x, None is x


@form
def matches(x: list[int]) -> Any:
    found: list[Any] = []
    for value in (1, "a", [1, 2, 3], {"k": 4, "l": 5}, Derived(1, 7), Base(3), (1, (2, 3)), 2.5, None):
        match value:
            case 1 | 2:
                found.append("few")
            case str(text) if text:
                found.append(text)
            case [first, *rest]:
                found.append((first, rest))
            case {"k": k, **others}:
                found.append((k, others))
            case Derived(1, b=b):
                found.append(b)
            case Base(a=a):
                found.append(a)
            case None:
                found.append("none")
            case other:
                found.append(other)
    return found


@form
def errors(x: list[int]) -> Any:
    found: list[Any] = []
    for bad in ({}, [], 3):
        try:
            found.append(bad["k"])  # type: ignore[index,call-overload]
        except (KeyError, TypeError) as error:
            found.append(type(error).__name__)
        else:
            found.append("no")
        finally:
            found.append(1)
    try:
        assert x == [], "not empty"
    except AssertionError as error:
        found.append(str(error))
    try:
        raise ExceptionGroup("both", [ValueError(1), KeyError(2)])
    except* ValueError as group:
        found.append(len(group.exceptions))
    except* KeyError:
        found.append("key")
    return found


@form
def contexts(x: list[int]) -> Any:
    log: list[Any] = []

    @contextmanager
    def scope(name: str) -> Any:
        log.append(name)
        try:
            yield name * 2
        finally:
            log.append("end")

    with scope("a") as a, scope("b"):
        log.append(a)
    return log


@form
def generators(x: list[int]) -> Any:
    def count(n: int) -> Any:
        for i in range(n):
            got = yield i
            if got:
                yield got * 10
        return n

    def outer(n: int) -> Any:
        back = yield from count(n)
        yield back, "end"

    running = count(3)
    return list(outer(x[1])), next(running), running.send(5), [*running], dict(zip("ab", count(2), strict=True))


@form
def texts(x: list[int]) -> Any:
    name, number = "n", 3.14159
    return f"{name}={number:.2f} {x!r} {len(x):>{x[0] + 4}} {number}", "".join(str(i) for i in x)


@form
def unpackings(x: list[int]) -> Any:
    a, b, *c = x
    (d, [e, f]), g = (a, [b, c]), {"k": 1}
    *h, i = "abc"
    for j, (k, m) in enumerate(zip(x, x, strict=True)):
        d += j * k * m
    return a, b, c, d, e, f, g, h, i


@form
def classes(x: list[int]) -> Any:
    class Local(Base):
        inner = tuple(i for i in range(3))
        value = len(inner)

        def __getitem__(self, key: int) -> int:
            return key * self.value

        def __len__(self) -> int:
            return self.a

        def __enter__(self) -> "Local":
            return self

        def __exit__(self, *error: object) -> None:
            self.a = 0

    with Local(2) as local:
        found = local[3], len(local), bool(local)
    return found, local.a, Local.inner, collections.Counter(x)[1]


@form
def operators(x: list[int]) -> Any:
    a, b = x[0] + 5, [1]
    a **= 2
    a //= 3
    a %= 7
    a <<= 2
    a |= 1
    b *= 2
    b += [a]
    (size := len(b))
    return a, b, size, -a, ~a, +a, not a, a @ 2 if hasattr(a, "__matmul__") else a ^ 3, a & 6, a >> 1, divmod(a, 3), b[-1:] * 2

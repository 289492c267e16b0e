"""Numbers that vary are the objects that Python has: `is`, `min`, `float`, and searches that find a NaN by its identity."""

import collections
import math
import operator
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd

Results = tuple[Any, ...]


def conversions(a: float, n: int) -> Results:
    c = a + 1.0
    return (
        float(a) is a,
        +a is a,
        a.real is a,
        int(n) is n,
        math.trunc(n) is n,
        math.floor(n) is n,
        n.numerator is n,
        float(c) is c,
        float(n) is a,
    )


def choices(a: float, n: int) -> Results:
    b, c = 9.0, a + 1.0
    least = min(a, b)
    return least is a, least is b, max(c, 0.0) is c, min([a, b], key=abs) is least, max((a, b), default=0) is b, max(a, a) is a


def in_memory(a: float, n: int) -> Results:
    c, m = a + 1.0, n + 0
    return c is a + 1.0, m is n, n is (n + 1) - 1, operator.is_(max(c, 0.0), c), operator.is_not(c, a), next(iter({c: 1})) is c


def found(a: float, n: int) -> Results:
    c = a + 1.0
    return (
        [1.0, a].index(a),
        (c, a, c).count(c),
        collections.deque([a]).index(a),
        operator.countOf([c, 1], c),
        operator.indexOf((a, c), c),
        {c: 1}[c],
    )


def counted(a: float, n: int) -> Results:
    counts = collections.Counter([a, a])
    counts.update((a, 1.0))
    return counts[a], len(counts)


def removed(a: float, n: int) -> Results:
    items = [0, a, n, a]
    items.remove(a)
    try:
        items.remove(n + 1)
    except ValueError as error:
        return items, str(error)
    return (items,)


def missing(a: float, n: int) -> Results:
    try:
        return ([a, 5].index(n),)
    except ValueError as error:
        return (str(error),)


@pytest.mark.parametrize("fn", [conversions, choices, in_memory, found, counted, removed, missing])
@pytest.mark.parametrize("where", ["argument", "attribute"])
def test_a_number_is_the_object_that_python_has(fn: Callable[[float, int], Results], where: str) -> None:
    state = types.SimpleNamespace()
    by_argument = spmd.compile(lambda x, a, n: (x * n, *fn(a, n)))
    by_attribute = spmd.compile(lambda x: (x * state.n, *fn(state.a, state.n)))
    for state.a, state.n in [(1.5, 3), (2.5, 4), (math.nan, 1000), (12.0, 300), (math.nan, 5)]:
        x = torch.ones(1).to("jax")
        ours = by_argument(x, state.a, state.n) if where == "argument" else by_attribute(x)
        assert repr(ours[1:]) == repr(fn(state.a, state.n))

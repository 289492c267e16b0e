"""Functions ask for their recorded form while a trace runs, whoever calls them, and have their own code afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from spmd.program.reads import _swap

SCALES = {"one": 2.0, "other": 3.0}


def reader(key: str) -> Callable[[Any], Any]:
    return lambda x: x * SCALES[key]


def adder(key: str) -> Callable[[Any], Any]:
    return lambda x: x + SCALES[key]


def plain(x: Any) -> Any:
    return x + 1


def another(x: Any) -> Any:
    return x + 2


@pytest.mark.parametrize("num_functions", [1, 3])
def test_functions_of_one_code_have_stubs_until_one_is_entered(num_functions: int) -> None:
    made = [reader("one") for _ in range(num_functions)]
    code = made[0].__code__
    swapped = _swap.swap(made)
    try:
        stubs = {fn.__code__ for fn in made}
        assert len(stubs) == 1 and code not in stubs
        assert all(_swap.code_of(fn) is code for fn in made)
        assert swapped.with_code(code) == made[-1:] + made[:-1]
        made[0](1.0)
        assert not stubs & {fn.__code__ for fn in made}
        assert [fn(1.0) for fn in made] == [2.0] * num_functions
    finally:
        _swap.restore(swapped)
    assert all(fn.__code__ is code for fn in made)


def test_a_swap_within_a_swap_leaves_the_functions_of_both_as_they_were() -> None:
    own = plain.__code__, another.__code__
    outer = _swap.swap([plain])
    inner = _swap.swap([plain, another])
    assert (plain(1), another(1)) == (2, 3)
    _swap.restore(inner)
    assert another.__code__ is own[1] and plain.__code__ is not own[0]
    assert plain(1) == 2
    _swap.restore(outer)
    assert (plain.__code__, another.__code__) == own


def test_a_code_that_a_function_was_given_meanwhile_stays() -> None:
    first, second = reader("one"), reader("one")
    swapped = _swap.swap([first, second])
    given = second.__code__ = adder("one").__code__
    _swap.restore(swapped)
    assert first(1.0) == 2.0 and second.__code__ is given


def test_functions_that_share_their_code_are_guarded_one_by_one() -> None:
    one, other = reader("one"), reader("other")
    step = spmd.compile(lambda x: sum(map(one, [x])) + sum(map(other, [x])))
    x = torch.ones(1).to("jax")
    try:
        assert step(x).tolist() == [5.0]
        SCALES["other"] = 7.0
        assert step(x).tolist() == [9.0]
        SCALES["one"] = 1.0
        assert step(x).tolist() == [8.0]
    finally:
        SCALES.update(one=2.0, other=3.0)

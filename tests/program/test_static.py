"""Objects of a user are looked at without running their code."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from tests.oracle import assert_same, batch


class FromDict:
    """A config whose attributes are entries; a missing one is a KeyError, and it may recurse."""

    def __init__(self) -> None:
        self._values = {"k": 2.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_values"][name]


class Recursing:
    def __init__(self, inner: Any = None) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner if self.inner is not None else self, name)


class Forbidding:
    __slots__ = ("k",)

    def __init__(self) -> None:
        self.k = 2.0

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


class Costly:
    """Properties that must not run unless the function asks for them."""

    k = 2.0

    @property
    def model(self) -> Any:
        raise AssertionError("a property was run")


class Called:
    """A callable that makes up attributes."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


CONFIGS: list[Callable[[], Any]] = [FromDict, lambda: Recursing(FromDict()), Forbidding, Costly]


@pytest.mark.parametrize("made", CONFIGS)
@pytest.mark.parametrize("place", ["closure", "argument", "list", "result"])
def test_no_code_of_a_config_runs_that_the_function_does_not_run(made: Callable[[], Any], place: str) -> None:
    config = made()

    def closed(x: torch.Tensor) -> Any:
        return x * config.k

    def open_(x: torch.Tensor, c: Any) -> Any:
        c = c[0] if isinstance(c, list) else c
        return (x * c.k, c) if place == "result" else x * c.k

    given = () if place == "closure" else ([config] if place == "list" else config,)
    step = spmd.compile(closed if place == "closure" else open_)
    x = batch(3)
    for _ in range(2):
        got = step(x.to("jax"), *given)
        if place == "result":
            assert got[1] is config
            got = got[0]
        assert_same(got, x * 2)
    assert step.num_traces == 1


def test_a_callable_object_is_compiled_without_asking_it() -> None:
    step = spmd.compile(Called())
    x = batch(3)
    assert_same(step(x.to("jax")), x * 2)
    assert "Called" in str(spmd.compile(Called())._name)

"""Containers beside numbers that change: those that are in themselves, and errors that a library would raise for such numbers alone."""

from __future__ import annotations

import base64
import collections
import copy
import json
import pickle
import pprint
import statistics
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import spmd


def in_list(n: Any) -> Any:
    found: list[Any] = [n]
    found.append(found)
    return found


def in_dict(n: Any) -> Any:
    found = {"a": n}
    found["self"] = found
    return found


def in_deque(n: Any) -> Any:
    found = collections.deque([n])
    found.append(found)
    return found


def through_tuple(n: Any) -> Any:
    found: list[Any] = [n]
    found.append((found,))
    return found


def through_both(n: Any) -> Any:
    found: list[Any] = [n]
    found.append({"l": found, "a": n})
    return found


KINDS = (in_list, in_dict, in_deque, through_tuple, through_both)


def appended(value: Any) -> Any:
    held: list[Any] = []
    held.append(value)
    return held[0] is value


def attempted(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        try:
            return fn(value)
        except (TypeError, ValueError) as error:
            return type(error).__name__

    return run


USES: dict[str, Callable[[Any], Any]] = {
    "append": appended,
    "extend": lambda v: len([*[v], v]),
    "str": str,
    "f-string": lambda v: f"{v}",
    "%": lambda v: "%s" % (v,),  # noqa: UP031
    "copy": lambda v: type(copy.copy(v)).__name__,
    "deepcopy": lambda v: str(copy.deepcopy(v)),
    "pickle": lambda v: len(pickle.dumps(v)) > 0,
    "pprint": lambda v: pprint.pformat(v).split("id")[0],
    "json": attempted(json.dumps),
    "isinstance": lambda v: isinstance(v, list),
    "type": lambda v: type(v).__name__,
    "in": lambda v: v in [v],
    "sorted": lambda v: len(sorted([v, v], key=lambda _: 0)),
    "sum": attempted(sum),
    "numpy": lambda v: np.asarray([v], dtype=object).dtype.name,
    "setattr": lambda v: setattr(types.SimpleNamespace(), "a", v),
    "map": lambda v: list(map(len, [[v]])),
}


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("use", USES)
def test_a_container_may_be_in_itself(use: str, is_new: bool) -> None:
    for make in KINDS:
        found = []
        for device in ("cpu", "jax"):
            state = types.SimpleNamespace(n=0, held=make(1))

            def step(x: torch.Tensor, state: Any = state, make: Any = make) -> Any:
                state.n += 1
                return x * state.n, USES[use](make(state.n) if is_new else state.held)

            run = step if device == "cpu" else spmd.compile(step)
            found.append([run(torch.ones(1).to(device))[1] for _ in range(3)])
        assert found[1] == found[0]


HANDLED: dict[str, Callable[[int], Any]] = {
    "json of a dict": lambda n: json.dumps({"n": [n]}),
    "json, indented": lambda n: json.dumps([n], indent=2),
    "json of an OrderedDict": lambda n: json.dumps(collections.OrderedDict(a=n)),
    "an encoder": lambda n: json.JSONEncoder().encode([n]),
    "bytes": lambda n: base64.b64encode(bytes([n])),
    "values of a dict": lambda n: statistics.mean({"a": n, "b": 2}.values()),
    "an error of plain numbers": lambda n: json.dumps({"n": n, "o": object()}),
}


@pytest.mark.parametrize("name", HANDLED)
def test_an_error_for_a_number_that_changes_is_not_the_functions(name: str) -> None:
    found = []
    for device in ("cpu", "jax"):
        state = types.SimpleNamespace(n=0)

        def step(x: torch.Tensor, state: Any = state) -> Any:
            state.n += 1
            return x * state.n, attempted(HANDLED[name])(state.n)

        run = step if device == "cpu" else spmd.compile(step)
        found.append([run(torch.ones(1).to(device))[1] for _ in range(4)])
    assert found[1] == found[0]


@pytest.mark.parametrize("kind", [list, tuple])
def test_the_class_of_a_list_with_a_number_of_the_device(kind: Any) -> None:
    step = spmd.compile(lambda x: type(kind([x.sum().item()])).__name__)
    assert step(torch.ones(2).to("jax")) == kind.__name__

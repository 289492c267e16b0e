"""A saved value of another kind than the program's is refused before anything changes."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spmd
from spmd import checkpoint


def schedule() -> Any:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), 1)


SAVED: dict[str, Any] = {
    **{"tensor": torch.ones(2, 3), "array": np.ones(2), "scalar": np.float64(0.5), "flag": True, "number": 3, "text": "abc", "none": None},
    **{"list": [1], "set": {1}, "counter": Counter("aab"), "dict": {"a": 1}},
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path, 1, {"weight": torch.ones(2), **SAVED, "schedule": schedule()}, wait=True)
    return tmp_path


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("tensor", 3, r"has the number 3\n.*has a tensor of shape \(2, 3\)"),
        ("tensor", "a", r"has the text 'a'\n.*has a tensor of shape \(2, 3\)"),
        ("tensor", {1}, r"has a set\n.*has a tensor"),
        ("tensor", schedule(), r"has a StepLR\n.*has a tensor"),
        ("array", 1.0, r"has the number 1.0\n.*has an array of shape \(2,\)"),
        ("scalar", "a", r"has the text 'a'\n.*has a scalar of dtype float64"),
        ("scalar", False, r"has False\n.*has a scalar of dtype float64"),
        ("number", torch.ones(()), "has an array\n.*another type"),
        ("number", "text", r"has the text 'text'\n.*has the number 3"),
        ("number", True, r"has True\n.*has the number 3"),
        ("number", object(), r"has a object, which a checkpoint cannot contain\n.*has the number 3"),
        ("number", schedule(), r"has a StepLR\n.*has the number 3"),
        ("flag", 0, r"has the number 0\n.*has True"),
        ("text", b"", r"has bytes\n.*has the text 'abc'"),
        ("none", 3, r"has the number 3\n.*has None"),
        ("list", {1}, r"has a set\n.*has a list"),
        ("set", frozenset(), r"has a frozenset\n.*has a set"),
        ("dict", Counter(), r"has a Counter\n.*has a dict"),
        ("schedule", 3, r"has the number 3\n.*has a dict"),
    ],
)
def test_a_value_of_another_kind_is_refused_before_anything_changes(saved: Path, key: str, value: Any, text: str) -> None:
    weight = torch.zeros(2)
    with pytest.raises(spmd.CheckpointError, match=text) as refused:
        checkpoint.restore(saved, {"weight": weight, key: value})
    assert f"the checkpoint does not match '{key}'" in str(refused.value) and weight.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("key", "value"),
    [("number", 0.5), ("scalar", 0), ("scalar", 0.0), ("flag", False), ("text", ""), ("counter", Counter()), ("set", set[int]())],
)
def test_a_value_of_the_same_kind_is_restored_as_it_was(saved: Path, key: str, value: Any) -> None:
    found = checkpoint.restore(saved, {key: value}).state[key]
    assert (found, type(found)) == (SAVED[key], type(SAVED[key]))


@pytest.mark.parametrize("key", SAVED)
def test_none_takes_any_value(saved: Path, key: str) -> None:
    found = checkpoint.restore(saved, {key: None}).state[key]
    assert type(found) is type(SAVED[key]) and np.array_equal(found, SAVED[key])


def test_a_defaultdict_stays_one(saved: Path) -> None:
    target = defaultdict[str, int](int, a=7)
    found = checkpoint.restore(saved, {"dict": target}).state["dict"]
    assert (found["a"], found["b"], target["a"]) == (1, 0, 7)


@pytest.mark.parametrize("value", [3, "a", {1}])
def test_a_state_that_is_no_container_is_refused(saved: Path, value: Any) -> None:
    with pytest.raises(spmd.CheckpointError, match="the checkpoint does not match 'the state'"):
        checkpoint.restore(saved, value)

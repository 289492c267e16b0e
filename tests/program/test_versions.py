"""Dicts that were written to since the last look are found, whichever way they were written to."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import spmd
from spmd.program.reuse import _columns
from spmd.program.reuse._columns import Guards
from tests.oracle import batch, descend

WRITES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another value": lambda d: d.__setitem__("a", 2),
    "an equal value of another type": lambda d: d.__setitem__("a", True),
    "a new key": lambda d: d.__setitem__("c", 1),
    "del": lambda d: d.__delitem__("a"),
    "pop": lambda d: d.pop("a"),
    "popitem": lambda d: d.popitem(),
    "clear": lambda d: d.clear(),
    "update": lambda d: d.update(a=3),
    "setdefault": lambda d: d.setdefault("c", 3),
    "|=": lambda d: d.__ior__({"a": 4}),
}


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda items: defaultdict(dict, items)], ids=["dict", "OrderedDict", "defaultdict"])
@pytest.mark.parametrize("write", WRITES)
def test_every_write_is_seen(write: str, kind: Callable[[Any], dict[str, Any]]) -> None:
    dicts = [kind({"a": 1, "b": 2}) for _ in range(3)]
    guards, asked = Guards(), list[int]()
    for index, holder in enumerate(dicts):
        guards.add(lambda index=index: asked.append(index), dicts=[holder])
    assert guards.reason() is None and asked == [0, 1, 2]
    asked.clear()
    WRITES[write](dicts[1])
    assert guards.reason() is None and 1 in asked
    asked.clear()
    assert guards.reason() is None and asked == ([0, 1, 2] if kind is OrderedDict else [])


def test_an_attribute_that_is_set_is_seen() -> None:
    module, guards, asked = nn.Linear(2, 2), Guards(), list[str]()
    guards.add(lambda: asked.append("attributes"), dicts=[module.__dict__])
    guards.add(lambda: asked.append("parameters"), dicts=[module._parameters])
    guards.reason()
    asked.clear()
    module.training = False
    assert guards.reason() is None and asked == ["attributes"]
    module.weight = nn.Parameter(torch.zeros(2, 2))
    assert guards.reason() is None and asked == ["attributes", "parameters"]


@pytest.mark.parametrize("can_tell", [True, False])
def test_a_step_notices_a_changed_module_and_a_replaced_state_without_versions_too(monkeypatch: pytest.MonkeyPatch, can_tell: bool) -> None:
    if not can_tell:
        monkeypatch.setattr(_columns, "_version", None)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    step = spmd.compile(lambda x: descend(model, optimizer, x))
    x = batch(2, 4).to("jax")
    for _ in range(3):
        step(x)
    assert step.retraces == []
    model[1].p = 0.25
    step(x)
    assert [r for r in step.retraces if "p changed from 0.5 to 0.25" in r]
    state = optimizer.state[model[0].weight]
    state["momentum_buffer"] = state["momentum_buffer"].clone()
    step(x)
    assert len(step.retraces) == 2 and "state was replaced" in step.retraces[1]

"""Functions are found whenever they were made, and garbage goes as it would. See Note [Frozen between traces]."""

import gc
import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import nn

import spmd

SETTINGS: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def nothing_frozen() -> Generator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def hook_that_reads(key: str) -> Callable[..., Any]:
    """A function that torch's code calls, made when this is called."""
    SETTINGS[key] = 2.0
    return lambda module, args, out: out * SETTINGS[key]


def require_recorded(key: str) -> None:
    """What a hook that is made now reads is a guard."""
    model = nn.Identity()
    model.register_forward_hook(hook_that_reads(key))
    step = spmd.compile(lambda x: model(x))
    x = torch.ones(2).to("jax")
    assert step(x).tolist() == [2.0, 2.0]
    SETTINGS[key] = 3.0
    assert step(x).tolist() == [3.0, 3.0]


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_a_function_made_between_two_traces_is_recorded() -> None:
    for key in ("first", "second", "third"):
        require_recorded(key)
    assert gc.get_freeze_count() > 1000


def test_a_function_made_before_a_collection_is_recorded_after_it() -> None:
    require_recorded("before")
    model = nn.Identity()
    model.register_forward_hook(hook_that_reads("kept"))
    gc.collect()
    assert gc.get_freeze_count() == 0
    step = spmd.compile(lambda x: model(x))
    x = torch.ones(2).to("jax")
    assert step(x).tolist() == [2.0, 2.0]
    SETTINGS["kept"] = 5.0
    assert step(x).tolist() == [5.0, 5.0]


@pytest.mark.parametrize("when", ["before the first trace", "between traces"])
def test_functions_that_the_program_froze_are_recorded_and_stay_frozen(when: str) -> None:
    if when == "between traces":
        require_recorded("earlier")
    model = nn.Identity()
    model.register_forward_hook(hook_that_reads("frozen"))
    gc.freeze()
    step = spmd.compile(lambda x: model(x))
    x = torch.ones(2).to("jax")
    assert step(x).tolist() == [2.0, 2.0]
    SETTINGS["frozen"] = 7.0
    assert step(x).tolist() == [7.0, 7.0]
    gc.collect()
    assert gc.get_freeze_count() > 1000
    require_recorded("later")


def test_garbage_that_was_there_at_a_trace_is_collected() -> None:
    cycle = Cycle()
    reference = weakref.ref(cycle)
    spmd.compile(lambda x: x + 1)(torch.ones(2).to("jax"))
    del cycle
    assert gc.get_freeze_count() > 1000
    gc.collect()
    assert reference() is None


def test_who_collects_garbage_and_then_looks_for_objects_finds_them() -> None:
    kept = Cycle()
    spmd.compile(lambda x: x + 1)(torch.ones(2).to("jax"))
    gc.collect()
    assert any(o is kept for o in gc.get_objects())


def test_a_collection_inside_the_function_changes_nothing() -> None:
    SETTINGS["inside"] = [1.0]

    def fn(x: torch.Tensor) -> torch.Tensor:
        made = [Cycle(), 2.0]
        gc.collect()
        made[1] = 4.0
        return x * made[1] * SETTINGS["inside"][0]

    step = spmd.compile(fn)
    x = torch.ones(2).to("jax")
    assert step(x).tolist() == step(x).tolist() == [4.0, 4.0]
    assert step.num_traces == 1
    SETTINGS["inside"][0] = 2.0
    assert step(x).tolist() == [8.0, 8.0]

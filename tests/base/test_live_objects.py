"""The objects of the process, listed while other threads run."""

import gc
import sys
import threading
import types

import pytest
from torch import nn

from spmd.base._live_objects import live_ids, live_instances


def test_instances_are_of_the_class_or_of_its_subclasses() -> None:
    layer, model = nn.Linear(2, 2), nn.Sequential()
    found = {id(module) for module in live_instances(nn.Module)}
    assert {id(layer), id(model)} <= found
    assert all(isinstance(module, nn.Module) for module in live_instances(nn.Module))
    assert {type(fn) for fn in live_instances(types.FunctionType)} == {types.FunctionType}


def test_objects_that_claim_another_class_are_not_asked() -> None:
    class Lazy:
        @property
        def __class__(self) -> type:
            raise AssertionError("the class of an object was asked for")

    lazy = [Lazy()]
    assert not any(type(module) is Lazy for module in live_instances(nn.Module))
    assert id(lazy) in live_ids()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collections_are_as_before_and_nothing_stays_referenced(is_enabled: bool) -> None:
    before = gc.isenabled()
    kept = object.__new__(type("Kept", (), {}))
    references = sys.getrefcount(kept)
    (gc.enable if is_enabled else gc.disable)()
    try:
        for _ in range(3):
            live_ids()
            live_instances(nn.Module)
        assert gc.isenabled() is is_enabled
        assert sys.getrefcount(kept) == references
    finally:
        (gc.enable if before else gc.disable)()


def test_tuples_that_other_threads_fill_are_left_alone() -> None:
    """With `gc.get_objects()` in a loop of Python, every 500th of these tuples is a SystemError."""
    errors: list[SystemError] = []
    is_over = threading.Event()

    def fill() -> None:
        while not is_over.is_set():
            try:
                tuple(i for i in ([], {}, ()))
            except SystemError as error:
                errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    threads = [threading.Thread(target=fill) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(10):
            live_ids()
            live_instances(types.FunctionType)
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)
        sys.setswitchinterval(interval)
    assert not errors

"""Accelerate keeps one state for the process: it is forgotten around each test. Its collections are those of young objects."""

import gc
import types
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from accelerate.utils import memory

    # Each call of a Trainer's train() collects all garbage: of this process, a million objects of other tests.
    monkeypatch.setattr(memory, "gc", types.SimpleNamespace(collect=lambda: gc.collect(1)))
    forget()
    yield
    forget()


def forget() -> None:
    from accelerate.state import AcceleratorState, GradientState  # not before a test of this folder: see tests/later.py

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()

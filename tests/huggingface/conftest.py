"""Accelerate keeps one state for the process: it is forgotten around each test."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_accelerator() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    from accelerate.state import AcceleratorState, GradientState  # not before a test of this folder: see tests/later.py

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()

"""Accelerate keeps one state for the process: it is forgotten around each test."""

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def no_accelerator() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()

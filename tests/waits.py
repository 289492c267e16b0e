"""Steps that branch on values of the device: they warn once that each call waits for it."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import spmd

WAITS = ".* branches on values of the device, at "


@contextmanager
def waiting(step: spmd.Step[Any, Any]) -> Generator[None]:
    """Context for calls of a step that may branch on values of the device."""
    assert isinstance(step, spmd.Step)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", WAITS)
        yield

"""Tests of the modules under torch_xla's names: installed for each test, gone after it."""

from collections.abc import Iterator

import pytest

import spmd.compat.torch_xla


@pytest.fixture(autouse=True)
def torch_xla_installed() -> Iterator[None]:
    with spmd.compat.torch_xla.installed():
        yield

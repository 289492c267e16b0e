"""Which rows of a sweep are in `make test`; all of them are in `make test-all`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def part_of(rows: Iterable[Any], is_quick: Callable[[int, Any], bool]) -> list[Any]:
    """The rows, those marked `slow` for which `is_quick(number, row)` is false."""
    return [pytest.param(row, marks=[] if is_quick(number, row) else pytest.mark.slow) for number, row in enumerate(rows)]


def every_other(rows: Iterable[Any], first: int = 0) -> list[Any]:
    """Rows `first`, `first + 2`, ... in `make test`: where two tests go through the same rows, each takes a half."""
    return part_of(rows, lambda number, _: number % 2 == first)

"""Order statistics beside infinities and NaN."""

import pytest
import torch

from tests.lowering.against_cpu import check

inf = float("inf")


@pytest.mark.parametrize(
    "rows", [[[inf, 2.0, inf, 1.0], [1.0, -inf, -inf, 1.0]], [[3, 3, 1, 1], [1, 2, 3, 3]], [[True, False], [True, True]]]
)
def test_mode_counts_what_is_equal(rows: list[list[float]]) -> None:
    check(lambda x: tuple(x.mode(-1)), torch.tensor(rows))

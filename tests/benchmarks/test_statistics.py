"""Summaries are those of numpy; a ratio is taken within its round."""

import numpy as np
import pytest

from spmd.bench._timing_statistics import paired_ratio, percentile, summary

VALUES = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]


def test_summary_is_numpys() -> None:
    found = summary(VALUES)
    assert found["mean"] == pytest.approx(np.mean(VALUES))
    assert found["median"] == pytest.approx(np.median(VALUES))
    assert found["std"] == pytest.approx(np.std(VALUES, ddof=1))
    assert found["cv"] == pytest.approx(np.std(VALUES, ddof=1) / np.mean(VALUES))
    assert (found["least"], found["count"]) == (1.0, 8)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.9, 1.0])
def test_percentile_is_numpys(fraction: float) -> None:
    assert percentile(VALUES, fraction) == pytest.approx(np.quantile(VALUES, fraction))


def test_one_value_has_no_deviation() -> None:
    assert summary([2.0])["cv"] == 0.0


def test_ratio_does_not_see_what_slows_a_whole_round() -> None:
    slow = [1.0, 10.0, 1.0, 30.0]
    assert paired_ratio([2 * s for s in slow], slow) == pytest.approx(2.0)

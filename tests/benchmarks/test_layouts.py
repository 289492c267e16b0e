"""A slice of `make layouts`: seeds of random layouts, among them those whose values were wrong or whose process ended once."""

import pytest

from benchmarks.layout_trials import trial
from benchmarks.seeds import kind_of

pytestmark = pytest.mark.multidevice(num=8)
ONCE_WRONG = (0, 4, 24, 48, 73, 228, 238, 543, 1028, 2894)
OTHERS = tuple(range(1000, 1008))


@pytest.mark.parametrize("seed", ONCE_WRONG + OTHERS)
def test_a_layout_changes_no_value(seed: int) -> None:
    found = trial(seed)
    assert kind_of(found["result"]) in ("right", "refused"), found

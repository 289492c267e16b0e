"""A slice of `make layouts`: seeds of random layouts, among them those whose values were wrong or whose process ended once."""

import pytest

from benchmarks.layout_trials import trial
from benchmarks.seeds import kind_of
from tests.sweeps import part_of

pytestmark = pytest.mark.multidevice(num=8)
ONCE_WRONG = (0, 4, 24, 48, 73, 228, 238, 543, 1028, 2894)
OTHERS = tuple(range(1000, 1008))


@pytest.mark.parametrize("seed", part_of(ONCE_WRONG + OTHERS, lambda _, seed: seed in ONCE_WRONG or seed % 2 == 1))
def test_a_layout_changes_no_value(seed: int) -> None:
    found = trial(seed)
    assert kind_of(found["result"]) in ("right", "refused"), found

"""`torch.accelerator`'s functions for memory say what jax counts, or that it does not count."""

from collections.abc import Callable

import pytest
import torch

import spmd
from spmd.device import _memory_statistics
from spmd.patches._table import is_expected

NAMES = [f.__name__ for f in _memory_statistics.FUNCTIONS if is_expected(f"torch.accelerator.memory.{f.__name__}")]
COUNTS = [name for name in NAMES if not name.startswith(("empty", "reset"))]
CHIPS = [
    {"bytes_in_use": 30, "peak_bytes_in_use": 40, "bytes_limit": 100, "pool_bytes": 50, "peak_pool_bytes": 60},
    {"bytes_in_use": 20, "peak_bytes_in_use": 70, "bytes_limit": 100, "pool_bytes": 80, "peak_pool_bytes": 80},
]


class Chip:
    process_index = 0

    def __init__(self, counts: dict[str, int]) -> None:
        self.memory_stats: Callable[[], dict[str, int]] = lambda: counts


@pytest.mark.parametrize("name", NAMES)
def test_the_device_has_them_under_both_names(name: str) -> None:
    function = getattr(_memory_statistics, name)
    assert getattr(torch.accelerator, name) is getattr(torch.accelerator.memory, name) is getattr(torch.jax, name) is function


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("empty")])
def test_there_is_no_cache_to_empty(name: str) -> None:
    assert getattr(torch.accelerator, name)() is None


@pytest.mark.parametrize("name", COUNTS)
def test_a_platform_without_counts_is_refused_by_name(name: str) -> None:
    with pytest.raises(spmd.SpmdError, match=r"no memory statistics on platform 'cpu'\n(.*)test_memory(.*)\n  fix: step.memory\(\)"):
        getattr(torch.accelerator, name)("jax:0")


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("reset")])
def test_counts_of_the_process_are_not_started_anew(name: str) -> None:
    with pytest.raises(spmd.SpmdError, match=rf"torch.accelerator.{name} cannot reset jax's statistics(.|\n)*fix: compare"):
        getattr(torch.accelerator, name)()


def test_each_figure_is_that_of_the_chip_on_which_it_is_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory_statistics.mesh, "devices", lambda: list(map(Chip, CHIPS)))
    assert [torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated("jax")] == [30, 70]
    assert [torch.accelerator.memory_reserved(0), torch.accelerator.max_memory_reserved()] == [80, 80]
    assert torch.accelerator.get_memory_info() == (70, 100)
    assert list(torch.accelerator.memory_stats().values()) == [30, 70, 80, 80]


def test_a_chip_that_does_not_count_its_pool_has_the_figures_of_its_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"bytes_in_use": 30, "peak_bytes_in_use": 40, "bytes_limit": 100}
    monkeypatch.setattr(_memory_statistics.mesh, "devices", lambda: [Chip(counts)])
    assert list(torch.accelerator.memory_stats().values()) == [30, 40, 30, 40]


def test_the_summary_is_a_table_of_the_worst_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory_statistics, "_counts", lambda: CHIPS)
    lines = _memory_statistics.memory_summary().splitlines()
    assert lines[0] == "memory of the chip that would run out first"
    assert len(lines) == 5 and "allocated bytes, peak" in lines[2]

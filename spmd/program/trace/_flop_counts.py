"""Counts of torch's `FlopCounterMode` around a compiled function: every call of the program adds the counts of its trace.

with FlopCounterMode() as counter:
    step(x)         # traced, perhaps several times
    step(x)         # not traced: the same FLOPs again
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from spmd.base._torch import dispatch_mode_at, num_torch_dispatch_modes


class FlopCounts:
    """Context that takes back the counts of a trace.

    Attributes:
        effects: for each counter with new counts, a call that adds them.
    """

    def __init__(self) -> None:
        modes = [dispatch_mode_at(i) for i in range(num_torch_dispatch_modes())]
        counters = [mode.counter for mode in modes if type(mode).__module__ == "torch.utils.flop_counter"]
        self._before = [(counter, {name: dict(counts) for name, counts in counter.flop_counts.items()}) for counter in counters]
        self.effects: list[Callable[[], Any]] = []

    def __enter__(self) -> FlopCounts:
        return self

    def __exit__(self, *error: object) -> None:
        for counter, before in self._before:
            found = {name: dict(counts) for name, counts in counter.flop_counts.items()}
            counter.flop_counts.clear()
            _add(counter, before)
            self.effects.append(partial(_add, counter, _difference(found, before)))


def _difference(counts: dict[str, dict[Any, int]], before: dict[str, dict[Any, int]]) -> dict[str, dict[Any, int]]:
    return {name: {op: number - before.get(name, {}).get(op, 0) for op, number in of_module.items()} for name, of_module in counts.items()}


def _add(counter: Any, counts: dict[str, dict[Any, int]]) -> None:
    for name, of_module in counts.items():
        for op, number in of_module.items():
            counter.flop_counts[name][op] += number


__all__ = ["FlopCounts"]

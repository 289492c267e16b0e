"""Statistics of step times, with the same figures as the PyTorch/XLA report on ResNet-50."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, 90th percentile, minimum, standard deviation and CV (deviation / mean). Needs at least one value."""
    mean = statistics.fmean(values)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    found = {"mean": mean, "median": statistics.median(values), "p90": percentile(values, 0.9), "least": min(values)}
    return found | {"std": deviation, "cv": deviation / mean if mean else 0.0, "count": len(values)}


def percentile(values: Sequence[float], fraction: float) -> float:
    """Percentile by linear interpolation between the two nearest values, as in numpy. `fraction` is between 0 and 1."""
    ordered, position = sorted(values), fraction * (len(values) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over the rounds of the ratio within a round. Load that slows a whole round cancels out."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))

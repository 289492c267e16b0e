"""Layers that must become one loop of the program (`spmd.scan_layers`).

A frozen layer whose input needs no gradient is computed by other operations than one with a gradient. So the layers before the first
result that needs a gradient are one loop, and those after it another, like a Python loop over them with `roll=True`. The layer between,
which needs a gradient of its parameters but none of its input, may stay outside both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from spmd.base._torch import pytree
from spmd.device._storage import is_device_tensor


@dataclass(frozen=True)
class LayerRun:
    """Successive layers that must become one loop.

    Attributes:
        start: index of the first of them among the layers of the call.
        results: for each layer, the variables of its results.
        trained: for each layer, the names of its parameters that need a gradient.
    """

    start: int
    results: list[list[Any]]
    trained: Sequence[frozenset[str]]


def layer_runs(results: Sequence[Any], trained: Sequence[frozenset[str]], variable_of: Callable[[torch.Tensor], Any]) -> list[LayerRun]:
    """The runs of layers that were called one after the other.

    Args:
        results: the result of each layer, a pytree of tensors.
        trained: for each layer, the names of its parameters that need a gradient.
        variable_of: the variable of a tensor's value.
    """
    tensors = [[t for t in pytree.tree_leaves(result) if is_device_tensor(t)] for result in results]
    flags = [tuple(t.requires_grad for t in found) for found in tensors]
    ends = [-1, *(i for i, (before, after) in enumerate(pairwise(flags), 1) if before != after), len(flags)]
    if any(len(before) != len(after) or any(b and not a for b, a in zip(before, after, strict=True)) for before, after in pairwise(flags)):
        ends = [-1, len(flags)]  # a layer detaches its result: gradients do not begin in one layer
    variables = [[variable_of(t) for t in found] for found in tensors]
    return [LayerRun(end + 1, variables[end + 1 : stop], trained[end + 1 : stop]) for end, stop in pairwise(ends) if end + 1 < stop]


__all__ = ["LayerRun", "layer_runs"]

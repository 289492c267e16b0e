"""Version counters of the tensors that a program writes.

Autograd compares the version of a tensor that it has saved with that of today, and raises if the tensor was written in between. A trace
advances the versions as eager code does. Later calls replace the arrays below the tensors, so they advance the versions themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spmd.base._torch import increment_version
from spmd.program.find._objects import flatten


class WrittenTensors:
    """The tensors that a program writes in place.

    Args:
        owners: the tensors; the position of one that is an argument.
        holders: see `flatten`.

    Attributes:
        state: those that are not arguments.
        has_arguments: whether there are others.
    """

    def __init__(self, owners: Sequence[Any], holders: Any) -> None:
        self.state = [owner for owner in owners if isinstance(owner, torch.Tensor)]
        self._positions = [owner for owner in owners if not isinstance(owner, torch.Tensor)]
        self._holders = holders
        self.has_arguments = bool(self._positions)

    def advance_arguments(self, given: Any) -> None:
        """Advance the versions of the arguments of a call."""
        leaves = flatten(given, classes=self._holders).leaves
        increment_version([leaves[i] for i in self._positions if not leaves[i].is_inference()])


def written_since(versions: Sequence[tuple[torch.Tensor, int]]) -> list[Any]:
    """The tensors whose version has advanced since `versions_of`."""
    return [tensor for tensor, version in versions if tensor._version != version]


def versions_of(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """The tensors that have a version, and their versions."""
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


__all__ = ["WrittenTensors", "versions_of", "written_since"]

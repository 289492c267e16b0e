"""Changes of `requires_grad` in a traced function: layers that it freezes, `x.requires_grad_()` of an argument."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class GradientFlags:
    """Context that restores `requires_grad` of the given leaf tensors after a trace.

    Attributes:
        left: (tensor, flag) for each flag that the function changed.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        by_id = {id(t): t for t in tensors if t.is_leaf}
        self._before = [(t, t.requires_grad) for t in by_id.values()]
        self.left: list[tuple[torch.Tensor, bool]] = []

    def __enter__(self) -> GradientFlags:
        return self

    def __exit__(self, *error: object) -> None:
        self.left = [(t, t.requires_grad) for t, before in self._before if t.is_leaf and t.requires_grad is not before]
        for tensor, flag in self.left:
            tensor.requires_grad = not flag


__all__ = ["GradientFlags"]

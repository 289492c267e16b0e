"""`requires_grad` of leaf tensors that a traced function changes: layers frozen inside, `x.requires_grad_()` of an argument."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class GradientFlags:
    """`requires_grad` of some tensors around a trace. A context: on leaving, each has its own again.

    Attributes:
        left: (tensor, flag) where the function left another one than it found.
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

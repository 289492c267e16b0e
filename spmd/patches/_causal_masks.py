"""Transformer layers of torch that look whether a mask is causal, to choose a kernel. A trace that cannot know lets them apply the mask."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from spmd.device._host_answers import host_answer
from spmd.device._storage import is_device_tensor, load
from spmd.patches._table import current, replaced

_TARGET = "torch.nn.modules.transformer._detect_is_causal_mask"


@contextmanager
def without_mask_reads() -> Generator[None]:
    """While active, a mask that only the program will know counts as not causal: the result is the same, as the mask is applied."""
    theirs = current(_TARGET)

    def detect(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        if is_causal is not None or mask is None or not is_device_tensor(mask) or mask.requires_grad:  # a gradient depends on the choice
            return theirs(mask, is_causal, size)
        return False if host_answer(load(mask)) is None else theirs(mask, is_causal, size)

    with replaced(_TARGET, detect):
        yield


__all__ = ["without_mask_reads"]

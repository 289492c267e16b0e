"""`F.embedding_bag` of bags of equal size, computed as a lookup and a sum over a dim.

PyTorch flattens ids [B, N] to [B * N] with offsets 0, N, 2N, .... Only the values of the offsets show that the bags are equal, so the
batch dim, which is sharded, is lost, and a sharded table is gathered or scattered element by element. A lookup of the ids as
they are keeps the batch dim, and a sharded table costs as much as in handwritten JAX.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from spmd.patches._table import replace

_torchs_embedding_bag = F.embedding_bag


def register() -> None:
    """Replace the function that `nn.EmbeddingBag` calls."""
    replace("torch.nn.functional.embedding_bag", embedding_bag)


@functools.wraps(_torchs_embedding_bag)
def embedding_bag(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    names = ("offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights", "include_last_offset")
    given = dict(zip((*names, "padding_idx"), args, strict=False)) | kwargs
    mode, padding = given.get("mode", "mean"), given.get("padding_idx")
    on_device = weight.device.type == "jax" and input.device.type == "jax" and input.dim() == weight.dim() == 2
    is_special = any(given.get(name) is not None for name in ("offsets", "max_norm"))
    is_special = is_special or any(given.get(name) for name in ("scale_grad_by_freq", "sparse", "include_last_offset"))
    if not on_device or is_special or mode not in ("sum", "mean") or input.is_floating_point():
        return _torchs_embedding_bag(input, weight, *args, **kwargs)
    factors: torch.Tensor | None = given.get("per_sample_weights")
    if factors is not None and (mode != "sum" or factors.shape != input.shape or factors.dtype != weight.dtype):
        return _torchs_embedding_bag(input, weight, *args, **kwargs)
    if padding is not None and not -weight.shape[0] <= padding < weight.shape[0]:
        return _torchs_embedding_bag(input, weight, *args, **kwargs)  # which raises
    return _fixed_bags(input, weight, mode, factors, padding)


def _fixed_bags(
    ids_BN: torch.Tensor, weight: torch.Tensor, mode: str, factors_BN: torch.Tensor | None, padding: int | None
) -> torch.Tensor:
    """Sums or means [B, C] of rows of `weight` [rows, C]. The result of a bag that contains only padding is zero."""
    rows_BNC = F.embedding(ids_BN, weight, padding)
    if factors_BN is not None:
        rows_BNC = rows_BNC * factors_BN.unsqueeze(-1)
    if padding is None:
        return rows_BNC.sum(1) if mode == "sum" or not ids_BN.shape[1] else rows_BNC.mean(1)
    kept_BN1 = (ids_BN != padding % weight.shape[0]).unsqueeze(-1)
    sums_BC = torch.where(kept_BN1, rows_BNC, rows_BNC.new_zeros(())).sum(1)
    return sums_BC if mode == "sum" else sums_BC / kept_BN1.sum(1).clamp(min=1)

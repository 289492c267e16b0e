"""Operations that index, and what they make of an index inside and outside of its bounds: for eager operations, programs and graphs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Op = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def assigned(w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    w = w.clone()
    w[i] = 1.0
    return w


OPS: dict[str, Op] = {
    "embedding": lambda w, i: F.embedding(i, w),
    "x[i]": lambda w, i: w[i],
    "x[:, i]": lambda w, i: w.mT[:, i],
    "x[i, j]": lambda w, i: w[i, torch.zeros_like(i)],
    "x[i] = v": assigned,
    "index_select": lambda w, i: w.index_select(0, i),
    "gather": lambda w, i: w.gather(0, i[:, None]),
    "scatter": lambda w, i: w.scatter(0, i[:, None], 1.0),
    "scatter_add": lambda w, i: w.scatter_add(0, i[:, None], w[:2, :1]),
    "index_add": lambda w, i: w.index_add(0, i, w[:2]),
    "index_add of a vector": lambda w, i: w[:, 0].index_add(0, i, w[:2, 0]),
    "index_add of columns": lambda w, i: w.mT.index_add(1, i, w.mT[:, :2]),
    "index_copy": lambda w, i: w.index_copy(0, i, w[:2]),
    "index_fill": lambda w, i: w.index_fill(0, i, 1.0),
    "take": lambda w, i: w[:, 0].take(i),
    "cross_entropy": lambda w, i: F.cross_entropy(w.mT[:2], i),
    "nll_loss": lambda w, i: F.nll_loss(w.mT[:2], i),
    "embedding_bag": lambda w, i: F.embedding_bag(i, w, torch.tensor([0, 1], device=i.device)),
    "multi_margin_loss": lambda w, i: F.multi_margin_loss(w.mT[:2], i),
    "one_hot": lambda w, i: F.one_hot(i, 4),
    "take_along_dim": lambda w, i: torch.take_along_dim(w, i[:, None], 0),
}
PLACES = {"inside": [1, 3], "behind": [1, 7], "before": [-9, 0], "negative": [-1, 0]}


def outcome(op: Op, *args: torch.Tensor) -> Any:
    try:
        return op(*args).cpu()
    except (IndexError, RuntimeError) as error:
        return error

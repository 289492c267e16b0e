"""Which dim of a module's weight an axis splits: the outputs (`column`) or the inputs (`row`)."""

from __future__ import annotations

import torch
from torch import nn

from mesh import PartitionSpec
from spmd.rules._families import Side, is_convolution

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def outputs_last(module: nn.Module) -> bool:
    """Whether the module's weight is [in, out], as in an embedding or Hugging Face's Conv1D. A Linear's is [out, in]."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) or type(module).__name__ == "Conv1D"


def spec_of_side(side: Side | None, module: nn.Module, tensor: torch.Tensor, axis: str) -> PartitionSpec | None:
    """The spec of a parameter or buffer of `module`; None: replicated. Vectors are split like the outputs."""
    dims = tensor.dim()
    if side is None or dims == 0 or (side == "row" and dims < 2):
        return None
    if dims == 1:
        dim = 0
    elif is_convolution(module):
        dim = 0 if side == "column" else 1
    elif isinstance(module, _TRANSPOSED):
        dim = 1 if side == "column" else 0
    else:
        dim = dims - 1 if (side == "column") == outputs_last(module) else dims - 2
    return split_dim(dim, dims, axis)


def split_dim(dim: int, dims: int, axis: str) -> PartitionSpec:
    """The spec of a tensor of `dims` dims whose dim `dim` is split over `axis`."""
    return PartitionSpec(*(axis if d == dim else None for d in range(dims)))


__all__ = ["outputs_last", "spec_of_side", "split_dim"]

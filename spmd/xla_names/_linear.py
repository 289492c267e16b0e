"""torch_xla's patched `nn.Linear`, by name. Here `linear` is lowered whole, so the plain one already does what the patch was for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def xla_patched_nn_linear_forward(m: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """`m(input)`: one contraction that merges no dims, so shardings of batch and sequence dims survive."""
    return F.linear(input, m.weight, m.bias)


class XLAPatchedLinear:
    """`XLAPatchedLinear.apply(input, weight, bias)` is `torch.nn.functional.linear`."""

    @staticmethod
    def apply(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(input, weight, bias)

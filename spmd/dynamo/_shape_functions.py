"""Shape functions of operators of which torch has none, so that Dynamo can capture modules that use them on the device."""

from __future__ import annotations

from functools import cache

import torch

from spmd.base._torch import dispatch_has_kernel_for_dispatch_key


@cache
def register() -> torch.library.Library:
    """Register the functions, which live as long as the library. Operators for which this version of torch has one keep it."""
    library = torch.library.Library("aten", "IMPL")
    if not dispatch_has_kernel_for_dispatch_key("aten::_thnn_fused_gru_cell", "Meta"):
        library.impl("_thnn_fused_gru_cell", _gru_cell, "Meta")
    return library


def _gru_cell(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, input_bias: object = None, hidden_bias: object = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new hidden state and the workspace, five numbers for each of its elements.

    `GRUCell` calls this operator under a fake tensor of the device; the program itself runs `gru_cell`.
    """
    return torch.empty_like(hx, memory_format=torch.contiguous_format), hx.new_empty(hx.shape[0], hx.shape[1] * 5)


__all__ = ["register"]

"""A copy of a tensor's value at the same place of autograd's graph: the copy's gradient is the tensor's.

Unlike the tensor, its copy is not changed by later writes to the tensor.
"""

from __future__ import annotations

from typing import Any

import torch


def with_graph_of(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """`copy`, a new tensor without a graph, with that of `tensor`, whatever the grad mode is."""
    with torch.enable_grad():
        return _WithGraph.apply(tensor, [copy])  # pyright: ignore[reportReturnType]


class _WithGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, copy: list[torch.Tensor]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return copy[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return grads[0], None


__all__ = ["with_graph_of"]

"""Kernels for the product of grouped rows that Hugging Face's mixtures of experts use while they are compiled.

Their operator (`transformers::grouped_mm_fallback`, for weights that are not bfloat16) loops over group sizes that it reads on the
host. Its meaning is that of torch's `_grouped_mm`, which has a lowering and reads nothing. transformers need not be there: torch lets
a kernel be registered before its operator.
"""

from __future__ import annotations

import torch


def grouped_mm(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Rows of input [rows, in], sorted by group, times weight [groups, in, out]; offs [groups] holds each group's end."""
    return torch.ops.aten._grouped_mm(input, weight, offs)


def grouped_mm_backward(
    input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, grad_output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of both factors."""
    return (
        torch.ops.aten._grouped_mm(grad_output, weight.transpose(-2, -1), offs),
        torch.ops.aten._grouped_mm(input.transpose(0, 1), grad_output, offs),
    )


def install() -> torch.library.Library:
    """Register both; they last as long as the result."""
    library = torch.library.Library("transformers", "IMPL")
    library.impl("grouped_mm_fallback", grouped_mm, "PrivateUse1")
    library.impl("grouped_mm_fallback_backward", grouped_mm_backward, "PrivateUse1")
    return library


__all__ = ["grouped_mm", "grouped_mm_backward", "install"]

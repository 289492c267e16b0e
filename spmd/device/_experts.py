"""Kernels for the grouped matrix product that Hugging Face's mixtures of experts use while they are compiled.

Their operator (`transformers::grouped_mm_fallback`, for weights that are not bfloat16) loops over group sizes that it reads on the
host. It computes the same as torch's `_grouped_mm`, whose lowering reads nothing on the host. transformers need not be installed:
torch allows a kernel to be registered before its operator.
"""

from __future__ import annotations

import torch


def grouped_mm(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Product [rows, out] of input [rows, in], sorted by group, and weight [groups, in, out]; offs [groups] holds each group's end row."""
    return torch.ops.aten._grouped_mm(input, weight, offs)


def grouped_mm_backward(
    input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, grad_output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of input [rows, in] and of weight [groups, in, out]; grad_output is [rows, out]."""
    return (
        torch.ops.aten._grouped_mm(grad_output, weight.transpose(-2, -1), offs),
        torch.ops.aten._grouped_mm(input.transpose(0, 1), grad_output, offs),
    )


def install() -> torch.library.Library:
    """Register both kernels. They stay registered as long as the returned library is alive."""
    library = torch.library.Library("transformers", "IMPL")
    library.impl("grouped_mm_fallback", grouped_mm, "PrivateUse1")
    library.impl("grouped_mm_fallback_backward", grouped_mm_backward, "PrivateUse1")
    return library


__all__ = ["grouped_mm", "grouped_mm_backward", "install"]

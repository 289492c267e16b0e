"""Kernels of linear algebra that must see the tensor, not only its array: its strides, or whether its values are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.base._jax import is_tracer
from spmd.base._torch import OpOverload
from spmd.device._adapter import Adapter
from spmd.device._copy import to_host
from spmd.device._storage import load
from spmd.lowering import lookup


def check_errors(info: torch.Tensor, api_name: str, *, is_matrix: bool) -> None:
    """The error of a factorisation that failed. In a trace nobody knows yet: the result then holds NaN."""
    if not is_tracer(load(info)):
        torch.ops.aten._linalg_check_errors(to_host(info), api_name, is_matrix=is_matrix)


def _determinant(op: OpOverload) -> Callable[..., Any]:
    """torch's gradients of determinants take the saved factors for those of A^T where A is real and row-major."""
    lowering = lookup(op)
    assert lowering is not None, f"{op} has no lowering"
    adapter = Adapter(lowering)

    def kernel(A: torch.Tensor) -> Any:
        return adapter(A.mT if A.is_contiguous() and not A.is_complex() else A)

    return kernel


def linalg_kernels() -> dict[str, Callable[..., Any]]:
    """Kernel by overload name."""
    return {
        "_linalg_check_errors": check_errors,
        "_linalg_det": _determinant(torch.ops.aten._linalg_det.default),
        "_linalg_slogdet": _determinant(torch.ops.aten._linalg_slogdet.default),
    }

"""Linear algebra kernels that need the tensor in addition to its array: its strides, or whether its values are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import user_line
from spmd.base._jax import is_tracer
from spmd.base._torch import LinAlgError, OpOverload
from spmd.device._adapter import Adapter
from spmd.device._checks import Check
from spmd.device._copy import to_host
from spmd.device._storage import load, recording
from spmd.lowering import lookup


def check_errors(info: torch.Tensor, api_name: str, *, is_matrix: bool) -> None:
    """Raise if a factorisation failed. In a trace the program checks it instead, and the result of a failed one contains NaN."""
    value, recorder = load(info), recording.get()
    if recorder is not None:
        with exact_dtypes():
            failed = jnp.any(value != 0)
        what = f"{api_name}: the input is singular, or not positive-definite"
        recorder.expect(failed, Check(LinAlgError, what, user_line()))
    elif not is_tracer(value):
        torch.ops.aten._linalg_check_errors(to_host(info), api_name, is_matrix=is_matrix)


def _determinant(op: OpOverload) -> Callable[..., Any]:
    """Kernel that factors A^T if A is real and row-major: torch's gradients of determinants assume that of the saved factors."""
    lowering = lookup(op)
    assert lowering is not None, f"{op} has no lowering"
    adapter = Adapter(lowering)

    def kernel(A: torch.Tensor) -> Any:
        return adapter(A.mT if A.is_contiguous() and not A.is_complex() else A)

    return kernel


def linalg_kernels() -> dict[str, Callable[..., Any]]:
    """Kernels of this module by overload name."""
    return {
        "_linalg_check_errors": check_errors,
        "_linalg_det": _determinant(torch.ops.aten._linalg_det.default),
        "_linalg_slogdet": _determinant(torch.ops.aten._linalg_slogdet.default),
    }

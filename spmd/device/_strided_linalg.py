"""Linear algebra kernels that need the tensor in addition to its array: its strides, or whether its values are known.

A factorisation that fails raises what the CPU raises: eagerly at once, in a program at the next read.
"""

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

_SINGULAR = "the input is singular, or not positive-definite"
_DIVERGED = "the input has NaN or infinite elements"
_NOT_FINITE = -4  # the `info` for which torch's error says that the input is not finite


def check_errors(info: torch.Tensor, api_name: str, *, is_matrix: bool, what: str = _SINGULAR) -> None:
    """Raise if a factorisation failed. In a trace the program checks it instead, and the result of a failed one contains NaN."""
    value, recorder = load(info), recording.get()
    if recorder is not None:
        with exact_dtypes():
            failed = jnp.any(value != 0)
        recorder.expect(failed, Check(LinAlgError, f"{api_name}: {what}", user_line()))
    elif not is_tracer(value):
        torch.ops.aten._linalg_check_errors(to_host(info), api_name, is_matrix=is_matrix)


def _adapter(op: OpOverload) -> Adapter:
    lowering = lookup(op)
    assert lowering is not None, f"{op} has no lowering"
    return Adapter(lowering)


def _determinant(op: OpOverload) -> Callable[..., Any]:
    """Kernel that factors A^T if A is real and row-major: torch's gradients of determinants assume that of the saved factors."""
    adapter = _adapter(op)

    def kernel(A: torch.Tensor) -> Any:
        return adapter(A.mT if A.is_contiguous() and not A.is_complex() else A)

    return kernel


def _optionally_checked(op: OpOverload, api_name: str, info_at: int) -> Callable[..., Any]:
    """Kernel of a factorisation that returns `info`, and raises for it if the caller asks for that.

    In a trace its rule is told so too, and a failed factor of `cholesky_ex` is NaN: no check can be added to the body of a loop.
    """
    adapter = _adapter(op)

    def kernel(A: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_checked = kwargs.pop("check_errors", False)
        results = adapter(A, *args, check_errors=is_tracer(load(A)), **kwargs)
        if is_checked:
            check_errors(results[info_at], api_name, is_matrix=A.ndim == 2)
        return results

    return kernel


def _cholesky(A: torch.Tensor, upper: bool = False) -> torch.Tensor:
    factor, info = torch.ops.aten.linalg_cholesky_ex.default(A, upper=upper)
    check_errors(info, "cholesky", is_matrix=A.ndim == 2)
    return factor


def _svd() -> Callable[..., Any]:
    """Kernel that refuses NaN, and the drivers that only CUDA has."""
    adapter = _adapter(torch.ops.aten._linalg_svd.default)

    def kernel(A: torch.Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> Any:
        if driver is not None:
            raise RuntimeError("torch.linalg.svd: keyword argument `driver=` is only supported on CUDA inputs with cuSOLVER backend.")
        if A.ndim < 2:
            raise RuntimeError("linalg.svd: The input tensor A must have at least 2 dimensions.")
        if A.numel():
            info = A.isnan().flatten(-2).any(-1).int() * _NOT_FINITE
            check_errors(info, "linalg.svd", is_matrix=A.ndim == 2, what=_DIVERGED)
        return adapter(A, full_matrices, compute_uv)

    return kernel


def _eigh() -> Callable[..., Any]:
    """Kernel that refuses NaN where LAPACK does not converge: in dense matrices of 3 rows or more, with eigenvectors of 25 at most.

    LAPACK splits a matrix with zeros into smaller ones, and computes eigenvectors of more than 25 rows by another algorithm.
    """
    adapter = _adapter(torch.ops.aten._linalg_eigh.default)

    def kernel(A: torch.Tensor, UPLO: str = "L", compute_v: bool = True) -> Any:
        rows = A.shape[-1]
        if A.numel() and rows > 2 and not (compute_v and rows > 25):
            read, beside = (A.tril(), A.tril(-1)) if UPLO.upper() == "L" else (A.triu(), A.triu(1))
            is_dense = (beside != 0).flatten(-2).sum(-1) == rows * (rows - 1) // 2
            info = (read.isnan().flatten(-2).any(-1) & is_dense).int()
            check_errors(info, "linalg.eigh", is_matrix=A.ndim == 2, what=_DIVERGED)
        return adapter(A, UPLO, compute_v)

    return kernel


def _eig() -> Callable[..., Any]:
    adapter = _adapter(torch.ops.aten.linalg_eig.default)

    def kernel(A: torch.Tensor) -> Any:
        value, recorder = load(A), recording.get()
        if recorder is not None:
            with exact_dtypes():
                failed = ~jnp.all(jnp.isfinite(value))
            recorder.expect(failed, Check(RuntimeError, f"linalg.eig: {_DIVERGED}", user_line()))
        elif not is_tracer(value) and not bool(to_host(A.isfinite().all())):
            raise RuntimeError("torch.linalg.eig: input tensor should not contain infs or NaNs.")
        return adapter(A)

    return kernel


def linalg_kernels() -> dict[str, Callable[..., Any]]:
    """Kernels of this module by overload name."""
    aten = torch.ops.aten
    return {
        "_linalg_check_errors": check_errors,
        "_linalg_det": _determinant(aten._linalg_det.default),
        "_linalg_slogdet": _determinant(aten._linalg_slogdet.default),
        "linalg_inv_ex": _optionally_checked(aten.linalg_inv_ex.default, "linalg.inv_ex", 1),
        "linalg_cholesky_ex": _optionally_checked(aten.linalg_cholesky_ex.default, "linalg.cholesky_ex", 1),
        "linalg_lu_factor_ex": _optionally_checked(aten.linalg_lu_factor_ex.default, "torch.linalg.lu_factor_ex", 2),
        "linalg_ldl_factor_ex": _optionally_checked(aten.linalg_ldl_factor_ex.default, "torch.linalg.ldl_factor_ex", 2),
        "_linalg_solve_ex": _optionally_checked(aten._linalg_solve_ex.default, "torch.linalg.solve_ex", 3),
        "cholesky": _cholesky,
        "_linalg_svd": _svd(),
        "_linalg_eigh": _eigh(),
        "linalg_eig": _eig(),
    }

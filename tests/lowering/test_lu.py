"""Gradients through LU: torch's formulas depend on the layout of the matrix, and complex ones on torch's convention."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "det": torch.linalg.det,
    "slogdet": lambda a: torch.linalg.slogdet(a)[1],
    "inv": torch.linalg.inv,
    "solve": lambda a: torch.linalg.solve(a, torch.ones(5, 3, dtype=a.dtype, device=a.device)),
    "solve from the right": lambda a: torch.linalg.solve(a, torch.ones(3, 5, dtype=a.dtype, device=a.device), left=False),
    "lu_solve": lambda a: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), torch.ones(5, 2, dtype=a.dtype, device=a.device), adjoint=True),
    "lu": lambda a: torch.linalg.lu(a)[1] + torch.linalg.lu(a)[2],
    "matmul": lambda a: a @ (a * 2),
}


def result_and_gradient(fn: Callable[[torch.Tensor], torch.Tensor], leaf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = fn(leaf)
    weights = torch.arange(1.0, out.numel() + 1, dtype=torch.float64).reshape(out.shape).to(out.device)
    gradient = torch.autograd.grad((out * out.conj() * weights).real.sum() if out.is_complex() else (out * weights).sum(), leaf)[0]
    return out.detach().cpu(), gradient.cpu()


@pytest.mark.parametrize("is_row_major", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_result_and_gradient_equal_the_cpus(name: str, dtype: torch.dtype, is_row_major: bool) -> None:
    matrix = torch.randn(5, 5, dtype=dtype, generator=torch.Generator().manual_seed(1))
    found = []
    for device in ("cpu", "jax"):
        leaf = matrix.to(device) if is_row_major else matrix.to(device).mT.contiguous().mT
        assert leaf.is_contiguous() == is_row_major
        found.append(result_and_gradient(FUNCTIONS[name], leaf.detach().requires_grad_()))
    torch.testing.assert_close(found[1], found[0])


BAD = torch.stack([torch.eye(3), torch.zeros(3, 3)])
FAILURES: dict[str, Any] = {
    **{name: functools.partial(getattr(torch.linalg, name), check_errors=True) for name in ("inv_ex", "cholesky_ex", "lu_factor_ex")},
    "ldl_factor_ex": lambda x: torch.linalg.ldl_factor_ex(x, check_errors=True),
    "solve_ex": lambda x: torch.linalg.solve_ex(x, x, check_errors=True),
    "torch.cholesky": torch.cholesky,
    "svdvals": lambda x: torch.linalg.svdvals(x / x),
    "eigh": lambda x: torch.linalg.eigh(x / x),
    "eig": lambda x: torch.linalg.eig(x / x),
    "a driver of CUDA": lambda x: torch.linalg.svd(x, driver="gesvd"),
}


@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_factorisation_raises_the_cpus_error(name: str) -> None:
    for x in (BAD, BAD[1]):
        with pytest.raises(RuntimeError) as cpu:
            FAILURES[name](x)
        with pytest.raises(RuntimeError) as ours:
            FAILURES[name](x.to("jax"))
        assert type(ours.value) is type(cpu.value)
        assert str(ours.value).split("(error code")[0] == str(cpu.value).split("(error code")[0]


MINORS = torch.tensor([[[4.0, 2, 1], [2, 5, 3], [1, 3, 9]], [[4, 2, 1], [2, -5, 3], [1, 3, 2]], [[4, 2, 1], [2, 5, 3], [1, 3, -2]]])


@pytest.mark.parametrize("upper", [False, True])
def test_a_failed_cholesky_ex_has_the_cpus_info_and_columns(upper: bool) -> None:
    for x in (
        MINORS,
        MINORS[1],
        -MINORS[0],
        MINORS * float("nan"),
        MINORS + 1j * torch.ones(3, 3).triu(1) - 1j * torch.ones(3, 3).tril(-1),
    ):
        expected = torch.linalg.cholesky_ex(x, upper=upper)
        factor, info = torch.linalg.cholesky_ex(x.to("jax"), upper=upper)
        torch.testing.assert_close(factor.cpu(), expected.L, equal_nan=True)
        assert torch.equal(info.cpu(), expected.info)
        factor, info = spmd.compile(torch.linalg.cholesky_ex)(x.to("jax"), upper=upper)
        assert torch.equal(info.cpu(), expected.info)
        assert torch.equal(factor.isnan().any(-1).any(-1).cpu(), expected.info > 0)

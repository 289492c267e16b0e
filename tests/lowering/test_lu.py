"""Gradients through LU: torch's formulas depend on the layout of the matrix, and complex ones on torch's convention."""

from collections.abc import Callable

import pytest
import torch

import spmd  # noqa: F401

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

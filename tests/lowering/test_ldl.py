"""LDL factors and pivots are LAPACK's, for blocks of one row and of two; solving with them equals the CPU's."""

import pytest
import torch

import spmd  # noqa: F401

KINDS = ("dense", "zero diagonal", "zero column")


def matrices(size: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
    drawn = torch.randn(2, size, size, dtype=dtype, generator=torch.Generator().manual_seed(size))
    if kind == "zero diagonal":  # every pivot is a block of two
        return drawn * torch.eye(size).logical_not()
    if kind == "zero column":
        drawn[:, :, 0] = drawn[:, 0, :] = 0
    return drawn


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hermitian", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("size", [1, 9])
def test_factors_and_pivots_are_lapacks(size: int, dtype: torch.dtype, hermitian: bool, kind: str) -> None:
    matrix = matrices(size, dtype, kind)
    wanted = torch.linalg.ldl_factor_ex(matrix, hermitian=hermitian)
    found = torch.linalg.ldl_factor_ex(matrix.to("jax"), hermitian=hermitian)
    assert torch.equal(found.pivots.cpu(), wanted.pivots) and torch.equal(found.info.cpu(), wanted.info)
    assert (wanted.pivots < 0).any() or kind != "zero diagonal" or size == 1
    torch.testing.assert_close(found.LD.cpu(), wanted.LD)


@pytest.mark.parametrize("kind", ["dense", "zero diagonal"])
@pytest.mark.parametrize("hermitian", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("size", [8])
def test_solution_equals_the_cpus(size: int, dtype: torch.dtype, hermitian: bool, kind: str) -> None:
    right = torch.randn(2, size, 3, dtype=dtype, generator=torch.Generator().manual_seed(1))
    factors, pivots, _ = torch.linalg.ldl_factor_ex(matrices(size, dtype, kind), hermitian=hermitian)
    found = torch.linalg.ldl_solve(factors.to("jax"), pivots.to("jax"), right.to("jax"), hermitian=hermitian)
    torch.testing.assert_close(found.cpu(), torch.linalg.ldl_solve(factors, pivots, right, hermitian=hermitian))

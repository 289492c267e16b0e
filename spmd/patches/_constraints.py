"""Constraints of torch.distributions that branch on tensor values. While a function is traced, both conditions are computed instead."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from spmd.base._torch import Symmetric
from spmd.patches._table import replaced


@contextmanager
def without_branches() -> Generator[None]:
    """While active, `positive_definite` and `positive_semidefinite` check the eigenvalues even if the matrix is not symmetric."""

    def positive_definite(self: Any, value: torch.Tensor) -> torch.Tensor:
        return Symmetric.check(self, value) & torch.linalg.cholesky_ex(value).info.eq(0)

    def positive_semidefinite(self: Any, value: torch.Tensor) -> torch.Tensor:
        return Symmetric.check(self, value) & torch.linalg.eigvalsh(value).ge(0).all(-1)

    checks: list[tuple[str, Callable[..., torch.Tensor]]] = [
        ("torch.distributions.constraints._PositiveDefinite.check", positive_definite),
        ("torch.distributions.constraints._PositiveSemidefinite.check", positive_semidefinite),
    ]
    with replaced(*checks[0]), replaced(*checks[1]):
        yield


__all__ = ["without_branches"]

"""Functions with checks of values, for test_checks: pytest rewrites the asserts of test files, and no others."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch

from spmd.base._branches import side_that_raises

places: list[int] = []


def asserted(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    assert x.sum() > 0, "must be positive"
    return x * v


def asserted_of_two(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    assert (x > 0).all() and not v.isnan().any()
    return x * v


def asked_of_an_item(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if x.sum().item() > 10:
        raise OverflowError(f"too large: {x.sum()}")
    return x * v


def inside_with(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if torch.isnan(v).any():
            what = "nan"
            raise ValueError(what)
    return x * v


def clipped(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    w = x.detach().clone().requires_grad_()
    (w * v).sum().backward()
    return torch.nn.utils.clip_grad_norm_([w], 1.0, error_if_nonfinite=True)


def with_anomaly_detection(x: torch.Tensor, v: torch.Tensor) -> Any:
    with torch.autograd.detect_anomaly():
        w = x.detach().requires_grad_()
        (w.sqrt() * v).sum().backward()
    return w.grad


def checked_by_torch(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    torch._assert((x > 0).all(), "positive")
    torch.ops.aten._assert_async(v.sum())  # pyright: ignore[reportAttributeAccessIssue]
    return x * v


def caught_inside(x: torch.Tensor) -> torch.Tensor:
    try:
        if x.isnan().any():
            raise ValueError("nan")
    except ValueError:
        return x
    return x * 2


def with_two_sides(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def written_first(x: torch.Tensor) -> torch.Tensor:
    if x.isnan().any():
        Asked.found = []
        raise ValueError("nan")
    return x


def in_a_branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: asserted(x, x), lambda x: x * 1, (x,))


class Asked:
    """A truth that notes which side of the branch on it raises."""

    found: ClassVar[list[Any]] = []

    def __init__(self, answer: bool) -> None:
        self.answer = answer

    def __bool__(self) -> bool:
        self.found.append(side_that_raises(sys._getframe(1)))
        return self.answer


def sides() -> list[Any]:
    """(truth, class) of the side that raises, of each of a few branches."""
    Asked.found.clear()
    if Asked(False):
        raise OverflowError("too large")
    assert Asked(True), "message"
    if not Asked(True):
        raise KeyError
    if Asked(False):
        places.append(2)
    return [side and (side.truth, side.kind) for side in Asked.found]

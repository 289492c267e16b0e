"""Numbers of a program beside 0-dim tensors under `vmap`: values and dtypes are those of CPU torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd


def used(r: torch.Tensor, k: Any) -> tuple[torch.Tensor, ...]:
    loss = (r * 2).sum()
    methods = r.add(k), r.sub(k), torch.mul(r, k), torch.div(k, r), torch.add(r, r, alpha=k), r.clone().mul_(k)
    return *methods, loss * k, k * loss, r + k, k - r, r / k, k / r, r**k, r // k, r % k, (r > k) * 1, torch.func.grad(lambda w: w * k)(r)


def of_an_argument(x: torch.Tensor, k: float) -> tuple[torch.Tensor, ...]:
    return torch.func.vmap(lambda r: used(r, k))(x)


def of_an_item(x: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    number = k.item()
    return torch.func.vmap(lambda r: used(r, number))(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fn", "make"), [(of_an_argument, float), (of_an_item, torch.tensor)])
def test_a_number_is_used_as_pythons(fn: Callable[..., Any], make: Callable[[float], Any], dtype: torch.dtype) -> None:
    x, step = torch.tensor([0.5, 2.0], dtype=dtype), spmd.compile(fn)
    for k in (0.25, 0.5, 0.75):
        number = make(k)
        ours = step(x.to("jax"), number.to("jax") if isinstance(number, torch.Tensor) else number)
        torch.testing.assert_close([t.cpu() for t in ours], list(fn(x, number)), rtol=torch.finfo(dtype).eps, atol=0)
    assert step.num_traces <= 2 + 2 * (fn is of_an_argument)

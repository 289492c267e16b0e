"""Operations that pad the same windows of one sharded dim with different values."""

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F

import spmd
from mesh import Mesh

pytestmark = pytest.mark.multidevice(num=8)
Fn = Callable[[torch.Tensor], torch.Tensor]
OF_ROWS: dict[str, Fn] = {
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "cummax": lambda x: x.cummax(0)[0],
    "cummin": lambda x: x.cummin(0)[0],
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "pad 0": lambda x: F.pad(x, (1, 1)),
    "pad 1": lambda x: F.pad(x, (1, 1), value=1.0),
    "pad -inf": lambda x: F.pad(x, (1, 1), value=-torch.inf),
}
OF_IMAGES: dict[str, Fn] = {
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 1, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "largest": lambda x: F.max_pool2d(x, 3, 1, 1, return_indices=True)[1].to(x.dtype),
    "conv2d": lambda x: F.conv2d(x, torch.ones(1, 1, 3, 3, dtype=x.dtype, device=x.device), padding=1),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1), value=2.0),
}


def _compare(pair: tuple[Fn, Fn], x: torch.Tensor, dim: int) -> None:
    mesh = Mesh(range(8), (8,), ("data",))
    sharded = spmd.mark_sharding(x.to("jax").requires_grad_(), mesh, tuple("data" if d == dim else None for d in range(x.dim())))

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first, second = pair[0](x), pair[1](x)
        kept = [value.masked_fill(value.isinf(), 0) for value in (first, second)]
        return first, second, torch.autograd.grad(kept[0].sum() + kept[1].square().sum(), x)[0]

    expected = step(x.clone().requires_grad_())
    for ours, theirs in zip(spmd.compile(step)(sharded), expected, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-13, atol=1e-13)  # float64: last bits


@pytest.mark.parametrize("pair", list(permutations(OF_ROWS, 2)), ids="-".join)
def test_rows_that_two_operations_share(pair: tuple[str, str]) -> None:
    _compare((OF_ROWS[pair[0]], OF_ROWS[pair[1]]), torch.linspace(-2.0, -0.5, 16, dtype=torch.float64), 0)


@pytest.mark.parametrize("pair", list(permutations(OF_IMAGES, 2)), ids="-".join)
def test_images_that_two_operations_share(pair: tuple[str, str]) -> None:
    _compare((OF_IMAGES[pair[0]], OF_IMAGES[pair[1]]), torch.linspace(-4.0, -1.0, 64, dtype=torch.float64).reshape(1, 1, 16, 4), 2)

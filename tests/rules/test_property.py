"""Whatever legal layout each parameter, input and activation has, loss, gradients and update are those of the unsharded step."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mesh
import spmd
from tests.oracle import array_of, assert_same, assert_same_model

pytestmark = pytest.mark.multidevice(num=8)
GRIDS = [((8,), ("a",)), ((4, 2), ("a", "b")), ((2, 2, 2), ("a", "b", "c"))]


class Net(nn.Module):
    """A look-up, a convolution, a norm, attention to itself and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.table(ids_BT)
        x_BTD = x_BTD + self.convolution(x_BTD.transpose(1, 2)).transpose(1, 2)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(self.norm(x_BTD)).chunk(3, -1))
        return self.head(x_BTD + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@st.composite
def legal_spec(draw: Any, shape: tuple[int, ...], sizes: dict[str, int]) -> tuple[Any, ...]:
    """A spec whose axes divide the dims that they split; tuples of axes in any order too."""
    free = draw(st.permutations(sorted(sizes)))
    entries: list[list[str]] = [[] for _ in shape]
    for axis in free[: draw(st.integers(0, len(free)))]:
        fitting = [d for d, n in enumerate(shape) if n % (sizes[axis] * math.prod(sizes[a] for a in entries[d])) == 0]
        if fitting:
            entries[draw(st.sampled_from(fitting))].append(axis)
    return tuple(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in entries)


@st.composite
def layouts(draw: Any) -> tuple[mesh.Mesh, dict[str, tuple[Any, ...]]]:
    """A mesh, its devices in any order, and a legal spec for every parameter and for the ids."""
    shape, names = draw(st.sampled_from(GRIDS))
    grid = mesh.Mesh(draw(st.permutations(range(8))), shape, names)
    sizes = dict(grid.shape())
    tensors = {name: tuple(p.shape) for name, p in Net().named_parameters()} | {"ids": (8, 8)}
    return grid, {name: draw(legal_spec(size, sizes)) for name, size in tensors.items()}


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step


@settings(max_examples=5)
@given(layouts())
def test_any_legal_sharding_gives_the_unsharded_step(layout: tuple[mesh.Mesh, dict[str, tuple[Any, ...]]]) -> None:
    grid, specs = layout
    torch.manual_seed(0)
    host = Net()
    torch.manual_seed(0)
    device = Net().to("jax")
    spmd.shard_module(device, grid, lambda name, parameter: specs[name])
    ids = torch.randint(0, 16, (8, 8), generator=torch.Generator().manual_seed(0))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (host, device)]
    on_host, on_mesh = step_of(host, optimizers[0]), spmd.compile(step_of(device, optimizers[1]))
    marked = spmd.mark_sharding(ids.to("jax"), grid, specs["ids"])
    for _ in range(2):
        assert_same(on_mesh(marked).detach(), on_host(ids).detach())
    assert_same_model(device, host, (1e-4, 1e-5))
    for name, parameter in device.named_parameters():
        assert array_of(parameter).sharding == mesh.ShardingSpec(grid, specs[name]).to_jax()

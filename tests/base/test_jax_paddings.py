"""Paddings in steps are what `lax.pad` gives, also where a replicated operand has a sharded result."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from mesh import Mesh
from spmd.base._jax_paddings import in_steps

EDGES = [(low, high, between) for low in (-9, -3, -1, 0, 1, 2) for high in (-2, 0, 3) for between in (0, 1, 2)]


@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_steps_give_what_the_padding_gives(size: int) -> None:
    x = np.arange(1.0, size * 2 + 1, dtype=np.float32).reshape(size, 2)
    for edges in EDGES:
        if (size - 1) * (edges[2] + 1) * (size > 0) + (size > 0) + edges[0] + edges[1] < 0:
            continue
        config = [edges, (1, 0, 1)]
        assert np.array_equal(np.asarray(in_steps(jnp.asarray(x), np.float32(7), config)), _by_numpy(_by_numpy(x, edges).T, config[1]).T), (
            edges
        )


def _by_numpy(x: Any, edges: tuple[int, int, int]) -> Any:
    """`lax.pad` with 7 along dim 0."""
    low, high, between = edges
    wide = np.full(((len(x) - 1) * (between + 1) + 1 if len(x) else 0, *x.shape[1:]), 7, x.dtype)
    wide[:: between + 1] = x
    wide = np.pad(wide, [(max(low, 0), max(high, 0)), (0, 0)], constant_values=7)
    return wide[max(-low, 0) : len(wide) - max(-high, 0)]


def _sharded(x: torch.Tensor, mesh: Mesh, *spec: Any) -> torch.Tensor:
    return spmd.mark_sharding(x.to("jax"), mesh, spec)


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("pad", [(1, -1), (-1, 1), (2, -2), (-3, 3)])
def test_rows_that_are_shifted_before_a_sharded_sum(pad: tuple[int, int]) -> None:
    mesh = Mesh(range(8), (8,), ("data",))
    replicated, x = torch.arange(16.0).reshape(8, 2), torch.ones(8, 2)

    @spmd.compile
    def step(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.pad(p, (0, 0, *pad)) + x

    expected = F.pad(replicated, (0, 0, *pad)) + x
    assert torch.equal(step(_sharded(replicated, mesh, None, None), _sharded(x, mesh, "data", None)).cpu(), expected)


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("size", [5, 8, 13, 16])
@pytest.mark.parametrize("num", [2, 4, 8])
def test_gradients_of_slices_and_paddings_of_a_sharded_dim(size: int, num: int) -> None:
    mesh = Mesh(range(num), (num,), ("data",))

    def gradients(x: torch.Tensor) -> list[torch.Tensor]:
        losses = (
            lambda x: (x[::2] * torch.arange(1.0, len(x[::2]) + 1, device=x.device)).sum() + (x * x).sum(),
            lambda x: (x[1::3] * torch.arange(1.0, len(x[1::3]) + 1, device=x.device)).sum() + (x * x).sum(),
            lambda x: (F.pad(x, (3, 0)) * torch.arange(1.0, len(x) + 4, device=x.device)).sum() + (x * x).sum(),
            lambda x: (F.pad(x, (2, -1)) * torch.arange(1.0, len(x) + 2, device=x.device)).sum() + (x * x).sum(),
        )
        return [torch.autograd.grad(loss(x), x)[0] for loss in losses]

    x = torch.arange(float(size)) - 3
    on_mesh = _sharded(x, mesh, "data").detach().requires_grad_()
    spmd.mark_sharding(on_mesh, mesh, ("data",))
    for ours, theirs in zip(spmd.compile(gradients)(on_mesh), gradients(x.clone().requires_grad_()), strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("pool", [F.max_pool1d, F.avg_pool1d])
@pytest.mark.parametrize("size", [12, 24])
def test_pools_of_a_replicated_tensor_with_a_sharded_result(pool: Any, size: int) -> None:
    mesh = Mesh(range(8), (2, 4), ("data", "model"))
    x = torch.arange(1.0, size + 1, dtype=torch.float64)[None, None]
    other = torch.ones(1, 1, size // 3, dtype=x.dtype)

    def step(x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = pool(x, 3, 3, 1) + other
        return total, torch.autograd.grad((total * total).sum(), x)[0]

    expected = step(x.clone().requires_grad_(), other)
    replicated = _sharded(x, mesh, None, None, None).detach().requires_grad_()
    for ours, theirs in zip(spmd.compile(step)(replicated, _sharded(other, mesh, None, None, "model")), expected, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-13, atol=1e-13)  # float64: last bits


def gradient_of_every_second(x: jax.Array) -> jax.Array:
    return jax.grad(lambda x: (x[::2] ** 2).sum())(x)


def with_an_edge_of_either_sign(x: jax.Array) -> jax.Array:
    return lax.pad(x[1:], 0.0, [(0, x.shape[0] - 13, 1)])


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("spec", [P(), P("data")])
@pytest.mark.parametrize("fn", [gradient_of_every_second, with_an_edge_of_either_sign])
def test_paddings_of_sizes_that_vary(fn: Any, spec: P) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    replicated = NamedSharding(mesh, P())
    jitted = jax.jit(fn, in_shardings=replicated, out_shardings=NamedSharding(mesh, spec))
    shape = jax.export.symbolic_shape("8*n", constraints=["n>=1"])
    exported = jax.export.export(jitted)(jax.ShapeDtypeStruct(shape, np.float32))
    for size in (8, 24, 40):
        x = np.arange(float(size), dtype=np.float32)
        found = jax.jit(exported.call)(jax.device_put(x, replicated))
        assert np.array_equal(np.asarray(found), np.asarray(fn(jnp.asarray(x))))

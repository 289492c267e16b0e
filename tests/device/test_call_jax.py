"""`call_jax`: JAX functions on torch tensors, with torch's gradients; on any number of devices."""

from typing import Any

import jax.numpy as jnp
import pytest
import torch

import spmd
from tests.grids import line
from tests.oracle import assert_same, batch


def affine(x: Any, options: dict[str, Any], power: int = 1) -> Any:
    return {"y": (x * options["scale"] + options["shift"]) ** power, "name": "affine", "n": power}


def test_values_structure_and_gradients() -> None:
    x, scale = batch(4, 3).requires_grad_(), batch(3, seed=2).requires_grad_()
    dx, dscale = (t.detach().to("jax").requires_grad_() for t in (x, scale))
    for power in (1, 2, 3):
        out = spmd.call_jax(affine, (dx, {"scale": dscale, "shift": 2.0}), {"power": power})
        want = (x * scale + 2.0) ** power
        assert (out["name"], out["n"]) == ("affine", power)
        assert_same(out["y"].detach(), want.detach())
        grads = torch.autograd.grad(out["y"].sum(), (dx, dscale))
        assert_same(grads, torch.autograd.grad(want.sum(), (x, scale)))
    assert not spmd.call_jax(jnp.sin, (dx.detach(),)).requires_grad


def test_a_function_is_traced_once_per_values_and_shapes() -> None:
    traced: list[Any] = []

    def double(x: Any, by: Any) -> Any:
        traced.append((x.shape, by))
        return x * by

    for shape, by in [((2,), 2), ((2,), 2), ((3,), 2), ((2,), 2.0), ((2,), True), ((2,), 2)]:
        out = spmd.call_jax(double, (batch(*shape).to("jax"), by))
        assert_same(out, batch(*shape) * by)
    assert traced == [((2,), 2), ((3,), 2), ((2,), 2.0), ((2,), True)]
    assert spmd.call_jax(lambda x, names: x + len(names), (torch.zeros(2, device="jax"), {1, 2})).tolist() == [2.0, 2.0]


def test_integers_keep_their_dtype_and_second_gradients_exist() -> None:
    assert spmd.call_jax(lambda x: x + 1, (torch.arange(3, device="jax"),)).dtype == torch.int64
    x = torch.tensor([0.3, 0.5], device="jax", requires_grad=True)
    (first,) = torch.autograd.grad(spmd.call_jax(lambda v: v**3, (x,)).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert_same(second, 6 * x.detach().cpu())


def test_it_keeps_layouts_and_is_part_of_a_program() -> None:
    x = spmd.mark_sharding(batch(8, 4).to("jax"), line(), ("data", None))
    assert spmd.call_jax(jnp.sin, (x,), name="wave").shape == (8, 4)
    step = spmd.compile(lambda x: spmd.call_jax(jnp.cumsum, (x,), {"axis": 1}) * 2)
    assert_same(step(x), batch(8, 4).cumsum(1) * 2)
    with pytest.raises(spmd.SpmdError, match="sin was given a tensor on device 'cpu'"):
        spmd.call_jax(jnp.sin, (batch(2),))

"""`call_jax`: JAX functions on torch tensors, with torch's gradients; on any number of devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas

import mesh
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


def of_jax(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return spmd.call_jax(lambda x, w: {"y": jnp.tanh(x @ w), "n": jnp.argmax(x)}, (x, w))["y"]


def of_torch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


def total(fn: Any) -> Any:
    return lambda x, w: fn(x, w).sum()


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "grad": lambda f, x, w: torch.func.grad(total(f), argnums=(0, 1))(x, w),
    "vjp": lambda f, x, w: torch.func.vjp(f, x, w)[1](torch.ones_like(x)),
    "jvp": lambda f, x, w: torch.func.jvp(lambda x: f(x, w), (x,), (x * 2,)),
    "vmap": lambda f, x, w: torch.func.vmap(f, in_dims=(0, None))(x, w),
    "vmap of grad": lambda f, x, w: torch.func.vmap(torch.func.grad(total(f)), in_dims=(0, None))(x, w),
    "jacfwd": lambda f, x, w: torch.func.jacfwd(f)(x, w),
    "hessian": lambda f, x, w: torch.func.hessian(total(f))(x, w),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch.func.jvp itself, the first time on the CPU
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_torch_func(transform: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
    x, w = batch(3, 4), batch(4, 4, seed=2)
    got = transform(of_jax, x.to("jax"), w.to("jax"))
    assert_same(got, transform(of_torch, x, w))
    assert_same(spmd.compile(lambda x, w: transform(of_jax, x, w))(x.to("jax"), w.to("jax")), transform(of_torch, x, w))


def test_a_complex_gradient_under_a_transform_is_torchs() -> None:
    z = torch.complex(batch(3), batch(3, seed=2))
    got = torch.func.grad(lambda z: spmd.call_jax(lambda z: jnp.abs(z * z * (1 + 2j)).sum(), (z,)))(z.to("jax"))
    assert_same(torch.view_as_real(got), torch.view_as_real(torch.func.grad(lambda z: (z * z * (1 + 2j)).abs().sum())(z)))


def doubled_by_a_kernel(x: Any) -> Any:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2

    return pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def test_a_pallas_kernel_eagerly_compiled_mapped_and_inside_shard_map() -> None:
    x = batch(8, 4)
    double = lambda x: spmd.call_jax(doubled_by_a_kernel, (x,))  # noqa: E731
    on_shards = spmd.shard_map(double, line(), in_specs=(("data", None),), out_specs=("data", None))
    for fn in (double, spmd.compile(double), torch.func.vmap(double), on_shards, spmd.compile(on_shards)):
        assert_same(fn(x.to("jax")).as_subclass(torch.Tensor), x * 2)


def test_collectives_of_jax_inside_shard_map() -> None:
    total = spmd.shard_map(
        lambda x: spmd.call_jax(lambda x: jax.lax.psum(x, "data"), (x,)), line(), in_specs=(("data", None),), out_specs=(None, None)
    )
    x = batch(mesh.device_count(), 4)
    assert_same(total(x.to("jax")), x.sum(0, keepdim=True))


def test_it_keeps_layouts_and_is_part_of_a_program() -> None:
    x = spmd.mark_sharding(batch(8, 4).to("jax"), line(), ("data", None))
    assert spmd.call_jax(jnp.sin, (x,), name="wave").shape == (8, 4)
    step = spmd.compile(lambda x: spmd.call_jax(jnp.cumsum, (x,), {"axis": 1}) * 2)
    assert_same(step(x), batch(8, 4).cumsum(1) * 2)
    with pytest.raises(spmd.SpmdError, match="sin was given a tensor on device 'cpu'"):
        spmd.call_jax(jnp.sin, (batch(2),))

"""`call_jax` under `torch.compile(fullgraph=True)`: one call of a graph, with torch's gradient."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas

import mesh
import spmd

Fn = Callable[..., torch.Tensor]


def affine(x: Any, parts: dict[str, Any], power: float = 1.0) -> dict[str, Any]:
    return {"y": jnp.tanh(x @ parts["w"]) ** power + parts["b"][0], "best": (jnp.argmax(x, 1), "x"), "parts": [x.sum(0), None]}


product = jax.jit(lambda x, w: x @ w)


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    """Twice x, by a Pallas kernel."""

    def kernel(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = x_ref[...] * 2

    return pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2 * g,))


def with_containers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = spmd.call_jax(affine, (x, {"w": w, "b": [0.5]}), {"power": 2.0})
    assert out["best"][1] == "x" and out["parts"][1] is None
    return out["y"].sum() + (out["parts"][0] * out["best"][0].sum()).sum()


FUNCTIONS: dict[str, Fn] = {
    "containers and constants": with_containers,
    "jnp's own": lambda x, w: (spmd.call_jax(jnp.sin, (x,)) @ w).sum(),
    "jitted": lambda x, w: spmd.call_jax(product, (x, w)).sum(),
    "twice, different": lambda x, w: (spmd.call_jax(jnp.sin, (x,)) @ spmd.call_jax(jnp.cos, (w,), name="wave")).sum(),
    "twice, the same": lambda x, w: (spmd.call_jax(jnp.sin, (x,)) @ spmd.call_jax(jnp.sin, (w,))).sum(),
    "a kernel": lambda x, w: (spmd.call_jax(doubled, (x,)) @ w).sum(),
    "torch around it": lambda x, w: torch.relu(spmd.call_jax(lambda x: x - 0.5, (x @ w,))).sum(),
}


def graded(fn: Fn, is_marked: bool) -> list[Any]:
    """Value and gradients, in two calls."""
    x = torch.linspace(-1, 1, 32, device="jax").reshape(8, 4).clone().requires_grad_()
    w = torch.linspace(0, 1, 8, device="jax").reshape(4, 2).requires_grad_()
    if is_marked:
        spmd.mark_sharding(x, mesh.Mesh(range(8), (8,), ("data",)), ("data", None))
    found: list[Any] = []
    for _ in range(2):
        loss = fn(x, w)
        found += [loss.item(), *(g.tolist() for g in torch.autograd.grad(loss, (x, w), allow_unused=True))]
    return found


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("is_marked", [False, True], ids=["one device", "sharded"])
@pytest.mark.parametrize("case", FUNCTIONS)
def test_the_graph_is_whole_and_has_the_gradients(case: str, is_marked: bool) -> None:
    fn = FUNCTIONS[case]
    got = graded(torch.compile(fn, backend="spmd", fullgraph=True), is_marked)
    assert all(g == pytest.approx(w, rel=1e-5, abs=1e-6) for g, w in zip(flat(got), flat(graded(fn, is_marked)), strict=True))


def flat(value: Any) -> list[float]:
    return [number for item in value for number in flat(item)] if isinstance(value, list) else [value]


def test_another_function_under_the_name_is_used() -> None:
    chosen = {"fn": jnp.sin}
    compiled = torch.compile(lambda x: spmd.call_jax(chosen["fn"], (x,)), backend="spmd", fullgraph=True)
    x = torch.ones(3, device="jax")
    assert compiled(x).tolist() == pytest.approx(torch.ones(3).sin().tolist())
    chosen["fn"] = jnp.cos
    assert compiled(x).tolist() == pytest.approx(torch.ones(3).cos().tolist())


def test_a_training_step_with_a_kernel_learns_as_without_dynamo() -> None:
    def losses(compiles: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4).to("jax")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = spmd.call_jax(doubled, (model(x),)).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        run = torch.compile(step, backend="spmd") if compiles else step
        return [run(torch.ones(2, 4, device="jax")).item() for _ in range(3)]

    assert losses(True) == pytest.approx(losses(False), rel=1e-5)


def test_a_result_of_another_type_is_refused_by_name() -> None:
    compiled = torch.compile(lambda x: spmd.call_jax(lambda x: slice(x, x), (x,)), backend="spmd", fullgraph=True)
    with pytest.raises(Exception, match="a JAX function in a Dynamo graph returns a slice"):
        compiled(torch.ones(2, device="jax"))


def test_a_tensor_on_another_device_is_refused_by_name() -> None:
    compiled = torch.compile(lambda x: spmd.call_jax(jnp.sin, (x,)), backend="spmd", fullgraph=True)
    with pytest.raises(Exception, match="sin was given a tensor on device 'cpu'"):
        compiled(torch.ones(2))

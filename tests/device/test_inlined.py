"""`Inlined` records what `jax.jit(fn, inline=True)` records."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.device._inlined import Inlined


def _counted() -> tuple[list[int], Any]:
    runs: list[int] = []

    def fn(pair: tuple[Any, Any], factor: Any, power: int) -> dict[str, Any]:
        runs.append(power)
        a, b = pair
        return {"sum": (a + b) * factor, "power": [a**power, b]}

    return runs, fn


def test_equations_are_those_of_jit() -> None:
    _, fn = _counted()
    inlined, jitted = Inlined(fn, static=(2,)), jax.jit(fn, static_argnums=(2,), inline=True)
    a, b = np.ones((2, 3), np.float32), np.ones(3, np.float32)

    def record(call: Any) -> str:
        return str(jax.make_jaxpr(lambda a, b: (call((a, b), b, 3), call((b, b), 2.0, 2)))(a, b))

    assert record(inlined) == record(jitted)


def test_a_function_runs_once_for_arguments_of_one_kind() -> None:
    runs, fn = _counted()
    inlined = Inlined(fn, static=(2,))
    a = np.ones((2, 3), np.float32)
    for _ in range(3):
        jax.make_jaxpr(lambda a: inlined((a, inlined((a, a), a, 2)["sum"]), a, 2))(a)
    assert runs == [2]
    jax.make_jaxpr(lambda a: inlined((a, a), a, 3))(a)
    jax.make_jaxpr(lambda a: inlined((a, a), a, 2))(a.astype(np.float16))
    assert runs == [2, 3, 2]


def test_what_jax_keeps_jaxprs_by_is_told_apart() -> None:
    inlined = Inlined(lambda a: a + jnp.arange(2.0))
    found: list[Any] = []
    for is_wide in (False, True):
        with jax.enable_x64(is_wide):
            found.append(jax.make_jaxpr(inlined)(np.ones(2, np.float32)).out_avals[0].dtype)
    assert found == [np.float32, np.float64]


def test_outside_a_trace_and_under_transformations_it_is_jit() -> None:
    _, fn = _counted()
    inlined = Inlined(fn, static=(2,))
    a = jnp.arange(3.0)
    np.testing.assert_array_equal(inlined((a, a), 2.0, 2)["power"][0], [0, 1, 4])
    np.testing.assert_array_equal(jax.grad(lambda a: inlined((a, a), 2.0, 3)["power"][0].sum())(a), [0, 3, 12])
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda a: inlined((a, a), 2.0, 2)["sum"]))(a), [0, 4, 8])

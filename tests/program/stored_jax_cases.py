"""Cases of JAX's objects in functions that `spmd.call_jax` calls. See `stored_harness`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import spmd
from tests.program.stored_harness import Values, calls, case

TABLE: Any = None


def _called(fn: Callable[..., Any], x: torch.Tensor, *args: Any) -> torch.Tensor:
    """`fn` of JAX, and on the CPU the same with torch."""
    return fn(x, *(torch.from_numpy(np.array(a)) for a in args)) if x.is_cpu else spmd.call_jax(fn, (x, *args))


def _table(device: str, changed: bool) -> Any:
    host = np.full(4, 3.0 if changed else 2.0, np.float32)
    return torch.from_numpy(host) if device == "cpu" else jnp.asarray(host)


def _scaled_by(table: Any) -> Callable[[Any], Any]:
    return lambda y: y * table


@case
def an_array_of_jax_in_a_variable(device: str, wrap: Any, changed: bool) -> Values:
    global TABLE
    TABLE = _table(device, changed)
    return calls(wrap(lambda x: _called(lambda y: y * TABLE, x)), device)


@case
def an_array_of_jax_in_a_closure(device: str, wrap: Any, changed: bool) -> Values:
    table = _table(device, changed)
    return calls(wrap(lambda x: _called(lambda y: y * table, x)), device)


@case
def an_array_of_jax_in_a_partial_function(device: str, wrap: Any, changed: bool) -> Values:
    fn = functools.partial(lambda table, y: y * table, _table(device, changed))
    return calls(wrap(lambda x: _called(fn, x)), device)


@case
def an_array_of_jax_in_a_checkpointed_function(device: str, wrap: Any, changed: bool) -> Values:
    scaled = _scaled_by(_table(device, changed))
    fn = scaled if device == "cpu" else jax.checkpoint(scaled)
    return calls(wrap(lambda x: _called(fn, x)), device)


@case
def an_array_of_jax_as_an_argument_of_a_jax_function(device: str, wrap: Any, changed: bool) -> Values:
    table = jnp.full(4, 3.0 if changed else 2.0)
    return calls(wrap(lambda x: _called(lambda y, t: y * t, x, table)), device)


@case
def an_array_of_jax_in_a_jitted_function(device: str, wrap: Any, changed: bool) -> Values:
    scaled = _scaled_by(_table(device, changed))
    fn = scaled if device == "cpu" else jax.jit(scaled)
    return calls(wrap(lambda x: _called(fn, x)), device)

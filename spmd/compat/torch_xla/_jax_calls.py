"""`torch_xla.core.xla_builder.call_jax`: `spmd.call_jax`, with a record of the compiled calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch

from spmd.base._exact import exactly
from spmd.base._torch import pytree
from spmd.device._call_jax import call_jax as call

# (function, jax's settings) -> structures, shapes and other arguments of its calls, each of which is a program
_JAX_TO_XLA_COMPUTATION_CACHE: dict[Any, set[Any]] = {}


def call_jax(
    jax_func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, name: str | None = None,
    override_hash: Any = None,
) -> Any:  # fmt: skip
    """`spmd.call_jax`.

    Args:
        jax_func: a function of jax arrays.
        args: its arguments, tensors in any container.
        kwargs: its keyword arguments.
        name: name of the call in profiles.
        override_hash: accepted for compatibility; the function itself is the cache key.
    """
    result = call(jax_func, args, kwargs, name)
    leaves, tree = pytree.tree_flatten((args, kwargs or {}))
    shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else str(exactly(x)) for x in leaves)
    config: Any = jax.config
    known = _JAX_TO_XLA_COMPUTATION_CACHE.setdefault((jax_func, config.jax_default_matmul_precision), set())
    known.add((str(tree), shapes))
    return result


def _jax_to_xla_computation_cache_elements() -> int:  # pyright: ignore[reportUnusedFunction]
    """Number of programs that calls needed since `_JAX_TO_XLA_COMPUTATION_CACHE` was last cleared."""
    return sum(map(len, _JAX_TO_XLA_COMPUTATION_CACHE.values()))


def jax_import_guard() -> None:
    """Does nothing: jax always computes here."""


def requires_jax(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` itself."""
    return fn

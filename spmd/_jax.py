"""The few functions of jax that are not, or not in every version, public. No other file imports a private name of jax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import jax.core
from jax._src.core import trace_state_clean as _trace_state_clean


def is_tracing() -> bool:
    """True while jax traces a function on this thread."""
    return not _trace_state_clean()


def is_tracer(value: Any) -> TypeGuard[jax.core.Tracer[Any]]:
    """True if `value` stands for an array that a traced function will have."""
    return isinstance(value, jax.core.Tracer)


def eval_jaxpr(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Interpret a jaxpr on arrays or tracers."""
    return jax.core.eval_jaxpr(jaxpr, consts, *args)

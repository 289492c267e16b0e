"""Questions about a jaxpr: which outputs depend on nothing, the part of it that some outputs need, and the functions inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.base._jax import is_jaxpr, is_literal


def constant_outputs(jaxpr: Any, is_new: Sequence[bool]) -> list[bool]:
    """For each output, whether it depends on no input and on no array that existed before.

    Args:
        is_new: for each constant of the jaxpr, whether it was made in the trace.
    """
    depends = {v for v, new in zip(jaxpr.constvars, is_new, strict=True) if not new} | set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if any(not is_literal(v) and v in depends for v in eqn.invars):
            depends.update(eqn.outvars)
    return [is_literal(v) or v not in depends for v in jaxpr.outvars]


def functions_of(equation: Any) -> list[Any]:
    """The traced functions among the parameters of an equation: a branch, the body of a loop."""
    values = (value if isinstance(value, tuple) else (value,) for value in equation.params.values())
    return [one for several in values for one in several if is_jaxpr(one)]


def with_constants_first(closed: Any, count: int) -> Any:
    """The closed jaxpr with its first `count` inputs turned into its first constants, each an object that stands for one."""
    if not count:
        return closed
    jaxpr = closed.jaxpr
    jaxpr = jaxpr.replace(
        constvars=[*jaxpr.invars[:count], *jaxpr.constvars], invars=jaxpr.invars[count:], debug_info=jaxpr.debug_info.with_unknown_names()
    )
    return closed.replace(jaxpr=jaxpr, consts=[*(object() for _ in range(count)), *closed.consts])


def pruned(jaxpr: Any, outputs: Sequence[int]) -> Any:
    """The jaxpr with only the given outputs, and the equations and inputs they need."""
    outvars = [jaxpr.outvars[i] for i in outputs]
    needed = {v for v in outvars if not is_literal(v)}
    kept: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        if any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if not is_literal(v))
    invars = [v for v in jaxpr.invars if v in needed]
    return jaxpr.replace(eqns=kept[::-1], invars=invars, outvars=outvars, debug_info=jaxpr.debug_info.with_unknown_names())

"""Analyses and transformations of a jaxpr: constant outputs, dead code elimination, nested functions, inputs as constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.base._jax import is_jaxpr, is_literal


def constant_outputs(jaxpr: Any, is_new: Sequence[bool]) -> list[bool]:
    """For each output, whether it depends neither on an input nor on an array from before the trace.

    Args:
        is_new: for each constant of the jaxpr, whether it was created in the trace.
    """
    depends = {v for v, new in zip(jaxpr.constvars, is_new, strict=True) if not new} | set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if any(not is_literal(v) and v in depends for v in eqn.invars):
            depends.update(eqn.outvars)
    return [is_literal(v) or v not in depends for v in jaxpr.outvars]


def functions_of(equation: Any) -> list[Any]:
    """The jaxprs among the parameters of an equation, such as branches or a loop body."""
    values = (value if isinstance(value, tuple) else (value,) for value in equation.params.values())
    return [one for several in values for one in several if is_jaxpr(one)]


def constants_within(value: Any) -> list[Any]:
    """The arrays in a jaxpr, or in a parameter of an equation: constants, literals and parameters, also of the functions that it calls.

    The text of a jaxpr shows neither constants nor, in full, large arrays, so two jaxprs are equal only if these are equal too.
    """
    found: list[Any] = []
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if is_jaxpr(value):
            jaxpr = getattr(value, "jaxpr", value)
            found.extend(getattr(value, "consts", ()))
            for eqn in jaxpr.eqns:
                waiting.extend(eqn.params.values())
            atoms = (atom for atoms in (*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars) for atom in atoms)
            waiting.extend(atom.val for atom in atoms if is_literal(atom))
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif getattr(value, "ndim", 0):
            found.append(value)
    return found


def with_constants_first(closed: Any, count: int) -> Any:
    """The closed jaxpr with its first `count` inputs turned into its first constants. Their values are unique placeholders."""
    if not count:
        return closed
    jaxpr = closed.jaxpr
    jaxpr = jaxpr.replace(
        constvars=[*jaxpr.invars[:count], *jaxpr.constvars], invars=jaxpr.invars[count:], debug_info=jaxpr.debug_info.with_unknown_names()
    )
    return closed.replace(jaxpr=jaxpr, consts=[*(object() for _ in range(count)), *closed.consts])


def pruned(jaxpr: Any, outputs: Sequence[int]) -> Any:
    """The jaxpr with only the given outputs, and the equations and inputs that these need."""
    outvars = [jaxpr.outvars[i] for i in outputs]
    needed = {v for v in outvars if not is_literal(v)}
    kept: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        if any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if not is_literal(v))
    invars = [v for v in jaxpr.invars if v in needed]
    return jaxpr.replace(eqns=kept[::-1], invars=invars, outvars=outvars, debug_info=jaxpr.debug_info.with_unknown_names())

"""Along which mesh axes the results of a manual region vary, read off its jaxpr.

    axes_of_outputs(jaxpr, [frozenset({"data"})])    # one set per output

A value varies along an axis if devices that differ only in their position on that axis may have different values. jax's own check
(`check_vma=True`) also refuses correct programs: the results of `all_gather`, and loops and kernels whose types do not say where they vary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.base._jax import is_jaxpr, is_literal

Axes = frozenset[str]

_EQUALIZE = frozenset(("psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"))
_DIFFER = frozenset(("axis_index", "ppermute", "all_to_all", "reduce_scatter"))
_NOWHERE: Axes = frozenset()


def axes_of_outputs(jaxpr: Any, given: Sequence[Axes]) -> list[Axes]:
    """The axes along which each output of a jaxpr varies.

    Args:
        jaxpr: open or closed; its constants vary nowhere.
        given: the axes along which each input varies.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    known: dict[Any, Axes] = dict(zip(jaxpr.invars, given, strict=True))

    def of(atom: Any) -> Axes:
        return _NOWHERE if is_literal(atom) else known.get(atom, _NOWHERE)

    for equation in jaxpr.eqns:
        found = _axes_of_results(equation, [of(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, found, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _axes_of_results(equation: Any, given: list[Axes]) -> list[Axes]:
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        return _of_branches(params["branches"], given)
    if name == "while":
        return _of_while(params, given)
    if name == "scan":
        return _of_scan(params, given)
    inner = next((p for p in params.values() if _has_form_of(p, equation)), None)
    if inner is not None:  # jit, checkpoint, custom derivatives
        return axes_of_outputs(inner, given)
    everywhere = _NOWHERE.union(*given)
    if name in _EQUALIZE and params.get("axis_index_groups") is None:
        everywhere -= _named(params)
    elif name in _DIFFER:
        everywhere |= _named(params)
    return [everywhere] * len(equation.outvars)


def _named(params: dict[str, Any]) -> Axes:
    axes = params["axes"] if "axes" in params else params["axis_name"]
    return frozenset(axes) if isinstance(axes, tuple | list) else frozenset((axes,))


def _has_form_of(param: Any, equation: Any) -> bool:
    """Whether a parameter is a jaxpr with the inputs and outputs of its equation."""
    if not is_jaxpr(param):
        return False
    jaxpr = getattr(param, "jaxpr", param)
    return (len(jaxpr.invars), len(jaxpr.outvars)) == (len(equation.invars), len(equation.outvars))


def _of_branches(branches: Sequence[Any], given: list[Axes]) -> list[Axes]:
    index, *operands = given
    each = [axes_of_outputs(branch, operands) for branch in branches]
    return [index.union(*of_one) for of_one in zip(*each, strict=True)]


def _of_while(params: dict[str, Any], given: list[Axes]) -> list[Axes]:
    num_test, num_body = params["cond_nconsts"], params["body_nconsts"]
    of_test, of_body, carried = given[:num_test], given[num_test : num_test + num_body], given[num_test + num_body :]
    while True:
        (test,) = axes_of_outputs(params["cond_jaxpr"], [*of_test, *carried])
        after = axes_of_outputs(params["body_jaxpr"], [*of_body, *carried])
        joined = [old | new | test for old, new in zip(carried, after, strict=True)]
        if joined == carried:
            return carried
        carried = joined


def _of_scan(params: dict[str, Any], given: list[Axes]) -> list[Axes]:
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carried, rows = given[:num_consts], given[num_consts : num_consts + num_carry], given[num_consts + num_carry :]
    while True:
        after = axes_of_outputs(params["jaxpr"], [*consts, *carried, *rows])
        joined = [old | new for old, new in zip(carried, after[:num_carry], strict=True)]
        if joined == carried:
            return [*carried, *after[num_carry:]]
        carried = joined


__all__ = ["Axes", "axes_of_outputs"]

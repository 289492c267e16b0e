"""Checks that the layers of `spmd.scan_layers` became a loop, and reports the operation in which they differ if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from spmd.base._errors import SpmdError, message
from spmd.base._jax import common_names, is_literal
from spmd.program.roll._repeats import MIN_PASSES, kinds


def require_loops(jaxpr: Any, runs: Sequence[Sequence[Sequence[Any]]], passes_at: Mapping[int, int], why_not: Sequence[str]) -> None:
    """Raise unless all equations of every layer but the first are in loops. The first may differ, because it may need fewer equations.

    Runs of at most `MIN_PASSES` layers and runs of another trace are not checked.

    Args:
        runs: one entry per run of layers: for each layer, the variables of its results.
        passes_at: index of each equation in a loop -> the loop's number of passes.
        why_not: for each repeat that is not a loop, the reason.

    Raises:
        SpmdError: an equation of a layer is not in a loop over the layers.
    """
    made = {v: place for place, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    for run in runs:
        # for each layer, the index of the last equation that computes one of its results
        borders = [max((made[v] for v in variables if v in made), default=-1) for variables in run]
        if len(run) <= MIN_PASSES or sorted(set(borders)) != borders or borders[0] < 0:
            continue
        parts = [range(start + 1, stop + 1) for start, stop in pairwise(borders)]  # layers 1, 2, ...
        outside = [[p for p in part if passes_at.get(p, 0) < len(run) - 1] for part in parts]
        is_end_alone = not any(outside[:-1])
        if is_end_alone and (not outside[-1] or _kinds_of(jaxpr.eqns, parts[-1]) == _kinds_of(jaxpr.eqns, parts[-2])):
            continue  # the passes may be shifted: the loop ends before the last layer and begins as much before the end of the first
        layer, places = next((i, places) for i, places in enumerate(outside, 1) if places)
        raise _no_loop(jaxpr.eqns, parts, places[0], layer, why_not)


def _kinds_of(equations: Sequence[Any], part: Sequence[int]) -> list[int]:
    numbers = kinds(equations)
    return [numbers[place] for place in part]


def _no_loop(equations: Sequence[Any], parts: Sequence[Sequence[int]], place: int, layer: int, why_not: Sequence[str]) -> SpmdError:
    """The error. It names the first operation in which two layers differ or, if none does, the reason why they are not a loop."""
    numbers = kinds(equations)
    fix = "call the layers that differ separately: for layer in layers: x = layer(x)"
    for index, part in enumerate(parts[1:], 2):
        pairs = zip(parts[0], part, strict=False)
        differs = next(((a, b) for a, b in pairs if numbers[a] != numbers[b]), None)
        if differs is None and len(part) != len(parts[0]):
            shorter, longer = sorted(((1, parts[0]), (index, part)), key=lambda found: len(found[1]))
            what = f"layers 1 and {index} cannot be a loop: layer {longer[0]} has {len(longer[1]) - len(shorter[1])} more operations"
            return SpmdError(message(what, f"the first of them: {_shown(equations[longer[1][len(shorter[1])]])}", fix=fix))
        if differs is not None:
            one, other = (_shown(equations[p]) for p in differs)
            return SpmdError(
                message(
                    f"layers 1 and {index} cannot be a loop: they differ in an operation",
                    f"layer 1: {one}",
                    f"layer {index}: {other}",
                    fix=fix,
                )
            )
    what = f"layers 0 to {len(parts)} cannot be a loop because of an operation of layer {layer}"
    return SpmdError(message(what, _shown(equations[place]), *why_not, fix=fix))


def _shown(eqn: Any) -> str:
    """An equation as text: its primitive, the types of its operands, and the module that it belongs to."""
    operands = ", ".join(str(atom.val if is_literal(atom) else atom.aval.str_short()) for atom in eqn.invars)
    name = str(common_names(eqn, eqn))
    return f"{eqn.primitive.name} of {operands}" + (f" in {name}" if name else "")


__all__ = ["require_loops"]

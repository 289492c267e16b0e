"""Layers that must be one loop (`spmd.scan_layers`): whether the program has them as one, and where they differ if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from spmd.base._errors import SpmdError, message
from spmd.base._jax import common_names, is_literal
from spmd.program.roll._repeats import MIN_PASSES, kinds


def require_loops(jaxpr: Any, runs: Sequence[Sequence[Sequence[Any]]], passes_at: Mapping[int, int], why_not: Sequence[str]) -> None:
    """Raise unless what every layer but the first computes is in loops; the first may differ in what it need not compute.

    Args:
        runs: for each run of layers and each layer the variables of its results.
        passes_at: of equations that are in a loop, its passes.
        why_not: of what repeats and is no loop, why.

    Raises:
        SpmdError: an equation of a layer is in no loop over the layers. Few layers, and those of another trace, are not looked at.
    """
    made = {v: place for place, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    for run in runs:
        # of each layer the place of the last equation that made a result
        borders = [max((made[v] for v in variables if v in made), default=-1) for variables in run]
        if len(run) <= MIN_PASSES or sorted(set(borders)) != borders or borders[0] < 0:
            continue
        parts = [range(start + 1, stop + 1) for start, stop in pairwise(borders)]  # without that of layer 0
        outside = [[p for p in part if passes_at.get(p, 0) < len(run) - 1] for part in parts]
        is_end_alone = not any(outside[:-1])
        if is_end_alone and (not outside[-1] or _kinds_of(jaxpr.eqns, parts[-1]) == _kinds_of(jaxpr.eqns, parts[-2])):
            continue  # a pass may end before the last layer does: the loop then begins as far before the first layer's end
        layer, places = next((i, places) for i, places in enumerate(outside, 1) if places)
        raise _no_loop(jaxpr.eqns, parts, places[0], layer, why_not)


def _kinds_of(equations: Sequence[Any], part: Sequence[int]) -> list[int]:
    numbers = kinds(equations)
    return [numbers[place] for place in part]


def _no_loop(equations: Sequence[Any], parts: Sequence[Sequence[int]], place: int, layer: int, why_not: Sequence[str]) -> SpmdError:
    """The error that names the first operation in which two layers differ, or why they are no loop if none does."""
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
    """An equation as text: what it does to what, for which module."""
    operands = ", ".join(str(atom.val if is_literal(atom) else atom.aval.str_short()) for atom in eqn.invars)
    name = str(common_names(eqn, eqn))
    return f"{eqn.primitive.name} of {operands}" + (f" in {name}" if name else "")


__all__ = ["require_loops"]

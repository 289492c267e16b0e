"""Checks that the layers of `spmd.scan_layers` became a loop, and reports the operation in which they differ if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from spmd.base._errors import SpmdError, message
from spmd.base._jax import common_names, is_literal
from spmd.program.roll._repeats import MIN_PASSES, kinds
from spmd.program.trace._layer_runs import LayerRun
from spmd.program.xla._jaxpr import constants_within


def require_loops(jaxpr: Any, runs: Sequence[LayerRun], passes_at: Mapping[int, int], why_not: Sequence[str]) -> None:
    """Raise unless all equations of every layer but the first are in loops. The first may differ, because it may need fewer equations.

    Runs of at most `MIN_PASSES` layers and runs of another trace are not checked.

    Args:
        runs: the layers that must be loops.
        passes_at: index of each equation in a loop -> the loop's number of passes.
        why_not: for each repeat that is not a loop, the reason.

    Raises:
        SpmdError: an equation of a layer is not in a loop over the layers.
    """
    made = {v: place for place, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    for layers in runs:
        run = layers.results
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
        raise _no_loop(jaxpr, layers, parts, places[0], layer, why_not)


def _kinds_of(equations: Sequence[Any], part: Sequence[int]) -> list[int]:
    numbers = kinds(equations)
    return [numbers[place] for place in part]


def _no_loop(jaxpr: Any, layers: LayerRun, parts: Sequence[Sequence[int]], place: int, layer: int, why_not: Sequence[str]) -> SpmdError:
    """The error. It names the first operation in which two layers differ or, if none does, the reason why they are not a loop."""
    equations, start = jaxpr.eqns, layers.start
    numbers = kinds(equations)
    fix = "call the layers that differ separately: for layer in layers: x = layer(x)"
    one = start + 1
    for index, part in enumerate(parts[1:], 2):
        pairs = zip(parts[0], part, strict=False)
        differs = next(((a, b) for a, b in pairs if numbers[a] != numbers[b]), None)
        if differs is None and len(part) != len(parts[0]):
            shorter, longer = sorted(((1, parts[0]), (index, part)), key=lambda found: len(found[1]))
            more = len(longer[1]) - len(shorter[1])
            what = f"layers {one} and {start + index} cannot be a loop: layer {start + longer[0]} has {more} more operations"
            first = f"the first of them: {_shown(equations[longer[1][len(shorter[1])]])}"
            return SpmdError(message(what, first, *_trained(layers, index), fix=fix))
        if differs is not None:
            operations = [f"layer {start + i}: {_shown(equations[p])}" for i, p in zip((1, index), differs, strict=True)]
            what = f"layers {one} and {start + index} cannot be a loop: they differ in an operation"
            if any(any(v is jaxpr.invars[-2] for v in equations[p].invars) for p in differs):  # the numbers that vary
                operations.append("one of them reads a number of its layer that has changed between calls; those of others are constants")
                fix = "keep the number in a tensor: layer.register_buffer('scale', torch.tensor(0.5))"
            elif _constants_of(equations[differs[0]]) != _constants_of(equations[differs[1]]):
                operations.append("the function that it calls has other arrays in each as constants")
                fix = "pass the arrays as arguments: spmd.call_jax(fn, (x, table)) with a buffer self.table of each layer"
            return SpmdError(message(what, *operations, *_trained(layers, index), fix=fix))
    what = f"layers {start} to {start + len(parts)} cannot be a loop because of an operation of layer {start + layer}"
    return SpmdError(message(what, _shown(equations[place]), *why_not, fix=fix))


def _constants_of(eqn: Any) -> list[int]:
    return list(map(id, constants_within(list(eqn.params.values()))))


def _trained(layers: LayerRun, index: int) -> list[str]:
    """A line that says in which parameters `requires_grad` differs between layers 1 and `index`, since that changes their operations."""
    names = sorted(layers.trained[1] ^ layers.trained[index])
    if not names:
        return []
    values = (f"{names[0] in layers.trained[i]} in layer {layers.start + i}" for i in (1, index))
    others = f" (also {', '.join(names[1:])})" if names[1:] else ""
    return [f"requires_grad of {names[0]}: {' and '.join(values)}{others}; layers with the same requires_grad can be a loop"]


def _shown(eqn: Any) -> str:
    """An equation as text: its primitive, the types of its operands, and the module that it belongs to."""
    operands = ", ".join(str(atom.val if is_literal(atom) else atom.aval.str_short()) for atom in eqn.invars)
    name = str(common_names(eqn, eqn))
    return f"{eqn.primitive.name} of {operands}" + (f" in {name}" if name else "")


__all__ = ["require_loops"]

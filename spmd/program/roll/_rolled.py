"""Records a traced program again with loops for repeated equations, so its size does not grow with the number of layers."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.base._jax import as_recorded, is_literal
from spmd.program.roll._passes import Carried, Each, NotALoop, Passes, passes_of
from spmd.program.roll._repeats import Repeat, best_repeat, stretches
from spmd.program.roll._stacks import Stacks


@dataclass(frozen=True)
class Loop:
    """A loop of a program, or repeated equations that are not a loop.

    Attributes:
        where: name of the module, with "*" for its index; "" in the backward pass and in the optimizer.
        passes: number of iterations.
        equations: number of equations per iteration.
        why_not: why the equations are not a loop; None if they are.
    """

    where: str
    passes: int
    equations: int
    why_not: str | None = None

    def __str__(self) -> str:
        what = f"{self.passes} x {self.equations} operations of {self.where or 'the backward pass or the optimizer'}"
        return what if self.why_not is None else f"not a loop: {what}: {self.why_not}"


class Rolled:
    """A jaxpr and the loops in it.

    Attributes:
        loops: the repeated equations, in program order.
        size: number of equations that are recorded; the body of a loop counts once.
        passes_at: index of each equation in a loop -> the loop's number of passes.
    """

    def __init__(self, jaxpr: Any) -> None:
        self._jaxpr = jaxpr
        readers: dict[Any, int] = {}
        for v in (v for atoms in (*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars) for v in atoms):
            if not is_literal(v):
                readers[v] = readers.get(v, 0) + 1
        self.loops: list[Loop] = []
        self._passes: list[Passes] = []
        self.passes_at: dict[int, int] = {}
        taken: dict[int, list[Any]] = {}  # index of an equation in a loop -> what is recorded there instead
        known: dict[Any, tuple[Any, int]] = {}
        for stretch in stretches(jaxpr):
            repeat = best_repeat(jaxpr.eqns, stretch, known)
            names = repeat.names(jaxpr)
            where = _common_start([str(name).split("/") for name in names])
            try:
                passes = passes_of(jaxpr, repeat, names, readers)
            except NotALoop as why:
                self.loops.append(Loop(where, repeat.passes, repeat.period, str(why)))
                continue
            self.loops.append(Loop(where, repeat.passes, repeat.period))
            self._passes.append(passes)
            _add_families(known, jaxpr.eqns, repeat, passes)
            places = (*repeat.places, *repeat.before)
            taken.update((place, []) for place in places)
            self.passes_at.update(dict.fromkeys(places, repeat.passes))
            taken[repeat.places[0]] = [*repeat.before, passes]
        self._plan: list[Any] = [step for place in range(len(jaxpr.eqns)) for step in taken.get(place, [place])]
        self.size = len(self._plan) + sum(len(passes.equations) - 1 for passes in self._passes)

    def families(self, allowed: Container[Any]) -> list[tuple[Any, ...]]:
        """Families of inputs of which a loop reads one in each pass, in the order of the passes. No input is in two families.

        Args:
            allowed: the inputs that may be in a family.
        """
        found: list[tuple[Any, ...]] = []
        taken: set[Any] = set()
        for family in (family for passes in self._passes for family in passes.each):
            if all(not is_literal(v) and v in allowed and v not in taken for v in family) and len(set(family)) == len(family):
                found.append(family)
                taken.update(family)
        return found

    def run(self, values: Stacks) -> None:
        """Record the program. `values` contains its inputs and, afterwards, its results."""
        for step in self._plan:
            if isinstance(step, Passes):
                _run_loop(step, values)
                continue
            eqn = self._jaxpr.eqns[step]
            if eqn.primitive.name == "stack" and eqn.params["axis"] == 0 and not any(map(is_literal, eqn.invars)):
                with as_recorded(eqn):
                    values.put(eqn.outvars[0], values.rows(eqn.invars))
                continue
            for variable, value in zip(eqn.outvars, _record(eqn, list(map(values.get, eqn.invars))), strict=True):
                values.put(variable, value)


def _add_families(known: dict[Any, tuple[Any, int]], equations: Any, repeat: Repeat, passes: Passes) -> None:
    """Add the families of a loop to `known`: for each `Each` operand and each result, its variables in the order of the passes."""
    for family in passes.each:
        known.update({v: (family[0], k) for k, v in enumerate(family) if not is_literal(v) and v not in known})
    for i, place in enumerate(repeat.places):
        k, first = i // repeat.period, equations[repeat.places[i % repeat.period]].outvars
        known.update({v: (first[o], k) for o, v in enumerate(equations[place].outvars)})


def _common_start(names: list[list[str]]) -> str:
    """The common prefix of names, as a path."""
    shortest = min(map(len, names))
    same = next((i for i in range(shortest) if len({name[i] for name in names}) > 1), shortest)
    return "/".join(names[0][:same])


def _record(eqn: Any, operands: list[Any], names: Any = None) -> list[Any]:
    """Record the equation with these operands. Returns its results."""
    with as_recorded(eqn, names):
        out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _run_loop(passes: Passes, values: Stacks) -> None:
    """Record the passes as one loop, or as one batch."""
    is_reversed = values.is_reversed([family for family in passes.each if not is_literal(family[0])])
    each = [_stacked(family, values, is_reversed) for family in passes.each]
    body = _body(passes, values)
    last: list[Any] = []
    if passes.is_batch:
        left = jax.vmap(lambda own: body([], own)[1], axis_size=passes.count)(each)
    else:
        given = zip(passes.first, passes.carried, strict=True)
        first = [jnp.zeros(v.aval.shape, v.aval.dtype) if atom is None else values.get(atom) for atom, v in given]
        last, left = lax.scan(body, first, each, length=passes.count, reverse=is_reversed)
    for family, stack in zip(passes.left, left, strict=True):
        values.put_stack(family[::-1] if is_reversed else family, stack)
    for variable, index in passes.last:
        values.put(variable, last[index])


def _stacked(family: tuple[Any, ...], values: Stacks, is_reversed: bool) -> Any:
    """[passes, ...]: the values of all passes. The first pass comes last if the loop is reversed."""
    ordered = family[::-1] if is_reversed else family
    if is_literal(family[0]):
        return np.stack([np.asarray(atom.val, atom.aval.dtype) for atom in ordered])
    return values.stack(ordered)


def _body(passes: Passes, values: Stacks) -> Callable[[Any, Any], Any]:
    """The body of the loop: (carry, each) -> (carry, left).

    Note [Layers are gathered after they are cut out]
        A loop reads a layer's parameter as a slice [1, ...] of a stack, and FSDP gathers it. Without a constraint, the partitioner gathers
        the slice while it still has that first dim. XLA then gives the whole stack the memory layout that suits this gather. That copies
        the parameters of all layers: 40 % more temporaries for a Llama of 24 layers on CPU devices. So the slice without its first dim is
        constrained to the layout that the parameter was marked with, and the gather follows.
    """
    layouts = [None if passes.is_batch else values.layout(family[0]) for family in passes.each]
    made = {v for eqn in passes.equations for v in eqn.outvars}
    atoms = (o for operands in passes.operands for o in operands if not isinstance(o, Each | Carried) and not is_literal(o))
    outside = {v: values.get(v) for v in atoms if v not in made}  # sliced out of their stacks here, not in the loop

    def body(carry: Any, each: Any) -> Any:
        local = dict(outside)
        each = [v if layout is None else lax.with_sharding_constraint(v, layout) for v, layout in zip(each, layouts, strict=True)]

        def value(operand: Any) -> Any:
            if isinstance(operand, Each):
                return each[operand.index]
            if isinstance(operand, Carried):
                return carry[operand.index]
            return operand.val if is_literal(operand) else local[operand]

        for eqn, names, operands in zip(passes.equations, passes.names, passes.operands, strict=True):
            for variable, out in zip(eqn.outvars, _record(eqn, list(map(value, operands)), names), strict=True):
                local[variable] = out
        return [local[v] for v in passes.carried], [local[family[0]] for family in passes.left]

    return body


__all__ = ["Loop", "Rolled"]

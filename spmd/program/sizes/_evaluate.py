"""Evaluates a program that was traced at several points, with the shapes of a bucket and the sizes of the current call as an input.

Corresponding equations of all traces are evaluated together. Whatever is the same in all traces is kept. A shape, a limit or a number that
differs gets its value for the bucket, or for the current call. The rule of each primitive computes the real elements of its results from
those of its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from spmd.base._jax import as_recorded, is_jaxpr, is_literal
from spmd.program.sizes._formulas import Inexact
from spmd.program.sizes._padded import Dims, Padded, Room
from spmd.program.xla._jaxpr import constants_within

Rule = Callable[["Evaluation", "Equation", list[Padded]], list[Padded]]
RULES: dict[str, Rule] = {}
_CALLS = frozenset(
    (
        "pjit",
        "jit",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "remat",
        "checkpoint",
        "remat2",
    )
)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the padding rule of the primitives with these names."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return register


class SizeDecides(Inexact):
    """The traces are not the same program: Python code or an operation behaved differently for a different size."""

    may_depend_on_range = True


class Equation:
    """Corresponding equations of all traces.

    Attributes:
        each: the equation of each trace.
        name: name of the primitive.
    """

    def __init__(self, room: Room, each: Sequence[Any]) -> None:
        self.room, self.each = room, each
        self.first = each[0]
        self.name: str = self.first.primitive.name

    def param(self, name: str) -> tuple[Any, ...]:
        """Value of a parameter at each point."""
        return tuple(one.params[name] for one in self.each)

    def fixed(self, name: str) -> Any:
        """Value of a parameter that is the same at all points.

        Raises:
            Inexact: the parameter depends on a size.
        """
        values = self.param(name)
        if any(v != values[0] for v in values):
            raise Inexact(f"parameter {name!r} of {self.name} depends on a size")
        return values[0]

    def columns(self, name: str) -> list[tuple[int, ...]]:
        """Values at each point, per dim, of a parameter with one integer per dim."""
        return [tuple(column) for column in zip(*self.param(name), strict=True)]

    def shapes(self, output: int = 0) -> list[tuple[int, ...]]:
        """Shape of a result at each point."""
        return [tuple(one.outvars[output].aval.shape) for one in self.each]

    def bind(self, *arrays: Any, **changed: Any) -> list[Any]:
        """Results of the primitive for padded arrays. Parameters that are not in `changed` have their values for the bucket."""
        params = {k: changed[k] if k in changed else self.at_bucket([one.params[k] for one in self.each]) for k in self.first.params}
        found = self.first.primitive.bind(*arrays, **params)
        return list(found) if self.first.primitive.multiple_results else [found]

    def at_bucket(self, values: Sequence[Any]) -> Any:
        """Value of a parameter in the padded program: integers that differ between the traces have their values for the bucket."""
        first = values[0]
        if all(v is first for v in values):
            return first
        if isinstance(first, int) and not isinstance(first, bool) and all(type(v) is type(first) for v in values):
            return self.room.size(tuple(values))
        if isinstance(first, tuple) and all(type(v) is type(first) and len(v) == len(first) for v in values):
            parts = [self.at_bucket(column) for column in zip(*values, strict=True)]
            return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
        if is_jaxpr(first):
            if any(not is_same(first, v) for v in values):
                raise Inexact(f"{self.name} calls a function that depends on a size")
            return first
        if callable(first) and all(type(v) is type(first) for v in values):  # a derivative rule, a new function in each trace
            return first
        if any(v != first for v in values):
            raise Inexact(f"a parameter of {self.name} depends on a size")
        return first

    def has_sizes(self) -> bool:
        """Whether the shape of an operand or a result depends on a size."""
        return any(
            len({tuple(one.aval.shape) for one in same}) > 1
            for kind in ("invars", "outvars")
            for same in zip(*(getattr(one, kind) for one in self.each), strict=True)
        )


class Evaluation:
    """Evaluator of the common program of several traces. See the module."""

    def __init__(self, room: Room) -> None:
        self.room = room

    def fixed(self, array: Any) -> Padded:
        """An array without padding."""
        return Padded(array, tuple(((n,) * len(self.room.points.at),) for n in np.shape(array)))

    def run(self, jaxprs: Sequence[Any], consts: Sequence[Sequence[Any]], args: Sequence[Padded]) -> list[Padded]:
        """Results of the program.

        Args:
            jaxprs: the open jaxpr of each point.
            consts: constants of each jaxpr.
            args: arguments, shared by all points.

        Raises:
            Inexact: it is not proved that padding does not affect the results; `equation` is the first such equation.
        """
        first = jaxprs[0]
        if any(len(j.eqns) != len(first.eqns) or len(j.outvars) != len(first.outvars) for j in jaxprs):
            raise SizeDecides("the size decides what is computed")
        values: dict[Any, Padded] = {}
        for variable, same in zip(first.constvars, zip(*consts, strict=True), strict=True):
            values[variable] = self.constant(same)
        values.update(zip(first.invars, args, strict=True))
        for each in zip(*(j.eqns for j in jaxprs), strict=True):
            if any(one.primitive is not each[0].primitive or _ranks(one) != _ranks(each[0]) for one in each[1:]):
                raise SizeDecides("the size decides what is computed")
            try:
                operands = [self._operand(same, values) for same in zip(*(one.invars for one in each), strict=True)]
                with as_recorded(each[0]):
                    results = self._results(Equation(self.room, each), operands)
            except Inexact as error:
                if error.equation is None:
                    error.equation = each[0]
                raise
            values.update(zip(each[0].outvars, results, strict=True))
        return [self._operand(same, values) for same in zip(*(j.outvars for j in jaxprs), strict=True)]

    def _operand(self, same: Sequence[Any], values: dict[Any, Padded]) -> Padded:
        if is_literal(same[0]):
            if not all(map(is_literal, same)):
                raise SizeDecides("the size decides what is computed")
            return self.constant([atom.val for atom in same], same[0].aval.dtype)
        return values[same[0]]

    def constant(self, same: Sequence[Any], dtype: Any = None) -> Padded:
        """A constant of the traces: the same array in all of them, or a number that depends on the sizes."""
        first = same[0]
        if isinstance(first, Padded) or all(v is first for v in same):
            return first if isinstance(first, Padded) else self.fixed(first)
        if any(np.shape(v) != np.shape(first) for v in same):
            raise SizeDecides("an array created in Python has a shape that depends on a size")
        hosts = [np.asarray(v) for v in same]
        if all(h.tobytes() == hosts[0].tobytes() for h in hosts):
            return self.fixed(first)
        if np.ndim(first):
            raise SizeDecides("an array created in Python has values that depend on a size")
        dtype = hosts[0].dtype if dtype is None else dtype
        value = self.room.points.number([h.item() for h in hosts], dtype)(self.room.today)
        return self.fixed(jnp.asarray(value).astype(dtype))

    def _results(self, eqn: Equation, operands: list[Padded]) -> list[Padded]:
        if eqn.name in _CALLS:
            inner = next(k for k, v in eqn.first.params.items() if is_jaxpr(v))
            return self.call(eqn.param(inner), operands)
        return self.operation(eqn, operands)

    def operation(self, eqn: Equation, operands: list[Padded]) -> list[Padded]:
        """Results of an equation that calls no other function."""
        applied = RULES.get(eqn.name)
        if not eqn.has_sizes() and (applied is None or eqn.name not in LOOPS):
            arrays = eqn.bind(*(v.array for v in operands))
            return [self.fixed_like(a, v.aval) for a, v in zip(arrays, eqn.first.outvars, strict=True)]
        if applied is None:
            raise Inexact("this operation has no padding rule")
        results = applied(self, eqn, operands)
        for number, result in enumerate(results):
            self._require_shapes(eqn.shapes(number), result.dims)
        return results

    def fixed_like(self, array: Any, aval: Any) -> Padded:
        """An array without padding, of the shape of `aval`."""
        return Padded(array, tuple(((n,) * len(self.room.points.at),) for n in aval.shape))

    def call(self, closed: Sequence[Any], operands: Sequence[Padded]) -> list[Padded]:
        """Results of calling the jaxprs, open or closed, one for each point."""
        opened = [(j.jaxpr, j.consts) if hasattr(j, "consts") else (j, ()) for j in closed]
        return self.run([j for j, _ in opened], [c for _, c in opened], operands)

    def _require_shapes(self, shapes: Sequence[Sequence[int]], dims: Dims) -> None:
        columns = list(zip(*shapes, strict=True)) if shapes[0] else []
        assert [self.room.product(dim) for dim in dims] == [tuple(c) for c in columns], (shapes, dims)
        for dim in dims:
            for factor in dim:
                if len(set(factor)) > 1:
                    self.room.need(factor, 2)


def _ranks(equation: Any) -> list[int]:
    return [len(getattr(v.aval, "shape", ())) for v in equation.outvars]


LOOPS = frozenset(("scan", "while", "cond"))


def is_same(one: Any, other: Any) -> bool:
    """Whether two jaxprs have the same text and equal constants."""
    consts = [constants_within(j) for j in (one, other)]
    pairs = zip(*consts, strict=False)
    alike = len(consts[0]) == len(consts[1]) and all(a is b or np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
    return alike and str(one) == str(other)

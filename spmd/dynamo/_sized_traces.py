"""A graph traced at several sizes, combined into its two passes for any size. See Note [Points] and Note [Padding].

Both passes are evaluated together, so a value that is saved for the backward pass keeps the padding that the forward pass gave it. The
backward pass gets the sizes of a call again as inputs: it recomputes masks, instead of saving them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._jax import is_literal, with_constants_as_inputs
from spmd.device._storage import Buffer
from spmd.dynamo._graph_passes import Joint
from spmd.dynamo._graph_results import Made, Plain, Shown
from spmd.program.sizes._evaluate import Equation, Evaluation, SizeDecides
from spmd.program.sizes._formulas import Inexact, Points, Values
from spmd.program.sizes._padded import Dims, Padded, Room, dims_of
from spmd.program.sizes._sized_checks import SizedChecks
from spmd.program.sizes._window_extents import Form, learn_extents
from spmd.program.trace._window import Window

Sizes = Sequence[int]


class SizedTraces:
    """One graph traced at several points.

    Attributes:
        input_checks: the checks of inputs before a call.

    Args:
        joints: its passes at each point. The last CPU tensor of each is a placeholder for the sizes of a call, int64[names].
        limits: for each name the smallest and largest valid size.
        extents: extents that Dynamo knows as functions of the sizes.

    Raises:
        Inexact: the traces do not combine into one program.
    """

    def __init__(
        self, names: tuple[str, ...], points: Points, joints: Sequence[Joint], limits: Sequence[tuple[int, int]], extents: Sequence[Form]
    ) -> None:
        self._names, self._points, self._joints, self._limits = names, points, list(joints), tuple(limits)
        _require_alike(joints)
        learn_extents(points, [j.closed for j in joints], self._limits, extents)
        self._shown = _formula(points, [(tuple(j.results), tuple(j.windows)) for j in joints])
        shapes = zip(*([a.shape for a in j.closed.out_avals] for j in joints), strict=True)
        self._shapes = [[points.integer(tuple(column)) for column in zip(*same, strict=True)] for same in shapes]
        self.input_checks = SizedChecks(points, [j.input_checks for j in joints])
        self._needs: dict[tuple[Values, int], None] = {}
        self._rooms: dict[tuple[int, ...], Room] = {}

    @property
    def is_certain(self) -> bool:
        """Whether there are enough points to determine the formulas of its numbers."""
        return self._points.are_enough

    def reason(self, sizes: Sizes, bucket: Sizes) -> str | None:
        """The reason why the traces are not valid for these sizes in a bucket; None if they are."""
        room = self._rooms.get(tuple(bucket))
        if room is not None and not room.holds(sizes):
            return "a part of the graph is larger than in its bucket"
        for name, size, (least, most) in zip(self._names, sizes, self._limits, strict=True):
            if not least <= size <= most:
                return f"size {size} of {name} is outside of {least} to {most}, for which the graph was traced"
        if any(self._points.integer(values)(sizes) < least for values, least in self._needs):
            return f"a part of the program has no meaning for the sizes {dict(zip(self._names, sizes, strict=True))}"
        return None

    def shown(self, sizes: Sizes) -> tuple[list[Made | Shown | Plain], list[Window | None]]:
        """(results, windows of the computed values) of a call with these sizes."""
        results, windows = self._shown(sizes)
        return list(results), list(windows)

    def shapes(self, sizes: Sizes) -> list[tuple[int, ...]]:
        """The shape of each result of both passes, without padding."""
        return [tuple(int(n(sizes)) for n in shape) for shape in self._shapes]

    def at(self, bucket: Sizes) -> Joint:
        """Both passes for arrays of a bucket's sizes; the sizes of a call are inputs of each.

        Raises:
            Inexact: it is not proved that padding does not affect the results; the error has the equation.
        """
        first, room = self._joints[0], Room(self._points, [least for least, _ in self._limits], bucket, ())
        kept = [buffer for _, buffer in first.outer if buffer is not None]
        num_known = len(first.closed.in_avals) - len(first.outer) - len(first.flowing)
        dims = [dims_of(same) for same in zip(*([a.shape for a in j.closed.in_avals] for j in self._joints), strict=True)]
        examples = [jax.ShapeDtypeStruct(room.shape(d), a.dtype) for d, a in zip(dims, first.closed.in_avals, strict=True)]
        state = [examples[i] for i, (_, buffer) in enumerate(first.outer) if buffer is not None]
        known, cotangents = examples[len(first.outer) :][:num_known], examples[len(first.outer) + num_known :]
        again = [jax.ShapeDtypeStruct((len(self._names),), np.int64)] if cotangents else []

        def run(*arrays: Any) -> list[Any]:
            return self._evaluated(room, dims, arrays[: len(state)], arrays[len(state) :], len(again))

        with exact_dtypes():
            closed, consts = with_constants_as_inputs(jax.make_jaxpr(run)(*state, *known, *again, *cotangents))
        for values, _ in room.needs:
            self._points.integer(values)
        self._needs.update(room.needs)
        self._rooms[tuple(bucket)] = room
        outer: list[tuple[Any, Buffer | None]] = [
            *((value, None) for value in consts),
            *((value, b) for value, b in first.outer if b is not None),
        ]
        assert len(outer) == len(consts) + len(kept)
        return Joint(
            *(closed, outer, first.num_inputs, len(again), first.results, first.windows, first.flowing, first.written),
            *(first.gradients, first.reached, first.draws, first.checks, []),
        )

    def _evaluated(self, room: Room, dims: Sequence[Dims], state: Sequence[Any], given: Sequence[Any], num_again: int) -> list[Any]:
        """The results from traced arrays: state, then inputs, CPU tensors, random words, the sizes again, and cotangents."""
        first, joints = self._joints[0], self._joints
        num_later = num_again + len(first.flowing)
        known, later = given[: len(given) - num_later], given[len(given) - num_later :]
        room.today = _elements(known[-2], len(self._names))
        passes = _Passes(room, first, _elements(later[0], len(self._names)) if num_again else room.today)
        values, args = iter(state), list[Padded]()
        for i, (_, buffer) in enumerate(first.outer):
            args.append(passes.constant([j.outer[i][0] for j in joints]) if buffer is None else Padded(next(values), dims[i]))
        args += [Padded(a, d) for a, d in zip((*known, *later[num_again:]), dims[len(args) :], strict=True)]
        found = passes.run([j.closed.jaxpr for j in joints], [[]] * len(joints), args)
        return [passes.whole(value, is_gradient=i >= first.num_own).array for i, value in enumerate(found)]


class _Passes(Evaluation):
    """An evaluation whose backward equations take the sizes of the call from a second input."""

    def __init__(self, room: Room, joint: Joint, again: list[Any]) -> None:
        super().__init__(room)
        self._now, self._again = room.today, again
        jaxpr = joint.closed.jaxpr
        later = set(jaxpr.invars[len(jaxpr.invars) - len(joint.flowing) :])
        self._later: set[int] = set()
        for equation in jaxpr.eqns if later else ():
            if any(not is_literal(v) and v in later for v in equation.invars):
                self._later.add(id(equation))
                later.update(equation.outvars)

    def _results(self, eqn: Equation, operands: list[Padded]) -> list[Padded]:
        if id(eqn.first) not in self._later:
            return super()._results(eqn, operands)
        self.room.today = self._again
        try:
            return super()._results(eqn, operands)
        finally:
            self.room.today = self._now

    def whole(self, value: Padded, *, is_gradient: bool) -> Padded:
        """The value with all padding of a dim behind the real elements."""
        self.room.today = self._again if is_gradient else self._now
        return self.room.like(value, tuple((self.room.product(dim),) for dim in value.dims))


def _elements(sizes: Any, count: int) -> list[Any]:
    return [sizes[i] for i in range(count)]


def _require_alike(joints: Sequence[Joint]) -> None:
    first = joints[0]
    for other in joints[1:]:
        alike = (
            len(first.outer) == len(other.outer)
            and all(a is b for (_, a), (_, b) in zip(first.outer, other.outer, strict=True))
            and (first.flowing, first.written, first.gradients) == (other.flowing, other.written, other.gradients)
            and (first.reached, first.draws) == (other.reached, other.draws)
            and len(first.closed.in_avals) == len(other.closed.in_avals)
            and len(first.closed.out_avals) == len(other.closed.out_avals)
            and len(first.checks) == len(other.checks)
        )
        if not alike:
            raise SizeDecides("the size decides what is computed")


def _formula(points: Points, values: Sequence[Any]) -> Callable[[Sizes], Any]:
    """A function of the sizes, from its value at each point. Values may be numbers in nested tuples.

    Raises:
        Inexact: no known kind of formula fits.
    """
    first = values[0]
    if any(type(v) is not type(first) for v in values) or isinstance(first, torch.Tensor):
        raise SizeDecides("the size decides what is returned")
    if isinstance(first, tuple):
        if len({len(v) for v in values}) > 1:
            raise SizeDecides("the size decides what is returned")
        parts = [_formula(points, column) for column in zip(*values, strict=True)]
        make: Any = getattr(type(first), "_make", type(first))
        return lambda sizes: make([part(sizes) for part in parts])
    if all(v is first or v == first for v in values):
        return lambda sizes: first
    if type(first) is int:
        number = points.integer(tuple(values))
        return lambda sizes: int(number(sizes))
    if type(first) is float:
        number = points.number(values, np.float64)
        return lambda sizes: float(number(sizes))
    raise Inexact("a result that is a Python object computed from a size")


__all__ = ["SizedTraces"]

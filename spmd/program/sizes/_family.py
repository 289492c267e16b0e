"""Traces of one function at several sizes, combined into programs for any size. See Note [Points] and Note [Padding]."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import torch
from jax import lax

from spmd.base._convert import exact_dtypes
from spmd.device._storage import Buffer, buffer_of
from spmd.program.reads import is_noted
from spmd.program.sizes import _rules_elements, _rules_loops, _rules_places, _rules_windows
from spmd.program.sizes._evaluate import Evaluation, SizeDecides
from spmd.program.sizes._formulas import Inexact, Points, Values
from spmd.program.sizes._padded import Dims, Padded, Room, dims_of
from spmd.program.sizes._size_reads import SizeReads
from spmd.program.sizes._sized_checks import SizedChecks
from spmd.program.sizes._window_extents import learn_extents
from spmd.program.trace._captured import Captured
from spmd.program.trace._results import Leaf
from spmd.program.trace._window import Window
from spmd.program.xla._jaxpr import with_constants_first

RULES_IN = (_rules_elements, _rules_loops, _rules_places, _rules_windows)  # importing them registers their rules


class Family:
    """Traces of one function at several points.

    Attributes:
        names: names of the varying sizes.
        captured: the first trace.
        today: sizes of the current call, in the order of `names`.
        checks: the checks of arguments before a call.
    """

    def __init__(self, names: tuple[str, ...], points: Points, traces: Sequence[Captured], reads: Sequence[SizeReads], limits: Any) -> None:
        """`limits`: for each name, the smallest and the largest size for which the family is valid.

        Raises:
            Inexact: the traces are not the same program.
        """
        traces = [traces[0], *(_in_order_of(traces[0], other) for other in traces[1:])]
        self.names, self.captured, self.today = names, traces[0], tuple(points.at[0])
        self._reads = reads[0]
        self._points, self._limits = points, tuple(limits)
        self._jaxprs = [t.jaxpr for t in traces]
        try:
            _require_alike(traces)
        except SizeDecides:
            require_alike([closed.jaxpr for closed in self._jaxprs])  # names the equation
            raise
        learn_extents(points, self._jaxprs, self._limits)
        self._windows: dict[int, tuple[Any, list[Any]]] = {}  # by id of the leaf, which `_leaves` keeps alive
        self._leaves = [self._leaf(same) for same in zip(*(t.outputs.leaves for t in traces), strict=True)]
        self.checks = SizedChecks(points, [[] if t.inputs.known is None else t.inputs.known.checks for t in traces])
        self._asked = questions(points, reads)
        _require_same_numbers(traces, reads)
        self._reads.current = _Leaves(self, self._asked[0])
        self._needs: dict[tuple[Values, int], None] = {}
        self._made: dict[tuple[int, ...], tuple[Any, list[Dims], Room]] = {}

    @property
    def traces(self) -> tuple[Points, list[Any]]:
        """The points and the closed jaxpr of each trace."""
        return self._points, self._jaxprs

    @property
    def asked(self) -> tuple[list[Values], list[Any]]:
        """The sizes that Python read, at each point, and its conditions on them with their results."""
        return self._asked

    def _leaf(self, same: Sequence[Leaf]) -> Leaf:
        """One leaf of the result; a function of the sizes if it is a Python number computed from them."""
        first = same[0]
        if any(leaf.kind != first.kind for leaf in same):
            raise SizeDecides("the size decides what is returned")
        if first.kind == "computed" or all(leaf.value is first.value for leaf in same):
            return first
        if first.kind == "alias" and all(_is_alias(leaf.value, first.value) for leaf in same):
            return first
        if first.kind in ("same", "alias"):
            raise SizeDecides("the size decides which part of the state is returned")
        values = [leaf.value for leaf in same]
        if first.kind == "static" and all(map(is_noted, values)):
            return Leaf("computed", first.value.now)
        if first.kind == "static" and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
            if len(set(values)) == 1:
                return Leaf("static", int(values[0]) if isinstance(values[0], int) else float(values[0]))
            dtype = np.int64 if isinstance(values[0], int) else np.float64
            formula = self._points.number(values, dtype)
            return Leaf("computed", lambda: formula(self.today))
        if first.kind == "static" and all(type(v) is torch.Size for v in values) and len(set(map(len, values))) == 1:
            columns = [tuple(map(int, column)) for column in zip(*values, strict=True)]
            for column in columns:
                self._points.integer(column)
            return Leaf("computed", lambda: torch.Size(map(self.number, columns)))
        if all(v == values[0] for v in values):
            return first
        if first.kind in ("view", "part") and len({v[0] for v in values}) == 1:
            windows = [v[1] for v in values]
            size, stride = (list(zip(*(getattr(w, name) for w in windows), strict=True)) for name in ("size", "stride"))
            if all(w[3:] == windows[0][3:] for w in windows):
                numbers = [*size, *stride, tuple(int(w.offset) for w in windows)]
                self._windows[id(first)] = windows[0], [self._points.integer(tuple(map(int, n))) for n in numbers]
                return first
        if first.kind == "host":
            raise SizeDecides("a CPU tensor among the results differs between sizes")
        if first.kind == "static":
            raise SizeDecides("a Python object among the results differs between sizes")
        raise Inexact("a result is a view whose layout depends on a size")

    def number(self, values: Values) -> int:
        """Value for the current sizes of a number with these values at the points."""
        return self._points.integer(values)(self.today)

    def leaves(self) -> list[Leaf]:
        """Leaves of the result for the current sizes, which views depend on."""
        if not self._windows:
            return self._leaves
        return [self._leaf_of_call(leaf) if id(leaf) in self._windows else leaf for leaf in self._leaves]

    def _leaf_of_call(self, leaf: Leaf) -> Leaf:
        window, formulas = self._windows[id(leaf)]
        numbers, rank = [formula(self.today) for formula in formulas], len(window.size)
        own = window._replace(size=tuple(numbers[:rank]), stride=tuple(numbers[rank : 2 * rank]), offset=numbers[-1])
        return Leaf(leaf.kind, (leaf.value[0], own))

    @property
    def is_certain(self) -> bool:
        """Whether the points are enough to verify the formulas of all numbers."""
        return self._points.are_enough

    def reason(self, sizes: Sequence[int]) -> str | None:
        """Why the traces are not valid for these sizes; None if they are."""
        if len(sizes) != len(self.names):
            return "different dims vary"
        for name, size, (least, most) in zip(self.names, sizes, self._limits, strict=True):
            if not least <= size <= most:
                return f"size {size} of dim {name!r} is outside the range {least} to {most} of its traces"
        if not self._points.within(sizes):
            return f"the function rounds quotients of sizes by {self._points.period}, and these sizes have other remainders than the traces"
        if any(self._points.integer(values)(sizes) < least for values, least in self._needs):
            return f"an operation of the program is invalid for the sizes {dict(zip(self.names, sizes, strict=True))}"
        leaves = [self._points.integer(v)(sizes) for v in self._asked[0]]
        if any(_answer(tree, leaves) != answer for tree, answer in self._asked[1]):
            return "a Python condition on a size has a different result"
        return None

    def padded(self, bucket: Sequence[int], buffers: list[Buffer]) -> tuple[Captured, list[Dims], Room]:
        """The program for arguments padded to the bucket, the dims of its outputs, and its sizes.

        The program's last host argument is the sizes of a call: int64[names].

        Raises:
            Inexact: it is not proved that padding does not affect the results.
        """
        base, key = self.captured, tuple(bucket)
        state, inputs = base.state, base.inputs
        kept = [b for b in state.consts if b is not None]
        if key not in self._made:
            self._made[key] = self._evaluated(Room(self._points, [least for least, _ in self._limits], bucket, ()), bucket)
        closed, dims, room = self._made[key]
        own = dict(zip(inputs.arguments, buffers, strict=True))
        consts: list[Buffer | None] = [*kept, *([None] * (len(closed.consts) - len(kept)))]
        found = replace(
            base,
            jaxpr=closed,
            inputs=replace(inputs, arguments=buffers, num_hosts=inputs.num_hosts + 1, shared=[own.get(b, b) for b in inputs.shared]),
            state=replace(state, consts=consts, written=[own.get(b, b) for b in state.written]),
            outputs=replace(base.outputs, leaves=self._leaves),
        )
        return found, dims, room

    def _evaluated(self, room: Room, bucket: Sequence[int]) -> tuple[Any, list[Dims], Room]:
        """A closed jaxpr of state, arguments, sizes and the remaining inputs, with the dims of its outputs."""
        jaxprs = [c.jaxpr for c in self._jaxprs]
        kept = [i for i, b in enumerate(self.captured.state.consts) if b is not None]
        consts = [list(column) for column in zip(*(c.consts for c in self._jaxprs), strict=True)]
        of_consts = [dims_of([j.constvars[i].aval.shape for j in jaxprs]) for i in kept]
        of_inputs = [dims_of([j.invars[i].aval.shape for j in jaxprs]) for i in range(len(jaxprs[0].invars))]
        num_first, dims = len(of_inputs) - 2, list[Dims]()

        def run(state: list[Any], given: list[Any], today: Any, rest: list[Any]) -> list[Any]:
            room.today = [today[i] for i in range(len(self.names))]
            for i, value, own in zip(kept, state, of_consts, strict=True):
                consts[i] = [Padded(value, own)] * len(jaxprs)
            inputs = [Padded(_cut(a, room.shape(d)), d) for a, d in zip((*given, *rest), of_inputs, strict=True)]
            found = Evaluation(room).run(jaxprs, [list(c) for c in zip(*consts, strict=True)] or [[]] * len(jaxprs), inputs)
            whole = [room.like(v, tuple((room.product(dim),) for dim in v.dims)) for v in found]
            dims[:] = [v.dims for v in whole]
            return [v.array for v in whole]

        def example(dims: Dims, variable: Any) -> Any:
            shape = tuple(int(self._points.integer(room.product(dim))(bucket)) for dim in dims)
            return jax.ShapeDtypeStruct(shape, variable.aval.dtype)

        invars = jaxprs[0].invars
        with exact_dtypes():
            closed = jax.make_jaxpr(run)(
                [example(d, jaxprs[0].constvars[i]) for i, d in zip(kept, of_consts, strict=True)],
                [example(d, v) for d, v in zip(of_inputs[:num_first], invars, strict=False)],
                jax.ShapeDtypeStruct((len(self.names),), np.int64),
                [example(d, v) for d, v in zip(of_inputs[num_first:], invars[num_first:], strict=True)],
            )
        for values, _ in room.needs:
            self._points.integer(values)
        self._needs.update(room.needs)
        return with_constants_first(closed, len(kept)), dims, room


def _cut(array: Any, shape: tuple[int, ...]) -> Any:
    """An argument of the bucket's size, cut to `shape`, the largest that a call has."""
    return array if array.shape == shape else lax.slice(array, (0,) * len(shape), shape)


def _in_order_of(first: Captured, other: Captured) -> Captured:
    """A trace with its constants in the order of another trace's, if both read the same state. Caches may change the order of reads."""
    wanted, found = ([None if b is None else id(b) for b in t.state.consts] for t in (first, other))
    if wanted == found or sorted(map(str, wanted)) != sorted(map(str, found)):
        return other
    made = iter([i for i, own in enumerate(found) if own is None])
    order = [next(made) if own is None else found.index(own) for own in wanted]
    closed = other.jaxpr
    jaxpr = closed.jaxpr.replace(
        constvars=[closed.jaxpr.constvars[i] for i in order], debug_info=closed.jaxpr.debug_info.with_unknown_names()
    )
    state = replace(other.state, consts=[other.state.consts[i] for i in order])
    return replace(other, jaxpr=closed.replace(jaxpr=jaxpr, consts=[closed.consts[i] for i in order]), state=state)


def _require_alike(traces: Sequence[Captured]) -> None:
    first = traces[0]
    for other in traces[1:]:
        outputs, others, state, its = first.outputs, other.outputs, first.state, other.state
        alike = (
            len(outputs.leaves) == len(others.leaves)
            and outputs.refs == others.refs
            and [n.parts for n in outputs.nodes] == [n.parts for n in others.nodes]
            and len(state.consts) == len(its.consts)
            and all(a is b for a, b in zip(state.consts, its.consts, strict=True))
            and len(first.inputs.arguments) == len(other.inputs.arguments)
            and len(state.written) == len(its.written)
            and first.inputs.draws == other.inputs.draws
            and len(first.writes.effects) == len(other.writes.effects)
            and len(state.born) == len(its.born)
            and len(outputs.kept_gradients) == len(others.kept_gradients)
        )
        own = dict(zip(first.inputs.arguments, other.inputs.arguments, strict=False))
        if not alike or any(own.get(a, a) is not b for a, b in zip(state.written, its.written, strict=True)):
            raise SizeDecides("the size decides what is computed")


def require_alike(jaxprs: Sequence[Any]) -> None:
    """Raise SizeDecides with the first equation that is missing or different for another size."""
    for each in itertools.zip_longest(*(j.eqns for j in jaxprs)):
        if None in each or any(one.primitive is not each[0].primitive for one in each):
            error = SizeDecides("the size decides what is computed")
            longest = max(range(len(jaxprs)), key=lambda i: len(jaxprs[i].eqns))
            error.equation = each[longest]  # missing in the other traces
            raise error


def _is_alias(one: torch.Tensor, other: torch.Tensor) -> bool:
    return buffer_of(one) is buffer_of(other) and Window.of(one) == Window.of(other)


class _Leaves(Sequence[int]):
    """The sizes that Python read, with their values in the current call."""

    def __init__(self, family: Family, values: list[Values]) -> None:
        self._family, self._values = family, values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, place: Any) -> Any:
        return self._family.number(self._values[place])


def _require_same_numbers(traces: Sequence[Captured], reads: Sequence[SizeReads]) -> None:
    """Require that numbers which the host recomputes in each call are the same functions of the sizes in all traces.

    Raises:
        SizeDecides: a number is computed differently, or a condition had a different result.
    """
    own = reads[0].current
    for trace, read in zip(traces, reads, strict=True):
        reads[0].current = read.leaves
        pairs = zip(_computed(traces[0]), _computed(trace), strict=False)
        if len(_computed(traces[0])) != len(_computed(trace)) or any(_differ(one, other) for one, other in pairs):
            raise SizeDecides("a number that the host computes is a different function of the size for different sizes")
    reads[0].current = own


def _computed(trace: Captured) -> list[Any]:
    leaves = [leaf.value for leaf in trace.outputs.leaves if leaf.kind == "computed"]
    noted = [leaf.value.now for leaf in trace.outputs.leaves if leaf.kind == "static" and is_noted(leaf.value)]
    return [*leaves, *noted, *trace.inputs.numbers.computed, *(ask for ask, _ in trace.guarded.branches)]


def _differ(one: Any, other: Any) -> bool:
    first, second = one(), other()
    return type(first) is not type(second) or (first != second and not (first != first and second != second))


def questions(points: Points, reads: Sequence[SizeReads]) -> tuple[list[Values], list[Any]]:
    """The sizes that Python read, at each point, and its conditions on them with their results.

    Raises:
        SizeDecides: the conditions or their results differ between the points.
    """
    for same, line in zip(zip(*(r.asked for r in reads), strict=False), reads[0].lines, strict=False):
        if len({answer for _, answer in same}) > 1:
            where = f", at {line}" if line else ""
            raise SizeDecides(f"a Python condition on a size has different results for different sizes{where}")
    if len({len(r.leaves) for r in reads}) > 1 or len({len(r.asked) for r in reads}) > 1:
        raise SizeDecides("Python reads or compares sizes a different number of times for different sizes")
    leaves = [tuple(column) for column in zip(*(r.leaves for r in reads), strict=True)]
    asked = list(reads[0].asked)
    for values in leaves:
        points.integer(values)
    return leaves, asked


def _answer(tree: Any, leaves: Sequence[int]) -> Any:
    try:
        return tree(leaves)
    except (ArithmeticError, ValueError):
        return None


__all__ = ["Family", "questions", "require_alike"]

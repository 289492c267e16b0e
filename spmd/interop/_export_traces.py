"""The traces of `spmd.export`: one program for the example's sizes, or for all sizes that `dynamic=` allows. Nothing is compiled.

Note [Sizes in a file]
If sizes vary, the function is traced at a few sizes, and the traces become one program over symbols (`sizes._symbolic`). That program
is valid for sizes of 2 and more for which no dim in it has fewer than two elements and Python's conditions on sizes have the same
outcomes as in the traces. The few other sizes of a name (1, which broadcasts; 2 if the function computes `x[1:]`) get programs of their
own, in which the other names still vary. The remaining sizes are refused here or, for combinations of names, by the loader.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mesh._mesh_errors import Noted
from spmd.base._errors import SpmdError, TraceError, message, place_of
from spmd.base._progress import underway
from spmd.base._torch_late import without_dynamo
from spmd.interop._exported_program import value_of
from spmd.program._job_checks import compiling
from spmd.program._options import Options
from spmd.program._program import Program
from spmd.program._step import Step
from spmd.program.reads import uncollected
from spmd.program.reuse._signature import Signature
from spmd.program.sizes._dims import AskedDims, Named
from spmd.program.sizes._family import Family
from spmd.program.sizes._family_search import family_at
from spmd.program.sizes._formulas import Inexact
from spmd.program.sizes._size_reads import SizeReads, sizes_read
from spmd.program.sizes._sized_arguments import parts_of, replaced, stand_in
from spmd.program.sizes._symbolic import Range, SymbolicTrace, points_of, symbolic
from spmd.program.trace._captured import Captured
from spmd.program.trace._gradients import StaleGradients
from spmd.program.trace._trace_settings import TraceSettings
from spmd.program.xla._compilation import Making

_MAX_SEPARATE_SIZES = 4  # sizes of one name that get programs of their own
_MAX_REMAINDERS = 8


class Traced(NamedTuple):
    """One program of a file.

    Attributes:
        program: the traced program; if sizes vary, that of the first trace.
        args, kwargs: arguments of the trace.
        named: the tensors among them with dims of varying size.
        ranges: range of each size that varies in this program.
        declared: range of each size that varies in the call.
        trace: the trace over symbols, or None.
        family: the traces that it combines, or None.
    """

    program: Program
    args: Any
    kwargs: Any
    named: Sequence[Named] = ()
    ranges: Mapping[str, Range] = {}
    declared: Mapping[str, Range] = {}
    trace: SymbolicTrace | None = None
    family: Family | None = None


class _TracedProgram(Program):
    """A program that is never compiled."""

    def _compile(self, arg_buffers: Any, name: str, making: Making) -> Any:
        for buffer in (*self.written.buffers, *self.read.buffers, *arg_buffers) if not self.is_ahead else ():
            self.devices.place(buffer)


class _Varying(NamedTuple):
    """The sizes at which to trace.

    Attributes:
        named: the tensors with varying dims, by id of their placeholder in the call.
        free: range of each name.
        shift: selects another set of sizes.
    """

    named: Mapping[int, Named]
    free: Mapping[str, Range]
    shift: int


class _Part(NamedTuple):
    """A subset of the sizes that a call may have.

    Attributes:
        fixed: names with a single size.
        steps: for each other name (step, remainder) of its sizes; empty: no restriction.
    """

    fixed: Mapping[str, int]
    steps: Mapping[str, tuple[int, int]]


class FileTraces(Step[Any, Any]):
    """Traces one function for a file."""

    def __init__(self, fn: Callable[..., Any], dynamic: Mapping[str, Any]) -> None:
        super().__init__(fn, Options(roll=False))
        self._parameters = inspect.signature(fn)
        self._asked = AskedDims(dynamic, [*self._parameters.parameters])
        self._sizes: _Varying | None = None
        self._family: Family | None = None
        self._trace: SymbolicTrace | None = None
        self._divisors = set[int]()  # numbers by which Python divided a size, with rounding

    def of_call(self, args: Any, kwargs: Any) -> list[Traced]:
        """The programs for calls with these arguments. The program for most sizes comes last.

        Raises:
            SpmdError: a size is outside the range of its dim.
            TraceError: the function cannot be traced, or a few programs do not cover all of these sizes.
        """
        named = self._asked.found(self._parameters.bind(*args, **kwargs).arguments)
        if not named:
            return [Traced(self._program_of(args, kwargs, None), args, kwargs)]
        declared = self._declared(named)
        found, seen, waiting = list[Traced](), list[_Part](), [_Part({}, {})]
        while waiting:
            part = waiting.pop(0)
            if part in seen:
                continue
            seen.append(part)
            self._divisors.clear()
            try:
                traced = self._at(args, kwargs, named, declared, part)
            except Inexact as error:
                waiting += self._by_remainders(part, declared, error)
                continue
            found.insert(0, traced)
            waiting += [_Part({**part.fixed, name: size}, {}) for name in traced.ranges for size in self._separate_sizes(traced, name)]
        return found

    def _by_remainders(self, part: _Part, declared: Mapping[str, Range], error: Inexact) -> list[_Part]:
        """Split `part` by the remainders of its sizes, modulo the numbers by which Python divided a size.

        For sizes with the same remainder, the quotient is a linear function.

        Raises:
            TraceError: the split does not help, or makes too many parts.
        """
        period = math.lcm(*self._divisors)
        steps = {name: math.lcm(own.multiple, period) for name, own in declared.items() if name not in part.fixed}
        rests = [range(0, step, declared[name].multiple) for name, step in steps.items()]
        is_narrow = any(declared[name].most < declared[name].least + 6 * step for name, step in steps.items())
        if period == 1 or part.steps or is_narrow or math.prod(map(len, rests)) > _MAX_REMAINDERS:
            raise self._not_for_all(error) from error
        return [
            _Part(part.fixed, {name: (step, rest) for (name, step), rest in zip(steps.items(), chosen, strict=True)})
            for chosen in itertools.product(*rests)
        ]

    def _declared(self, named: Sequence[Named]) -> dict[str, Range]:
        """The range of sizes that the file will accept: multiples of the number of shards."""
        sizes = self._asked.sizes(named)
        multiples = dict.fromkeys(sizes, 1)
        for one, parts in zip(named, parts_of(named), strict=True):
            for d, name in one.dims.items():
                multiples[name] = math.lcm(multiples[name], parts[d])
        found: dict[str, Range] = {}
        for name, size in sizes.items():
            dim, multiple = self._asked.dims[name], multiples[name]
            found[name] = Range(-(-dim.min // multiple) * multiple, dim.max // multiple * multiple, multiple)
            if size % multiple:
                what = f"dim {name!r} has size {size}, but it is split into {multiple} shards"
                raise SpmdError(
                    message(
                        what,
                        "an exported file takes multiples of the number of shards",
                        fix=f"give an example with {name} = {found[name].least}",
                    )
                )
            if found[name].most < max(found[name].least, 2) + 5 * multiple:  # too few sizes to derive a formula
                what = f"dim {name!r} varies from {dim.min} to {dim.max} in steps of {multiple}: too few sizes to trace at several of them"
                raise SpmdError(message(what, fix="drop it from dynamic=, and export the other sizes too: also=[(x,)]"))
        return found

    def _at(self, args: Any, kwargs: Any, named: Sequence[Named], declared: Mapping[str, Range], part: _Part) -> Traced:
        """The program for one part of the sizes.

        Raises:
            Inexact: it is not proved that a single program covers them.
        """
        free = {name: Range(max(own.least, 2), own.most, own.multiple) for name, own in declared.items() if name not in part.fixed}
        free = {name: own.within(*part.steps.get(name, (own.multiple, 0))) for name, own in free.items()}
        sizes = {**part.fixed, **{name: own.least for name, own in free.items()}}
        others = {id(n.tensor): stand_in(n, sizes) for n in named}
        args, kwargs = replaced(args, kwargs, others, self._settings.holders)
        named = [Named(n.path, others[id(n.tensor)], {d: name for d, name in n.dims.items() if name in free}) for n in named]
        if free:
            return self._symbolic(args, kwargs, named, free, declared)
        try:
            return Traced(self._program_of(args, kwargs, None), args, kwargs, named, free, declared)
        except Noted:
            raise
        except Exception as error:
            raise self._not_for(part.fixed, error) from error

    def _symbolic(self, args: Any, kwargs: Any, named: Sequence[Named], free: Mapping[str, Range], declared: Mapping[str, Range]) -> Traced:
        varying = {id(n.tensor): n for n in named if n.dims}
        for shift in (0, 1):  # retry at other points: a size may equal a constant of the model by chance
            try:
                program = self._program_of(args, kwargs, _Varying(varying, free, shift))
                assert self._family is not None
                return Traced(program, args, kwargs, named, free, declared, self._trace, self._family)
            except Inexact as error:
                if shift or not error.may_depend_on_range:
                    raise
        raise AssertionError("the second try returns or raises")

    def _program_of(self, args: Any, kwargs: Any, sizes: _Varying | None) -> Program:
        self._sizes, self._family, self._trace = sizes, None, None
        self.clear()
        return self._found(args, kwargs)[0]

    def _compiled(self, call: Signature, failed: str | None, settings: TraceSettings, is_beside: bool) -> tuple[Program, int]:
        with compiling(), uncollected(), without_dynamo():
            if self._sizes is None:
                captured, buffers = self._traced(call, settings)[0], call.buffers
            else:
                self._family = self._traced_at(self._sizes, call, settings)
                captured = self._family.captured
                buffers = captured.inputs.arguments
            return _TracedProgram(captured, buffers, self._options, self._name, (0.0, 0.0), Making()), 1

    def _traced_at(self, varying: _Varying, call: Signature, settings: TraceSettings) -> Family:
        names, ranges = tuple(varying.free), list(varying.free.values())

        def trace(point: Sequence[int]) -> tuple[Captured, SizeReads]:
            sizes = dict(zip(names, point, strict=True))
            others = {i: stand_in(named, sizes) for i, named in varying.named.items()}
            args, kwargs = replaced(call.args, call.kwargs, others, settings.holders)
            with underway(f"tracing {self._name} for sizes {sizes}"), sizes_read() as read:
                try:
                    captured = self._traced(call._replace(args=args, kwargs=kwargs), settings)[0]
                except (Noted, Inexact, StaleGradients):
                    raise
                except Exception as error:
                    raise self._not_for(sizes, error) from error
            self._divisors |= read.divisors
            return captured, read

        def use(family: Family) -> None:
            self._trace = symbolic(family, ranges)

        points, more = points_of(ranges, varying.shift)
        period = math.gcd(*(own.multiple for own in ranges))
        return family_at(names, points, more, period, tuple((own.least, own.most) for own in ranges), trace, use)

    def _separate_sizes(self, traced: Traced, name: str) -> list[int]:
        """The sizes of a name for which a program is not valid, for any sizes of the other names.

        Raises:
            TraceError: there are too many.
        """
        assert traced.trace is not None
        own = traced.ranges[name]
        sizes = traced.declared[name].within(own.multiple, own.rest).sizes()
        holds = sizes >= own.least
        for limit in traced.trace.limits:
            others = [{other: r.most if end else r.least + 3 * r.multiple for other, r in traced.ranges.items()} for end in (0, 1)]
            holds &= np.any([np.broadcast_to(value_of(limit, {**one, name: sizes}), sizes.shape) for one in others], axis=0)
        found = [int(n) for n in sizes[~holds]]
        if len(found) > _MAX_SEPARATE_SIZES:
            raise self._too_many(name, sizes, holds)
        return found

    def _too_many(self, name: str, sizes: Any, holds: Any) -> TraceError:
        groups = itertools.groupby(zip(sizes, holds, strict=True), lambda pair: bool(pair[1]))
        runs = [[int(n) for n, _ in group] for is_held, group in groups if is_held]
        text = " and ".join(f"{run[0]} to {run[-1]}" for run in runs) or "none"
        longest = max(runs, key=len, default=[1, 1])
        return TraceError(
            message(
                f"{self._name} is not one program for all sizes of dim {name!r}",
                f"because of Python's conditions on sizes, or a dim of few elements, one program only covers {name} = {text}",
                fix=f"spmd.Dim({name!r}, min={longest[0]}, max={longest[-1]})",
            )
        )

    def _not_for(self, fixed: Mapping[str, int], error: Exception) -> TraceError:
        listed = ", ".join(f"{name} = {size}" for name, size in fixed.items())
        name, size = list(fixed.items())[-1]
        what = f"{self._name} cannot be traced for {listed}, a size that dynamic= allows"
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return TraceError(message(what, first, fix=f"spmd.Dim({name!r}, min={size + 1}, max={self._asked.dims[name].max})"))

    def _not_for_all(self, error: Inexact) -> TraceError:
        details, equation = [str(error)], error.equation
        if equation is not None:
            shapes = ", ".join(str(v.aval) for v in equation.invars)
            details.insert(0, f"operation {equation.primitive.name} of {shapes}, {place_of(equation.source_info.traceback)}")
        name, dim = next(iter(self._asked.dims.items()))
        narrower = f"spmd.Dim({name!r}, min={max(2, dim.max // 2)}, max={dim.max})"
        return TraceError(
            message(
                f"{self._name} is not one program for all sizes that dynamic= allows",
                *details,
                fix=f"narrow the sizes, {narrower}, or drop the dim: also=[(x,)] adds sizes",
            )
        )


__all__ = ["FileTraces", "Traced"]

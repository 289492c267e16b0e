"""`spmd.compile(dynamic=...)`: a step whose arguments have sizes that vary, as a few programs of larger sizes.

@spmd.compile(dynamic={"ids": {0: spmd.Dim("batch", max=64), 1: spmd.Dim("seq", max=512)}})
def train_step(ids): ...

The function is traced at a few sizes, once. Programs for buckets follow from these traces, when a call needs them. See Note [Points].
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from spmd.base._errors import SpmdError, TraceError, message, place_of
from spmd.base._torch_late import without_dynamo
from spmd.base._underway import underway
from spmd.program._job_checks import compiling
from spmd.program._program import Options, Program
from spmd.program._step import Step, uncollected
from spmd.program.find._objects import flatten
from spmd.program.reuse._signature import Signature
from spmd.program.sizes._dims import SMALLEST, AskedDims, Named
from spmd.program.sizes._evaluate import SizeDecides
from spmd.program.sizes._family import Family
from spmd.program.sizes._formulas import Inexact, Points
from spmd.program.sizes._learned_dims import LearnedDims
from spmd.program.sizes._size_reads import sizes_read
from spmd.program.sizes._sized_arguments import padded, parts_of, replaced, stand_in
from spmd.program.sizes._sized_program import SizedProgram
from spmd.program.trace._way import Way
from spmd.program.xla._compilation import Making


class _Call:
    """The sizes of the call at hand."""

    def __init__(self, named: list[Named], sizes: dict[str, int], bucket: dict[str, int], multiples: dict[str, int]) -> None:
        self.named, self.sizes, self.bucket, self.multiples = named, sizes, bucket, multiples
        self.names = tuple(sizes)
        self.tensors: dict[int, Named] = {}  # by id of what stands for it in this call


class SizedStep(Step[Any, Any]):
    """A step with dims that vary. Sizes of 1, and sizes for which Python goes another way, have a program each, without padding.

    Attributes:
        dynamic: what it was told of them.
    """

    def __init__(self, fn: Callable[..., Any], options: Options, dynamic: Mapping[str, Any] | Literal[True]) -> None:
        self._own_traces = 0
        self._exact: Step[Any, Any] = Step(fn, options)
        super().__init__(fn, options)
        self.dynamic: Mapping[str, Any] = {} if dynamic is True else dynamic
        self._parameters = _parameters(fn)
        names = self._parameters and [*self._parameters.parameters]
        self._asked = LearnedDims() if dynamic is True else AskedDims(dynamic, names)
        self._families: dict[Any, list[Family]] = {}
        self._now: _Call | None = None
        if options.steps_per_call > 1 or options.check:
            name = "check" if options.check else "steps_per_call"
            what = f"compile's options dynamic and {name} do not go together"
            raise SpmdError(
                message(what, "arguments of several steps are stacked, and traces are compared as they are", fix=f"drop {name}")
            )

    @property
    def num_traces(self) -> int:  # type: ignore[override]
        """How often the function was traced."""
        return self._own_traces + self._exact.num_traces

    @num_traces.setter
    def num_traces(self, count: int) -> None:
        self._own_traces = count - self._exact.num_traces

    @property
    def num_executables(self) -> int:
        """How many programs are kept."""
        return super().num_executables + self._exact.num_executables

    def clear(self) -> None:
        """Forget all programs and traces."""
        super().clear()
        self._families.clear()
        self._exact.clear()

    def _note_use(self, program: Program) -> None:
        (self._programs if isinstance(program, SizedProgram) else self._exact._programs).note_use(program)

    def _found(self, args: Any, kwargs: Any, *, is_beside: bool = False) -> tuple[Program, Signature]:
        args, kwargs, call = self._sized(args, kwargs)
        if not call.sizes:
            return self._exact._found(args, kwargs, is_beside=is_beside)
        self._now = call
        for families in self._families.values():
            for family in families:
                family.today = tuple(call.sizes[name] for name in family.names) if set(family.names) == set(call.sizes) else ()
        others = {id(n.tensor): padded(n, call.bucket) for n in call.named}
        call.tensors = {id(others[id(n.tensor)]): n for n in call.named}
        try:
            program, found = super()._found(*replaced(args, kwargs, others, self._way.holders), is_beside=is_beside)
        except Inexact as why:
            if not isinstance(why, SizeDecides) and isinstance(self._asked, AskedDims):
                raise self._refused(why) from why
            if str(why) not in self.retraces:
                self.retraces.append(str(why))
            return self._exact._found(args, kwargs, is_beside=is_beside)
        finally:
            self._now = None
        return program, found._replace(hosts=[*found.hosts, torch.tensor([call.sizes[name] for name in call.names])])

    def _sized(self, args: Any, kwargs: Any) -> tuple[Any, Any, _Call]:
        """The arguments, those that the model masks padded, and the sizes that vary in this call."""
        named = self._asked.found(self._arguments(args, kwargs))
        sizes = self._asked.sizes(named)
        multiples = dict.fromkeys(sizes, 1)
        for one, parts in zip(named, parts_of(named), strict=True):
            for d, name in one.dims.items():
                multiples[name] = math.lcm(multiples[name], parts[d])
        bucket = {name: self._asked.dims[name].bucket(n, multiples[name]) for name, n in sizes.items()}
        masked = {name: bucket[name] for name in sizes if self._asked.dims[name].masked_by_model}
        if masked:
            others = {}
            for one in named:
                fills = [self._asked.dims[n].fill for n in one.dims.values() if n in masked]
                others[id(one.tensor)] = padded(one, masked, fills[0]) if fills else one.tensor
            args, kwargs = replaced(args, kwargs, others, self._way.holders)
            named = [Named(n.path, others[id(n.tensor)], n.dims) for n in named]
        vary = {name: n for name, n in sizes.items() if name not in masked and n > 1}
        named = [n for n in named if vary.keys() & set(n.dims.values())]
        return args, kwargs, _Call(named, vary, {name: bucket[name] for name in vary}, multiples)

    def _arguments(self, args: Any, kwargs: Any) -> Mapping[str, Any]:
        if self._parameters is None:
            return kwargs
        try:
            return self._parameters.bind(*args, **kwargs).arguments
        except TypeError:  # the call itself says so
            return {}

    def _compiled(self, call: Signature, failed: str | None, way: Way, is_beside: bool) -> tuple[Program, int]:
        now = self._now
        assert now is not None
        bucket = tuple(now.bucket[name] for name in now.names)
        with compiling(), uncollected(), without_dynamo():
            start = time.perf_counter()
            family, num_traces = self._family(call, way, now, failed)
            spent = 0.0, time.perf_counter() - start
            program = SizedProgram(family, bucket, call.buffers, self._options, self._name, spent, Making([self._loaded.get], is_beside))
        why = family.reason(tuple(now.sizes.values()))
        if why is not None:  # known only now that the program was evaluated
            raise SizeDecides(why)
        return program, num_traces

    def _family(self, call: Signature, way: Way, now: _Call, failed: str | None) -> tuple[Family, int]:
        """The traces that hold for a call, made if there are none, and how many were made."""
        key, sizes = self._family_key(call, now), tuple(now.sizes.values())
        for family in self._families.get(key, ()):
            family.captured.numbers.refresh(call.numbers)
            if family.captured.guards.reason() is None and family.reason(sizes) is None:
                return family, 0
        self._require_may_trace(failed)
        num_traces, ranges = 0, self._ranges(now)
        for number, limits in enumerate(ranges):
            try:
                points = _points(limits, [now.multiples[name] for name in now.names], number)
                num_traces += len(points)
                holds_for = [(low if number else least, most) for low, (least, most) in zip(points[0], limits, strict=True)]
                family = self._traced_at(points, holds_for, call, way, now)
                family.padded(tuple(now.bucket.values()), call.buffers)
                why = family.reason(sizes)
                if why is None:
                    self._families.setdefault(key, []).insert(0, family)
                    return family, num_traces
                raise SizeDecides(why)
            except Inexact as error:
                if number == len(ranges) - 1 or not error.may_depend_on_range:
                    self._own_traces += num_traces
                    raise
        raise AssertionError("there is a range")

    def _ranges(self, now: _Call) -> list[list[tuple[int, int]]]:
        """The sizes for which one set of traces may hold: all; all that are not small; those of the bucket."""
        most = {name: max(self._asked.dims[name].max, now.bucket[name]) for name in now.names}
        bucket = [(now.bucket[name] // 2 + 1 if now.bucket[name] > SMALLEST else 2, now.bucket[name]) for name in now.names]
        found = [[(2, most[name]) for name in now.names], [(max(2, most[name] // 6), most[name]) for name in now.names], bucket]
        today = list(now.sizes.values())
        found = [limits for limits in found if all(low <= n <= high for n, (low, high) in zip(today, limits, strict=True))]
        found = [limits for i, limits in enumerate(found) if limits not in found[:i]]
        return [*found[:1], *found]  # once more at other points: a size that is the model's own constant can be taken for it

    def _traced_at(self, points: list[tuple[int, ...]], limits: Any, call: Signature, way: Way, now: _Call) -> Family:
        traces, reads = [], []
        for point in points:
            sizes = dict(zip(now.names, point, strict=True))
            others = {i: stand_in(named, sizes) for i, named in now.tensors.items()}
            args, kwargs = replaced(call.args, call.kwargs, others, way.holders)
            with underway(f"tracing {self._name} for sizes {sizes}"), sizes_read() as read:
                traces.append(self._traced(call._replace(args=args, kwargs=kwargs), way)[0])
            reads.append(read)
        return Family(now.names, Points(points), traces, reads, limits)

    def _family_key(self, call: Signature, now: _Call) -> Any:
        """A call's key with names for the sizes that vary."""
        leaves = flatten((call.args, call.kwargs), classes=self._way.holders).leaves
        first, key = len(call.key) - len(leaves), list(call.key)
        for i, leaf in enumerate(leaves):
            named = now.tensors.get(id(leaf))
            if named is not None and len(key[first + i]) > 2:
                place, shape, *rest = key[first + i]
                names = tuple(named.dims.get(d) if named.dims.get(d) in now.sizes else n for d, n in enumerate(shape))
                key[first + i] = (place, names, *rest)
        return now.names, tuple(key)

    def _refused(self, error: Inexact) -> TraceError:
        equation = error.equation
        details = [str(error)]
        if equation is not None:
            shapes = ", ".join(str(v.aval) for v in equation.invars)
            details.insert(0, f"operation {equation.primitive.name} of {shapes}, {place_of(equation.source_info.traceback)}")
        return TraceError(
            message(
                f"{self._name} is not proved to compute the same with padded dims",
                *details,
                fix="drop the dim from dynamic=, or, if the model masks padding itself: spmd.Dim(..., masked_by_model=True)",
            )
        )


def _points(limits: list[tuple[int, int]], multiples: list[int], shift: int) -> list[tuple[int, ...]]:
    """See Note [Points]: small, each large in its turn, all in between, twice; multiples of what shards divide.

    Raises:
        SizeDecides: there are no three sizes within the limits.
    """
    low, high, middle, other = list[int](), list[int](), list[int](), list[int]()
    for place, ((least, most), multiple) in enumerate(zip(limits, multiples, strict=True)):
        low.append(-(-max(least, min(3 + 2 * place + 4 * shift, most // 2)) // multiple) * multiple)
        high.append(max(most // multiple * multiple, low[-1] + 3 * multiple))
        steps = (high[-1] - low[-1]) // multiple
        middle.append(low[-1] + max(2, int(steps * (0.618 + 0.07 * shift))) * multiple)
        other.append(low[-1] + max(1, int(steps * (0.31 + 0.05 * shift))) * multiple)
    found = [tuple(low)]
    found += [tuple(high[j] if j == i else n for j, n in enumerate(low)) for i in range(len(low))]
    return [*found, tuple(middle), tuple(other)]


def _parameters(fn: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


__all__ = ["SizedStep"]

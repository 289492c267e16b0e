"""`spmd.compile(dynamic=...)`: a step whose arguments vary in size, as a few programs of larger sizes.

@spmd.compile(dynamic={"ids": {0: spmd.Dim("batch", max=64), 1: spmd.Dim("seq", max=512)}})
def train_step(ids): ...

The function is traced once at each of a few sizes. The programs for all buckets are derived from these traces, each when a call first
needs it. See Note [Points].
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from spmd.base._errors import SpmdError, TraceAgain, TraceError, message, place_of, text_of
from spmd.base._progress import underway
from spmd.base._torch_late import without_dynamo
from spmd.program._job_checks import compiling
from spmd.program._options import Options
from spmd.program._program import Program
from spmd.program._step import Step
from spmd.program.find._objects import flatten
from spmd.program.reads import uncollected
from spmd.program.reuse._signature import Signature
from spmd.program.sizes._dims import AskedDims, Named
from spmd.program.sizes._evaluate import SizeDecides
from spmd.program.sizes._family import Family
from spmd.program.sizes._family_search import Families, Sizes
from spmd.program.sizes._formulas import Inexact, Unknown
from spmd.program.sizes._learned_dims import LearnedDims
from spmd.program.sizes._size_reads import SizeReads, sizes_read
from spmd.program.sizes._sized_arguments import padded, parts_of, replaced, stand_in
from spmd.program.sizes._sized_program import SizedProgram
from spmd.program.trace._captured import Captured
from spmd.program.trace._device_branches import OtherSides
from spmd.program.trace._gradients import StaleGradients
from spmd.program.trace._trace_settings import TraceSettings
from spmd.program.xla._compilation import Making


class _Call:
    """The sizes of one call.

    Attributes:
        named: the arguments with dims that vary.
        sizes, bucket, multiples: by name of a dim: its size, the size it is padded to, and a number that divides that size.
        tensors: `named` by the id of the placeholder of the argument in this call.
    """

    def __init__(self, named: list[Named], sizes: dict[str, int], bucket: dict[str, int], multiples: dict[str, int]) -> None:
        self.named, self.sizes, self.bucket, self.multiples = named, sizes, bucket, multiples
        self.names = tuple(sizes)
        self.tensors: dict[int, Named] = {}


class SizedStep(Step[Any, Any]):
    """A step with dims that vary. Sizes of 1, and sizes for which Python takes another branch, get a program each, without padding.

    Attributes:
        dynamic: the option `dynamic` of `spmd.compile`; empty if it was True.
    """

    _may_branch = False  # at the sizes of a trace, which are no call's

    def __init__(self, fn: Callable[..., Any], options: Options, dynamic: Mapping[str, Any] | Literal[True]) -> None:
        self._own_traces = 0
        self._exact: Step[Any, Any] = Step(fn, options)
        super().__init__(fn, options)
        self._settings = self._exact._settings = replace(self._settings, leaves_cached=False)
        self.dynamic: Mapping[str, Any] = {} if dynamic is True else dynamic
        self._parameters = _parameters(fn)
        names = self._parameters and [*self._parameters.parameters]
        self._asked = LearnedDims() if dynamic is True else AskedDims(dynamic, names)
        self._families = Families()
        self._now: _Call | None = None
        if options.steps_per_call > 1 or options.check:
            name = "check" if options.check else "steps_per_call"
            what = f"compile's options dynamic and {name} cannot be combined"
            raise SpmdError(
                message(what, "steps_per_call stacks the arguments, and check compares traces of equal sizes", fix=f"drop {name}")
            )

    @property
    def num_traces(self) -> int:  # type: ignore[override]
        """The number of traces."""
        return self._own_traces + self._exact.num_traces

    @num_traces.setter
    def num_traces(self, count: int) -> None:
        self._own_traces = count - self._exact.num_traces

    @property
    def num_executables(self) -> int:
        """The number of cached programs."""
        return super().num_executables + self._exact.num_executables

    def clear(self) -> None:
        """Drop all programs and traces."""
        super().clear()
        self._families.clear()
        self._exact.clear()

    def _note_use(self, program: Program) -> None:
        (self._programs if isinstance(program, SizedProgram) else self._exact._programs).note_use(program)

    def _found(self, args: Any, kwargs: Any, *, is_beside: bool = False, decided: OtherSides | None = None) -> tuple[Program, Signature]:
        args, kwargs, call = self._sized(args, kwargs)
        if not call.sizes:
            return self._exact._found(args, kwargs, is_beside=is_beside, decided=decided)
        self._now = call
        for family in self._families:
            family.today = tuple(call.sizes[name] for name in family.names) if set(family.names) == set(call.sizes) else ()
        others = {id(n.tensor): padded(n, call.bucket) for n in call.named}
        call.tensors = {id(others[id(n.tensor)]): n for n in call.named}
        try:
            program, found = super()._found(*replaced(args, kwargs, others, self._settings.holders), is_beside=is_beside)
        except Inexact as why:
            if not isinstance(why, (SizeDecides, Unknown)) and isinstance(self._asked, AskedDims):
                raise self._refused(why) from why
            if str(why) not in self.retraces:
                self.retraces.append(str(why))
            return self._exact._found(args, kwargs, is_beside=is_beside, decided=decided)
        finally:
            self._now = None
        return program, found._replace(hosts=[*found.hosts, torch.tensor([call.sizes[name] for name in call.names])])

    def _sized(self, args: Any, kwargs: Any) -> tuple[Any, Any, _Call]:
        """The arguments, padded in the dims that the model masks itself, and the sizes that vary in this call."""
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
            args, kwargs = replaced(args, kwargs, others, self._settings.holders)
            named = [Named(n.path, others[id(n.tensor)], n.dims) for n in named]
        vary = {name: n for name, n in sizes.items() if name not in masked and n > 1}
        named = [n for n in named if vary.keys() & set(n.dims.values())]
        return args, kwargs, _Call(named, vary, {name: bucket[name] for name in vary}, multiples)

    def _arguments(self, args: Any, kwargs: Any) -> Mapping[str, Any]:
        if self._parameters is None:
            return kwargs
        try:
            return self._parameters.bind(*args, **kwargs).arguments
        except TypeError:  # calling the function raises it too
            return {}

    def _compiled(self, call: Signature, failed: str | None, settings: TraceSettings, is_beside: bool) -> tuple[Program, int]:
        now = self._now
        assert now is not None
        bucket = tuple(now.bucket[name] for name in now.names)
        with compiling(), uncollected(), without_dynamo():
            start = time.perf_counter()
            family, num_traces = self._family(call, settings, now, failed)
            spent = 0.0, time.perf_counter() - start
            program = SizedProgram(family, bucket, call.buffers, self._options, self._name, spent, Making([self._loaded.get], is_beside))
        family.today = tuple(now.sizes.values())
        family.captured.inputs.refresh(call.numbers, call.arguments)
        why = program.reason_for(family.today)
        if why is not None:  # known only after the program was evaluated
            raise SizeDecides(why)
        return program, num_traces

    def _family(self, call: Signature, settings: TraceSettings, now: _Call, failed: str | None) -> tuple[Family, int]:
        """The family of traces that is valid for a call, and the number of traces made for it now."""
        key, today = self._family_key(call, now), tuple(now.sizes.values())
        for family in self._families.of(key):
            family.captured.inputs.refresh(call.numbers, call.arguments)
            if family.captured.guarded.guards.reason() is None and family.reason(today) is None:
                return family, 0
        self._require_may_trace(failed)
        most = tuple(max(self._asked.dims[name].max, now.bucket[name]) for name in now.names)
        least = tuple(max(2, self._asked.dims[name].min) for name in now.names)
        multiples = tuple(now.multiples[name] for name in now.names)
        sizes = Sizes(now.names, today, tuple(now.bucket.values()), least, most, multiples)
        before = self._own_traces
        family = self._families.search(key, sizes, call.buffers, lambda point: self._traced_at(point, call, settings, now))
        num_traces, self._own_traces = self._own_traces - before, before  # the caller adds them to the count
        return family, num_traces

    def _traced_at(self, point: Sequence[int], call: Signature, settings: TraceSettings, now: _Call) -> tuple[Captured, SizeReads]:
        """A trace at the sizes `point` instead of the call's, and the sizes that Python read in it.

        Raises:
            SizeDecides: the function raises an exception at these sizes.
        """
        sizes = dict(zip(now.names, point, strict=True))
        others = {i: stand_in(named, sizes) for i, named in now.tensors.items()}
        args, kwargs = replaced(call.args, call.kwargs, others, settings.holders)
        self._own_traces += 1
        with underway(f"tracing {self._name} for sizes {sizes}"), sizes_read() as read:
            try:
                return self._traced(call._replace(args=args, kwargs=kwargs), settings)[0], read
            except (TraceAgain, StaleGradients, Inexact):
                raise
            except Exception as error:
                raise SizeDecides(f"for sizes {sizes} the function raises {type(error).__name__}: {text_of(error)}") from error

    def _family_key(self, call: Signature, now: _Call) -> Any:
        """The cache key of a call with the names of dims in place of the sizes that vary."""
        leaves = flatten((call.args, call.kwargs), classes=self._settings.holders).leaves
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
                f"{self._name} could not be proved to give the same results with padded dims",
                *details,
                fix="drop the dim from dynamic=, or, if the model masks padding itself: spmd.Dim(..., masked_by_model=True)",
            )
        )


def _parameters(fn: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


__all__ = ["SizedStep"]

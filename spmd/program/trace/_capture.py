"""Traces a user's function once: its computation, the storages that it reads and writes, and its results.

While jax traces, every device array that the function reads becomes a constant of the jaxpr, with its identity. So each constant maps to
the buffer that it was read from. Buffers that contain a tracer afterwards were written. The user's state does not change: `capture`
restores values, gradients and numbers before it returns, also after an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import TraceAgain
from spmd.base._jax_notes import without_jax_note
from spmd.device._host_copies import is_host_copy
from spmd.device._random_stream import default_stream
from spmd.device._storage import Buffer, buffer_of, is_device_tensor
from spmd.program.find._discover import Reachable
from spmd.program.find._objects import EmptyContainers, flatten
from spmd.program.optim._lifted_numbers import LiftedNumbers
from spmd.program.optim._preparation import equal_counters
from spmd.program.optim._traced_state import TracedState
from spmd.program.reads import ObjectPlace, PartPlace
from spmd.program.run._program_devices import ProgramDevices
from spmd.program.run._written_tensors import versions_of, written_since
from spmd.program.trace._arguments import BoundArguments, bind
from spmd.program.trace._buffer_use import TraceRecorder
from spmd.program.trace._captured import Captured, Guarded, PythonWrites, TraceInputs, TraceOutputs, TraceState
from spmd.program.trace._data_assignment import DataAssignments
from spmd.program.trace._device_branches import DeviceBranches
from spmd.program.trace._gradient_flags import GradientFlags
from spmd.program.trace._gradients import Gradients
from spmd.program.trace._host_effects import no_host_random, no_host_writes
from spmd.program.trace._known_inputs import KnownInputs
from spmd.program.trace._results import note_gradients, show_held
from spmd.program.trace._topology_tensors import waiting_for_topology
from spmd.program.trace._trace import TorchState, Trace, TraceOptions
from spmd.program.trace._trace_settings import TraceSettings
from spmd.program.trace._varying_inputs import VaryingInputs
from spmd.program.xla._jaxpr import with_constants_first
from spmd.program.xla._target import likely_platform


class UnequalCounters(TraceAgain):
    """Equal step counters that were read as one got different new values. The next trace reads each on its own."""

    def other_settings(self, settings: TraceSettings) -> TraceSettings:
        return replace(settings, share_counters=False)


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: Reachable,
    settings: TraceSettings,
    *,
    keep_grads: bool,
    debug_nans: bool,
    is_stacked: bool,
    varying: VaryingInputs,
    arguments: dict[int, int | float],
    may_branch: bool = False,
) -> Captured:
    """Trace `fn(*args, **kwargs)` once.

    Args:
        found, settings: what the function can reach, with prepared optimizers; the settings that earlier traces have found.
        keep_grads, debug_nans, is_stacked: see `TraceOptions`; each argument is the first element of a stack, and results will be stacked.
        varying, arguments: what is another number or object in every call; such numbers among the arguments, by position.
        may_branch: whether the function may branch on values that only the device knows. See Note [Device branches].

    Raises:
        TraceAgain, TraceError: it must be traced with other settings; Python needs a value that is known only when the program runs.
    """
    flat = flatten((args, kwargs), classes=found.holders)
    unfilled, changed, known = EmptyContainers(flat.leaves), [*varying.places.values()], varying.counters
    numbers = LiftedNumbers(found.optimizers, changed, arguments, bool(known), settings.has_constant_numbers)
    bound, buffers, hosts = bind([numbers.argument(i) if i in arguments else v for i, v in enumerate(flat.leaves)])
    given = [t for t in bound if is_device_tensor(t)]
    reachable = [*map(buffer_of, (*found.device_tensors(), *found.optimizer_tensors())), *buffers]
    waiting = waiting_for_topology(reachable)
    branches = DeviceBranches(settings.sides, settings.likely_sides) if may_branch and not waiting else None
    arg_values: list[Any] = [waiting.get(b) or b.raw() for b in buffers] + [buffer_of(t.held).host for t in bound if is_host_copy(t)]
    waiting = {b: shape for b, shape in waiting.items() if b not in buffers}
    before, counters = versions_of([*found.device_tensors(), *given]), equal_counters(found.optimizers, are_shared=settings.share_counters)
    with (
        exact_dtypes(),
        no_host_random(settings),
        no_host_writes(found.cpu_tensors(), settings),
        GradientFlags([*found.device_tensors(), *given]) as flags,
        TracedState(found.optimizers) as optim,
        Gradients([*found.leaves(), *given], settings.unmarked) as gradients,
        DataAssignments([*found.named_tensors(), *(("an argument", t) for t in given)]) as memory,
    ):
        trace = Trace(
            fn,
            BoundArguments.of(args, kwargs, flat, (bound, buffers, hosts), is_stacked),
            found,
            settings,
            TraceOptions(keep_grads, debug_nans, likely_platform(reachable)),
            TorchState(optim, gradients, flags, memory, counters),
            numbers,
            None if is_stacked else KnownInputs([*buffers, *arg_values[len(buffers) :]], known),
            branches,
        )
        jaxpr = _jaxpr(trace, waiting, buffers, arg_values)
        unfilled.require_empty()
        trace.arguments.containers.require_one_way(trace.reads, trace.left.effects)
    return _captured(trace, jaxpr, list(waiting), written_since(before), changed)


def _jaxpr(trace: Trace, waiting: dict[Buffer, Any], buffers: list[Buffer], arg_values: list[Any]) -> Any:
    """The jaxpr of a trace.

    Raises:
        OtherSides: the trace has left the function at a branch; with the sides that this call takes so far.
    """
    traced = jax.make_jaxpr(lambda shapes, *given: trace.run([*waiting, *buffers, *trace.arguments.held], shapes, *given))
    with without_jax_note():
        jaxpr = traced(list(waiting.values()), arg_values, np.zeros(trace.numbers.size), default_stream.words())
    if trace.branches is None or not trace.branches.is_left:
        return jaxpr
    numbers, reads, inputs = trace.numbers, trace.recorder.reads, [*buffers, *arg_values[len(buffers) :]]
    numbers.refresh({})
    consts = [reads.get(id(c)) for c in jaxpr.consts]
    devices = ProgramDevices.of([*(b for b in consts if b is not None), *trace.arguments.buffers], trace.recorder.layouts)
    found = trace.branches.decided_by(jaxpr, consts, [*inputs, np.array(numbers.today, np.float64), default_stream.words()], devices)
    found.num_written = sum(not output.is_late for output in trace.reads.journal.outputs)
    raise found


def _captured(trace: Trace, jaxpr: Any, waiting: list[Buffer], versioned: list[torch.Tensor], changed: Sequence[PartPlace]) -> Captured:
    """The result of a trace, after all state was restored.

    Args:
        waiting: buffers without an array (see `waiting_for_topology`).
        versioned: tensors that were written in place.
        changed: places that hold another number or object in every call.
    """
    recorder, arguments, left, inputs = trace.recorder, trace.arguments, trace.left, trace.known
    gradients = trace.torch_state.gradients.left
    copies = _copies(recorder, jaxpr.jaxpr, left.num_outputs)
    position = {id(t): i for i, t in enumerate(arguments.leaves) if is_device_tensor(t)}
    jaxpr = with_constants_first(jaxpr, len(waiting))
    recorder.reads.update((id(c), b) for c, b in zip(jaxpr.consts, waiting, strict=False))
    state_buffers = {buffer_of(t) for t in trace.found.device_tensors()}
    replaced = trace.reads.held(left.effects, trace.is_fixed, [place for place in changed if isinstance(place, ObjectPlace)])
    show_held(left.leaves, replaced.held)
    if trace.options.keep_grads and not arguments.is_stacked:
        note_gradients(left.leaves, left.returned, {id(g): position.get(id(p), p) for p, g in gradients if g is not None})
    looked_up = [cache.look_up for cache in trace.reads.caches.values() if cache.lookups]
    shared = [b for b in arguments.buffers if b in state_buffers]
    reached = {**trace.reads.reached(), **{id(t): t for t in trace.found.device_tensors() if shared and buffer_of(t) in shared}}
    guarded = Guarded(trace.guards(replaced), trace.places, list(recorder.branches.values()), reached)
    return Captured(
        jaxpr=jaxpr,
        inputs=TraceInputs(
            arguments=arguments.buffers,
            num_hosts=len(arguments.hosts),
            shared=shared,
            holders=trace.found.holders,
            numbers=trace.numbers,
            draws=trace.draws,
            known=inputs if inputs is not None and inputs.is_used else None,
        ),
        state=TraceState(
            consts=[recorder.reads.get(id(c)) for c in jaxpr.consts],
            written=list(recorder.written),
            copies=copies,
            slots={b: position.get(id(p), p) for b, p in trace.slots().items()},
            held=replaced.held,
            born=trace.torch_state.optim.born,
            versioned=[position.get(id(t), t) for t in versioned],
        ),
        outputs=TraceOutputs(
            leaves=left.leaves,
            nodes=left.nodes,
            refs=left.refs,
            num_objects=len(arguments.objects),
            finite=[name for name, _ in recorder.finite],
            checks=[check for check, _ in recorder.checks],
            sides=[] if trace.branches is None else trace.branches.sides,
            gradients=[(position.get(id(p), p), grad) for p, grad in gradients],
            flags=[(position.get(id(t), t), flag) for t, flag in trace.torch_state.flags.left],
            kept_gradients=[g for _, g in gradients if g is not None] if trace.options.keep_grads else [],
        ),
        guarded=guarded,
        writes=PythonWrites([e.of_program() for e in left.effects], [*left.actions, *looked_up], recorder.stepped),
        layouts=[*recorder.layouts],
        layers=recorder.layers,
    )


def _copies(recorder: TraceRecorder, jaxpr: Any, num_outputs: int) -> dict[Buffer, Buffer]:
    """The written counters that were read as another one, each with that one: both have the same new value.

    Raises:
        UnequalCounters: a counter has another new value than the one that it was read as.
    """
    results = dict(zip(recorder.written, jaxpr.outvars[num_outputs:], strict=False))
    if any(results.get(b) is not results.get(its) for b, its in recorder.leaders.items()):
        raise UnequalCounters
    return {b: its for b, its in recorder.leaders.items() if b in results}

"""One trace of a user's function: what it computes, which storages it read and wrote, and what it returned.

While jax traces, every device array that the function reads appears as a constant of the jaxpr by identity, so constants
map back to the buffers they came from. Buffers that hold a tracer afterwards were written. Nothing of the user's state
changes here: whatever the outcome, values, gradients and numbers are put back before `capture` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from operator import call as _call
from typing import Any

import jax
import numpy as np
import torch

from mesh import ShardingSpec
from spmd.base._convert import exact_dtypes, host_array
from spmd.base._errors import DroppedValueError, TraceAgain, TraceError, line_of, nothing_swallowed
from spmd.device._arrays import padded
from spmd.device._checks import Check, stacked
from spmd.device._fused_steps import called_directly
from spmd.device._layout import state_sharding_of
from spmd.device._numbers import needs_value
from spmd.device._random_stream import default_stream
from spmd.device._storage import Buffer, buffer_of, is_device_tensor, load, recording
from spmd.patches._constraints import without_branches
from spmd.patches._grad_scaler import scale_of_before
from spmd.patches._running_averages import counting_on_device, replaced_counts
from spmd.program.find._discover import Reachable
from spmd.program.find._objects import ITEMS, EmptyContainers, contents_of, flatten, unflatten
from spmd.program.flow._remat import barrier_on_recompute
from spmd.program.optim._lifted_numbers import LiftedNumbers
from spmd.program.optim._preparation import equal_counters, traceable
from spmd.program.optim._traced_state import Action, TracedState
from spmd.program.reads import PLAIN, Effect, NumberPlace, NumbersNeeded, Place, Recording, ReplacedState, guard_places, guard_who, recorded
from spmd.program.reuse import _guards
from spmd.program.reuse._columns import Guards
from spmd.program.trace._ahead import on_topology, waiting_for_topology
from spmd.program.trace._arguments import ArgumentContainers, bind, require_one_way, with_shared
from spmd.program.trace._buffer_use import TraceRecorder
from spmd.program.trace._gradients import STALE_GRADIENT, Gradients, StaleGradients
from spmd.program.trace._host_values import identity_of, no_host_random, no_host_writes
from spmd.program.trace._known_inputs import KnownInputs
from spmd.program.trace._memory import Memory
from spmd.program.trace._modes import Switches
from spmd.program.trace._remade import Node, Remade
from spmd.program.trace._results import Leaf, Results, is_shown_otherwise, note_gradients, show_held
from spmd.program.trace._watch import report_compiling, restore_functorch, watching
from spmd.program.trace._way import Way
from spmd.program.xla._jaxpr import with_constants_first
from spmd.program.xla._target import likely_platform


class AttributesNeeded(TraceAgain):
    """Attributes of tensors among the arguments were read or written: trace again, they are part of a call's signature."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names = names

    def other_way(self, way: Way) -> Way:
        return replace(way, attributes=way.attributes | self._names)


class CountsNeeded(TraceAgain):
    """An integer that the host knows was needed as a size: trace again, each of them a Python int where it is read."""

    def other_way(self, way: Way) -> Way:
        return replace(way, has_counts=True)


class UnequalCounters(TraceAgain):
    """Equal step counters that were read as one have different new values: trace again with each on its own."""

    def other_way(self, way: Way) -> Way:
        return replace(way, share_counters=False)


@dataclass
class Captured:
    """What one trace found.

    Attributes:
        nodes, refs: how the leaves make the result, the values of the effects and the contents of the objects among the arguments.
        num_objects: how many objects there are among the arguments.
        gradients: (parameter or position of an argument, gradient made in the trace or None) for each one that it left.
        born: (parameter, tensor) of optimizer state that it created; outputs of the program, after the gradients.
        checks: checks of values that it makes: the program's flags of them are one output behind those of the result.
        effects: what it wrote to Python objects, for every call to write; their values follow the function's result in `leaves`.
        stepped: the optimizers that stepped.
        layouts: those to which values were constrained at some point.
        actions: what it changed in the optimizers' state, for every call to change.
        held: what a name holds to which the function assigns anew.
        shared: arguments that the function also reaches without being passed them.
        slots: gradients that were there: buffer, and the parameter or position of an argument whose gradient a call takes.
        copies: state whose new value is that of other state. See Note [Equal counters].
        holders: classes of arguments that are containers even while they hold no tensor.
        known: inputs whose values decided what it is.
        layers: see `TraceRecorder`.
        branches: what Python asked of numbers that vary, each with its answer.
    """

    jaxpr: Any
    arg_buffers: list[Buffer]
    const_buffers: list[Buffer | None]
    written: list[Buffer]
    leaves: list[Leaf]
    nodes: list[Node]
    refs: list[int]
    num_objects: int
    numbers: LiftedNumbers
    draws: int
    guards: Guards
    places: list[Place]
    gradients: list[tuple[torch.Tensor | int, torch.Tensor | None]]
    kept_gradients: list[torch.Tensor]
    host_tensors: int
    finite: list[str]
    checks: list[Check]
    effects: list[Effect]
    stepped: list[torch.optim.Optimizer]
    layouts: list[ShardingSpec]
    actions: list[Action]
    held: list[ReplacedState]
    born: list[tuple[torch.Tensor, torch.Tensor]]
    shared: list[Buffer]
    slots: dict[Buffer, torch.Tensor | int]
    copies: dict[Buffer, Buffer]
    holders: frozenset[type]
    known: KnownInputs | None
    layers: list[list[list[Any]]]
    branches: list[tuple[Callable[[], Any], Any]]

    def refresh(self, numbers: Mapping[int, int | float], arguments: Sequence[Buffer]) -> None:
        """The guards are to be asked about a call with these."""
        self.numbers.refresh(numbers)
        if self.known is not None:
            self.known.refresh(arguments)

    def look(self, arguments: Sequence[Buffer]) -> None:
        """A call with these arguments begins: what a device could only do wrong is raised. See `_indices`."""
        if self.known is not None:
            self.known.look(arguments)

    def let_go(self) -> None:
        """Hold no value of the state that it was traced with, and no gradient that was there: empty buffers stand for these."""
        consts = [c if b is None else None for c, b in zip(self.jaxpr.consts, self.const_buffers, strict=True)]
        self.jaxpr = self.jaxpr.replace(consts=consts)
        empty = {b: Buffer(None, b.shape) for b in self.slots}
        self.const_buffers = [None if b is None else empty.get(b, b) for b in self.const_buffers]
        self.written = [empty.get(b, b) for b in self.written]
        self.slots = {empty[b]: owner for b, owner in self.slots.items()}

    @property
    def is_ahead(self) -> bool:
        """Whether its tensors lie on a topology that is not here."""
        return any(on_topology(b) for b in (*self.arg_buffers, *self.const_buffers, *self.written) if b is not None)


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: Reachable,
    way: Way,
    *,
    keep_grads: bool,
    debug_nans: bool,
    is_stacked: bool,
    varying: Sequence[NumberPlace],
    arguments: dict[int, int | float],
) -> Captured:
    """Trace `fn(*args, **kwargs)` once.

    Args:
        found: modules and optimizers that the function can reach, the optimizers prepared.
        way: in which way.
        keep_grads: gradients left on leaf tensors become outputs of the program.
        debug_nans: the program also says for each module that ran whether its outputs are finite.
        is_stacked: the arguments are the first of a stack each, the results will be stacks.
        varying, arguments: numbers that are inputs: places, and by position among the arguments.

    Raises:
        TraceAgain, TraceError: it must be traced in another way; Python needed a value of the program.
    """
    flat = flatten((args, kwargs), classes=found.holders)
    unfilled = EmptyContainers(flat.leaves)
    numbers = LiftedNumbers(found.optimizers, varying, arguments)
    bound, arg_buffers, host_tensors = bind([numbers.argument(i) if i in arguments else v for i, v in enumerate(flat.leaves)])
    leaves = [*found.leaves(), *(t for t in bound if is_device_tensor(t))]
    reachable = [*map(buffer_of, (*found.device_tensors(), *found.optimizer_tensors())), *arg_buffers]
    waiting = waiting_for_topology(reachable)
    arg_values = [waiting.get(b) or b.raw() for b in arg_buffers] + [host_array(t) for t in host_tensors]
    waiting = {b: shape for b, shape in waiting.items() if b not in arg_buffers}
    counters = equal_counters(found.optimizers) if way.share_counters else {}
    with (
        exact_dtypes(),
        no_host_random(),
        no_host_writes(found.cpu_tensors()),
        TracedState(found.optimizers) as optim,
        Gradients(leaves, way.unmarked) as gradients,
        Memory([*found.named_tensors(), *(("an argument", t) for t in bound if is_device_tensor(t))]) as memory,
    ):
        call, objects = unflatten(bound, flat.tree)
        call = with_shared(call, (args, kwargs))
        first = flat.tree.root.objects.count(None) if is_stacked else 0  # what objects hold is no stack
        held = {id(bound[i]): i for i in range(first, len(bound)) if not isinstance(bound[i], PLAIN)}
        positions = {buffer_of(t): i for i, t in enumerate(bound) if is_device_tensor(t)}
        state = _Trace(
            *(fn, call, objects, held, positions, is_stacked, numbers, found, optim, gradients, memory),
            *(keep_grads, debug_nans, counters, likely_platform(reachable), way),
            None if is_stacked else KnownInputs(arg_buffers),
        )
        jaxpr = jax.make_jaxpr(lambda shapes, *given: state.run([*waiting, *arg_buffers], host_tensors, shapes, *given))(
            list(waiting.values()), arg_values, np.zeros(numbers.size), default_stream.words()
        )
        unfilled.require_empty()
        require_one_way(args, kwargs, state.reads, state.effects)
    return _captured(state, jaxpr, bound, arg_buffers, len(host_tensors), list(waiting))


def _captured(state: _Trace, jaxpr: Any, bound: list[Any], arg_buffers: list[Buffer], num_hosts: int, waiting: list[Buffer]) -> Captured:
    """What the trace found, now that everything is put back."""
    recorder, gradients = state.recorder, state.gradients
    assert recorder is not None
    copies = _copies(recorder, jaxpr.jaxpr, state.num_outputs)
    position = {id(t): i for i, t in enumerate(bound) if is_device_tensor(t)}
    jaxpr = with_constants_first(jaxpr, len(waiting))
    recorder.reads.update((id(c), b) for c, b in zip(jaxpr.consts, waiting, strict=False))
    state_buffers = {buffer_of(t) for t in state.found.device_tensors()}
    assert state.reads is not None
    held = state.reads.held(state.effects, lambda t: buffer_of(t) in arg_buffers or is_shown_otherwise(t, state.leaves))
    show_held(state.leaves, held)
    if state.keep_grads and not state.is_stacked:
        note_gradients(state.leaves, state.returned, {id(g): position.get(id(p), p) for p, g in gradients.left if g is not None})
    return Captured(
        jaxpr=jaxpr,
        arg_buffers=arg_buffers,
        const_buffers=[recorder.reads.get(id(c)) for c in jaxpr.consts],
        written=list(recorder.written),
        leaves=state.leaves,
        nodes=state.nodes,
        refs=state.refs,
        num_objects=len(state.objects),
        numbers=state.numbers,
        draws=state.draws,
        guards=state.guards(recorder, held),
        places=state.places,
        gradients=[(position.get(id(p), p), grad) for p, grad in gradients.left],
        kept_gradients=[g for _, g in gradients.left if g is not None] if state.keep_grads else [],
        host_tensors=num_hosts,
        finite=[name for name, _ in recorder.finite],
        checks=[check for check, _ in recorder.checks],
        effects=state.effects,
        stepped=recorder.stepped,
        layouts=[*recorder.layouts],
        actions=state.actions,
        held=held,
        born=state.optim.born,
        shared=[b for b in arg_buffers if b in state_buffers],
        slots={b: position.get(id(p), p) for b, p in state.slots(recorder).items()},
        copies=copies,
        holders=state.found.holders,
        known=state.known if state.known is not None and state.known.is_used else None,
        layers=recorder.layers,
        branches=list(recorder.branches.values()),
    )


def _copies(recorder: TraceRecorder, jaxpr: Any, num_outputs: int) -> dict[Buffer, Buffer]:
    """Counters that were read as their leader, each with it: those that were written have the leader's new value."""
    results = dict(zip(recorder.written, jaxpr.outvars[num_outputs:], strict=False))
    if any(results.get(b) is not results.get(its) for b, its in recorder.leaders.items()):
        raise UnequalCounters
    return {b: its for b, its in recorder.leaders.items() if b in results}


def stored_like(parameter: torch.Tensor, state: torch.Tensor) -> Any:
    """The traced value of a gradient or optimizer state that leaves the program, padded as its parameter is."""
    value, spec = load(state), state_sharding_of(parameter)
    if spec is None or parameter.shape != state.shape or spec.padded_shape(value.shape) == value.shape:
        return value
    return padded(value, spec.to_jax())


@dataclass
class _Trace:
    """The body of one trace and what it leaves behind."""

    fn: Callable[..., Any]
    call: tuple[tuple[Any, ...], dict[str, Any]]
    objects: list[Any]
    held: dict[int, int]
    positions: dict[Buffer, int]
    is_stacked: bool
    numbers: LiftedNumbers
    found: Reachable
    optim: TracedState
    gradients: Gradients
    memory: Memory
    keep_grads: bool
    debug_nans: bool
    counters: dict[Buffer, Any]
    platform: str
    way: Way
    known: KnownInputs | None
    recorder: TraceRecorder | None = None
    arguments: frozenset[Buffer] = frozenset()
    leaves: list[Leaf] = field(default_factory=list[Leaf])
    nodes: list[Node] = field(default_factory=list[Node])
    refs: list[int] = field(default_factory=list[int])
    draws: int = 0
    num_outputs: int = 0
    containers: ArgumentContainers = field(init=False)
    places: list[Place] = field(default_factory=list[Place])
    returned: list[torch.Tensor | None] = field(default_factory=list[torch.Tensor | None])
    reads: Recording | None = None
    effects: list[Effect] = field(default_factory=list[Effect])
    actions: list[Action] = field(default_factory=list[Action])

    def __post_init__(self) -> None:
        self.containers = ArgumentContainers(self.call, self.objects)

    def run(self, buffers: list[Buffer], hosts: list[torch.Tensor], shapes: list[Any], values: list[Any], vector: Any, words: Any) -> Any:
        """Called by jax: install tracers, run the user's function, collect outputs, put everything back."""
        self.arguments = frozenset(buffers[len(shapes) :])
        values = [*shapes, *values]
        inputs = dict(zip(map(identity_of, hosts), values[len(buffers) :], strict=True))
        recorder = self.recorder = self._recorder(words, inputs, values[len(shapes) : len(buffers)])
        token = recording.set(recorder)
        try:
            for buffer, value in zip(buffers, values, strict=False):
                recorder.touched[buffer] = (buffer.value, buffer.host)
                buffer.value, buffer.host = value, None
                buffer.reads.clear()
            self.gradients.mark()
            with ExitStack() as stack:
                stack.enter_context(self.numbers.in_place(vector, recorder.on_branch))
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                run_module = stack.enter_context(watching(recorder, self.found, self.debug_nans))
                stack.enter_context(report_compiling())
                stack.enter_context(barrier_on_recompute())
                stack.enter_context(counting_on_device())
                stack.enter_context(without_branches())
                stack.enter_context(scale_of_before())
                stack.enter_context(called_directly())
                stack.enter_context(traceable(self.found.optimizers))
                stack.enter_context(restore_functorch())
                reads = self.reads = stack.enter_context(recorded(*self._known_to_reads()))
                reads.run_module, reads.note_gradient = run_module, self.gradients.note_read
                reads.fixes_indices, reads.has_own_context = self.way.fixes_indices, self.way.has_own_context
                args, kwargs = self.call
                with nothing_swallowed(), Switches() as switches:
                    run_in = copy_context().run if self.way.has_own_context else _call
                    result = run_in(reads.run, self.fn, *args, **kwargs)
                if not (names := reads.attribute_names(self.containers.tensors)) <= self.way.attributes:
                    raise AttributesNeeded(names)
                self.effects = [*map(self.containers.of_tensor, run_in(reads.effects)), *self.containers.effects()]
                self.optim.note(recorder.newborn.__contains__)
                self.memory.write_back()
            flags = [stacked([flag for _, flag in recorder.checks])] if recorder.checks else []
            outputs = [*self._outputs(result, recorder), *flags, *(flag for _, flag in recorder.finite)]
            self.num_outputs = len(outputs)
            self.gradients.collect(recorder.newborn.__contains__, self.keep_grads)
            kept = [stored_like(p, g) for p, g in self.gradients.left if g is not None] if self.keep_grads else []
            kept.extend(stored_like(p, t) for p, t in self.optim.born)
            self.actions = [*self.optim.effects, *switches.effects]
            if self.known is not None:
                self.known.follow(recorder.written, recorder.reads, recorder.counts)
            return outputs, [b.value for b in recorder.written], kept
        except DroppedValueError as error:
            if STALE_GRADIENT in str(error) and not isinstance(error, StaleGradients):
                raise self.gradients.stale() from error
            raise
        except (TypeError, IndexError, AttributeError, RuntimeError) as error:
            self._raise_meant(error, recorder)
            raise
        finally:
            recording.reset(token)
            self.draws = default_stream.draws - recorder.start_draws
            default_stream.draws = recorder.start_draws
            recorder.put_back()
            self.gradients.drop()

    def _raise_meant(self, error: Exception, recorder: TraceRecorder) -> None:
        """Raise what an exception of the function means: another trace where a number should be Python's own, or an error of ours.

        No name is bound to an exception: it would hold its frame, and the frame what the function had.
        """
        text = str(error)
        if isinstance(error, TraceError) and recorder.knows_counts():
            raise CountsNeeded from error
        if isinstance(error, RuntimeError) and not any(words in text for words in ("scalar.isIntegral", "of Varying")):  # C++, of a size
            return
        names_number = any(name in text for name in ("SymFloat", "SymBool", "NumberNode"))
        if isinstance(error, AttributeError):  # a method of int or float
            if names_number and recorder.knows_counts():
                raise CountsNeeded from error
            if names_number:
                raise needs_value("number (for a method)", line_of(error)) from error
            return
        # an object whose `__index__` gives a varying number; a slice; a size, which C++ takes for no argument at all
        is_index = any(words in text for words in ("only integers, slices", "slice indices must be integers", "positional argument but"))
        if "Varying" in text or ((names_number or is_index) and self.numbers.has_varying):
            raise NumbersNeeded from error
        if recorder.knows_counts():
            raise CountsNeeded from error
        if names_number or "slice indices must be integers" in text:  # a place where Python takes nothing but its own numbers
            raise needs_value("number (index, range, format)", line_of(error)) from error

    def _recorder(self, words: Any, inputs: dict[Any, Any], arguments: list[Any]) -> TraceRecorder:
        if self.known is not None:
            self.known.install(arguments)
        draws, counts = default_stream.draws, self.way.has_counts
        return TraceRecorder(words, inputs, draws, self.counters, platform=self.platform, known=self.known, has_counts=counts)

    def _known_to_reads(self) -> tuple[dict[int, str], dict[int, Any], set[Any]]:
        """Names of the modules, the dicts they hold, and what the trace may change as it likes: copies of arguments, optimizers' state."""
        modules = list(self.found.all_modules())
        names = {id(module): name for name, module in modules}
        kinds = ("_parameters", "_buffers", "_modules")
        owners = {id(d): m for _, m in modules for d in (m.__dict__, *(m.__dict__[kind] for kind in kinds))}
        ignored = {id(o) for optimizer in self.found.optimizers for o in (optimizer.state, *optimizer.state.values())}
        return names, owners, ignored | self.containers.ids | replaced_counts(modules)

    def _outputs(self, result: Any, recorder: TraceRecorder) -> list[Any]:
        flat = self._taken_apart(result)
        for value in flat:
            if is_device_tensor(value) and (why := recorder.unwritable.get(buffer_of(value))) is not None:
                raise why
        known = {id(t): t for t in (*self.found.device_tensors(), *self.found.optimizer_tensors())}
        state = set(map(buffer_of, known.values()))
        results = Results(
            self.containers.paths,
            self.held,
            self.positions,
            set(known),
            state,
            self.is_stacked,
            recorder.newborn.__contains__,
            self.numbers.stand_ins,
        )
        outputs = results.outputs(flat)
        self.numbers.stand_ins = {}
        self.leaves, self.returned = results.leaves, results.returned
        return outputs

    def _taken_apart(self, result: Any) -> list[Any]:
        """The leaves of the result, of what was written and of what the objects among the arguments hold."""
        reads = self.reads
        assert reads is not None
        taken = Remade(lambda value: id(value) in self.numbers.stand_ins or reads.is_before(value))
        refs = [taken.take(result), *(taken.take(effect.value, effect.is_content) for effect in self.effects)]
        contents = list(map(contents_of, self.objects))
        for content in contents:
            taken.take(content.get(ITEMS), is_new=True)
        refs += [taken.take(content, is_new=True) for content in contents]
        self.nodes, self.refs = taken.ordered(refs)
        return taken.leaves

    def slots(self, recorder: TraceRecorder) -> dict[Buffer, torch.Tensor]:
        """The gradients that a call takes from their leaves."""
        fixed = {buffer_of(t) for t in self.found.device_tensors()} | self.arguments
        return self.gradients.slots(recorder.touched.__contains__, fixed)

    def guards(self, recorder: TraceRecorder, held: Sequence[ReplacedState]) -> Guards:
        """Everything the trace baked in."""
        ran, roots = recorder.modules, {id(m) for _, m in self.found.modules.values()}
        modules = [(name, m) for name, m in self.found.all_modules() if id(m) in ran or id(m) in roots]
        assert self.reads is not None
        self.places = self.reads.settled(self.numbers.expected)
        self.reads.expect_missing()
        guards, slots = Guards(), self.slots(recorder)
        for optimizer in self.found.optimizers:
            if any(optimizer is stepped for stepped in recorder.stepped):
                _guards.guard_optimizer(guards, optimizer, self.numbers)
        _guards.guard_numbers(guards, self.numbers)
        guard_places(guards, self.places)
        tensors = [(n, t) for n, t in self.found.named_tensors() if buffer_of(t) in recorder.touched]
        _guards.guard_modules(guards, modules, tensors)
        _guards.guard_storages(guards, tensors)
        _guards.guard_annotations(guards, [b for b in recorder.touched if b not in self.arguments and b not in slots])
        _guards.guard_equal_counters(guards, recorder.leaders)
        for evaluate, outcome in recorder.branches.values():
            _guards.guard_branch(guards, self.numbers, evaluate, outcome)
        for tensor in recorder.host_reads:
            _guards.guard_host_tensor(guards, tensor)
        if self.known is not None:
            self.known.guard(guards)
        self.memory.guard(guards)
        self.gradients.guard(guards, recorder.touched.__contains__, slots, self.held)
        guard_who(guards, held)
        return guards

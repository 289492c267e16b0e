"""The body of one trace, which jax calls: it puts tracers into buffers, runs the user's function, and restores all state.

It does not know how a trace becomes a program (`_capture`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import call as _call
from typing import Any

import torch

from spmd.base._errors import DroppedValueError, TraceAgain, TraceError, line_of, nothing_swallowed, text_of
from spmd.device._checks import stacked
from spmd.device._fused_steps import called_directly
from spmd.device._numbers import needs_value
from spmd.device._random_stream import default_stream
from spmd.device._storage import Buffer, buffer_of, is_device_tensor, recording
from spmd.patches._causal_masks import without_mask_reads
from spmd.patches._constraints import without_branches
from spmd.patches._grad_scaler import traceable_grad_scaler
from spmd.patches._printed_tensors import printing_refused_by_name
from spmd.patches._running_averages import counting_on_device, replaced_counts
from spmd.program.find._discover import Reachable
from spmd.program.find._objects import ITEMS, contents_of
from spmd.program.find._static import attributes_of
from spmd.program.flow._remat import barrier_on_recompute
from spmd.program.optim._lifted_numbers import LiftedNumbers
from spmd.program.optim._preparation import drop_unused_state, traceable
from spmd.program.optim._state_rules import stored_like
from spmd.program.optim._traced_state import Action, TracedState
from spmd.program.reads import Effect, NumbersNeeded, Place, Recording, Replacements, guard_places, recorded
from spmd.program.reads._library import is_library, is_of_python
from spmd.program.reuse import _guards
from spmd.program.reuse._columns import Guards
from spmd.program.trace._arguments import BoundArguments
from spmd.program.trace._buffer_use import TraceRecorder
from spmd.program.trace._data_assignment import DataAssignments
from spmd.program.trace._device_branches import DeviceBranches, SideNeeded
from spmd.program.trace._flop_counts import FlopCounts
from spmd.program.trace._gradient_flags import GradientFlags
from spmd.program.trace._gradients import STALE_GRADIENT, Gradients, StaleGradients
from spmd.program.trace._host_arguments import require_unchanged
from spmd.program.trace._known_inputs import KnownInputs
from spmd.program.trace._modes import Switches
from spmd.program.trace._module_calls import report_compiling, require_known_state, restore_functorch, watching
from spmd.program.trace._object_parts import existing_within
from spmd.program.trace._output_tree import Node, OutputTree
from spmd.program.trace._results import Leaf, Results, is_shown_otherwise
from spmd.program.trace._trace_settings import TraceSettings


class AttributesNeeded(TraceAgain):
    """Attributes of tensor arguments were read or written. The next trace has them in the signature of a call."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names = names

    def other_settings(self, settings: TraceSettings) -> TraceSettings:
        return replace(settings, attributes=settings.attributes | self._names)


class CountsNeeded(TraceAgain):
    """An integer that the host knows was needed as a size. In the next trace each such integer is a Python int when it is read."""

    def other_settings(self, settings: TraceSettings) -> TraceSettings:
        return replace(settings, has_counts=True)


@dataclass(frozen=True)
class TraceOptions:
    """Options of one trace.

    Attributes:
        keep_grads: gradients left on leaf tensors become outputs of the program.
        debug_nans: for each module that runs, the program also outputs whether its outputs are finite.
        platform: the platform that the program is likely compiled for.
    """

    keep_grads: bool
    debug_nans: bool
    platform: str


@dataclass(frozen=True)
class TorchState:
    """The torch state that a trace changes, each kind as a context that restores it.

    Attributes:
        optim: state of the optimizers.
        gradients: `.grad` of leaf tensors.
        flags: `requires_grad` of leaf tensors.
        memory: storages of tensors, which `.data = new` replaces.
        counters: step counters of optimizers that are read as one. See Note [Equal counters].
    """

    optim: TracedState
    gradients: Gradients
    flags: GradientFlags
    memory: DataAssignments
    counters: dict[Buffer, Any]


@dataclass
class FunctionLeft:
    """The function's results, and its writes to Python objects.

    Attributes:
        leaves, nodes, refs: see `TraceOutputs`.
        returned: see `Results`.
        effects, actions: see `PythonWrites`.
        arrays: the program's traced output values; empty after the trace.
        num_outputs: the number of outputs, including flags.
    """

    leaves: list[Leaf]
    nodes: list[Node]
    refs: list[int]
    returned: list[torch.Tensor | None]
    effects: list[Effect]
    arrays: list[Any]
    actions: list[Action] = field(default_factory=list[Action])
    num_outputs: int = 0


_IN_C = ("scalar.isIntegral", "of Varying", "symbolic float")  # in errors of torch's C++ that are of numbers
_OF_NUMBERS = ("'int' object has no attribute", "'float' object has no attribute")
_PATCHES: tuple[Callable[[], AbstractContextManager[None]], ...] = (
    report_compiling,
    barrier_on_recompute,
    counting_on_device,
    without_branches,
    without_mask_reads,
    traceable_grad_scaler,
    printing_refused_by_name,
    called_directly,
)
"""The patches of torch during a trace, outermost first."""


def is_refused_by_library(error: Exception) -> bool:
    """Whether code of Python's library or of torch raised the error, which may have been given a number that varies."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    name = frames[-1].f_globals.get("__name__")
    return is_of_python(name) or str(name).partition(".")[0] == "torch"


def is_raised_in_library(error: Exception) -> bool:
    """Whether a function of a library raised the error: it may not take a number that varies, which an object of the user's holds."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return is_library(frames[-1].f_globals.get("__name__"))


@dataclass
class Trace:
    """One trace and its records.

    Attributes:
        fn, arguments: the function, and the placeholders of its arguments.
        found: the modules, tensors and optimizers that it can reach.
        settings, options: how it is traced.
        torch_state: the torch state that it may change.
        numbers: Python numbers that are inputs.
        known: inputs whose values the host knows; None for stacked arguments.
        branches: branches on values that only the device knows; None if each is refused.
        recorder: record of the buffers that it uses. Set by `run`.
        reads: record of the Python values that it reads and writes. Set by `run`.
        left: its results and writes. Set by `run`.
        draws: number of draws from the random stream.
        places: places of the Python values that it read. Set by `guards`.
    """

    fn: Callable[..., Any]
    arguments: BoundArguments
    found: Reachable
    settings: TraceSettings
    options: TraceOptions
    torch_state: TorchState
    numbers: LiftedNumbers
    known: KnownInputs | None
    branches: DeviceBranches | None
    recorder: TraceRecorder = field(init=False)
    reads: Recording = field(init=False)
    left: FunctionLeft = field(init=False)
    draws: int = 0
    places: list[Place] = field(default_factory=list[Place])

    def run(self, buffers: list[Buffer], shapes: list[Any], values: list[Any], vector: Any, words: Any) -> Any:
        """Install tracers, run the user's function, collect outputs, and restore all state. jax calls this.

        `buffers`: those without an array, with the tracers `shapes`, then those of device and CPU arguments, with the tracers `values`.
        `vector`, `words`: of numbers and the random state. Returns outputs, written buffers, gradients and optimizer state.
        """
        values, gradients, optim = [*shapes, *values], self.torch_state.gradients, self.torch_state.optim
        recorder = self.recorder = self._recorder(words, values[len(shapes) :])
        token = recording.set(recorder)
        try:
            for buffer, value in zip(buffers, values, strict=True):
                recorder.touched.setdefault(buffer, (buffer.value, buffer.host))
                buffer.value, buffer.host = value, None
                buffer.reads.clear()
            gradients.mark()
            with ExitStack() as stack:
                stack.enter_context(self.numbers.in_place(vector, recorder.on_branch))
                optim.mark()
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                run_module = stack.enter_context(watching(recorder, self.found, self.options.debug_nans))
                for patch in _PATCHES:
                    stack.enter_context(patch())
                stack.enter_context(traceable(self.found.optimizers))
                stack.enter_context(restore_functorch())
                reads = self.reads = stack.enter_context(recorded(*self._recording_arguments()))
                self._set_up(reads, run_module)
                (args, kwargs), containers = self.arguments.call, self.arguments.containers
                with nothing_swallowed(), FlopCounts() as flops, Switches() as switches:
                    run_in = copy_context().run if self.settings.has_own_context else _call
                    result = run_in(reads.run, self.fn, *args, **kwargs)
                self._require_no_other_settings(recorder, reads)
                require_unchanged(zip(self.arguments.copies, self.arguments.hosts, strict=True))
                effects, elements = [*containers.of_tensors(run_in(reads.effects)), *containers.effects()], self.numbers.elements()
                optim.note(recorder.newborn.__contains__)
                self.torch_state.memory.write_back()
            left = self.left = self._left(result, effects)
            outputs = [*left.arrays, *self._flags()]
            left.arrays, left.num_outputs = [], len(outputs)
            gradients.collect(recorder.newborn.__contains__, self.options.keep_grads)
            kept = gradients.values() if self.options.keep_grads else []
            kept.extend(stored_like(p, t) for p, t in optim.born)
            left.actions = [*optim.effects, *(lambda leave=leave: leave for leave in (*switches.effects, *flops.effects))]
            if self.known is not None:
                self.known.follow(recorder.written, recorder.reads, recorder.counts, elements)
            return outputs, [b.value for b in recorder.written], kept
        except DroppedValueError as error:
            if STALE_GRADIENT in str(error) and not isinstance(error, StaleGradients):
                raise gradients.stale() from error
            raise
        except Exception as error:
            if self.branches is not None and (isinstance(error, SideNeeded) or self._may_be_of_guess(error)):
                return self.branches.leave()
            self._translate_error(error, recorder)
            raise
        finally:
            recording.reset(token)
            recorder.put_back()
            self.draws = default_stream.draws - recorder.start_draws
            default_stream.draws = recorder.start_draws
            gradients.drop()

    def _flags(self) -> list[Any]:
        """The outputs after those of the function: flags of checks and of modules, and the conditions of branches."""
        checks, finite = [flag for _, flag in self.recorder.checks], [flag for _, flag in self.recorder.finite]
        sides = [] if self.branches is None else self.branches.conditions
        return [*([stacked(checks)] if checks else []), *finite, *([stacked(sides)] if sides else [])]

    def _set_up(self, reads: Recording, run_module: Any) -> None:
        """Connect the record of Python values with the others, and give it its settings."""
        settings, journal = self.settings, reads.journal
        reads.run_module, reads.note_gradient, reads.met = run_module, self.torch_state.gradients.note_read, self.recorder.met
        reads.lengths, reads.given = self.numbers.lengths, self.arguments.containers.originals
        reads.has_input = self.numbers.has_input
        reads.fixes_indices, reads.has_constant_texts, reads.has_own_context, reads.late.takes_all, *sets = settings.of_reads
        reads.imported, reads.no_choices = sets
        reads.leaves_cached = settings.leaves_cached and not self.arguments.is_stacked
        reads.late.is_stacked, reads.late.known = self.arguments.is_stacked, frozenset(id(t) for _, t in self.found.cpu_tensors())
        journal.repeats_outputs, journal.num_written = bool(settings.sides), settings.num_written
        journal.puts_off = not self.arguments.is_stacked and settings.puts_off_outputs

    def _may_be_of_guess(self, error: Exception) -> bool:
        """Whether the function may have raised the error because the trace has guessed a side. See Note [Device branches]."""
        return self.branches is not None and self.branches.has_guesses and not isinstance(error, TraceAgain)

    def _require_no_other_settings(self, recorder: TraceRecorder, reads: Recording) -> None:
        """Raise TraceAgain if the trace must be repeated with other settings."""
        if not (names := reads.attribute_names(self.arguments.containers.tensors)) <= self.settings.attributes:
            raise AttributesNeeded(names)
        require_known_state(recorder, self.found)

    def _translate_error(self, error: Exception, recorder: TraceRecorder) -> None:
        """Translate an exception of the function: raise TraceAgain if a number should be a Python number, or an error with a fix.

        No exception is bound to a name: it would keep its frame alive, and the frame the values of the function.
        """
        text = text_of(error)
        if self.numbers.has_varying and isinstance(error, RecursionError):  # of JSON's encoder, which asks for each number again
            raise NumbersNeeded from error
        if not isinstance(error, (TypeError, IndexError, AttributeError, RuntimeError)):
            if self.numbers.has_varying and ("Varying" in text or "Circular reference" in text or is_refused_by_library(error)):
                raise NumbersNeeded from error
            return
        if isinstance(error, TraceError) and recorder.knows_counts():
            raise CountsNeeded from error
        if isinstance(error, RuntimeError) and not any(words in text for words in _IN_C):  # C++, of a size
            return
        names_number = any(name in text for name in ("SymFloat", "SymBool", "NumberNode", "symbolic float", "Pending"))
        if isinstance(error, AttributeError):  # a method of int or float
            if names_number and recorder.knows_counts():
                raise CountsNeeded from error
            if names_number:
                raise needs_value("number (for a method)", line_of(error)) from error
            if self.numbers.has_varying and text.startswith(_OF_NUMBERS):
                raise NumbersNeeded from error
            return
        # an object whose `__index__` returns a varying number; a slice; a size, which C++ reports as a missing argument
        is_index = any(words in text for words in ("only integers, slices", "slice indices must be integers", "positional argument but"))
        is_of_library = type(error) is TypeError and not names_number and is_raised_in_library(error)
        if "Varying" in text or ((names_number or is_index or is_of_library) and self.numbers.has_varying):
            raise NumbersNeeded from error
        if recorder.knows_counts():
            raise CountsNeeded from error
        if names_number:  # Python accepts only its own numbers here
            raise needs_value("number or text (index, range, format)", line_of(error)) from error

    def _recorder(self, words: Any, arguments: list[Any]) -> TraceRecorder:
        if self.known is not None:
            self.known.install(arguments)
        return TraceRecorder(
            words,
            default_stream.draws,
            self.torch_state.counters,
            platform=self.options.platform,
            known=self.known,
            is_stacked=self.arguments.is_stacked,
            has_counts=self.settings.has_counts,
            copies_leave=True,
            as_number=self.numbers.known,
            branches_on_device=self.branches,
        )

    def _recording_arguments(self) -> tuple[dict[int, str], dict[int, Any], set[Any]]:
        """What the recording must know: names of modules, by id; the module of each dict of a module, by id of the dict; and ids of objects
        whose reads and writes are not recorded (copies of arguments, optimizer state)."""
        modules = list(self.found.all_modules())
        names = {id(module): name for name, module in modules}
        kinds = ("_parameters", "_buffers", "_modules")
        owners = {id(d): m for _, m in modules for d in (m.__dict__, *(m.__dict__[kind] for kind in kinds))}
        ignored = {
            id(o) for optimizer in self.found.optimizers for o in (optimizer.state, *optimizer.state.values()) if isinstance(o, dict)
        }
        return names, owners, ignored | self.arguments.containers.ids | replaced_counts(modules)

    def _left(self, result: Any, effects: list[Effect]) -> FunctionLeft:
        """The function's results and written values, taken apart and classified."""
        self.numbers.require_tensors_kept(effects)
        arguments, recorder = self.arguments, self.recorder
        flat, nodes, refs = self._flattened_results(result, effects)
        for value in flat:
            if is_device_tensor(value) and (why := recorder.unwritable.get(buffer_of(value))) is not None:
                raise why
        known = {id(t): t for t in (*self.found.device_tensors(), *self.found.optimizer_tensors())}
        results = Results(
            arguments.containers.paths,
            arguments.owned,
            arguments.positions,
            set(known),
            set(map(buffer_of, known.values())),
            arguments.is_stacked,
            recorder.newborn.__contains__,
            self.reads.is_before,
            self.numbers.stand_ins,
            [place.holder for place in self.reads.read_places()],
        )
        arrays = results.outputs(flat)
        self.numbers.stand_ins = {}
        return FunctionLeft(results.leaves, nodes, refs, results.returned, effects, arrays)

    def _flattened_results(self, result: Any, effects: list[Effect]) -> tuple[list[Any], list[Node], list[int]]:
        """The leaves, nodes and refs of the result, of the written values, and of the contents of the objects among the arguments."""
        is_stacked = self.arguments.is_stacked
        stand_ins = self.numbers.stand_ins
        taken = OutputTree(lambda value: id(value) in stand_ins or self.reads.is_before(value), is_stacked, stand_ins)
        refs = [taken.take(result), *(taken.take(effect.value, effect.is_content) for effect in effects)]
        contents = list(map(contents_of, self.arguments.objects))
        for content in contents:
            taken.take(content.get(ITEMS), is_new=True)
        refs += [taken.take(content, is_new=True) for content in contents]
        for leaf in self.torch_state.gradients.leaves if self.options.keep_grads else ():
            taken.take_gradient(leaf)
        if is_stacked and taken.pending:
            raise taken.pending[0].needed("value of each step (with steps_per_call)")
        self.one_call = taken.one_call
        self.shared = existing_within(taken.shared, self.reads.is_before)
        return taken.leaves, *taken.ordered(refs)

    def is_fixed(self, value: Any) -> bool:
        """Whether a value that the trace found in a place has another role too: it is an argument, or part of what all calls share.

        A tensor also has one if another tensor that the function can reach has the same memory.
        """
        if not is_device_tensor(value):
            return id(value) in self.shared
        buffer = buffer_of(value)
        has_other = any(t is not value for t in self._reachable.get(buffer, ()))
        return has_other or buffer in self.arguments.buffers or is_shown_otherwise(value, self.left.leaves)

    @cached_property
    def _reachable(self) -> dict[Buffer, list[torch.Tensor]]:
        """The tensors that the function can reach, by their memory."""
        found: dict[Buffer, list[torch.Tensor]] = {}
        for _, tensor in self.found.named_tensors():
            found.setdefault(buffer_of(tensor), []).append(tensor)
        return found

    def slots(self) -> dict[Buffer, torch.Tensor]:
        """The gradients that each call takes from the leaf tensors, by the gradient's buffer in the trace."""
        gradients = self.torch_state.gradients
        with_attributes = [g for g in gradients.kept if id(attributes_of(g)) in self._attributes_used]
        fixed = {*map(buffer_of, (*self.found.device_tensors(), *with_attributes)), *self.arguments.buffers}
        return gradients.slots(self.recorder.touched.__contains__, fixed)

    @cached_property
    def _attributes_used(self) -> set[int]:
        """Ids of the attribute dicts that the function read or wrote."""
        return {id(place.holder) for place in self.reads.places.values()} | {id(effect.holder) for effect in self.left.effects}

    def guards(self, replaced: Replacements) -> Guards:
        """Guards on everything that the trace assumed, in the order of evaluation."""
        recorder = self.recorder
        ran, roots = recorder.modules, {id(m) for _, m in self.found.modules.values()}
        modules = [(name, m) for name, m in self.found.all_modules() if id(m) in ran or id(m) in roots]
        self.places = self.reads.settled(self.numbers.expected)
        self.reads.expect_missing()
        guards, slots, arguments = Guards(), self.slots(), frozenset((*self.arguments.buffers, *self.arguments.held))
        for optimizer, created in self.found.prepared:
            drop_unused_state(optimizer, created, recorder.touched.__contains__)
        for optimizer in self.found.optimizers:
            if any(optimizer is stepped for stepped in recorder.stepped):
                _guards.guard_optimizer(guards, optimizer, self.numbers)
        if self.known is not None:
            self.known.guard(guards)
        _guards.guard_numbers(guards, self.numbers)
        guard_places(guards, self.places)
        asked, flags, named = self.reads.tensors_asked(), self.reads.tensors_asked("requires_grad"), list(self.found.named_tensors())
        tensors = [(n, t) for n, t in named if buffer_of(t) in recorder.touched or id(t) in asked]
        known = {*(id(t) for _, t in named), *self.arguments.owned}
        _guards.guard_modules(guards, modules, [*tensors, *(("a tensor", t) for t in flags.values() if id(t) not in known)])
        _guards.guard_storages(guards, tensors)
        _guards.guard_annotations(guards, [b for b in recorder.touched if b not in arguments and b not in slots])
        _guards.guard_equal_counters(guards, recorder.leaders)
        for evaluate, outcome in recorder.branches.values():
            _guards.guard_branch(guards, self.numbers, evaluate, outcome)
        for tensor in recorder.host_reads:
            _guards.guard_host_tensor(guards, tensor)
        self.torch_state.memory.guard(guards)
        self.torch_state.gradients.guard(guards, recorder.touched.__contains__, slots, self.arguments.owned)
        replaced.guard(guards, recorder.written, recorder.reads.values())
        if self.one_call.titles:
            guards.add(self.one_call.guard)
        return guards

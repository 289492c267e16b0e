"""Compiles a captured trace to one executable with donated state and fixed shardings, and calls it.

A call collects the arrays of the state's buffers, runs the executable and stores the results in the buffers. Python does no work per
operation. State is written only after the executable was dispatched, so an error before that leaves all state unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
import torch

from mesh import size_text
from spmd.base._errors import NonFiniteError, SpmdError, TraceError, message
from spmd.base._jax import inline_jaxpr
from spmd.base._signals import handlers_wait
from spmd.base._torch import increment_version
from spmd.device._arrays import fetched, is_readable
from spmd.device._checks import note, raise_known
from spmd.device._pacing import note_call
from spmd.device._random_stream import default_stream
from spmd.device._shared_arrays import copy_shared, donatable
from spmd.device._storage import Buffer, buffer_of
from spmd.device._trace_lock import memory_is_gone, was_taken
from spmd.device._uploaded import note_sent
from spmd.program._job_checks import compiling, require_sound, watched
from spmd.program._options import Options
from spmd.program._program_digest import program_digest
from spmd.program.find._objects import fill, flatten
from spmd.program.flow._repeat import repeated, require_no_writes
from spmd.program.reads._repeated_outputs import take_written
from spmd.program.roll._rolled import Loop
from spmd.program.roll._rolled_program import RolledProgram, repeats_left, rolled_program
from spmd.program.run._argument_arrays import ArgumentArrays
from spmd.program.run._call_gradients import CallGradients
from spmd.program.run._held_state import HeldState
from spmd.program.run._host_inputs import HostInputs
from spmd.program.run._program_call import ProgramCall
from spmd.program.run._program_devices import ProgramDevices
from spmd.program.run._state_arrays import StateArrays
from spmd.program.run._written_tensors import WrittenTensors
from spmd.program.stored import StoredTrace
from spmd.program.trace._arguments import of_caller, put_in_argument
from spmd.program.trace._captured import Captured
from spmd.program.trace._device_branches import other_sides
from spmd.program.trace._known_inputs import check_arguments
from spmd.program.trace._memory_order import stored_values
from spmd.program.trace._output_tree import rebuilt
from spmd.program.trace._results import Leaf, made
from spmd.program.xla._channels_last import has_convolution, run_channels_last
from spmd.program.xla._compilation import Compilation, CompileRequest, Making, Timings
from spmd.program.xla._digest import NoDigest
from spmd.program.xla._executable import Executable
from spmd.program.xla._target import mesh_of

Steps = tuple[Callable[[ProgramCall], None], ...]


class Program(Executable):
    """One executable for one signature of a step.

    Attributes:
        captured: the trace that it is compiled from.
        mesh: the mesh of its state and arguments, or None (one device).
        is_ahead: the mesh is of a topology without local devices: the program is compiled and cannot be run.
        digest: cache key of its executable; None if the executable cannot be cached.
        no_digest: what prevents a digest, as a noun phrase.
        compilation: the compilation of the executable, which may still be running in another thread.
        sides: the sides of its branches on values that only the device knows. See Note [Device branches].
    """

    def __init__(
        self,
        captured: Captured,
        arg_buffers: list[Buffer],
        options: Options,
        name: str,
        spent: tuple[float, float],
        making: Making,
        stored: StoredTrace | None = None,
    ) -> None:
        """Start the compilation.

        Args:
            captured: the trace.
            arg_buffers: buffers of the device tensors among the arguments of the call.
            options, name: of the step.
            spent: seconds for preparing optimizers and for tracing.
            making: where to look for executables, and whether to compile in another thread.
            stored: the trace of an earlier process that `captured` is of; None after a trace of this process.
        """
        self.captured, self.options, self._stored = captured, options, stored
        self.sides = tuple(side.taken for side in captured.outputs.sides)
        written, read, written_args = _state_of(captured)
        self.devices = ProgramDevices.of((*written, *read, *captured.inputs.arguments), captured.layouts)
        self.mesh, self.is_ahead = self.devices.mesh, self.devices.is_ahead
        start = time.perf_counter()
        self.rolled = rolled_program(captured, options.roll, self.devices.platform) if stored is None else stored.stacked()
        self._spent = spent[0], spent[1] + time.perf_counter() - start
        if self.rolled is not None:
            written, read = self.rolled.state(written), self.rolled.state(read)
        self.num_donated = sum(b.shape != () for b in written)
        self.written = StateArrays(written, self.devices, is_written=True)
        self.read = StateArrays(read, self.devices, is_written=False)
        self.arguments = ArgumentArrays(len(captured.inputs.arguments), written_args, self.mesh is not None)
        self.inputs = HostInputs(captured.inputs.numbers, captured.inputs.draws, self.devices)
        writes = any(isinstance(e.holder, tuple) or e.held for e in captured.writes.effects) or captured.outputs.num_objects > 0
        self._held = HeldState(captured.state.held, self.written, self.read, written_args, writes)
        self._tensors = WrittenTensors(captured.state.versioned, captured.inputs.holders)
        self._is_advanced = stored is None  # the trace has advanced the versions of the tensors that the first call writes
        self._gradients = CallGradients(captured, options.keep_grads, self.written, self.read)
        self._shows_arguments = captured.outputs.num_objects > 0 or any(
            leaf.kind in ("argument", "part") or isinstance(leaf.owner, int) for leaf in captured.outputs.leaves
        )
        self.watched = watched()
        captured.inputs.numbers.refresh({})  # known only now: the numbers that the trace uses
        self.digest: str | None = None
        self.no_digest = "tensors on a topology without local devices"
        self.compilation = self._compile(arg_buffers, name, making)
        if not self.is_ahead:
            captured.let_go()
            self._gradients.release()
        self._before, self._gathered, self._dispatched, self._after = self._steps()

    def _steps(self) -> tuple[Steps, ...]:
        """The steps of a call that this program needs, in four phases: before the arrays are collected, after that, after the dispatch,
        and after the state was written."""
        captured, known, grads = self.captured, self.captured.inputs.known, self._gradients
        before: list[tuple[object, Callable[[ProgramCall], None]]] = [
            (self.is_ahead, self._refuse_to_run),
            (captured.outputs.checks, lambda call: raise_known()),
            (known is not None and known.checks, self._check_arguments),
            (captured.state.held, self._held.read),
            (grads.has_inputs, grads.bind),
            (grads.has_results, grads.compare),
            (self.rolled, self._gather),
        ]
        gathered: list[tuple[object, Callable[[ProgramCall], None]]] = [
            (self.watched, self._begin_watched),
            (known is not None and known.followed, self._follow),
        ]
        dispatched: list[tuple[object, Callable[[ProgramCall], None]]] = [
            (self.devices.are_paced, self._note_call),
            (captured.outputs.sides, self._require_sides),
            (captured.outputs.finite, self._require_finite),
            (captured.outputs.checks, self._note_checks),
            ("copy" in captured.outputs.output_kinds, self._begin_copies),
        ]
        after: list[tuple[object, Callable[[ProgramCall], None]]] = [
            (captured.state.copies, self._copy_counters),
            (self.arguments.written, self._store_arguments),
            (self._tensors.has_arguments, self._advance_arguments),
            (known is not None and known.followed, self._note_followed),
            (captured.inputs.draws, self._advance),
            (grads.has_inputs, grads.release),
            (grads.has_results, grads.store),
            (grads.flags, grads.store_flags),
            (self.watched, self._end_watched),
        ]
        return tuple(tuple(step for needed, step in steps if needed) for steps in (before, gathered, dispatched, after))

    def __str__(self) -> str:
        spent, memory = self.timings, self.memory()
        platform = self.devices.platform
        written, read = len(self.written.buffers), len(self.read.buffers)
        where = f"1 {platform} device" if self.mesh is None else f"{self.mesh} ({self.mesh.size()} {platform} devices)"
        return "\n".join(
            (
                f"on {where}" + (", which this machine does not have" if self.is_ahead else ""),
                f"{written} tensors written, {read} read; {size_text(memory.alias_bytes)} donated on each device",
                f"traced in {spent.prepare_s + spent.trace_s:.1f} s, lowered in {spent.lower_s:.1f} s, compiled in {spent.compile_s:.1f} s",
                *str(memory).splitlines(),
            )
        )

    def _compile(self, arg_buffers: list[Buffer], name: str, making: Making) -> Compilation:
        """Start the compilation for arguments of the shapes, dtypes and shardings of `arg_buffers`."""
        if not self.is_ahead:
            if self.rolled is not None:
                self.rolled.gather()
            for buffer in (*self.written.buffers, *self.read.buffers, *arg_buffers):
                self.devices.place(buffer)
        state, read, given = (
            list(map(self.devices.example, buffers)) for buffers in (self.written.buffers, self.read.buffers, arg_buffers)
        )
        self.written.shardings, self.read.shardings = [v.sharding for v in state], [v.sharding for v in read]
        self.arguments.shardings = [v.sharding for v in given]
        if self._stored is not None:
            self.digest, devices = self._stored.digest, self.inputs.current()[1].sharding.device_set
            return self._stored.compilation(self, name, [*state, *read, *given], next(iter(devices)).client, making)
        run = self._function()
        if self.options.steps_per_call > 1:
            require_no_writes(self.captured.writes.effects, bool(self.captured.outputs.flags))
            has_args, has_born = bool(self.arguments.written), bool(self.captured.state.born)
            run = repeated(run, self.options.steps_per_call, self.captured.inputs.draws, has_args, has_born, self.options.keep_grads)
        run.__name__ = run.__qualname__ = name
        donated = state[: self.num_donated], [given[i] for i in self.arguments.written]
        pinned = None
        if self.mesh is not None:
            grads = [self._gradient_sharding(g) for g in self.captured.outputs.kept_gradients]
            grads.extend(self.devices.state_sharding(buffer_of(p)) if p.shape == t.shape else None for p, t in self.captured.state.born)
            pinned = (self.written.shardings, [v.sharding for v in donated[1]], grads, self._output_shardings())
        kept, hosts, (numbers, words) = [given[i] for i in self.arguments.kept], self._example_hosts(), self.inputs.current()
        args = (donated, state[self.num_donated :], read, kept, hosts, numbers, words)
        client = None if self.is_ahead else next(iter(words.sharding.device_set)).client
        try:
            self.digest = None if client is None else program_digest(self, name, args, pinned, client)
        except NoDigest as error:
            self.no_digest = str(error)
        check, donate = None, not (self.options.debug_nans or self.captured.outputs.sides)
        if self.watched is not None:
            buffers = [*self.written.buffers, *self.read.buffers]
            check = partial(self.watched.require_same, name, self.mesh, buffers, arg_buffers), self._require_sound
        of = self.mesh, self.devices.platform, self.is_ahead, self.digest, client, self.captured.jaxpr.jaxpr
        return Compilation(CompileRequest(name, run, args, donate, pinned, *of), making=making, check=check)

    @cached_property
    def compiled(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]  (the first access waits)
        """jax's executable. The first access waits for the compilation."""
        with compiling():
            return self.compilation.result()[0]

    @property
    def timings(self) -> Timings:
        """Seconds spent preparing optimizers, tracing, lowering and compiling."""
        return Timings(*self._spent, self.compilation.lower_s, self.compilation.result()[1])

    @property
    def loops(self) -> list[Loop]:
        """The repeated parts, and why a part is not a loop."""
        if self._stored is not None:
            return self._stored.loops
        if self.rolled is None:
            return repeats_left(self.captured, self.devices.platform) if self.options.roll == "auto" else []
        return self.rolled.loops

    def _require_sound(self, compiled: Any) -> None:
        if self.devices.are_paced:
            require_sound(compiled.as_text())

    def _function(self) -> Any:
        """The program as a function of (donated arrays, 0-dim state, read state, arguments, CPU tensors, numbers, random words)."""
        captured, arguments = self.captured, self.arguments
        state, others = self.written.buffers, self.read.buffers
        num_outputs = captured.outputs.num_arrays
        if isinstance(self.rolled, RolledProgram):
            return self.rolled.function(state, others, arguments.written, arguments.kept, num_outputs)
        jaxpr, literal = captured.jaxpr.jaxpr, captured.jaxpr.consts
        slot = {id(b): (0, i) for i, b in enumerate(state)} | {id(b): (1, i) for i, b in enumerate(others)}
        sources = [slot.get(id(b)) if b is not None else None for b in captured.state.consts]
        results = {b: i for i, b in enumerate(captured.state.written)}
        state_results = [results[b] for b in state]
        arg_results = [results[captured.inputs.arguments[i]] for i in arguments.written]
        record = run_channels_last if self.devices.is_on_cpu and has_convolution(jaxpr) else inline_jaxpr

        def run(donated: Any, scalars: Any, read: Any, kept_args: Any, hosts: Any, vector: Any, words: Any) -> Any:
            written, written_args = donated
            state = ([*written, *scalars], read)
            consts = [literal[i] if s is None else state[s[0]][s[1]] for i, s in enumerate(sources)]
            args: list[Any] = [None] * len(captured.inputs.arguments)
            for i, value in (*zip(arguments.written, written_args, strict=True), *zip(arguments.kept, kept_args, strict=True)):
                args[i] = value
            flat = record(jaxpr, consts, *args, *hosts, vector, words)
            outputs, rest = flat[:num_outputs], flat[num_outputs:]
            # State comes first: jax gives donated memory to the first result of its size, which should be the new value of the same state.
            return [rest[i] for i in state_results], [rest[i] for i in arg_results], rest[len(results) :], outputs

        return run

    def _example_hosts(self) -> list[Any]:
        invars = self.captured.jaxpr.jaxpr.invars[len(self.captured.inputs.arguments) :]
        return [self.devices.array_of(np.zeros(v.aval.shape, v.aval.dtype)) for v in invars[: self.captured.inputs.num_hosts]]

    def _output_shardings(self) -> list[Any] | None:
        """In a job of several processes each has all of a copy to the host. XLA chooses the others, without such copies all (None)."""
        outputs, whole = self.captured.outputs, self.devices.replicated
        kinds, has_sides = outputs.output_kinds, bool(outputs.sides)
        if self.watched is None or not ("copy" in kinds or has_sides):
            return None
        others = [None] * (outputs.num_arrays - len(kinds) - has_sides)
        return [*(whole if kind == "copy" else None for kind in kinds), *others, *[whole] * has_sides]

    def _gradient_sharding(self, grad: torch.Tensor) -> Any:
        for parameter, its in self.captured.outputs.gradients:
            if its is grad and isinstance(parameter, torch.Tensor):
                return self.devices.state_sharding(buffer_of(parameter))
        return None

    def reason_to_trace(self, numbers: Mapping[int, int | float], buffers: list[Buffer], hosts: list[torch.Tensor]) -> str | None:
        """Why a call needs a new trace; None if this program is valid for it.

        Args:
            numbers: the numbers among the arguments that are inputs, by position.
            buffers: buffers of the device tensors among the arguments.
            hosts: the CPU tensors among the arguments.
        """
        captured = self.captured
        if captured.inputs.known is not None:
            captured.inputs.known.refresh([*buffers, *hosts])
        captured.inputs.numbers.refresh(numbers)
        if self.mesh is None:
            state = self.written if self.written.buffers else self.read
            over = mesh_of(state.buffers[0].value) if state.first_has_changed() else None
            if over is not None:
                return f"its state is on {over} now, and was on one device"
        return captured.guarded.guards.reason()

    def __call__(self, arg_buffers: list[Buffer], hosts: list[torch.Tensor], given: Any, num_decided: int = 0) -> Any:
        """Run once on the current state.

        Args:
            arg_buffers: buffers of the device tensors among the arguments.
            hosts: the CPU tensors among the arguments.
            given: the positional and keyword arguments of the caller.
            num_decided: number of branches on values of the device whose sides another program has decided for this call.

        Returns:
            The function's result.

        Raises:
            OtherSides: the call takes other sides than the program; nothing was stored.
        """
        call = ProgramCall(arg_buffers, given, num_decided)
        call.hosts = list(map(stored_values, hosts)) if hosts else []
        for step in self._before:
            step(call)
        state, read = self.written.current(call.changed), self.read.current(call.changed)
        written_args, kept_args = self.arguments.current(arg_buffers)
        donated = donatable(state[: self.num_donated]), donatable(written_args)
        if call.changed:
            copy_shared(donated[0])
        host_args, (numbers, words) = [*map(self.devices.array_of, call.hosts)], self.inputs.current()
        call.inputs = donated, state[self.num_donated :], read, kept_args, host_args, numbers, words
        for step in self._gathered:
            step(call)
        run = self.compiled  # may wait for the compiler, which a signal may interrupt
        with handlers_wait():
            self._run(run, call)
            return self._result(call.outputs, given, call.held)

    def _run(self, run: Any, call: ProgramCall) -> None:
        """Dispatch the executable, and store its results in the state. An exception in between would lose the state."""
        try:
            call.state, call.arguments_left, call.gradients, call.outputs = run(*call.inputs)
        except (RuntimeError, ValueError) as error:
            if was_taken(error):
                raise memory_is_gone() from error
            raise
        for step in self._dispatched:
            step(call)
        self.written.store(call.state)
        for step in self._after:
            step(call)
        if self._is_advanced:
            self._is_advanced = False
        else:
            increment_version(self._tensors.state)

    def _check_arguments(self, call: ProgramCall) -> None:
        assert self.captured.inputs.known is not None
        check_arguments(self.captured.inputs.known.checks, [*call.arguments, *call.hosts])

    def _gather(self, call: ProgramCall) -> None:
        assert self.rolled is not None
        self.rolled.gather()

    def _follow(self, call: ProgramCall) -> None:
        assert self.captured.inputs.known is not None
        call.followed = self.captured.inputs.known.written([*call.arguments, *call.hosts])

    def _begin_watched(self, call: ProgramCall) -> None:
        assert self.watched is not None
        self.watched.begin(self.captured.inputs.numbers.today, call.arguments, call.hosts)
        if self.devices.are_paced:  # the processes of a job run one program at a time, since gloo does not order two
            (state, args), scalars, _, *inputs = call.inputs
            jax.block_until_ready(((state or scalars)[:1], call.changed, args, inputs))

    def _note_call(self, call: ProgramCall) -> None:
        note_call((*call.outputs, *call.gradients, *call.state[self.num_donated :]), call.state)

    def _note_checks(self, call: ProgramCall) -> None:
        note(call.outputs[len(self.captured.outputs.output_kinds)], self.captured.outputs.checks)

    def _begin_copies(self, call: ProgramCall) -> None:
        """Begin all copies to the host at once."""
        for kind, value in zip(self.captured.outputs.output_kinds, call.outputs, strict=False):
            if kind == "copy" and is_readable(value):
                value.copy_to_host_async()

    def _copy_counters(self, call: ProgramCall) -> None:
        for follower, leader in self.captured.state.copies.items():
            follower.value = leader.value
            follower.host = None

    def _store_arguments(self, call: ProgramCall) -> None:
        self.arguments.store(call.arguments, call.arguments_left)

    def _note_followed(self, call: ProgramCall) -> None:
        for buffer, value in call.followed:
            note_sent(buffer.value, value)

    def _advance_arguments(self, call: ProgramCall) -> None:
        if not self._is_advanced:
            self._tensors.advance_arguments(call.given)

    def _advance(self, call: ProgramCall) -> None:
        default_stream.draws += self.captured.inputs.draws * self.options.steps_per_call

    def _end_watched(self, call: ProgramCall) -> None:
        assert self.watched is not None
        self.watched.end()

    def refuse_write_to_view(self, base: Buffer, position: int) -> None:
        """Raise TraceError if the program writes to the argument at `position`, which is a copy of a view of `base`, or to `base`."""
        if position in self.arguments.written or any(b is base for b in (*self.written.buffers, *self.captured.state.written)):
            raise TraceError(
                message(
                    "an argument is a view of a tensor, and the compiled function writes in place to one of the two",
                    f"the tensor has shape {base.shape}; a view is passed as a copy, so a write to one would not change the other",
                    fix="pass the whole tensor and slice it inside the function, or pass a clone",
                )
            )

    def _require_sides(self, call: ProgramCall) -> None:
        """Raise OtherSides, before state is written, if the call takes other sides than the program. See Note [Device branches]."""
        if others := other_sides(self.captured.outputs.sides, fetched(call.outputs[-1]).tolist(), call.num_decided):
            self._is_advanced, others.num_written = False, take_written(self.captured.writes.effects)
            raise others

    def _require_finite(self, call: ProgramCall) -> None:
        """Raise NonFiniteError, before state is written, if the output of a module was not finite."""
        own = self.captured.outputs
        for name, flag in zip(own.finite, call.outputs[len(own.output_kinds) + bool(own.checks) :], strict=False):
            if not np.all(fetched(flag)):
                raise NonFiniteError(
                    message(
                        f"the output of module '{name}' is not finite",
                        "it is the first such module in the order of execution; the model and the optimizer are unchanged",
                        fix="check its inputs and parameters; lower the learning rate, clip gradients, or use a wider dtype",
                    )
                )

    def _result(self, outputs: list[Any], given: Any, held: list[Any]) -> Any:
        captured = self.captured
        leaves, objects = [], []
        if self._shows_arguments:
            leaves, _, objects = flatten(given, classes=captured.inputs.holders)
        given = (*given, objects)
        flat = made(self._leaves(), outputs, leaves, given, held)
        result, *values = rebuilt(captured.outputs.nodes, captured.outputs.refs, flat)
        if values:
            self._write(values, given, objects, held)
        return result

    def _leaves(self) -> list[Leaf]:
        """The leaves of the result of the current call."""
        return self.captured.outputs.leaves

    def _write(self, values: list[Any], given: Any, objects: list[Any], held: list[Any]) -> None:
        """Repeat the function's writes: to the objects among the arguments, and to other Python objects. `held`: see `ProgramCall`."""
        effects = self.captured.writes.effects
        holders = [of_caller(e.holder, given) if isinstance(e.holder, tuple) else None for e in effects]
        for instance, contents in zip(objects, values[len(effects) :], strict=True):
            fill(instance, contents)
        for effect, holder, value in zip(effects, holders, values, strict=False):
            if isinstance(effect.holder, tuple):
                put_in_argument(effect, holder, value)
            elif effect.held is not None and effect.put_in is not None:
                number, holder_in = effect.held
                effect.put_in(holder_in(held[number]))(value)
            else:
                effect.put(value)

    def _refuse_to_run(self, call: ProgramCall) -> None:
        assert self.mesh is not None
        raise SpmdError(
            message(
                f"this program cannot run: its tensors are on {self.mesh}, whose devices are not on this machine",
                "programs for a topology are only compiled, not run",
                fix="read it with step.program(...).memory(), or mark the tensors over a mesh of this machine's devices",
            )
        )


def _state_of(captured: Captured) -> tuple[list[Buffer], list[Buffer], list[int]]:
    """The state that a program updates, the state that it only reads, and the positions of the arguments that it updates."""
    position = {id(b): i for i, b in enumerate(captured.inputs.arguments)}
    written = [b for b in captured.state.written if id(b) not in position and b not in captured.state.copies]
    written.sort(key=lambda b: not b.shape)  # 0-dim state last: it is not donated, see Note [Equal counters]
    is_written = set(written)
    read = [b for b in dict.fromkeys(captured.state.consts) if b is not None and b not in is_written]
    return written, read, [position[id(b)] for b in captured.state.written if id(b) in position]


__all__ = ["Program"]

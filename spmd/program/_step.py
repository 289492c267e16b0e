"""`spmd.compile`: compiles a Python function of device tensors to a few programs, one per signature.

@spmd.compile
def train_step(x, y): ...

loss = train_step(x, y)          # the first call traces, compiles and runs; later calls run
train_step.collectives()         # read from the compiled program
train_step.retraces              # the reason for each retrace
"""

from __future__ import annotations

import functools
import os
import time
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

from mesh._mesh_errors import nearest
from spmd.base._errors import SpmdError, TraceAgain, TraceError, message
from spmd.base._progress import underway
from spmd.base._signals import handlers_run, handlers_wait
from spmd.base._torch_late import without_dynamo
from spmd.base._warning_registries import shown_warnings_kept
from spmd.device._buffer_stack import take_apart
from spmd.device._deferred import end_step
from spmd.device._indices import checked
from spmd.device._storage import recording
from spmd.device._trace_lock import trace_lock
from spmd.patches._running_averages import move_counts_to_device
from spmd.program._copied_step import CopiedStep
from spmd.program._executable_file import load_executables, not_in_file, save_executables
from spmd.program._job_checks import compiling
from spmd.program._options import Options, has_dims
from spmd.program._program import Program
from spmd.program.find._discover import reachable
from spmd.program.find._static import name_of
from spmd.program.flow._repeat import first_of_stack
from spmd.program.optim._preparation import OptimizerStates, prepare_state
from spmd.program.reads import uncollected
from spmd.program.reuse._check import require_same
from spmd.program.reuse._guards import guard_configured_checks
from spmd.program.reuse._program_cache import ProgramCache
from spmd.program.reuse._retrace_log import log_retrace, never_ends, noting_retrace, too_often
from spmd.program.reuse._signature import Signature, changed_signature, signature
from spmd.program.roll._rolled import Loop
from spmd.program.stored import NotHere, TraceStore
from spmd.program.trace._capture import capture
from spmd.program.trace._captured import Captured
from spmd.program.trace._device_branches import OtherSides, waits
from spmd.program.trace._gradients import StaleGradients
from spmd.program.trace._results import require_function
from spmd.program.trace._trace_settings import TraceSettings
from spmd.program.trace._varying_inputs import VaryingInputs
from spmd.program.trace._whole_batch import whole_batch
from spmd.program.xla import _hlo
from spmd.program.xla._cached_executables import CachedExecutable
from spmd.program.xla._compilation import Making, Timings
from spmd.program.xla._memory_report import MemoryReport
from spmd.program.xla._target import client

P = ParamSpec("P")
R = TypeVar("R")
_MOST_ATTEMPTS = 100  # traces in one call, each with settings that the one before has found


class Step(CopiedStep, Generic[P, R]):
    """A compiled function, created by `spmd.compile`.

    Attributes:
        retraces: the reason for every trace after the first.
        num_traces: the number of traces.
    """

    _may_branch = True  # on values that only the device knows

    def __init__(self, fn: Callable[P, R], options: Options) -> None:
        require_function(fn)
        if isinstance(fn, (types.FunctionType, types.MethodType)):
            functools.update_wrapper(self, fn)
        else:
            self.__wrapped__ = fn
        self._fn = fn
        self._name = name_of(fn)
        self._options = options
        self._programs = ProgramCache(options.max_programs)
        self._latest: Program | None = None
        self._latest_key: Any = None
        self._settings = TraceSettings()
        self._varying = VaryingInputs()
        self._loaded: dict[str, CachedExecutable] = {}
        self._loaded_from = ""
        self.retraces: list[str] = []
        self.num_traces = 0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function. The first call with a new signature traces and compiles it."""
        if recording.get() is not None:  # called by another compiled function: part of that function's trace
            return self._fn(*args, **kwargs)
        end_step()
        with trace_lock:
            decided: OtherSides | None = None
            while True:
                program, call = self._found(args, kwargs, decided=decided)
                for base, position in call.copied:
                    program.refuse_write_to_view(base, position)
                self._latest, self._latest_key = program, call.key
                if program is not self._programs.newest:
                    self._note_use(program)
                leaves = [action() for action in program.captured.writes.actions]
                try:
                    result = program(call.buffers, call.hosts, (args, kwargs), 0 if decided is None else len(decided.sides))
                except OtherSides as found:  # nothing was stored
                    decided = found.with_traceback(None)
                    continue
                for leave in leaves:
                    leave()
                return result

    def _note_use(self, program: Program) -> None:
        self._programs.note_use(program)

    def program(self, *args: P.args, **kwargs: P.kwargs) -> Program:
        """The program that a call with these arguments would run; it is traced and compiled if necessary, but not run.

        With tensors on a mesh of a topology (`mesh.Mesh(..., topology="v5e:16x16")`) it is compiled ahead of time for chips that
        need not exist, from shapes alone: `torch.empty` and `to_empty(device="jax")` allocate nothing until the tensor's
        first use. Such a program can be inspected (`memory()`, `collectives()`, `flops()`, `hlo()`) but not run, and has no side
        effects: it creates no optimizer state, and its trace is not counted.
        """
        end_step()
        with trace_lock:
            return self._found(args, kwargs)[0]

    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Trace for these arguments now and compile in another thread; the first call waits for the compilation to finish.

        Several programs can then compile in parallel, while data is loaded and checkpoints are restored:

            train_step.prepare(x, y)
            eval_step.prepare(x)

        Nothing runs and no value changes, but optimizer state is created, as before a first step. A compiler error
        is raised by the call. Python numbers and shapes select the program, as in a call.
        """
        end_step()
        with trace_lock:
            self._found(args, kwargs, is_beside=True)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the cached executables to a file, so that another process need not compile them; see `load`.

        Returns:
            The path.

        Raises:
            SpmdError: `path` cannot be a file, there is no program yet, a program calls back into Python, or this process is part of a job.
        """
        with trace_lock:
            programs = list(self._programs)
            if not programs:
                raise self._no_program()
            return save_executables(path, self._name, programs, client())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load executables from a file written by `save` instead of compiling. The file is executed: load only files that you trust.

        The first call traces the function, unless the cache folder has its trace. If the file has a program for the trace, it is neither
        lowered nor compiled. Executables are read by other threads meanwhile. A program that is not in the file (another shape, changed
        code) is compiled, with a warning.

        Raises:
            SpmdError: the file is invalid, damaged, or for another function, version or device; or this process is part of a job.
            NoProgramFile: the file does not exist; also a FileNotFoundError.
        """
        found = load_executables(path, self._name, client())
        with trace_lock:
            self._loaded = {**self._loaded, **found}
            self._loaded_from = str(path)

    def _found(self, args: Any, kwargs: Any, *, is_beside: bool = False, decided: OtherSides | None = None) -> tuple[Program, Signature]:
        """The program for a call, and the call's signature under the settings of that program. Traces if no cached program is valid.

        `decided`: the first sides of this call, after a program took others.
        """
        settings = self._settings if decided is None else decided.other_settings(self._settings)
        failed = None if decided is None else decided.reason  # why the newest program of this signature is not valid any more
        attempts = 0
        while True:
            attempts += 1
            try:
                call = self._signature(args, kwargs)
                for program in self._programs.of(call.key):
                    if program.compilation.has_failed:
                        self._programs.drop(program)
                        continue
                    if decided is not None and program.sides[: len(decided.sides)] != decided.sides:
                        continue
                    reason = program.reason_to_trace(call.numbers, call.buffers, call.hosts)
                    if reason is None:
                        if self._options.check:
                            require_same(self._name, program.captured, self._traced(call, replace(settings, sides=program.sides))[0])
                        return program, call
                    failed = failed or reason
                    self._varying.note(program.captured, settings)
                if failed is None and self._latest_key is not None:
                    failed = changed_signature(self._latest_key, call.key)
                return self._new(args, kwargs, call, failed, settings, is_beside)
            except (TraceAgain, StaleGradients) as again:
                before, settings = settings, again.other_settings(settings)
                if settings == before:
                    raise
                if attempts == _MOST_ATTEMPTS:
                    raise never_ends(self._name, attempts, again) from None
                settings = self._varying.limited(settings, before)
                self._settings = settings.of_step()

    def _new(
        self, args: Any, kwargs: Any, call: Signature, failed: str | None, settings: TraceSettings, is_beside: bool
    ) -> tuple[Program, Signature]:
        """Trace, compile and cache a program. `failed`: why no cached program is valid; None if there was none."""
        is_new = not settings.has_constant_numbers and not self._programs.of(call.key)
        if is_new and self._varying.note_arguments(self._programs.keys(), call.key):
            call = self._signature(args, kwargs)
        with noting_retrace(self._name, failed), shown_warnings_kept():
            program, num_traces = self._compiled(call, failed, settings, is_beside)
        captured = program.captured
        if self._loaded and program.digest not in self._loaded:
            warnings.warn(not_in_file(self._name, self._loaded_from), stacklevel=4)
        warning = None if self.num_traces else whole_batch(self._name, program.mesh, captured, call.buffers, call.hosts)
        if warning is not None:
            warnings.warn(warning, stacklevel=4)
        if program.sides and not any(other.sides for other in self._programs):
            warnings.warn(waits(self._name, captured.outputs.sides), stacklevel=4)
        if program.is_ahead:
            return program, call
        self.num_traces += num_traces
        if failed is not None and num_traces:
            self._note_retrace(failed)
        self._programs.note_state(captured)
        if captured.inputs.shared or captured.guarded.reached:  # arguments may be state too: the program is valid for these only
            call = call._replace(key=self._signature(args, kwargs).key)
        self._programs.put(call.key, program)
        return program, call

    def _compiled(self, call: Signature, failed: str | None, settings: TraceSettings, is_beside: bool) -> tuple[Program, int]:
        """A new program for a call, and the number of traces that it took.

        Raises:
            TraceError: there were too many retraces, or the function cannot be traced.
        """
        self._require_may_trace(failed)
        # what has changed is an input: a stored trace in which it is a constant would be found again for every other value
        store = TraceStore()
        if not settings.sides:  # a stored trace cannot say which sides a call takes
            store = TraceStore.of(self._fn, self._name, self._options, call, self._varying, client())
        try:
            return self._made(call, failed, settings, is_beside, store)
        except NotHere:  # the executable of a stored trace is for other shardings, or damaged
            return self._made(call, failed, settings, is_beside, TraceStore())

    def _made(
        self, call: Signature, failed: str | None, settings: TraceSettings, is_beside: bool, store: TraceStore
    ) -> tuple[Program, int]:
        """A new program, of a stored trace if there is one."""
        start = time.perf_counter()
        with handlers_wait(), compiling(), uncollected(), without_dynamo():
            with underway(f"tracing {self._name}" + (f" again: {failed.splitlines()[0]}" if failed else "")):
                captured, prepare_s = self._traced(call, settings, store)
            trace_s = time.perf_counter() - start - prepare_s
            making = Making([self._loaded.get, store.begun.get], is_beside)
            with handlers_run():
                program = Program(captured, call.buffers, self._options, self._name, (prepare_s, trace_s), making, store.found)
            captured.guarded.guards.drop_dead()
            store.keep(program)
            return program, int(store.found is None)

    def _require_may_trace(self, failed: str | None) -> None:
        if failed is not None and self._options.on_retrace == "error" and len(self.retraces) + 1 >= self._options.max_retraces:
            raise TraceError(too_often(self._name, len(self.retraces) + 1, failed))

    def _signature(self, args: Any, kwargs: Any) -> Signature:
        settings, state, reached = self._settings, self._programs.state, self._programs.reached
        varying, is_stack = self._varying.arguments, self._options.steps_per_call > 1
        return signature(args, kwargs, state, settings.holders, varying, settings.attributes, reached, is_stack)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind to an instance, as a function in a class does."""
        return self if instance is None else types.MethodType(self, instance)

    def _traced(self, call: Signature, settings: TraceSettings, store: TraceStore | None = None) -> tuple[Captured, float]:
        """Prepare the optimizers and trace the function once. Returns the trace and the seconds for preparing.

        `store`: where the trace of an earlier process may be, which is returned if it is valid here.
        """
        store = TraceStore() if store is None else store
        options, args, kwargs = self._options, call.args, call.kwargs
        if options.steps_per_call > 1:
            args, kwargs = first_of_stack(args, kwargs, options.steps_per_call)
        take_apart()
        found = reachable(self._fn, args, kwargs, settings.holders, settings.as_objects)
        for value in settings.unreached:
            found.add(value)
            found.add_hooks()
        move_counts_to_device(found.all_modules())
        with OptimizerStates() as states:
            start = time.perf_counter()
            for optimizer in found.optimizers:
                states.keep(optimizer)
                with underway(f"preparing the state of {type(optimizer).__name__}"):
                    created = prepare_state(optimizer, creates=all(optimizer is not other for other in settings.unprepared))
                    found.prepared.append((optimizer, created))
            prepare_s = time.perf_counter() - start
            captured = store.find(found, [self._loaded.get])
            with checked(options.check_indices), store.noted():
                captured = captured or capture(
                    self._fn,
                    args,
                    kwargs,
                    found,
                    settings,
                    keep_grads=options.keep_grads,
                    debug_nans=options.debug_nans,
                    is_stacked=options.steps_per_call > 1,
                    varying=self._varying,
                    arguments=call.numbers,
                    may_branch=self._may_branch and options.steps_per_call == 1,
                )
            if options.check_indices is None and store.found is None:
                guard_configured_checks(captured.guarded.guards)
            if captured.is_ahead:
                states.put_back()
            else:
                states.forget_all_but(captured.writes.stepped)
            return captured, prepare_s

    def _note_retrace(self, reason: str) -> None:
        self.retraces.append(reason)
        log_retrace(self._name, reason, len(self.retraces), self._options.max_retraces)
        if len(self.retraces) == self._options.max_retraces:
            warnings.warn(too_often(self._name, len(self.retraces), reason), stacklevel=5)

    def __repr__(self) -> str:
        return f"<compiled function {self._name}: {_counted(self.num_executables, 'program')}, {_counted(self.num_traces, 'trace')}>"

    def __str__(self) -> str:
        lines = [f"{self._name}: {_counted(self.num_executables, 'program')} kept, {_counted(self.num_traces, 'trace')}"]
        if self._latest is not None:
            lines += [f"  {line}" for line in str(self._latest).splitlines()]
        lines += [f"  trace {i}: {reason}" for i, reason in enumerate(self.retraces, start=2)]
        return "\n".join(lines)

    def clear(self) -> None:
        """Drop all programs; the next call traces and compiles again. Counts and `retraces` are kept."""
        with trace_lock:
            self._programs.clear()
            self._latest = self._latest_key = None

    @property
    def num_executables(self) -> int:
        """The number of cached programs, at most `max_programs`."""
        return len(list(self._programs))

    @property
    def timings(self) -> Timings:
        """Seconds spent to prepare optimizers, trace, lower and compile the latest program."""
        return self._program.timings

    @property
    def mesh(self) -> Any:
        """The mesh that the latest program runs on, or None."""
        return self._program.mesh

    @property
    def _program(self) -> Program:
        if self._latest is None:
            raise self._no_program()
        return self._latest

    def _no_program(self) -> SpmdError:
        return SpmdError(
            message(f"{self._name} has no program yet: it is compiled by its first call", fix=f"call {self._name}(...) once first")
        )

    @property
    def rolled(self) -> list[Loop]:
        """The repeated parts of the latest program, and why a part is not a loop; empty with `roll=False`."""
        return self._program.loops

    def collectives(self) -> _hlo.CollectiveReport:
        """The collectives of the latest program: kind, count, bytes and mesh axes, read from its HLO."""
        return self._program.collectives()

    def memory(self) -> MemoryReport:
        """Bytes of arguments, outputs, temporaries and their peak on each device, as reported by the compiler."""
        return self._program.memory()

    def flops(self) -> int:
        """Floating-point operations of one call on one device (dots and convolutions, 2 per multiply-add)."""
        return self._program.flops()

    def hlo(self) -> str:
        """The optimised HLO text of the latest program."""
        return self._program.hlo()


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@overload
def compile(
    fn: Callable[P, R],
    *,
    keep_grads: bool = False,
    max_retraces: int = 8,
    on_retrace: Literal["warn", "error"] = "warn",
    max_programs: int = 32,
    steps_per_call: int = 1,
    check: bool = False,
    debug_nans: bool = False,
    check_indices: bool | None = None,
    roll: bool | Literal["auto"] = "auto",
    dynamic: Mapping[str, Any] | bool | None = None,
) -> Step[P, R]: ...
@overload
def compile(
    fn: None = None,
    *,
    keep_grads: bool = False,
    max_retraces: int = 8,
    on_retrace: Literal["warn", "error"] = "warn",
    max_programs: int = 32,
    steps_per_call: int = 1,
    check: bool = False,
    debug_nans: bool = False,
    check_indices: bool | None = None,
    roll: bool | Literal["auto"] = "auto",
    dynamic: Mapping[str, Any] | bool | None = None,
) -> Callable[[Callable[P, R]], Step[P, R]]: ...
def compile(
    fn: Any = None,
    *,
    keep_grads: bool = False,
    max_retraces: int = 8,
    on_retrace: Literal["warn", "error"] = "warn",
    max_programs: int = 32,
    steps_per_call: int = 1,
    check: bool = False,
    debug_nans: bool = False,
    check_indices: bool | None = None,
    roll: bool | Literal["auto"] = "auto",
    dynamic: Mapping[str, Any] | bool | None = None,
    **unknown: Any,
) -> Any:
    """Compile `fn` to one donated, sharded `jax.jit` program: forward pass, backward pass, optimizer, and everything else in it.

    The trace finds the state that `fn` reads and writes (parameters, buffers, optimizer state, random stream), and every call updates
    it in place. Returned tensors stay on the devices until they are read.

    Args:
        fn: a function of tensors, containers of tensors and Python values; Python values are part of the signature.
        keep_grads: keep the gradients in `.grad` after the call; otherwise reading one raises an error.
        max_retraces: warn after this many retraces, with the input or value that changed.
        on_retrace: "warn", or "error" to raise an error instead of compiling again.
        max_programs: the number of compiled programs to cache; the least recently used one is dropped first.
        steps_per_call: run this many steps in one dispatch; tensor arguments and results gain a first dim of this size.
        check: retrace on every call and raise an error if the program would differ (slow; for finding stale constants).
        debug_nans: raise an error that names the first module whose output is not finite; the state is left unchanged.
        roll: compile identical layers as one loop, in the forward pass, the backward pass and the optimizer, so that neither the program
            nor the compile time grows with their number; their parameters and optimizer state are then stored stacked between calls.
            "auto": only large programs that loops make at most half as large (docs/depth.md). `.rolled` lists the repeated parts, and why
            a part is not a loop.
        check_indices: after an index out of bounds, raise `CheckFailed` (an IndexError) at the next read, with the op, the line and the
            index. None: the setting of `spmd.configure(check_indices=...)`, which also applies to eager operations.
        dynamic: dims whose size varies: for each argument a dict from dim to `Dim` or its name (inside a dict or list of them where the
            argument is a dict or list of tensors). A few programs of larger sizes serve all sizes, with the results of the unpadded
            function (docs/sizes.md). True: all dims that have had a second size, or that `spmd.mark_dynamic` names.

    Raises:
        TypeError: an option does not exist.
        SpmdError: an option has an invalid value.
        TraceError: on a call, if Python needs a value that is known only when the program runs, or if there were too many retraces.
    """
    if unknown:
        name, known = next(iter(unknown)), [*(field.name for field in fields(Options)), "dynamic"]
        raise TypeError(message(f"compile has no option {name!r}{nearest(name, known)}", fix=f"options are {', '.join(known)}"))
    options = Options(keep_grads, max_retraces, on_retrace, max_programs, steps_per_call, check, debug_nans, check_indices, roll)
    kind: Any = functools.partial(_sized, dynamic=dynamic) if has_dims(dynamic) else Step
    return functools.partial(kind, options=options) if fn is None else kind(fn, options=options)


def _sized(fn: Any, options: Options, dynamic: Any) -> Any:
    from spmd.program._sized_step import SizedStep  # which is a Step

    return SizedStep(fn, options, dynamic)

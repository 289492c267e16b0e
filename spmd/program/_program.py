"""A captured trace as one compiled executable, and a call of it: state in, state out, donated, shardings pinned.

A call gathers the arrays of the state's buffers, runs the executable and puts the results back; Python does nothing per
operation. State is written back only after the executable was dispatched, so an error leaves everything as it was.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter, is_
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding

from mesh import size_text
from spmd.base._convert import host_array
from spmd.base._errors import NonFiniteError, SpmdError, TraceError, message
from spmd.base._jax import inline_jaxpr
from spmd.device._arrays import fetched, moved
from spmd.device._checks import note
from spmd.device._layout import state_sharding_of
from spmd.device._left_values import NOTHING, LeftValues
from spmd.device._lent import donatable
from spmd.device._pacing import note_call
from spmd.device._random_stream import default_stream
from spmd.device._storage import Buffer, buffer_of, wrap, wrap_stored
from spmd.device._turn import memory_is_gone, was_taken
from spmd.device._uploaded import note_sent
from spmd.program._job_checks import compiling, require_sound, watched
from spmd.program._program_digest import program_digest
from spmd.program.find._objects import fill, flatten
from spmd.program.flow._repeat import repeated, require_no_writes
from spmd.program.reads import touched_by
from spmd.program.roll._rolled_program import rolled_program
from spmd.program.trace._arguments import of_caller, put_in_argument
from spmd.program.trace._capture import Captured
from spmd.program.trace._remade import remade
from spmd.program.trace._results import made
from spmd.program.xla._channels_last import has_convolution, run_channels_last
from spmd.program.xla._compilation import Compilation, Making, Order, Timings
from spmd.program.xla._digest import NoDigest
from spmd.program.xla._executable import Executable, on_all_devices
from spmd.program.xla._target import lies_on, mesh_of, platform_of, program_mesh


@dataclass(frozen=True)
class Options:
    """How a step is compiled; `spmd.compile` documents each."""

    keep_grads: bool = False
    max_retraces: int = 8
    on_retrace: str = "warn"
    max_programs: int = 32
    steps_per_call: int = 1
    check: bool = False
    debug_nans: bool = False
    check_indices: bool | None = None
    roll: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        flags: dict[str, object] = {"keep_grads": self.keep_grads, "check": self.check, "debug_nans": self.debug_nans}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise SpmdError(message(f"compile's option {name} is True or False", f"got {flag!r}", fix=f"spmd.compile(fn, {name}=True)"))
        counts: dict[str, object] = {name: getattr(self, name) for name in ("max_retraces", "max_programs", "steps_per_call")}
        for name, count in counts.items():
            if type(count) is not int or count < 1:
                raise SpmdError(message(f"compile's option {name} is 1 or more", f"got {count!r}", fix=f"spmd.compile(fn, {name}=8)"))
        if self.on_retrace not in ("warn", "error"):
            what = f"compile's option on_retrace is 'warn' or 'error', got {self.on_retrace!r}"
            raise SpmdError(message(what, fix='spmd.compile(fn, on_retrace="warn")'))
        if self.roll not in (True, False, "auto"):
            raise SpmdError(message("roll is True, False or 'auto'", f"roll={self.roll!r}", fix='spmd.compile(fn, roll="auto")'))


class Program(Executable):
    """One executable for one signature of a step.

    Attributes:
        captured: the trace it was made from.
        mesh: the mesh its state lies on, or None (one device).
        is_ahead: the mesh is of a topology that is not here: compiled and not run.
        digest: under which its executable is kept; None if it cannot be.
        no_digest: why not.
        compilation: how the executable is made.
    """

    def __init__(
        self, captured: Captured, arg_buffers: list[Buffer], options: Options, name: str, spent: tuple[float, float], making: Making
    ) -> None:
        """`spent`: seconds to prepare and to trace."""
        self.captured = captured
        self.options = options
        buffers = [b for b in captured.const_buffers if b is not None]
        self.position = {id(b): i for i, b in enumerate(captured.arg_buffers)}
        written = [b for b in captured.written if id(b) not in self.position and b not in captured.copies]
        written.sort(key=lambda b: not b.shape)  # 0-dim state last: it is not donated, see Note [Equal counters]
        read = [b for b in dict.fromkeys(buffers) if b not in set(written)]
        self.mesh = program_mesh((*written, *read, *captured.arg_buffers), captured.layouts)
        self.platform = platform_of(self.mesh)
        start = time.perf_counter()
        self.rolled = rolled_program(captured, options.roll, self.platform)
        spent = spent[0], spent[1] + time.perf_counter() - start
        if self.rolled is not None:
            written, read = self.rolled.state(written), self.rolled.state(read)
        self.num_donated = sum(b.shape != () for b in written)
        self.written, self.read = written, read
        self.written_args = [self.position[id(b)] for b in captured.written if id(b) in self.position]
        self.kept_args = [i for i in range(len(captured.arg_buffers)) if i not in set(self.written_args)]
        self.is_ahead = self.mesh is not None and self.mesh.topology is not None
        self.replicated = None if self.mesh is None else NamedSharding(self.mesh.to_jax(), jax.sharding.PartitionSpec())
        self.is_on_cpu = self.platform == "cpu"
        self.is_paced = self.replicated is not None and self.replicated.num_devices > 1 and self.is_on_cpu
        self.last, self.last_read = LeftValues(written), LeftValues(read)
        self.rebound = [(i, buffers, k) for buffers in (written, read) for i, k in touched_by(captured.held, buffers)]
        left = [(owner, grad) for owner, grad in captured.gradients if isinstance(owner, torch.Tensor)]
        is_left = not options.keep_grads and len(left) == len(captured.gradients)
        self.leaves, self.left = ([p for p, _ in left], [grad for _, grad in left]) if is_left else (None, [])
        self.shows_arguments = captured.num_objects > 0 or any(
            leaf.kind in ("argument", "part") or isinstance(leaf.owner, int) for leaf in captured.leaves
        )
        self._numbers: Any = None
        self._digest: bytes | None = None
        self._vector: Any = None
        self._words: Any = None
        self.watched = watched()
        self.slots = [(captured.slots[b], state, i) for state in (written, read) for i, b in enumerate(state) if b in captured.slots]
        captured.numbers.refresh({})  # with those that the trace was found to use
        self._spent = spent
        self.digest: str | None = None
        self.no_digest = "it is for chips that are not here"
        self.compilation = self._compile(arg_buffers, name, making)
        if not self.is_ahead:
            captured.let_go()
            self._forget_gradients()

    def __str__(self) -> str:
        spent, memory = self.timings, self.memory()
        where = f"1 {self.platform} device" if self.mesh is None else f"{self.mesh} ({self.mesh.size()} {self.platform} devices)"
        return "\n".join(
            (
                f"on {where}" + (", which are not here" if self.is_ahead else ""),
                f"{len(self.written)} tensors written, {len(self.read)} read; {size_text(memory.alias_bytes)} donated on each device",
                f"traced in {spent.prepare_s + spent.trace_s:.1f} s, lowered in {spent.lower_s:.1f} s, compiled in {spent.compile_s:.1f} s",
                *str(memory).splitlines(),
            )
        )

    def _compile(self, arg_buffers: list[Buffer], name: str, making: Making) -> Compilation:
        """The executable for arguments like those in `arg_buffers`, on its way."""
        if not self.is_ahead:
            if self.rolled is not None:
                self.rolled.gather()
            for buffer in (*self.written, *self.read, *arg_buffers):
                self._settle(buffer)
        state, given = [self._example(b) for b in self.written], [self._example(b) for b in arg_buffers]
        read = [self._example(b) for b in self.read]
        run = self._function()
        if self.options.steps_per_call > 1:
            require_no_writes(self.captured.effects)
            has_args, has_born = bool(self.written_args), bool(self.captured.born)
            run = repeated(run, self.options.steps_per_call, self.captured.draws, has_args, has_born, self.options.keep_grads)
        run.__name__ = run.__qualname__ = name
        donated = state[: self.num_donated], [given[i] for i in self.written_args]
        self.shardings, self.read_shardings = [v.sharding for v in state], [v.sharding for v in read]
        pinned = None
        if self.mesh is not None:
            grads = [self._gradient_sharding(g) for g in self.captured.kept_gradients]
            grads.extend(self._state_sharding(p) if p.shape == t.shape else None for p, t in self.captured.born)
            pinned = (self.shardings, [v.sharding for v in donated[1]], grads, None)
        args = (donated, state[self.num_donated :], read, *self._inputs(given, self._example_hosts()))
        self.arg_shardings = [v.sharding for v in given]
        client = None if self.is_ahead else next(iter(self._words.sharding.device_set)).client
        try:
            self.digest = None if client is None else program_digest(self, name, args, pinned, client)
        except NoDigest as error:
            self.no_digest = str(error)
        check, donate = None, not self.options.debug_nans
        if self.watched is not None:
            check = partial(self.watched.require_same, name, self.mesh, [*self.written, *self.read], arg_buffers), self._require_sound
        order = Order(name, run, args, donate, pinned, self.mesh, self.platform, self.is_ahead, self.digest, client)
        return Compilation(order, making=making, check=check)

    @cached_property
    def compiled(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]  (waits, the first time)
        """jax's executable, when it is there."""
        with compiling():
            return self.compilation.result()[0]

    @property
    def timings(self) -> Timings:
        """Seconds spent making it."""
        return Timings(*self._spent, self.compilation.lower_s, self.compilation.result()[1])

    def _require_sound(self, compiled: Any) -> None:
        if self.is_paced:
            require_sound(compiled.as_text())

    def _function(self) -> Any:
        """The program as a function of (donated, 0-dim state, read, args, hosts, numbers, random words)."""
        captured = self.captured
        num_outputs = sum(leaf.kind in ("array", "number") for leaf in captured.leaves)
        num_outputs += len(captured.finite) + bool(captured.checks)
        if self.rolled is not None:
            return self.rolled.function(self.written, self.read, self.written_args, self.kept_args, num_outputs)
        jaxpr, literal = captured.jaxpr.jaxpr, captured.jaxpr.consts
        slot = {id(b): (0, i) for i, b in enumerate(self.written)} | {id(b): (1, i) for i, b in enumerate(self.read)}
        sources = [slot.get(id(b)) if b is not None else None for b in captured.const_buffers]
        results = {b: i for i, b in enumerate(captured.written)}
        state_results = [results[b] for b in self.written]
        arg_results = [results[captured.arg_buffers[i]] for i in self.written_args]
        record = run_channels_last if self.is_on_cpu and has_convolution(jaxpr) else inline_jaxpr

        def run(donated: Any, scalars: Any, read: Any, kept_args: Any, hosts: Any, vector: Any, words: Any) -> Any:
            written, written_args = donated
            state = ([*written, *scalars], read)
            consts = [literal[i] if s is None else state[s[0]][s[1]] for i, s in enumerate(sources)]
            args: list[Any] = [None] * len(captured.arg_buffers)
            for i, value in (*zip(self.written_args, written_args, strict=True), *zip(self.kept_args, kept_args, strict=True)):
                args[i] = value
            flat = record(jaxpr, consts, *args, *hosts, vector, words)
            outputs, rest = flat[:num_outputs], flat[num_outputs:]
            # State first: jax gives donated memory to the first result that fits it, which should be the state's own.
            return [rest[i] for i in state_results], [rest[i] for i in arg_results], rest[len(results) :], outputs

        return run

    def _example_hosts(self) -> list[Any]:
        invars = self.captured.jaxpr.jaxpr.invars[len(self.captured.arg_buffers) :]
        return [np.zeros(v.aval.shape, v.aval.dtype) for v in invars[: self.captured.host_tensors]]

    def _settle(self, buffer: Buffer) -> None:
        """Bring the buffer's value to where the program wants it: unmarked values on a mesh are replicated."""
        buffer.settle()
        if buffer.value is None:
            buffer.place(buffer.annotation.to_jax() if buffer.annotation is not None else self.replicated)
        elif buffer.annotation is not None and buffer.value.shape != buffer.stored:
            buffer.place(buffer.annotation.to_jax())
        elif self.mesh is not None and not lies_on(buffer.value, self.mesh):
            assert self.replicated is not None
            buffer.value = moved(buffer.value, self.replicated)

    def _example(self, buffer: Buffer) -> Any:
        """The buffer's array, or its shape, dtype and sharding for a program that is only compiled."""
        if not self.is_ahead:
            return buffer.value
        sharding = self.replicated if buffer.annotation is None else buffer.annotation.to_jax()
        return jax.ShapeDtypeStruct(buffer.stored, buffer.dtype, sharding=sharding)

    def _gradient_sharding(self, grad: torch.Tensor) -> Any:
        for parameter, its in self.captured.gradients:
            if its is grad and isinstance(parameter, torch.Tensor):
                return self._state_sharding(parameter)
        return None

    def _state_sharding(self, parameter: torch.Tensor) -> Any:
        """Where gradient and optimizer state of a parameter go."""
        own = buffer_of(parameter).state_annotation
        return self._example(buffer_of(parameter)).sharding if own is None else own.to_jax()

    def _inputs(self, args: list[Any], hosts: list[Any]) -> tuple[Any, ...]:
        """(arguments not written, host arguments, numbers, random words) of a call."""
        kept = [args[i] for i in self.kept_args]
        today = self.captured.numbers.today
        if today is not self._numbers:
            numbers = np.array(today, np.float64)
            digest = numbers.tobytes()  # -0.0 is not 0.0, and NaN is NaN
            if digest != self._digest:
                self._vector = self._on_device(numbers)
            self._numbers, self._digest = today, digest
        words = self._on_device(default_stream.words()) if self.captured.draws or self._words is None else self._words
        self._words = words
        return kept, [self._on_device(h) for h in hosts] if hosts else [], self._vector, words

    def _on_device(self, host: np.ndarray[Any, Any]) -> Any:
        if self.is_ahead:
            return jax.ShapeDtypeStruct(host.shape, host.dtype, sharding=self.replicated)
        return on_all_devices(host, self.replicated)

    def reason_to_trace(self, numbers: Mapping[int, int | float], buffers: list[Buffer]) -> str | None:
        """Why it does not hold for a call with these numbers and tensors among its arguments; None if it does."""
        self.captured.refresh(numbers, buffers)
        state = self.written or self.read
        over = mesh_of(state[0].value) if self.mesh is None and state else None
        return self.captured.guards.reason() if over is None else f"its state lies over {over} now, and was on one device"

    def __call__(self, arg_buffers: list[Buffer], hosts: list[torch.Tensor], given: Any) -> Any:
        """Run once on today's state; returns what the traced function returned. `given`: the arguments as the user gave them."""
        if self.is_ahead:
            raise self._not_here()
        self.captured.look(arg_buffers)
        held = [place.read() for place in self.captured.held] if self.captured.held else []
        for position, buffers, index in self.rebound:
            buffers[index] = buffer_of(held[position])
        if self.rebound:
            self._refuse_aliases(arg_buffers)
        changed: list[Any] = []
        if self.slots:
            self._take_gradients(given)
        if self.rolled is not None:
            self.rolled.gather()
        state = self._values(self.written, self.last.values, self.shardings, changed)
        read = self._values(self.read, self.last_read.values, self.read_shardings, changed)
        self.last_read.values = read
        for i, buffer in enumerate(arg_buffers):
            if buffer.value is None or buffer.value.sharding != self.arg_shardings[i]:
                buffer.place(self.arg_shardings[i] if self.mesh is not None or buffer.value is not None else None)
        donated = donatable(state[: self.num_donated]), donatable([arg_buffers[i].value for i in self.written_args])
        if changed:
            self._refuse_shared(donated[0])
        host_arrays = [host_array(t) for t in hosts] if hosts else []
        if self.watched is not None:
            self.watched.begin(self.captured.numbers.today, arg_buffers, host_arrays)
        inputs = self._inputs([b.value for b in arg_buffers], host_arrays)
        if self.is_paced and self.watched is not None:  # the processes of a job run one program at a time: gloo has no order for two
            jax.block_until_ready((state[:1], changed, donated[1], inputs))
        followed = () if self.captured.known is None else self.captured.known.written(arg_buffers)
        try:
            new_state, new_args, grads, outputs = self.compiled(donated, state[self.num_donated :], read, *inputs)
        except (RuntimeError, ValueError) as error:
            if was_taken(error):
                raise memory_is_gone() from error
            raise
        if self.is_paced:
            note_call((*outputs, *grads, *new_state[self.num_donated :]), new_state)
        if self.captured.finite:
            self._require_finite(outputs[-len(self.captured.finite) :])
        if self.captured.checks:
            note(outputs[-1 - len(self.captured.finite)], self.captured.checks)
        for buffer, value in zip(self.written, new_state, strict=True):
            buffer.value = value  # its host value is gone: `_settle` has uploaded it
        self.last.values = new_state
        for follower, leader in self.captured.copies.items():
            follower.value = leader.value
            follower.host = None
        for i, value in zip(self.written_args, new_args, strict=True):
            arg_buffers[i].value = value
        for buffer, value in followed:
            note_sent(buffer.value, value)
        default_stream.draws += self.captured.draws * self.options.steps_per_call
        if self.slots:
            self._forget_gradients()
        self._leave_gradients(grads, given)
        if self.watched is not None:
            self.watched.end()
        return self._result(outputs, given, held)

    def _take_gradients(self, given: Any) -> None:
        """Put the buffers of today's gradients in their places among the state."""
        leaves = flatten(given, classes=self.captured.holders).leaves if any(isinstance(o, int) for o, _, _ in self.slots) else []
        for owner, state, i in self.slots:
            grad = (owner if isinstance(owner, torch.Tensor) else leaves[owner]).grad
            assert grad is not None, "a guard or the signature said that it is there"
            state[i] = buffer_of(grad)

    def _forget_gradients(self) -> None:
        """Hold none of them until the next call, which may have others."""
        for _, state, i in self.slots:
            state[i] = _EMPTY
            (self.last if state is self.written else self.last_read).values[i] = NOTHING

    def refuse_write_to_view(self, base: Buffer, position: int) -> None:
        """Raise if the program updates an argument that stands for a view of `base`, or `base` itself."""
        if position in self.written_args or any(b is base for b in (*self.written, *self.captured.written)):
            raise TraceError(
                message(
                    "an argument is a view of a tensor, and the compiled function writes in place to one of the two",
                    f"the tensor has shape {base.shape}; a view is passed as a copy, so the other would not see the write",
                    fix="pass the whole tensor and slice it inside the function, or pass a clone",
                )
            )

    def _refuse_aliases(self, arg_buffers: list[Buffer]) -> None:
        """Raise if what a name holds today is an argument or other state too, and the program writes to one of them."""
        count = Counter(map(id, (*self.written, *self.read, *arg_buffers)))
        writes = {id(b) for b in (*self.written, *(arg_buffers[i] for i in self.written_args))}
        for _, buffers, index in self.rebound:
            buffer = buffers[index]
            if count[id(buffer)] > 1 and id(buffer) in writes:
                raise TraceError(
                    message(
                        "a tensor that is read under a name is an argument or other state too, and the function writes to one of them",
                        f"the tensor has shape {buffer.shape}; when the function was traced they were two tensors",
                        fix="give the name a clone: holder.name = tensor.clone()",
                    )
                )

    def _require_finite(self, flags: list[Any]) -> None:
        """Raise, before state is written back, if a module's output was not finite."""
        for name, flag in zip(self.captured.finite, flags, strict=True):
            if not np.all(fetched(flag)):
                raise NonFiniteError(
                    message(
                        f"the output of module '{name}' is not finite",
                        "it is the first one in the order in which modules finished; model and optimizer are as before the step",
                        fix="look at its inputs and parameters; lower the learning rate, clip gradients, or use a wider dtype",
                    )
                )

    def _values(self, buffers: list[Buffer], last: list[Any], shardings: list[Any], changed: list[Any]) -> list[Any]:
        """The buffers' arrays; those that are not what the last call left (`last`) are laid out anew, and added to `changed`."""
        values = list(map(_value, buffers))
        if len(last) == len(values) and all(map(is_, values, last)):
            return values
        for i, value in enumerate(values):
            if value is not last[i]:
                values[i] = self._fitted(buffers[i], shardings[i])
                changed.append(values[i])
        return values

    def _fitted(self, buffer: Buffer, sharding: Any) -> Any:
        """A state value that somebody else wrote since the last call, laid out as the program expects."""
        self._settle(buffer)
        if buffer.raw().sharding != sharding:
            buffer.place(sharding)
        return buffer.value

    def _refuse_shared(self, state: list[Any]) -> None:
        """No array may be donated twice: a state tensor that shares its array with another gets its own copy."""
        if len(set(map(id, state))) == len(state):
            return
        seen: set[int] = set()
        for i, value in enumerate(state):
            if id(value) in seen:
                state[i] = jnp.copy(value)
            seen.add(id(value))

    def _leave_gradients(self, grads: list[Any], given: Any) -> None:
        values = iter(grads)
        for owner, grad in () if self._has_left_gradients() else self.captured.gradients:
            leaf = owner if isinstance(owner, torch.Tensor) else flatten(given, classes=self.captured.holders).leaves[owner]
            left = grad
            if grad is not None and self.options.keep_grads:
                value, shape, spec = next(values), tuple(grad.shape), state_sharding_of(leaf)
                left = wrap(value) if value.shape == shape or spec is None else wrap_stored(value, shape, spec)
            if leaf.grad is not left:
                leaf.grad = left
        for (parameter, state), value in zip(self.captured.born, values, strict=True):
            buffer = buffer_of(state)
            buffer.value, buffer.dropped = value, None
            buffer.annotation = state_sharding_of(parameter) if parameter.shape == state.shape else None

    def _has_left_gradients(self) -> bool:
        """Whether each parameter has the gradient that a call leaves there: none has to be put."""
        return self.leaves is not None and all(map(is_, map(_grad, self.leaves), self.left))

    def _result(self, outputs: list[Any], given: Any, held: list[Any]) -> Any:
        captured = self.captured
        leaves, objects = [], []
        if self.shows_arguments:
            leaves, _, objects = flatten(given, classes=captured.holders)
        given = (*given, objects)
        flat = made(captured.leaves, outputs, leaves, given, held)
        result, *values = remade(captured.nodes, captured.refs, flat)
        holders = [of_caller(e.holder, given) if isinstance(e.holder, tuple) else None for e in captured.effects]
        for instance, contents in zip(objects, values[len(holders) :], strict=True):
            fill(instance, contents)
        for effect, holder, value in zip(captured.effects, holders, values, strict=False):
            if isinstance(effect.holder, tuple):
                put_in_argument(effect, holder, value)
            else:
                effect.put(value)
        return result

    def _not_here(self) -> SpmdError:
        assert self.mesh is not None
        return SpmdError(
            message(
                f"this program cannot run: its tensors lie on {self.mesh}, which has no devices here",
                "programs over a topology are compiled and not run",
                fix="read it with step.program(...).memory(), or mark the tensors over a mesh of devices that are here",
            )
        )


_EMPTY = Buffer(None, ())
_grad, _value = attrgetter("grad"), attrgetter("value")


__all__ = ["Options", "Program"]

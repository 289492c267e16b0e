"""The program of a recording. It takes buffers from before the recording and returns those still alive; written buffers are donated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

from mesh import Mesh
from spmd.base import _counters
from spmd.base._convert import exact_dtypes, to_torch_dtype
from spmd.base._exact import exactly
from spmd.base._jax import inline_jaxpr
from spmd.base._progress import underway
from spmd.base._settings import keep_programs_by_default
from spmd.device._arrays import laid_out, upload
from spmd.device._checks import Check, note, raise_known, stacked
from spmd.device._numbers import lifted
from spmd.device._pacing import note_call
from spmd.device._random_stream import default_stream
from spmd.device._shared_arrays import donatable
from spmd.device._storage import recording
from spmd.program._job_checks import require_sound, watched
from spmd.program.lazy._described import repeated_number
from spmd.program.lazy._effect import stored_shape, traced_buffer
from spmd.program.lazy._node import Node
from spmd.program.lazy._recording import Input, Recording
from spmd.program.lazy._replay import New, Replay
from spmd.program.trace._buffer_use import TraceRecorder
from spmd.program.xla._channels_last import has_convolution, run_channels_last
from spmd.program.xla._compile_options import compiled
from spmd.program.xla._executable import Executable, lowered, on_all_devices
from spmd.program.xla._target import lies_on, platform_of, program_mesh, target_text

_LARGEST_EXACT = 2**53


class Region(Executable):
    """An executable for the operations on the path to a node.

    Attributes:
        outputs: places of the buffers whose values it returns, in order.
        donated: the outputs whose old arrays are donated; they come first.
        varying: positions of the Python numbers that are its inputs.
        literals: (position, exact value) of the Python numbers that are constants of it.
        checks: its checks of values. Their flags are its last result.
    """

    def __init__(self, recorded: Recording, outputs: Sequence[int], varying: frozenset[int], platform: str) -> None:
        """Compile the program of a recording.

        Args:
            recorded: the recording, which has not run yet.
            outputs: places of the buffers whose values are needed.
            varying: positions of the Python numbers that are inputs.
            platform: platform of the program if no tensor is on a mesh.

        Raises:
            SpmdError: its tensors are on meshes with different devices.
        """
        self.node = recorded.node
        self.varying = sorted(i for i in varying if abs(recorded.numbers[i]) <= _LARGEST_EXACT)
        is_varying = set(self.varying)
        self.literals = [(i, exactly(n)) for i, n in enumerate(recorded.numbers) if i not in is_varying]
        self.mesh = recording_mesh(recorded)
        self.platform = platform_of(self.mesh) if self.mesh is not None else platform
        self.replicated = None if self.mesh is None else NamedSharding(self.mesh.to_jax(), PartitionSpec())
        self.checks: list[Check] = []
        self.watched = watched()
        written = _written(self.node)
        input_at = {one.place: i for i, one in enumerate(recorded.inputs)}
        roots = recorded.roots
        # State first, as in every program: jax assigns donated memory to the first result that fits it. 0-dim state is not donated.
        self.donated = [p for p in outputs if p in input_at and p in written and roots[p].shape]
        is_donated = set(self.donated)
        self.outputs = [*self.donated, *(p for p in outputs if p not in is_donated)]
        self._donated = [input_at[p] for p in self.donated]
        self._kept = [i for i, one in enumerate(recorded.inputs) if one.place not in is_donated]
        self.shardings: list[Any] = [None] * len(recorded.inputs)
        self._compile(recorded)

    @property
    def title(self) -> str:
        """A name for messages: the number of operations, the user's line of the last one, and the mesh."""
        where = f" up to {self.node.line}" if self.node.line else ""
        return f"{self.node.count} recorded operation{'' if self.node.count == 1 else 's'}{where}{target_text(self.mesh)}"

    def note_lowered(self, program: Any) -> None:
        """Called with the lowered program before it is compiled. Does nothing here; a subclass may read the program."""

    def holds(self, numbers: list[int | float]) -> bool:
        """Whether the numbers that are constants of the program have the same values in `numbers`."""
        return all(exactly(numbers[i]) == value for i, value in self.literals)

    def _compile(self, recorded: Recording) -> None:
        values = self._values(recorded)
        self.shardings = [v.sharding for v in values]
        vector, words = np.zeros(len(self.varying)), _words(recorded)
        with exact_dtypes():
            examples = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
            with underway(f"tracing {self.title}"):
                closed: Any = jax.make_jaxpr(lambda *given: self._trace(recorded, *given))(examples, vector, words)
            record = run_channels_last if self.platform == "cpu" and has_convolution(closed.jaxpr) else inline_jaxpr
            order, kept, num_donated = [*self._donated, *self._kept], self._kept, len(self._donated)

            def lazy(donated: Any, rest: Any, vector: Any, words: Any) -> Any:
                values: list[Any] = [None] * len(order)
                for i, value in zip(order, (*donated, *rest), strict=True):
                    values[i] = value
                return record(closed.jaxpr, closed.consts, *values, vector, words)

            pinned = None
            if self.mesh is not None:
                input_at = {one.place: i for i, one in enumerate(recorded.inputs)}
                pinned = [self._result_sharding(recorded, p, input_at.get(p)) for p in self.outputs]
                pinned.extend([None] * bool(self.checks))
            args = ([values[i] for i in self._donated], [values[i] for i in kept], *self._upload(vector, words))
            assert len(args[0]) == num_donated
            program = lowered(lazy, args, donate=True, pinned=pinned, mesh=self.mesh, platform=self.platform)
            self.note_lowered(program)
            if self.watched is not None:
                buffers = [b for b in (ref() for ref in recorded.buffers) if b is not None and b.value is not None]
                self.watched.require_same("lazy", self.mesh, buffers, [], program)
            keep_programs_by_default()
            with underway(f"compiling {self.title}"):
                self.compiled = compiled(program, self.platform)
            if self.watched is not None and self.platform == "cpu":
                require_sound(self.hlo())

    def _trace(self, recorded: Recording, values: list[Any], vector: Any, words: Any) -> list[Any]:
        """Run the recorded operations on tracers. Called by `jax.make_jaxpr`."""
        replay, start = Replay(), default_stream.draws
        streams = iter([words[i] for i in range(words.shape[0])])
        recorder = TraceRecorder(next(streams), start, {}, platform=self.platform)
        has_drawn = False
        position = {number: i for i, number in enumerate(self.varying)}
        numbers: list[Any] = [
            lifted(vector[position[i]], integral=type(n) is int) if i in position else n for i, n in enumerate(recorded.numbers)
        ]
        arrays = {t.place: value for t, value in zip(recorded.inputs, values, strict=True)}
        token = recording.set(recorder)
        try:
            for node in self.node.path():
                for place, found in node.inputs:
                    value = jnp.full(stored_shape(found), repeated_number(found)) if found.fill is not None else arrays[place]
                    replay.put(place, traced_buffer(value, found), to_torch_dtype(found.dtype))
                if node.effect.draws:
                    if node.sets_stream and has_drawn:
                        recorder.words, recorder.start_draws = next(streams), default_stream.draws
                    has_drawn = True
                with torch.autocast("jax", enabled=False):
                    result, _ = replay.run(node.operation, node.args, node.kwargs, numbers[node.first_number :])
                bind(replay, node.effect.result, result, node.first_made)
            self.checks = [check for check, _ in recorder.checks]
            flags = [stacked([flag for _, flag in recorder.checks])] if recorder.checks else []
            return [*(replay.buffer(place).raw() for place in self.outputs), *flags]
        finally:
            recording.reset(token)
            default_stream.draws = start

    def _result_sharding(self, recorded: Recording, place: int, index: int | None) -> Any:
        """The sharding of an output, or None where XLA chooses. `index` is its index among the inputs, if it is one."""
        if place in recorded.layouts:
            return recorded.layouts[place].to_jax()
        if index is not None:
            return self.shardings[index]
        annotation = recorded.roots[place].annotation
        return None if annotation is None else annotation.to_jax()

    def _upload(self, vector: np.ndarray[Any, Any], words: np.ndarray[Any, Any]) -> tuple[Any, Any]:
        return on_all_devices(vector, self.replicated), on_all_devices(words, self.replicated)

    def _values(self, recorded: Recording) -> list[Any]:
        """The arrays of the buffers from before the recording, with the shardings that the program expects."""
        return [self._value(recorded, one, sharding) for one, sharding in zip(recorded.inputs, self.shardings, strict=True)]

    def _value(self, recorded: Recording, given: Input, sharding: Any) -> Any:
        value, root = given.value, recorded.roots[given.place]
        if value is not None and sharding is not None and value.sharding is sharding:
            return value
        annotation = root.annotation
        wanted = sharding if sharding is not None else self.replicated if annotation is None else annotation.to_jax()
        buffer = recorded.buffers[given.place]()
        is_current = buffer is not None and buffer.queue is recorded and not buffer.is_waiting
        if value is None:
            if not is_current or buffer is None:
                assert given.host is not None
                return upload(given.host, wanted)
            buffer.place(wanted)  # kept in the buffer, so that it is uploaded only once
            return buffer.value
        if sharding is None and annotation is None and (self.mesh is None or lies_on(value, self.mesh)):
            return value
        if wanted is None or value.sharding == wanted:
            return value
        value = laid_out(value, root.shape, wanted)
        if is_current and buffer is not None:
            buffer.value = value
        return value

    def __call__(self, recorded: Recording) -> list[Any]:
        """Run on the inputs of a recording. Returns the values of `outputs`."""
        if self.checks:
            raise_known()
        _counters.count("programs")
        values = self._values(recorded)
        vector = np.array([recorded.numbers[i] for i in self.varying], np.float64)
        words = _words(recorded)
        if self.watched is not None:
            self.watched.begin(vector.tolist(), [], [])
        args = (donatable([values[i] for i in self._donated]), [values[i] for i in self._kept], *self._upload(vector, words))
        is_paced = self.replicated is not None and self.replicated.num_devices > 1 and self.platform == "cpu"
        if is_paced and self.watched is not None:
            jax.block_until_ready(args)
        with exact_dtypes():
            results = self.compiled(*args)
        if is_paced:
            note_call(results[len(self.donated) :], results[: len(self.donated)])
        if self.checks:
            note(results[-1], self.checks)
        if self.watched is not None:
            self.watched.end()
        return results[: len(self.outputs)]


def recording_mesh(recorded: Recording) -> Mesh | None:
    """The mesh that the buffers of a recording are marked over; otherwise the mesh of an array, the result of another program, or None.

    Raises:
        SpmdError: they are marked over meshes with different devices.
    """
    marked = [*(root.annotation for root in recorded.roots), *recorded.layouts.values()]
    return program_mesh(marked, (), [one.value for one in recorded.inputs])


def _words(recorded: Recording) -> np.ndarray[Any, Any]:
    """The random states at which draws begin: uint32[states, 4]."""
    return np.stack(recorded.words or [default_stream.words()])


def _written(node: Node) -> set[int]:
    return {place for one in node.path() for place in one.effect.written}


def bind(replay: Replay, shown: Any, result: Any, first: int) -> None:
    """Bind the buffers that an operation created to their places in a replay.

    Args:
        shown: the result of the operation, as in `Effect.result`.
        result: its result in the replay.
        first: the place of the first buffer that it creates.
    """
    if type(shown) is New:
        replay.bind(first + shown.made, result)
    elif isinstance(shown, list | tuple) and isinstance(result, list | tuple):
        for one, part in zip(shown, result, strict=True):
            bind(replay, one, part, first)


__all__ = ["Region", "bind", "recording_mesh"]

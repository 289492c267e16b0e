"""One trace of a graph that Dynamo captured: flat lists of arrays in and out, forward and, if gradients flow, backward.

torch's autograd writes the backward pass in the trace of the forward pass (as in `spmd.program.flow._joint`). The trace also records side
effects: inputs that are written, results that are inputs or views of inputs or of each other, and the number of random draws.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import called_at, message
from spmd.base._jax import with_constants_as_inputs
from spmd.base._open_sizes import are_sizes_open
from spmd.device._checks import Check
from spmd.device._indices import BeforeCall
from spmd.device._random_stream import default_stream
from spmd.device._storage import Buffer, buffer_of, load, recording, wrap
from spmd.dynamo._graph_backward import reached_by, tie_derivatives
from spmd.dynamo._graph_inputs import Given
from spmd.dynamo._graph_passes import Joint
from spmd.dynamo._graph_results import Results, Untraceable
from spmd.program.flow._round import CheckedRound, one_round
from spmd.program.trace._buffer_use import TraceRecorder
from spmd.program.trace._known_inputs import ArgumentCheck

Graph = Callable[..., Sequence[Any]]
Recorded = Callable[[Sequence[Any], Any], TraceRecorder]


class _GraphRound(CheckedRound):
    """A round that may write to its inputs, but to nothing outside.

    Attributes:
        positions: the position of each input, by id of its array.
        inputs: the device tensors among the inputs.
        input_checks: checks of inputs before each call.
        is_forward: whether flags can leave the graph: those of the backward pass cannot.
    """

    def __init__(self, words: Any, start_draws: int) -> None:
        super().__init__(words, start_draws)
        self.positions: dict[int, int] = {}
        self.inputs: list[torch.Tensor] = []
        self.input_checks: list[ArgumentCheck] = []
        self.is_forward = True

    @property
    def takes_checks(self) -> bool:
        return self.is_forward

    def each_call(self, tensor: torch.Tensor, look: BeforeCall) -> bool:
        position = self.positions.get(id(buffer_of(tensor).value))
        if position is None:
            return False
        check = ArgumentCheck.of(position, tensor, look)
        if position < len(self.inputs) and _shape(tensor)[:3] == _shape(self.inputs[position])[:3]:
            check.place = None
        if check.place is not None and are_sizes_open():  # the view of another call has other sizes
            return True
        self.input_checks.append(check)
        return False

    def will_write(self, buffer: Buffer) -> None:
        if buffer not in self.newborn:
            raise Untraceable(
                message(
                    "a graph writes in place to a tensor that is not among its inputs",
                    *called_at(),
                    f"the tensor has shape {buffer.shape}",
                    fix="pass the tensor to the compiled function",
                )
            )
        super().will_write(buffer)


class GraphTrace:
    """The trace of one graph. If gradients flow it runs twice, the first time for the shapes of the cotangents.

    Args:
        graph: a function of device tensors, passed as `given` says.
        layouts: for each tensor the sharding of values written to it and of its gradient, or None.
        recorded: makes the recorder of a trace, from the values of CPU tensors and the random state.
    """

    def __init__(self, graph: Graph, given: Sequence[Given], layouts: Sequence[Any], recorded: Recorded) -> None:
        self._graph, self._given, self._layouts, self._recorded = graph, given, layouts, recorded
        self._wanted = [i for i, one in enumerate(given) if one.wants_gradient]
        self._found: Results
        self._written: list[int] = []
        self._gradients: list[int] = []
        self._reached: list[list[bool]] = []
        self._reads: dict[int, Buffer] = {}
        self._draws = 0
        self._checks: list[Check] = []
        self._input_checks: list[ArgumentCheck] = []

    def joint(self, examples: Sequence[Any], hosts: Sequence[Any]) -> Joint:
        """Trace both passes, given an array (or its shape and dtype) for each tensor and the values of CPU tensors.

        Raises:
            Untraceable: the graph writes to a tensor from outside, writes a value with a gradient to an input, or replaces an input's
                memory; or a result is not expressible as a view.
            TraceError: Python or the host needs a value.
        """
        with exact_dtypes():
            known = [*map(jax.typeof, (*examples, *map(jnp.asarray, hosts))), jax.ShapeDtypeStruct((4,), jnp.uint32)]
            cotangents: list[Any] = []
            if self._wanted:
                values = jax.eval_shape(lambda *arrays: self._run(arrays, None)[0], *known)
                cotangents = [jax.ShapeDtypeStruct(tuple(self._found.made[i].shape), values[i].dtype) for i in self._found.flowing]
            closed, consts = with_constants_as_inputs(jax.make_jaxpr(self._run)(known, cotangents))
        found, outer = self._found, [(value, self._reads.get(id(value))) for value in consts]
        return Joint(
            *(closed, outer, len(self._given), 0, found.results, found.windows, found.flowing if cotangents else []),
            *(self._written, self._gradients, self._reached, self._draws, self._checks, self._input_checks),
        )

    def _run(self, arrays: Sequence[Any], cotangents: Sequence[Any] | None) -> tuple[list[Any], ...]:
        """(computed values, new values of written inputs, flags of checks, gradients), from traced arrays: tensors, CPU tensors, random
        words."""
        words, hosts = arrays[-1], arrays[len(self._given) : -1]
        one_thread = torch.autograd.set_multithreading_enabled(False)  # jax's trace state is thread-local
        with _recording_in(self._recorded(hosts, words)), one_round(words, _GraphRound) as part, one_thread:
            part.positions = {id(array): i for i, array in enumerate(arrays[:-1])}
            inputs = [one.in_trace(array) for one, array in zip(self._given, arrays, strict=False)]
            part.inputs, buffers = inputs, list(map(buffer_of, inputs))
            start, shapes = [b.value for b in buffers], list(map(_shape, inputs))
            found = self._found = Results(self._returned(inputs), inputs)
            if [*map(buffer_of, inputs)] != buffers or [*map(_shape, inputs)] != shapes:
                fix = "write to its elements, or return the new tensor"
                raise Untraceable(message("a graph gives an input new memory or another shape", *called_at(), fix=fix))
            self._written = [i for i, (b, was) in enumerate(zip(buffers, start, strict=True)) if b.value is not was]
            if any(inputs[i].grad_fn is not None for i in self._written):
                raise Untraceable(message("a graph writes a value with a gradient to an input", fix="return the new value instead"))
            part.is_forward = False
            self._checks, self._input_checks = [check for check, _ in part.checks], part.input_checks
            grads: Any = ()
            reaches: list[list[bool]] = []
            if cotangents:
                flowing, sources = [found.made[i] for i in found.flowing], [inputs[i] for i in self._wanted]
                reaches = [reached_by(output, sources) if len(flowing) > 1 else [True] * len(sources) for output in flowing]
                if len(flowing) > 1:
                    tie_derivatives(flowing)
                try:
                    grads = torch.autograd.grad(flowing, sources, list(map(wrap, cotangents)), allow_unused=True)
                except RuntimeError as error:  # eager code raises it when gradients are requested
                    raise Untraceable(message("the gradient of a graph cannot be computed", str(error), fix="see there")) from error
            reached = [(i, g) for i, g in zip(self._wanted, grads, strict=False) if g is not None]
            self._gradients = [i for i, _ in reached]
            self._reached = [[r for r, g in zip(own, grads, strict=True) if g is not None] for own in reaches]
            self._draws = default_stream.draws - part.start_draws
            self._reads = {id(value): buffer for buffer, value in part.seen.items()}
            new = [self._constrained(i, buffers[i].raw()) for i in self._written]
            flags = [jnp.stack(part.flags())] if part.checks else []
            return found.values(), new, flags, [self._constrained(i, load(g)) for i, g in reached]

    def _returned(self, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        try:
            return self._graph(*inputs)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            what = "a graph writes to an input that requires a gradient"  # outside the graph it may not be a leaf
            raise Untraceable(message(what, *called_at(), fix="return the new value instead")) from error

    def _constrained(self, position: int, value: Any) -> Any:
        sharding = self._layouts[position]
        return value if sharding is None else jax.lax.with_sharding_constraint(value, sharding)


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.requires_grad


@contextmanager
def _recording_in(recorder: TraceRecorder) -> Generator[None]:
    token = recording.set(recorder)
    try:
        yield
    finally:
        recording.reset(token)


__all__ = ["GraphTrace"]

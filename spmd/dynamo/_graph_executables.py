"""The executables of one graph for one signature, and a call of them: a flat list of arrays in, results wrapped once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._jax import ArrayImpl
from spmd.base._progress import underway
from spmd.base._torch import without_saved_tensors_hooks
from spmd.base._torch_late import without_dynamo
from spmd.device._checks import note, raise_known
from spmd.device._host_copies import HostCopy
from spmd.device._indices import known_values
from spmd.device._pacing import note_operation
from spmd.device._partitioner import PartitionedJit
from spmd.device._random_stream import default_stream
from spmd.device._storage import Buffer, buffer_of, is_device_tensor, load, wrap
from spmd.device._uploaded import host_values
from spmd.dynamo._graph_calls import Calls
from spmd.dynamo._graph_inputs import Given, example_of, given_as, layout_of, write_back
from spmd.dynamo._graph_node import on_tape
from spmd.dynamo._graph_passes import Traced
from spmd.dynamo._graph_results import Made, Plain, Shown, made_of
from spmd.dynamo._graph_trace import GraphTrace
from spmd.program._job_checks import compiling
from spmd.program.trace._buffer_use import TraceRecorder
from spmd.program.trace._host_arguments import host_argument
from spmd.program.trace._host_effects import no_host_random
from spmd.program.trace._known_inputs import ArgumentCheck
from spmd.program.trace._memory_order import stored_values
from spmd.program.trace._window import Window
from spmd.program.xla._executable import on_all_devices
from spmd.program.xla._target import common_mesh, lies_on, likely_platform

Sizes = tuple[int, ...]


def is_host_tensor(value: Any) -> bool:
    """Whether `value` is a tensor that is not on device 'jax'."""
    return isinstance(value, torch.Tensor) and not is_device_tensor(value)


class GraphExecutables:
    """The executables for one signature.

    Attributes:
        traced: the trace from which they were made.
        given: how each device tensor is passed to them.
        mesh: the mesh of the tensors, or None for a single device.
    """

    def __init__(self, calls: Calls, args: tuple[Any, ...], name: str, *, takes_numbers: bool) -> None:
        """`takes_numbers`: Python floats are inputs; otherwise they are constants."""
        self._held, self._held_hosts = calls.held, calls.held_hosts
        self._positions = [i for i, a in enumerate(args) if is_device_tensor(a)]
        self._numbers = calls.numbers if takes_numbers else []
        self._hosts = [*self._numbers, *(i for i, a in enumerate(args) if is_host_tensor(a) and i not in calls.numbers)]
        self._has_all = len(self._positions) == len(args)
        tensors = self._tensors(args)
        self.mesh = common_mesh(buffer_of(t).annotation for t in tensors)
        self._replicated = None if self.mesh is None else jax.NamedSharding(self.mesh.to_jax(), jax.sharding.PartitionSpec())
        self._turns_on = calls.enables_gradients
        with_gradient = torch.is_grad_enabled() or self._turns_on
        self.given = [self._given_as(t, i, with_gradient) for i, t in enumerate(tensors)]
        with compiling(), without_dynamo(), without_saved_tensors_hooks(), underway(f"tracing {name}"), no_host_random():
            self.traced = traced = self._traced(calls, args, tensors)
        self._outer = [value for value, _ in traced.outer]
        self._no_words: Any = on_all_devices(np.zeros(4, np.uint32), self._replicated)  # a device array, so that no call uploads it
        self._forward = self._jitted(traced.run_forward, name)
        self._name = name
        self._backwards: dict[tuple[bool, ...], tuple[Any, list[int]]] = {}  # keyed by which cotangents are given
        self._is_plain = all(isinstance(r, Made) and r.position == i for i, r in enumerate(traced.results))

    def _given_as(self, tensor: torch.Tensor, position: int, with_gradient: bool) -> Given:
        return given_as(tensor, with_gradient and tensor.requires_grad)

    def _jitted(self, fn: Any, name: str) -> Any:
        def run(*args: Any) -> Any:
            return fn(*args)

        run.__name__ = run.__qualname__ = name
        return jax.jit(run) if self.mesh is None else PartitionedJit(run)

    def _traced(self, calls: Calls, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> Traced:
        """The trace. CPU tensors are inputs after the device tensors, and the graph must not write to them."""
        hosts = self._host_tensors(args)
        examples = [example_of(t, self.mesh, self._replicated) for t in tensors]
        return self._trace(calls, args, hosts, self.given).joint(examples, list(map(stored_values, hosts))).split()

    def _trace(self, calls: Calls, args: tuple[Any, ...], hosts: list[torch.Tensor], given: Sequence[Given]) -> GraphTrace:
        """The trace of the graph with device tensors passed as in `given`, and with CPU tensors like `hosts`."""
        bound = [None if is_device_tensor(a) else a for a in args]
        tensors = self._tensors(args)
        count, platform = len(self._positions), likely_platform(map(buffer_of, tensors))
        numbers: list[Any] = []
        copies: list[HostCopy] = []

        def run(*inputs: torch.Tensor) -> Any:
            filled = list(bound)
            for position, copy in zip(self._hosts, copies, strict=False):
                filled[position] = copy
            for position, number in zip(self._numbers, numbers, strict=True):
                filled[position] = wrap(number)  # its `item()` is a number on the device
            for position, tensor in zip(self._positions, inputs, strict=False):
                filled[position] = tensor
            return calls.run(filled, [*inputs[count:], *copies[len(self._hosts) :]])

        def recorded(values: Sequence[Any], words: Any) -> TraceRecorder:
            numbers[:] = values[: len(self._numbers)]
            copies[:] = [host_argument(host.detach(), wrap(value)) for host, value in zip(hosts, values, strict=False)]
            return TraceRecorder(words, default_stream.draws, {}, platform=platform)

        return GraphTrace(run, given, [layout_of(t, how.size) for t, how in zip(tensors, given, strict=True)], recorded)

    def _host_tensors(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        return [*(args[i] for i in self._hosts), *self._held_hosts]

    def _host_arrays(self, args: tuple[Any, ...]) -> Sequence[Any]:
        return list(map(stored_values, self._host_tensors(args))) if self._hosts or self._held_hosts else ()

    def sizes_of(self, args: tuple[Any, ...]) -> Sizes:
        """The varying sizes of a call; () if none vary."""
        return ()

    def _cut(self, values: Sequence[Any], outputs: Sequence[int], sizes: Sizes) -> Sequence[Any]:
        """Results of the program without padding. `outputs`: their indices among the results of both passes."""
        return values

    def _shown(self, sizes: Sizes) -> tuple[list[Made | Shown | Plain], list[Window | None]]:
        """The results of a call, and the windows of its computed values."""
        return self.traced.results, self.traced.windows

    def _tensors(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        return [*args, *self._held] if self._has_all else [*(args[i] for i in self._positions), *self._held]

    def is_shared(self, args: tuple[Any, ...]) -> bool:
        """Whether the graph writes to a tensor that shares its storage with another input. PyTorch then runs the graph itself."""
        if not self.traced.written:
            return False
        buffers = list(map(buffer_of, self._tensors(args)))
        return any(buffers.count(buffers[i]) > 1 for i in self.traced.written)

    def __call__(self, args: tuple[Any, ...]) -> Any:
        """Run the graph; returns its results."""
        if self._turns_on and not torch.is_grad_enabled():  # the trace determines which results have a gradient
            with torch.enable_grad():
                return self(args)
        tensors = self._tensors(args)
        if self.traced.backward is None:
            made: Sequence[torch.Tensor] = self.forward(tensors, args)[0]
        else:
            made = on_tape(self, tensors, args)
        if self._is_plain:
            return made
        return [self._result(result, made, tensors) for result in self._shown(self.sizes_of(args))[0]]

    def forward(self, tensors: list[torch.Tensor], args: tuple[Any, ...]) -> tuple[list[torch.Tensor], list[Any]]:
        """(computed values as tensors, arrays saved for the backward pass). Inputs that the graph writes to are updated."""
        traced, words, outer, sizes = self.traced, self._no_words, self._outer, self.sizes_of(args)
        self._check_inputs(tensors, args, sizes)
        if traced.checks:
            raise_known()
        if traced.draws:
            words = default_stream.words()
            default_stream.draws += traced.draws
        if outer:
            outer = [value if buffer is None else buffer.get() for value, buffer in traced.outer]
        with exact_dtypes():
            inputs = self.arrays(tensors, self.given)
            inputs += self._host_arrays(args)
            flat = self._forward(*outer, *inputs, words)
        if self.mesh is not None:
            note_operation(flat)
        num_values, num_own = len(traced.windows), traced.num_own
        own = self._cut(flat[:num_own], range(num_own), sizes)
        for i, value in zip(traced.written, own[num_values:], strict=False):
            write_back(tensors[i], self.given[i].stride, value)
        if traced.checks:
            note(own[-1], traced.checks)
        return list(map(made_of, own[:num_values], self._shown(sizes)[1])), flat[num_own:]

    def _input_checks(self, sizes: Sizes) -> list[ArgumentCheck]:
        """The checks of inputs before a call with these sizes."""
        return self.traced.input_checks

    def _check_inputs(self, tensors: list[torch.Tensor], args: tuple[Any, ...], sizes: Sizes) -> None:
        """Raise CPU torch's error if the host knows that an index among the inputs is out of bounds."""
        for check in self._input_checks(sizes):
            place = check.argument
            if place < len(tensors):
                check(_known_values(tensors[place], self.given[place]))
            else:
                check(stored_values(self._host_tensors(args)[place - len(tensors)]))

    def bare(self, args: tuple[Any, ...]) -> Callable[[], Any]:
        """A call of only the forward executable on today's arrays, to measure the overhead around it."""
        inputs = self.arrays(self._tensors(args), self.given)

        def call() -> Any:
            with exact_dtypes():
                return self._forward(*self._outer, *inputs, self._no_words)

        return call

    def backward(self, kept: Sequence[Any], cotangents: Sequence[Any], sizes: Sizes) -> list[torch.Tensor | None]:
        """Gradients of the inputs at `traced.gradients`. See Note [Outputs without a gradient].

        Args:
            cotangents: cotangents of the outputs at `traced.flowing`; None for an output without one.
        """
        run, found = self._backward_for(tuple(c is not None for c in cotangents), kept)
        with exact_dtypes():
            grads = run(*kept, *(c for c in cotangents if c is not None))
        if self.mesh is not None:
            note_operation(grads)
        made: list[torch.Tensor | None] = [None] * len(self.traced.gradients)
        for place, grad in zip(found, self._cut(grads, [self.traced.num_own + i for i in found], sizes), strict=True):
            made[place] = wrap(grad)
        return made

    def _backward_for(self, is_given: tuple[bool, ...], kept: Sequence[Any]) -> tuple[Any, list[int]]:
        if is_given not in self._backwards:
            assert self.traced.backward is not None
            with compiling(), underway(f"tracing {self._name}_backward"):
                run, found = self.traced.backward.for_outputs(is_given, kept)
            self._backwards[is_given] = self._jitted(run, f"{self._name}_backward"), found
        return self._backwards[is_given]

    def arrays(self, tensors: Sequence[torch.Tensor], given: Sequence[Given]) -> list[Any]:
        """The executable's inputs for today's tensors."""
        found: list[Any] = []
        mesh, add = self.mesh, found.append
        for tensor, how in zip(tensors, given, strict=True):
            buffer: Buffer = tensor.untyped_storage().spmd_buffer  # pyright: ignore[reportAttributeAccessIssue]
            value: Any = buffer.value
            root = buffer.shape
            is_array = type(value) is ArrayImpl and buffer.stored is root and root == how.root and value.aval.dtype is how.dtype
            if is_array and (mesh is None or lies_on(value, mesh)):
                add(value)
            else:
                add(self._fitted(tensor, how))
        return found

    def _fitted(self, tensor: torch.Tensor, how: Given) -> Any:
        value = example_of(tensor, self.mesh, self._replicated)
        if value.shape == how.root:
            return value
        stride = how.stride
        if stride is None:
            return load(tensor)
        # a part of a storage, laid out like the dense storage in the trace
        order = sorted(range(tensor.dim()), key=lambda dim: -stride[dim])
        return load(tensor).transpose(order).reshape(how.root)

    def _result(self, result: Made | Shown | Plain, made: Sequence[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
        if isinstance(result, Plain):
            return result.value
        if isinstance(result, Made):
            return made[result.position]
        if result.is_made:
            return result.shown(made[result.position], None)
        return result.shown(tensors[result.position], self.given[result.position].stride)


def _known_values(tensor: torch.Tensor, how: Given) -> Any:
    """The values that the host knows of an input, in the form in which the trace got it; None if it does not."""
    return known_values(tensor) if how.stride is None else host_values(buffer_of(tensor))


__all__ = ["GraphExecutables"]

"""A graph of Dynamo's as compiled programs, one per sizes: arrays in by a flat list, one call of the executable, results wrapped once.

    program = GraphProgram(graph_module, "graph_0")
    results = program(*inputs)              # Dynamo's guards hold: shapes, dtypes, gradients and modes are those of the trace

Graphs without a tensor of the device, and graphs that cannot be traced, run as PyTorch runs them, operation by operation; the
logger "spmd.dynamo" says which and why.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from spmd.base._convert import exact_dtypes, host_array
from spmd.base._errors import TraceError
from spmd.base._jax import ArrayImpl
from spmd.base._torch import are_functorch_transforms_active
from spmd.base._torch_late import without_dynamo
from spmd.base._underway import underway
from spmd.device._pacing import note_operation
from spmd.device._partitioner import PartitionedJit
from spmd.device._random_stream import default_stream
from spmd.device._storage import Buffer, buffer_of, is_device_tensor, load, recording
from spmd.device._turn import turn
from spmd.dynamo._graph_calls import Calls
from spmd.dynamo._graph_inputs import Given, example_of, given_as, layout_of, write_back
from spmd.dynamo._graph_node import Node
from spmd.dynamo._graph_results import Made, Plain, Shown, made_of
from spmd.dynamo._graph_trace import GraphTrace, Traced
from spmd.program._job_checks import compiling
from spmd.program.trace._buffer_use import TraceRecorder
from spmd.program.trace._host_values import HostArgument, computed_on_host, identity_of, no_host_random
from spmd.program.xla._target import common_mesh, lies_on, likely_platform

logger = logging.getLogger("spmd.dynamo")
_NO_WORDS = np.zeros(4, np.uint32)


class GraphProgram:
    """One graph, and its programs by what Dynamo leaves open: the values of its integers, and where tensors lie.

    Attributes:
        name: of its programs in profiles.
        num_programs: how many were compiled.
        refused: why the graph runs operation by operation; None: it does not.
    """

    def __init__(self, graph: torch.fx.GraphModule, name: str) -> None:
        self._calls = Calls(graph)
        self.name = name
        self._programs: dict[Any, Program] = {}
        self._latest: Program | None = None
        self._marks = -1
        self.num_programs = 0
        self.refused: str | None = None

    def __repr__(self) -> str:
        return f"<{self.name}: {self.num_programs} programs>" if self.refused is None else f"<{self.name}: {self.refused.splitlines()[0]}>"

    def __call__(self, *args: Any) -> Any:
        """Run the graph; the first call with new sizes traces and compiles it."""
        if self.refused is not None or recording.get() is not None or are_functorch_transforms_active():
            return self._calls.graph(*args)
        program = self._latest
        if program is None or self._calls.has_symbols or self._marks != Buffer.marks:
            with turn:
                program = self._found(args)
        return self._calls.graph(*args) if program is None or program.is_shared(args) else program(args)

    def _found(self, args: tuple[Any, ...]) -> Program | None:
        if not any(map(is_device_tensor, (*args, *self._calls.held))) and not self._calls.makes_device_tensors:
            self.refused = "no tensor of it is on the device"
            return None
        key = tuple(map(_described, args))
        program = self._programs.get(key)
        if program is None:
            try:
                program = self._programs[key] = Program(self._calls, args, self.name)
            except TraceError as error:
                self.refused = str(error)
                logger.warning("%s runs operation by operation: %s", self.name, error)
                return None
            self.num_programs += 1
        self._latest, self._marks = program, Buffer.marks
        return program


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value), value
    return tuple(value.shape), buffer_of(value).annotation if is_device_tensor(value) else None


class Program:
    """The executables for one signature.

    Attributes:
        traced: the trace they were made from.
        given: how each tensor of the device is given to them.
        mesh: the mesh that the tensors lie on, or None (one device).
    """

    def __init__(self, calls: Calls, args: tuple[Any, ...], name: str) -> None:
        self._held, self._held_hosts = calls.held, calls.held_hosts
        self._positions = [i for i, a in enumerate(args) if is_device_tensor(a)]
        self._hosts = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and not is_device_tensor(a)]
        tensors = self._tensors(args)
        self.mesh = common_mesh(buffer_of(t).annotation for t in tensors)
        self._replicated = None if self.mesh is None else jax.NamedSharding(self.mesh.to_jax(), jax.sharding.PartitionSpec())
        with_gradient = torch.is_grad_enabled()
        self.given = [given_as(t, with_gradient and t.requires_grad) for t in tensors]
        with compiling(), without_dynamo(), underway(f"tracing {name}"), no_host_random():
            self.traced = traced = self._traced(calls, args, tensors)
        self._outer = [value for value, _ in traced.outer]
        self._forward = self._jitted(traced.run_forward, name)
        self._backward = None if traced.backward is None else self._jitted(traced.backward, f"{name}_backward")
        self._is_plain = all(isinstance(r, Made) and r.position == i for i, r in enumerate(traced.results))

    def _jitted(self, fn: Any, name: str) -> Any:
        def run(*args: Any) -> Any:
            return fn(*args)

        run.__name__ = run.__qualname__ = name
        return jax.jit(run) if self.mesh is None else PartitionedJit(run)

    def _traced(self, calls: Calls, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> Traced:
        """The trace, with CPU tensors as inputs after those of the device; it may not write to them."""
        hosts = self._host_tensors(args)
        copies = [t.detach().clone() for t in hosts]  # a trace is no call: what it writes is not written
        stand_ins = [t.as_subclass(HostArgument) for t in copies]
        bound, held_hosts = list(args), stand_ins[len(self._hosts) :]
        for i, stand_in in zip(self._hosts, stand_ins, strict=False):
            bound[i] = stand_in
        count, platform = len(self._positions), likely_platform(map(buffer_of, tensors))
        identities = list(map(identity_of, copies))

        def run(*inputs: torch.Tensor) -> Any:
            filled = list(bound)
            for position, tensor in zip(self._positions, inputs, strict=False):
                filled[position] = tensor
            return calls.run(filled, [*inputs[count:], *held_hosts])

        def recorded(values: Sequence[Any], words: Any) -> TraceRecorder:
            return TraceRecorder(words, dict(zip(identities, values, strict=True)), default_stream.draws, {}, platform=platform)

        examples = [example_of(t, self.mesh, self._replicated) for t in tensors]
        traced = GraphTrace(run, self.given, [layout_of(t) for t in tensors], recorded).traced(examples, list(map(host_array, hosts)))
        if any(t._version for t in copies):
            raise computed_on_host("it writes to it")
        return traced

    def _host_tensors(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        return [*(args[i] for i in self._hosts), *self._held_hosts]

    def _tensors(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        return [*(args[i] for i in self._positions), *self._held]

    def is_shared(self, args: tuple[Any, ...]) -> bool:
        """Whether the graph writes to a tensor whose storage another one shows too: PyTorch knows what the other sees then."""
        if not self.traced.written:
            return False
        buffers = list(map(buffer_of, self._tensors(args)))
        return any(buffers.count(buffers[i]) > 1 for i in self.traced.written)

    def __call__(self, args: tuple[Any, ...]) -> Any:
        """What the graph returns for these inputs."""
        tensors = self._tensors(args)
        if self._backward is None:
            made: Sequence[torch.Tensor] = self.forward(tensors, args)[0]
        else:
            made = Node.apply(self, tensors, args, *[tensors[i] for i in self.traced.gradients])
        if self._is_plain:
            return made
        return [self._result(result, made, tensors) for result in self.traced.results]

    def forward(self, tensors: list[torch.Tensor], args: tuple[Any, ...]) -> tuple[list[torch.Tensor], list[Any]]:
        """The computed values as tensors, and what is kept for the backward pass, as arrays; inputs that the graph writes are written."""
        traced, words, outer = self.traced, _NO_WORDS, self._outer
        if traced.draws:
            words = default_stream.words()
            default_stream.draws += traced.draws
        if outer:
            outer = [value if buffer is None else buffer.get() for value, buffer in traced.outer]
        with exact_dtypes():
            inputs = self.arrays(tensors, self.given)
            if self._hosts or self._held_hosts:
                inputs += map(host_array, self._host_tensors(args))
            values, new, kept = self._forward(outer, inputs, words)
        if self.mesh is not None:
            note_operation(values or new)
        for i, value in zip(traced.written, new, strict=True):
            write_back(tensors[i], self.given[i].stride, value)
        return list(map(made_of, values, traced.windows)), kept

    def backward(self, kept: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Gradients of the inputs at `traced.gradients`, as arrays."""
        assert self._backward is not None
        with exact_dtypes():
            grads = self._backward(kept, cotangents)
        if self.mesh is not None:
            note_operation(grads)
        return grads

    def arrays(self, tensors: Sequence[torch.Tensor], given: Sequence[Given]) -> list[Any]:
        """What the executable takes for today's tensors."""
        found: list[Any] = []
        for tensor, how in zip(tensors, given, strict=True):
            buffer: Buffer = tensor.untyped_storage().spmd_buffer  # pyright: ignore[reportAttributeAccessIssue]
            value: Any = buffer.value
            root = buffer.shape
            is_as_given = type(value) is ArrayImpl and buffer.stored is root and root == how.root and value.dtype == how.dtype
            if is_as_given and (self.mesh is None or lies_on(value, self.mesh)):
                found.append(value)
            else:
                found.append(self._fitted(tensor, how))
        return found

    def _fitted(self, tensor: torch.Tensor, how: Given) -> Any:
        value = example_of(tensor, self.mesh, self._replicated)
        if value.shape == how.root:
            return value
        stride = how.stride
        if stride is None:
            return load(tensor)
        # a part of a storage, as dense as the storage that there was
        order = sorted(range(tensor.dim()), key=lambda dim: -stride[dim])
        return load(tensor).transpose(order).reshape(how.root)

    def _result(self, result: Made | Shown | Plain, made: Sequence[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
        if isinstance(result, Plain):
            return result.value
        if isinstance(result, Made):
            return made[result.position]
        return result.shown(made[result.position] if result.is_made else tensors[result.position])


__all__ = ["GraphProgram", "Program"]

"""A Dynamo graph as compiled programs, one per sizes: a flat list of arrays in, one call of an executable, results wrapped once.

    program = GraphProgram(graph_module, "graph_0")
    results = program(*inputs)              # Dynamo's guards ensure the shapes, dtypes, requires_grad and modes of the trace

Graphs without a device tensor, and graphs that cannot be traced, run in PyTorch operation by operation. The logger "spmd.dynamo" reports
which graphs, and why.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from spmd.base._errors import TraceError
from spmd.base._exact import exactly
from spmd.base._settings import in_force
from spmd.base._torch import are_functorch_transforms_active
from spmd.device._storage import Buffer, buffer_of, is_device_tensor, recording
from spmd.device._trace_lock import trace_lock
from spmd.dynamo._graph_calls import Calls
from spmd.dynamo._graph_executables import GraphExecutables
from spmd.dynamo._sized_programs import SizedPrograms

logger = logging.getLogger("spmd.dynamo")
_MAX_NUMBERS = 16


class GraphProgram:
    """One graph, with a program for each case that Dynamo leaves open: values of its integers, and layouts of tensors.

    Python floats that vary are inputs of a program. If a trace needs their values, they are constants instead, with at most 16 programs.

    Attributes:
        name: name of its programs in profiles.
        refused: why the graph runs operation by operation; None if it does not.
    """

    def __init__(self, graph: torch.fx.GraphModule, name: str) -> None:
        self._calls = Calls(graph)
        self._takes_numbers = True  # until a trace needs the value of one
        self.name = name
        self.refused: str | None = None
        self._start()

    def _start(self) -> None:
        """Begin without programs."""
        self._checks_indices = in_force.check_indices
        self._programs: dict[Any, GraphExecutables] = {}
        self._latest: GraphExecutables | None = None
        self._marks = -1
        self._sized = SizedPrograms(self._calls, self.name)

    @property
    def num_programs(self) -> int:
        """Number of compiled programs."""
        return len(self._programs) + self._sized.num_programs

    @property
    def sizes(self) -> str | None:
        """Why every size gets its own program; None if a program serves many sizes, or none vary."""
        return self._sized.refused

    @property
    def latest(self) -> GraphExecutables | None:
        """The program that ran last."""
        return self._latest

    def __repr__(self) -> str:
        return f"<{self.name}: {self.num_programs} programs>" if self.refused is None else f"<{self.name}: {self.refused.splitlines()[0]}>"

    def __call__(self, *args: Any) -> Any:
        """Run the graph. The first call with new sizes traces and compiles it."""
        if self.refused is not None or recording.get() is not None or are_functorch_transforms_active():
            return self._calls.graph(*args)
        if self._checks_indices is not in_force.check_indices:  # `spmd.configure` was called
            self._start()
        program = self._latest
        if program is None or self._varies() or self._marks != Buffer.marks:
            with trace_lock:
                program = self._found(args)
        return self._calls.graph(*args) if program is None or program.is_shared(args) else program(args)

    def _found(self, args: tuple[Any, ...]) -> GraphExecutables | None:
        if not any(map(is_device_tensor, (*args, *self._calls.held))) and not self._calls.makes_device_tensors:
            self.refused = "it has no tensor on the device"
            return None
        if self._calls.enables_gradients and torch.is_inference_mode_enabled():
            self._refuse("it turns gradients on in inference mode, where only views of its inputs have a gradient")
            return None
        if self._calls.numbers and self._takes_numbers:
            try:
                return self._program_for(args, ())
            except (TraceError, TypeError, RuntimeError) as reason:  # an error with another cause is raised again below
                self._takes_numbers = False
                logger.info("%s takes its Python floats as constants: %s", self.name, reason)
        return self._program_for(args, tuple(exactly(args[i].item()) for i in self._calls.numbers))

    def _varies(self) -> bool:
        """Whether calls that pass Dynamo's guards may need different programs."""
        return bool(self._calls.sizes.names) or bool(self._calls.numbers and not self._takes_numbers)

    def _program_for(self, args: tuple[Any, ...], numbers: tuple[Any, ...]) -> GraphExecutables | None:
        """The program of a call in which these Python floats are constants."""
        program = self._sized.found(args, numbers, takes_numbers=self._takes_numbers) if self._calls.sizes.names else None
        key = (numbers, *map(_described, args))
        program = self._programs.get(key) if program is None else program
        if program is None and len({values for values, *_ in self._programs} | self._sized.numbers | {numbers}) > _MAX_NUMBERS:
            self._refuse(f"more than {_MAX_NUMBERS} values of its Python floats, each with its own program")
            return None
        if program is None:
            try:
                program = self._programs[key] = GraphExecutables(self._calls, args, self.name, takes_numbers=self._takes_numbers)
            except TraceError as error:
                if self._calls.numbers and self._takes_numbers:
                    raise
                self._refuse(str(error))
                return None
        self._latest, self._marks = program, Buffer.marks
        return program

    def _refuse(self, why: str) -> None:
        self.refused = why
        logger.warning("%s runs one operation at a time: %s", self.name, why)


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value), value
    return tuple(value.shape), buffer_of(value).annotation if is_device_tensor(value) else None


__all__ = ["GraphProgram"]

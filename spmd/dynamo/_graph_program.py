"""A graph of Dynamo's as compiled programs, one per sizes: arrays in by a flat list, one call of the executable, results wrapped once.

    program = GraphProgram(graph_module, "graph_0")
    results = program(*inputs)              # Dynamo's guards hold: shapes, dtypes, gradients and modes are those of the trace

Graphs without a tensor of the device, and graphs that cannot be traced, run as PyTorch runs them, operation by operation; the
logger "spmd.dynamo" says which and why.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from spmd.base._errors import TraceError
from spmd.base._exact import exactly
from spmd.base._torch import are_functorch_transforms_active
from spmd.device._storage import Buffer, buffer_of, is_device_tensor, recording
from spmd.device._turn import turn
from spmd.dynamo._graph_calls import Calls
from spmd.dynamo._graph_executables import GraphExecutables
from spmd.dynamo._sized_programs import SizedPrograms

logger = logging.getLogger("spmd.dynamo")
_MAX_NUMBERS = 16


class GraphProgram:
    """One graph, and its programs by what Dynamo leaves open: the values of its integers, and where tensors lie.

    Python floats that vary are inputs of a program; where its trace needs one to be Python's own, constants, of which there are 16 at most.

    Attributes:
        name: of its programs in profiles.
        refused: why the graph runs operation by operation; None: it does not.
    """

    def __init__(self, graph: torch.fx.GraphModule, name: str) -> None:
        self._calls = Calls(graph)
        self._takes_numbers = True  # until a trace needs one to be Python's own
        self.name = name
        self._programs: dict[Any, GraphExecutables] = {}
        self._latest: GraphExecutables | None = None
        self._marks = -1
        self._sized = SizedPrograms(self._calls, name)
        self.refused: str | None = None

    @property
    def num_programs(self) -> int:
        """How many were compiled."""
        return len(self._programs) + self._sized.num_programs

    @property
    def sizes(self) -> str | None:
        """Why each size that varies has a program of its own; None: one serves many, or nothing varies."""
        return self._sized.refused

    @property
    def latest(self) -> GraphExecutables | None:
        """The program that ran last."""
        return self._latest

    def __repr__(self) -> str:
        return f"<{self.name}: {self.num_programs} programs>" if self.refused is None else f"<{self.name}: {self.refused.splitlines()[0]}>"

    def __call__(self, *args: Any) -> Any:
        """Run the graph; the first call with new sizes traces and compiles it."""
        if self.refused is not None or recording.get() is not None or are_functorch_transforms_active():
            return self._calls.graph(*args)
        program = self._latest
        if program is None or self._varies() or self._marks != Buffer.marks:
            with turn:
                program = self._found(args)
        return self._calls.graph(*args) if program is None or program.is_shared(args) else program(args)

    def _found(self, args: tuple[Any, ...]) -> GraphExecutables | None:
        if not any(map(is_device_tensor, (*args, *self._calls.held))) and not self._calls.makes_device_tensors:
            self.refused = "no tensor of it is on the device"
            return None
        if self._calls.enables_gradients and torch.is_inference_mode_enabled():
            self._refuse("it turns gradients on in inference mode, where only views of its inputs have one")
            return None
        if self._calls.numbers and self._takes_numbers:
            try:
                return self._kept(args, ())
            except (TraceError, TypeError, RuntimeError) as reason:  # what has another reason is raised again below
                self._takes_numbers = False
                logger.info("%s has its Python floats as constants: %s", self.name, reason)
        return self._kept(args, tuple(exactly(args[i].item()) for i in self._calls.numbers))

    def _varies(self) -> bool:
        """Whether calls that Dynamo's guards let pass may be of different programs."""
        return bool(self._calls.sizes.names) or bool(self._calls.numbers and not self._takes_numbers)

    def _kept(self, args: tuple[Any, ...], numbers: tuple[Any, ...]) -> GraphExecutables | None:
        """The program of a call whose Python floats are these constants."""
        program = self._sized.found(args, numbers, takes_numbers=self._takes_numbers) if self._calls.sizes.names else None
        key = (numbers, *map(_described, args))
        program = self._programs.get(key) if program is None else program
        if program is None and len({values for values, *_ in self._programs} | self._sized.numbers | {numbers}) > _MAX_NUMBERS:
            self._refuse(f"more than {_MAX_NUMBERS} values of its Python floats, each of which was a program")
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
        logger.warning("%s runs operation by operation: %s", self.name, why)


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value), value
    return tuple(value.shape), buffer_of(value).annotation if is_device_tensor(value) else None


__all__ = ["GraphProgram"]

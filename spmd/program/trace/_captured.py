"""The result of one trace: inputs, state and outputs of its program, guards, and the writes to Python objects that every call repeats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mesh import ShardingSpec
from spmd.device._checks import Check
from spmd.device._storage import Buffer
from spmd.program.optim._lifted_numbers import LiftedNumbers
from spmd.program.optim._traced_state import Action
from spmd.program.reads import Effect, Place, ReplacedState
from spmd.program.reuse._columns import Guards
from spmd.program.trace._device_branches import Side
from spmd.program.trace._known_inputs import Argument, KnownInputs
from spmd.program.trace._layer_runs import LayerRun
from spmd.program.trace._output_tree import Node
from spmd.program.trace._results import OUTPUTS, Leaf
from spmd.program.trace._topology_tensors import on_topology

Owner = torch.Tensor | int  # the tensor that a gradient or flag belongs to: a parameter, or the position of an argument


@dataclass(frozen=True)
class TraceInputs:
    """The inputs of the program besides its state.

    Attributes:
        arguments: buffers of the device tensors among the arguments.
        num_hosts: number of CPU tensors among the arguments.
        shared: buffers of arguments that the function also reaches in another way.
        holders: classes whose instances among the arguments count as containers even if they have no tensor attribute.
        numbers: Python numbers that are inputs.
        draws: number of draws from the random stream.
        known: inputs whose values the trace depended on; None if there are none.
    """

    arguments: list[Buffer]
    num_hosts: int
    shared: list[Buffer]
    holders: frozenset[type]
    numbers: LiftedNumbers
    draws: int
    known: KnownInputs | None

    def refresh(self, numbers: Mapping[int, int | float], arguments: Sequence[Argument]) -> None:
        """Update the inputs that guards read, before they are evaluated for a call with these numbers and arguments."""
        if self.known is not None:
            self.known.refresh(arguments)
        self.numbers.refresh(numbers)


@dataclass(frozen=True)
class TraceState:
    """The state that the program reads and writes.

    Attributes:
        consts: for each constant of the jaxpr the buffer that it is read from; None for a value that is a constant of the program.
        written: buffers that the program writes, including arguments.
        copies: step counters that get the new value of another counter. See Note [Equal counters].
        slots: gradients from before the trace, by buffer: the tensor whose current gradient a call takes in its place.
        held: tensors and containers that the function replaces in every call, each with the variable, attribute or item where it is.
        born: (parameter, tensor) of optimizer state that the function created. Outputs of the program, after the gradients.
        versioned: tensors in reach that the function wrote in place, and positions of such arguments. See `_written_tensors`.
    """

    consts: list[Buffer | None]
    written: list[Buffer]
    copies: dict[Buffer, Buffer]
    slots: dict[Buffer, Owner]
    held: list[ReplacedState]
    born: list[tuple[torch.Tensor, torch.Tensor]]
    versioned: list[Owner]

    def without_gradients(self) -> TraceState:
        """A copy with empty buffers in place of the gradients from before the trace."""
        empty = {b: Buffer(None, b.shape) for b in self.slots}
        return replace(
            self,
            consts=[None if b is None else empty.get(b, b) for b in self.consts],
            written=[empty.get(b, b) for b in self.written],
            slots={empty[b]: owner for b, owner in self.slots.items()},
        )


@dataclass(frozen=True)
class TraceOutputs:
    """The outputs of the program besides its state, and how results are made of them.

    Attributes:
        leaves: leaves of the function's result, of the values that it writes to Python objects, and of the contents of the objects
            among the arguments.
        nodes, refs: the containers and objects that are made of the leaves, and the numbers of the values in them (see `OutputTree`).
        num_objects: number of objects with tensor attributes among the arguments.
        finite: names of the modules whose output the program checks to be finite, one flag each.
        checks: checks of values. Their flags are one array, the output after those of the leaves.
        sides: the sides of the branches on values that only the device knows. Their conditions are one array, the last output.
        gradients: (owner, gradient made in the trace or None) for each gradient that the function replaced.
        flags: (owner, `requires_grad`) for each flag that the function changed.
        kept_gradients: the gradients that are outputs of the program.
    """

    leaves: list[Leaf]
    nodes: list[Node]
    refs: list[int]
    num_objects: int
    finite: list[str]
    checks: list[Check]
    sides: list[Side]
    gradients: list[tuple[Owner, torch.Tensor | None]]
    flags: list[tuple[Owner, bool]]
    kept_gradients: list[torch.Tensor]

    @property
    def num_arrays(self) -> int:
        """The number of output arrays besides state and gradients."""
        return len(self.output_kinds) + len(self.finite) + bool(self.checks) + bool(self.sides)

    @property
    def output_kinds(self) -> list[str]:
        """The kinds of the leaves that are outputs, in their order."""
        return [leaf.kind for leaf in self.leaves if leaf.kind in OUTPUTS]


@dataclass(frozen=True)
class Guarded:
    """What the trace assumed.

    Attributes:
        guards: evaluated before each call.
        places: places of the Python values that the trace read.
        branches: conditions on numbers that vary, each with its outcome in the trace.
        reached: containers, objects and tensors that the function reached by name, by id. An argument that is one has another program.
    """

    guards: Guards
    places: list[Place]
    branches: list[tuple[Callable[[], Any], Any]]
    reached: dict[int, Any]


@dataclass(frozen=True)
class PythonWrites:
    """The function's writes to Python objects, which every call repeats.

    Attributes:
        effects: the writes. Their values follow the function's result in `TraceOutputs.leaves`.
        actions: changes to optimizer state and to torch's global modes.
        stepped: the optimizers that stepped.
    """

    effects: list[Effect]
    actions: list[Action]
    stepped: list[torch.optim.Optimizer]


@dataclass
class Captured:
    """The result of one trace.

    Attributes:
        jaxpr: the program, from constants, arguments, CPU tensors, numbers and random words to outputs, state and gradients; None for
            the trace of an earlier process.
        layouts: shardings to which the trace constrained values.
        layers: see `TraceRecorder`.
    """

    jaxpr: Any
    inputs: TraceInputs
    state: TraceState
    outputs: TraceOutputs
    guarded: Guarded
    writes: PythonWrites
    layouts: list[ShardingSpec]
    layers: list[LayerRun]

    def let_go(self) -> None:
        """Release the arrays of the state and the gradients from before the trace. Empty buffers replace the gradients."""
        if self.jaxpr is not None:
            consts = [c if b is None else None for c, b in zip(self.jaxpr.consts, self.state.consts, strict=True)]
            self.jaxpr = self.jaxpr.replace(consts=consts)
        self.state = self.state.without_gradients()

    @property
    def is_ahead(self) -> bool:
        """Whether its tensors are on a topology without local devices."""
        buffers = (*self.inputs.arguments, *self.state.consts, *self.state.written)
        return any(on_topology(b) for b in buffers if b is not None)


__all__ = ["Captured", "Guarded", "Owner", "PythonWrites", "TraceInputs", "TraceOutputs", "TraceState"]

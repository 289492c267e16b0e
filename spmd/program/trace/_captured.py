"""What one trace found: what goes into its program, the state, what comes out, what is guarded, what Python every call writes."""

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
from spmd.program.trace._known_inputs import KnownInputs
from spmd.program.trace._output_tree import Node
from spmd.program.trace._results import Leaf
from spmd.program.trace._topology_tensors import on_topology

Owner = torch.Tensor | int  # whose a gradient or flag is: a parameter, or the position of an argument


@dataclass(frozen=True)
class TraceInputs:
    """What goes into the program besides its state.

    Attributes:
        arguments: buffers of the device tensors among the arguments.
        num_hosts: how many CPU tensors there are.
        shared: arguments that the function also reaches without being passed them.
        holders: classes of arguments that are containers even while they hold no tensor.
        numbers: Python's that are inputs.
        draws: how often it takes random numbers.
        known: inputs whose values decided what it is; None: there are none.
    """

    arguments: list[Buffer]
    num_hosts: int
    shared: list[Buffer]
    holders: frozenset[type]
    numbers: LiftedNumbers
    draws: int
    known: KnownInputs | None

    def refresh(self, numbers: Mapping[int, int | float], arguments: Sequence[Buffer]) -> None:
        """The guards are to be asked about a call with these."""
        self.numbers.refresh(numbers)
        if self.known is not None:
            self.known.refresh(arguments)


@dataclass(frozen=True)
class TraceState:
    """The state that the program reads and writes.

    Attributes:
        consts: for each constant of the jaxpr the buffer that it is read from, None for values that are baked in.
        written: buffers that have other values afterwards, arguments among them.
        copies: those whose new value is that of other state. See Note [Equal counters].
        slots: gradients that were there: buffer, and the parameter or position of an argument whose gradient a call takes.
        held: what a name holds to which the function assigns anew.
        born: (parameter, tensor) of optimizer state that it created; outputs of the program, after the gradients.
    """

    consts: list[Buffer | None]
    written: list[Buffer]
    copies: dict[Buffer, Buffer]
    slots: dict[Buffer, Owner]
    held: list[ReplacedState]
    born: list[tuple[torch.Tensor, torch.Tensor]]

    def without_gradients(self) -> TraceState:
        """The same with empty buffers in place of the gradients that were there."""
        empty = {b: Buffer(None, b.shape) for b in self.slots}
        return replace(
            self,
            consts=[None if b is None else empty.get(b, b) for b in self.consts],
            written=[empty.get(b, b) for b in self.written],
            slots={empty[b]: owner for b, owner in self.slots.items()},
        )


@dataclass(frozen=True)
class TraceOutputs:
    """What comes out of the program besides its state, and what it becomes.

    Attributes:
        leaves: of the function's result, of the values of the effects, and of the contents of the objects among the arguments.
        nodes, refs: how the leaves make these.
        num_objects: how many objects there are among the arguments.
        finite: names of modules, each of which has a flag that says whether its output was finite.
        checks: checks of values that it makes: the program's flags of them are one output behind those of the leaves.
        gradients: (owner, gradient made in the trace or None) for each one that the function left.
        flags: (owner, `requires_grad`) for each one that the function changed.
        kept_gradients: those that leave the program.
    """

    leaves: list[Leaf]
    nodes: list[Node]
    refs: list[int]
    num_objects: int
    finite: list[str]
    checks: list[Check]
    gradients: list[tuple[Owner, torch.Tensor | None]]
    flags: list[tuple[Owner, bool]]
    kept_gradients: list[torch.Tensor]

    @property
    def num_arrays(self) -> int:
        """How many arrays leave the program, but for state and gradients."""
        return sum(leaf.kind in ("array", "number") for leaf in self.leaves) + len(self.finite) + bool(self.checks)


@dataclass(frozen=True)
class Guarded:
    """What the trace baked in.

    Attributes:
        guards: asked before each call.
        places: of Python values that it read.
        branches: what Python asked of numbers that vary, each with its answer.
    """

    guards: Guards
    places: list[Place]
    branches: list[tuple[Callable[[], Any], Any]]


@dataclass(frozen=True)
class PythonWrites:
    """What the function did to Python's objects, for every call to do.

    Attributes:
        effects: what it wrote; their values follow the function's result in `TraceOutputs.leaves`.
        actions: what it changed in the optimizers' state.
        stepped: the optimizers that stepped.
    """

    effects: list[Effect]
    actions: list[Action]
    stepped: list[torch.optim.Optimizer]


@dataclass
class Captured:
    """What one trace found.

    Attributes:
        jaxpr: the program: of constants, arguments, CPU tensors, numbers and random words; outputs, state, gradients.
        layouts: those to which values were constrained at some point.
        layers: see `TraceRecorder`.
    """

    jaxpr: Any
    inputs: TraceInputs
    state: TraceState
    outputs: TraceOutputs
    guarded: Guarded
    writes: PythonWrites
    layouts: list[ShardingSpec]
    layers: list[list[list[Any]]]

    def let_go(self) -> None:
        """Hold no value of the state that it was traced with, and no gradient that was there: empty buffers stand for these."""
        consts = [c if b is None else None for c, b in zip(self.jaxpr.consts, self.state.consts, strict=True)]
        self.jaxpr = self.jaxpr.replace(consts=consts)
        self.state = self.state.without_gradients()

    @property
    def is_ahead(self) -> bool:
        """Whether its tensors lie on a topology that is not here."""
        buffers = (*self.inputs.arguments, *self.state.consts, *self.state.written)
        return any(on_topology(b) for b in buffers if b is not None)


__all__ = ["Captured", "Guarded", "Owner", "PythonWrites", "TraceInputs", "TraceOutputs", "TraceState"]

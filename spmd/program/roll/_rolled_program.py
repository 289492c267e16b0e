"""A trace with loops for repeated equations, and the buffers whose values stay stacked between calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from spmd.device._buffer_stack import BufferStack, stack_of
from spmd.device._storage import Buffer, buffer_of, is_device_tensor
from spmd.program.roll._layers import require_loops
from spmd.program.roll._rolled import Loop, Rolled
from spmd.program.roll._stacks import Stacks
from spmd.program.trace._captured import Captured
from spmd.program.xla._channels_last import has_convolution


class StackedState:
    """The state of a program with loops.

    Attributes:
        loops: the repeated equations, in program order.
        stacks: buffers whose values the program takes and returns as one array. See Note [Stacks of buffers].
    """

    def __init__(self, loops: list[Loop], stacks: list[BufferStack]) -> None:
        self.loops, self.stacks = loops, stacks
        self._whole = {b: stack.whole for stack in stacks for b in stack.members}

    def state(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        """The buffers, with the members of a stack replaced by the stack's buffer. 0-dim buffers come last."""
        return sorted(dict.fromkeys(self._whole.get(b, b) for b in buffers), key=lambda b: not b.shape)

    def gather(self) -> None:
        """Stack the values of the members of each stack."""
        for stack in self.stacks:
            stack.gather()


class RolledProgram(StackedState):
    """A captured program with loops, created by `rolled_program`."""

    def __init__(self, captured: Captured, rolled: Rolled) -> None:
        self._captured, self._rolled = captured, rolled
        self._variables = {b: v for b, v in zip(captured.state.consts, captured.jaxpr.jaxpr.constvars, strict=True) if b is not None}
        buffers = {v: b for b, v in self._variables.items()}
        alone = {*captured.state.slots, *captured.state.copies, *captured.state.copies.values(), *captured.inputs.arguments}
        alone.update(buffer_of(held.value) for held in captured.state.held if is_device_tensor(held.value))
        written = set(captured.state.written)
        stacks: list[BufferStack] = []
        for family in rolled.families({v for v, b in buffers.items() if b not in alone}):
            members = [buffers[v] for v in family]
            if len({(b.shape, b.stored, b.dtype, b.annotation, b in written) for b in members}) == 1:
                stacks.append(stack_of(members))
        super().__init__(rolled.loops, stacks)
        self._stack_at = {stack.whole: stack for stack in stacks}

    def function(
        self, written: list[Buffer], read: list[Buffer], written_args: list[int], kept_args: list[int], num_outputs: int
    ) -> Callable[..., Any]:
        """The program as a function of (donated, 0-dim state, read, args, hosts, numbers, random words).

        Args:
            written, read: buffers of the state that the program updates, and of the state that it only reads.
            written_args, kept_args: positions of the arguments that it updates, and of the others.
            num_outputs: number of results of the user's function.

        Returns:
            A function that returns (state, updated arguments, gradients and optimizer state, outputs).
        """
        captured = self._captured
        jaxpr = captured.jaxpr.jaxpr
        outputs, rest = jaxpr.outvars[:num_outputs], jaxpr.outvars[num_outputs:]
        result = dict(zip(captured.state.written, rest, strict=False))

        def run(donated: Any, scalars: Any, read_values: Any, kept: Any, hosts: Any, vector: Any, words: Any) -> Any:
            donated_state, donated_args = donated
            values = Stacks()
            for variable, buffer, const in zip(jaxpr.constvars, captured.state.consts, captured.jaxpr.consts, strict=True):
                if buffer is None:
                    values.put(variable, const)
            for buffer, value in (*zip(written, (*donated_state, *scalars), strict=True), *zip(read, read_values, strict=True)):
                if buffer in self._stack_at:
                    members = self._stack_at[buffer].members
                    spec = members[0].annotation
                    values.put_stack([self._variables[b] for b in members], value, None if spec is None else spec.to_jax())
                elif buffer in self._variables:  # otherwise the buffer is written but not read
                    values.put(self._variables[buffer], value)
            args: list[Any] = [None] * len(captured.inputs.arguments)
            for i, value in (*zip(written_args, donated_args, strict=True), *zip(kept_args, kept, strict=True)):
                args[i] = value
            for variable, value in zip(jaxpr.invars, (*args, *hosts, vector, words), strict=True):
                values.put(variable, value)
            self._rolled.run(values)
            state = [self._result(buffer, result, values) for buffer in written]
            left = [values.get(result[captured.inputs.arguments[i]]) for i in written_args]
            return state, left, [values.get(v) for v in rest[len(captured.state.written) :]], [values.get(v) for v in outputs]

        return run

    def _result(self, buffer: Buffer, result: dict[Buffer, Any], values: Stacks) -> Any:
        """The new value of a buffer of the state."""
        stack = self._stack_at.get(buffer)
        return values.get(result[buffer]) if stack is None else values.stack([result[b] for b in stack.members])


_SMALLEST = {"cpu": 20_000}  # minimum number of operations for loops with roll="auto", by platform; see docs/depth.md
_SMALLEST_ELSEWHERE = 4_000


def rolled_program(captured: Captured, roll: bool | str, platform: str) -> RolledProgram | None:
    """The trace with loops. None if it is compiled without.

    Args:
        roll: True for loops, False for none. "auto" makes loops for `spmd.scan_layers`, and for a large program if they at least halve
            the number of its operations.
        platform: "cpu", "gpu" or "tpu".

    Raises:
        SpmdError: layers of `spmd.scan_layers` cannot be a loop.
    """
    jaxpr = captured.jaxpr.jaxpr
    if not roll or (roll == "auto" and not captured.layers and _why_unrolled(jaxpr, platform) is not None):
        return None
    rolled = Rolled(jaxpr)
    if captured.layers:
        require_loops(jaxpr, captured.layers, rolled.passes_at, [loop.why_not for loop in rolled.loops if loop.why_not is not None])
    is_wanted = roll is True or bool(captured.layers) or 2 * rolled.size <= len(jaxpr.eqns)
    return RolledProgram(captured, rolled) if rolled.loops and is_wanted else None


def repeats_left(captured: Captured, platform: str) -> list[Loop]:
    """The repeated equations of a program that "auto" compiled without loops, each with the reason."""
    jaxpr = captured.jaxpr.jaxpr
    rolled = Rolled(jaxpr)
    why = _why_unrolled(jaxpr, platform) or f"loops would leave {rolled.size:,} of the program's {len(jaxpr.eqns):,} operations"
    return [replace(loop, why_not=loop.why_not or why) for loop in rolled.loops]


def _why_unrolled(jaxpr: Any, platform: str) -> str | None:
    """Why "auto" does not search a program for loops. None if it does."""
    smallest = _SMALLEST.get(platform, _SMALLEST_ELSEWHERE)
    if len(jaxpr.eqns) < smallest:
        return f"the program is small enough to be compiled as it is: {len(jaxpr.eqns):,} operations, loops from {smallest:,} on"
    if platform == "cpu" and has_convolution(jaxpr):
        return "its convolutions are computed with channels last, which loops on CPU devices do not keep"
    return None


__all__ = ["RolledProgram", "StackedState", "repeats_left", "rolled_program"]

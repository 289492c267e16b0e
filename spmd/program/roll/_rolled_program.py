"""A trace with its repeated equations as loops, and which buffers' values live stacked between its calls."""

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


class RolledProgram:
    """Made by `rolled_program`.

    Attributes:
        loops: what repeats in it, in the order of the program.
        stacks: buffers whose values it takes and leaves as one array. See Note [Stacks of buffers].
    """

    def __init__(self, captured: Captured, rolled: Rolled) -> None:
        self._captured, self._rolled = captured, rolled
        self.loops: list[Loop] = rolled.loops
        self._variables = {b: v for b, v in zip(captured.state.consts, captured.jaxpr.jaxpr.constvars, strict=True) if b is not None}
        buffers = {v: b for b, v in self._variables.items()}
        alone = {*captured.state.slots, *captured.state.copies, *captured.state.copies.values(), *captured.inputs.arguments}
        alone.update(buffer_of(held.value) for held in captured.state.held if is_device_tensor(held.value))
        written = set(captured.state.written)
        self.stacks: list[BufferStack] = []
        for family in rolled.families({v for v, b in buffers.items() if b not in alone}):
            members = [buffers[v] for v in family]
            if len({(b.shape, b.stored, b.dtype, b.annotation, b in written) for b in members}) == 1:
                self.stacks.append(stack_of(members))
        self._stack_at = {stack.whole: stack for stack in self.stacks}
        self._whole = {b: stack.whole for stack in self.stacks for b in stack.members}

    def state(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        """The buffers, those of a stack as that stack's one; what has no dims comes last."""
        return sorted(dict.fromkeys(self._whole.get(b, b) for b in buffers), key=lambda b: not b.shape)

    def gather(self) -> None:
        """Bring together what its loops read as one array."""
        for stack in self.stacks:
            stack.gather()

    def function(
        self, written: list[Buffer], read: list[Buffer], written_args: list[int], kept_args: list[int], num_outputs: int
    ) -> Callable[..., Any]:
        """The program as a function of (donated, 0-dim state, read, args, hosts, numbers, random words)."""
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
                elif buffer in self._variables:  # else it is written and never read
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
        """What the program leaves in a buffer of its state."""
        stack = self._stack_at.get(buffer)
        return values.get(result[buffer]) if stack is None else values.stack([result[b] for b in stack.members])


_SMALLEST = {"cpu": 20_000}  # operations from which on "auto" rolls, see docs/depth.md; elsewhere:
_SMALLEST_ELSEWHERE = 4_000


def rolled_program(captured: Captured, roll: bool | str, platform: str) -> RolledProgram | None:
    """The trace with loops; None if it is compiled as it is.

    Args:
        roll: False: no loops, "auto": if layers must be one, or it is large and loops leave half of its operations or fewer.

    Raises:
        SpmdError: layers that must be a loop (`spmd.scan_layers`) are none.
    """
    jaxpr = captured.jaxpr.jaxpr
    if not roll or (roll == "auto" and not captured.layers and _why_as_it_is(jaxpr, platform) is not None):
        return None
    rolled = Rolled(jaxpr)
    if captured.layers:
        require_loops(jaxpr, captured.layers, rolled.passes_at, [loop.why_not for loop in rolled.loops if loop.why_not is not None])
    is_wanted = roll is True or bool(captured.layers) or 2 * rolled.size <= len(jaxpr.eqns)
    return RolledProgram(captured, rolled) if rolled.loops and is_wanted else None


def repeats_left(captured: Captured, platform: str) -> list[Loop]:
    """What repeats in a program that "auto" compiled as it is, and why it did."""
    jaxpr = captured.jaxpr.jaxpr
    rolled = Rolled(jaxpr)
    why = _why_as_it_is(jaxpr, platform) or f"loops would leave {rolled.size:,} of the program's {len(jaxpr.eqns):,} operations"
    return [replace(loop, why_not=loop.why_not or why) for loop in rolled.loops]


def _why_as_it_is(jaxpr: Any, platform: str) -> str | None:
    """Why "auto" compiles a program without looking for loops; None if it looks."""
    smallest = _SMALLEST.get(platform, _SMALLEST_ELSEWHERE)
    if len(jaxpr.eqns) < smallest:
        return f"the program is small enough to be compiled as it is: {len(jaxpr.eqns):,} operations, loops from {smallest:,} on"
    if platform == "cpu" and has_convolution(jaxpr):
        return "its convolutions are computed with channels last, which loops on CPU devices do not keep"
    return None


__all__ = ["RolledProgram", "repeats_left", "rolled_program"]

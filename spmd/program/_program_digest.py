"""The digest of one program of a step: of its trace, and of the layouts of its state, arguments and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from spmd.program.xla._digest import digest

if TYPE_CHECKING:
    from spmd.program._program import Program


def program_digest(program: Program, name: str, args: Sequence[Any], pinned: Any, client: Any) -> str:
    """The digest that an executable is cached under. See Note [Digests of programs].

    Args:
        program: the program, before it is compiled.
        name: name of the compiled function.
        args: the arguments that it is lowered for: arrays, or their types and shardings.
        pinned: the shardings of its results; None without a mesh.
        client: jax's client of the devices.

    Raises:
        NoDigest: the trace contains a value that the digest does not cover.
    """
    captured, options, rolled = program.captured, program.options, program.rolled
    state = [b for b in (*captured.state.consts, *captured.state.written, *captured.inputs.arguments) if b is not None]
    number = {id(b): i for i, b in enumerate({id(b): b for b in state}.values())}
    members = {} if rolled is None else {id(stack.whole): [number[id(b)] for b in stack.members] for stack in rolled.stacks}

    def places(buffers: Sequence[Any]) -> list[Any]:
        return [None if b is None else members.get(id(b), number.get(id(b))) for b in buffers]

    kinds = [leaf.kind for leaf in captured.outputs.leaves]
    layout = [
        *(name, program.devices.platform, options.debug_nans, options.steps_per_call, options.keep_grads, rolled is not None),
        *map(
            places,
            (captured.state.consts, captured.state.written, captured.inputs.arguments, program.written.buffers, program.read.buffers),
        ),
        *(
            program.num_donated,
            program.arguments.written,
            program.arguments.kept,
            kinds,
            len(captured.outputs.finite),
            bool(captured.outputs.checks),
            bool(captured.outputs.sides),
        ),
        *(captured.inputs.draws, captured.inputs.num_hosts, len(captured.outputs.kept_gradients), len(captured.state.born)),
        [_described(value) for value in jax.tree.leaves(args)],
        jax.tree.flatten(pinned, is_leaf=lambda value: value is None)[0],
    ]
    consts = [c if b is None else None for c, b in zip(captured.jaxpr.consts, captured.state.consts, strict=True)]
    return digest(captured.jaxpr.jaxpr, consts, layout, client)


def _described(value: Any) -> tuple[Any, ...]:
    """Type and sharding of an array or of its placeholder."""
    kind: Any = jax.typeof(value)
    return kind, getattr(value, "sharding", None), getattr(value, "committed", None)


__all__ = ["program_digest"]

"""What one call of a program has at hand, from step to step."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.device._storage import Buffer


class ProgramCall:
    """One call.

    Attributes:
        arguments: buffers of the device tensors among the arguments.
        given: the arguments as the user gave them.
        held: what the places of `TraceState.held` hold today.
        hosts: the CPU tensors among the arguments, as numpy's.
        changed: arrays of the state that are not those which the last call left.
        followed: what it will leave in arguments and state whose values the host follows.
        inputs: arrays that go in: (donated, 0-dim state, read, args, hosts, numbers, random words).
        outputs, gradients, state, arguments_left: arrays that came out, once it was dispatched.
    """

    __slots__ = ("arguments", "arguments_left", "changed", "followed", "given", "gradients", "held", "hosts", "inputs", "outputs", "state")

    hosts: list[np.ndarray[Any, Any]]
    inputs: tuple[Any, ...]
    outputs: list[Any]
    gradients: list[Any]
    state: list[Any]
    arguments_left: list[Any]

    def __init__(self, arguments: list[Buffer], given: Any) -> None:
        self.arguments, self.given = arguments, given
        self.held: list[Any] = []
        self.changed: list[Any] = []
        self.followed: list[tuple[Buffer, np.ndarray[Any, Any]]] = []


__all__ = ["ProgramCall"]

"""The data of one call of a program, passed through the stages of the call."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.device._storage import Buffer


class ProgramCall:
    """One call.

    Attributes:
        arguments: buffers of the device tensors among the arguments.
        given: the arguments as the user gave them.
        held: the current values of the places of `TraceState.held`.
        hosts: the stored values of the CPU tensors among the arguments.
        changed: arrays of the state that were replaced since the previous call.
        followed: (buffer, new value) of arguments and state whose values the host computes as well.
        num_decided: see `Program.__call__`.
        inputs: arrays for the executable: (donated, 0-dim state, read, args, hosts, numbers, random words).
        outputs, gradients, state, arguments_left: results of the executable; the last are the new values of updated arguments.
    """

    __slots__ = (
        *("arguments", "arguments_left", "changed", "followed", "given", "gradients", "held", "hosts", "inputs", "num_decided"),
        *("outputs", "state"),
    )

    hosts: list[np.ndarray[Any, Any]]
    inputs: tuple[Any, ...]
    outputs: list[Any]
    gradients: list[Any]
    state: list[Any]
    arguments_left: list[Any]

    def __init__(self, arguments: list[Buffer], given: Any, num_decided: int) -> None:
        self.arguments, self.given, self.num_decided = arguments, given, num_decided
        self.held: list[Any] = []
        self.changed: list[Any] = []
        self.followed: list[tuple[Buffer, np.ndarray[Any, Any]]] = []


__all__ = ["ProgramCall"]

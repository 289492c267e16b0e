"""What a traced step does to the state of its optimizers.

State tensors that the trace updates in place are state of the program like any other. State that the step creates (a
momentum that starts as the first gradient) leaves the program as an output, and the next step has a program of its own.
Numbers in the state (`state["step"] += 1` in a user's optimizer) are lifted like learning rates; their next values follow
from today's on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.base._errors import TraceError, message
from spmd.device._numbers import NumberNode
from spmd.device._storage import Buffer, buffer_of, is_device_tensor

Action = Callable[[], None]


class TracedState:
    """The state of some optimizers around a trace. A context: on leaving, it is as before.

    Attributes:
        born: (parameter, state tensor) of the state that the trace created.
        effects: what gives the state its new tensors and numbers after each call.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._kept = [{p: dict(s) for p, s in o.state.items() if isinstance(s, dict)} for o in optimizers]
        self.born: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.effects: list[Action] = []

    def __enter__(self) -> TracedState:
        return self

    def __exit__(self, *error: object) -> None:
        for optimizer, kept in zip(self._optimizers, self._kept, strict=True):
            for parameter in [p for p, s in optimizer.state.items() if isinstance(s, dict)]:
                if parameter not in kept:
                    del optimizer.state[parameter]
                else:
                    state = optimizer.state[parameter]
                    for key in state.keys() - kept[parameter].keys():
                        del state[key]
                    state.update(kept[parameter])

    def note(self, is_newborn: Callable[[Buffer], bool]) -> None:
        """Look at what the trace made of the state.

        Raises:
            TraceError: a state tensor was replaced by another one, or a number depends on values of the program.
        """
        for optimizer, kept in zip(self._optimizers, self._kept, strict=True):
            for parameter, state in optimizer.state.items():
                before = kept.get(parameter, {})
                for key, value in state.items() if isinstance(state, dict) else ():
                    if value is before.get(key):
                        continue
                    if not is_device_tensor(value):
                        self.effects.append(_set_number(optimizer, parameter, key, value, before.get(key)))
                    elif is_device_tensor(before.get(key)):
                        raise lost_update(f"{type(optimizer).__name__}'s state[{key!r}]")
                    elif is_newborn(buffer_of(value)):
                        self.born.append((parameter, value))
                        self.effects.append(_set(optimizer, parameter, key, value))


def _set(optimizer: torch.optim.Optimizer, parameter: Any, key: str, value: Any) -> Action:
    return lambda: optimizer.state[parameter].__setitem__(key, value)


def _set_number(optimizer: torch.optim.Optimizer, parameter: Any, key: str, value: Any, before: Any) -> Action:
    if not isinstance(value, torch.SymFloat):
        return _set(optimizer, parameter, key, value)
    node = value.node
    evaluate = node.evaluate if isinstance(node, NumberNode) else None
    if evaluate is None:
        raise TraceError(
            message(
                f"{type(optimizer).__name__} keeps a number in its state[{key!r}] that only the compiled program will know",
                fix="keep it as a tensor on device 'jax'",
            )
        )
    kind = int if isinstance(before, int) else float
    return lambda: optimizer.state[parameter].__setitem__(key, kind(evaluate()))


def lost_update(name: str) -> TraceError:
    """The error for state that a function reads and then replaces by a new tensor."""
    return TraceError(
        message(
            f"the compiled function reads {name} and then assigns a new tensor to it",
            "the next call would read the old tensor again",
            fix=f"update it in place: {name}.copy_(new)",
        )
    )

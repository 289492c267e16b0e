"""Changes of optimizer state in a traced step.

State tensors that the trace updates in place are state of the program. State that the step creates (a momentum that starts as the first
gradient) is an output of the program, and the next step gets a program of its own. Numbers in the state (`state["step"] += 1` in a user's
optimizer) are inputs of the program: floats as learning rates are, ints as counters elsewhere are (`Varying`). The host computes their next
values from the current ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from spmd.base._errors import TraceAgain, TraceError, message
from spmd.device._numbers import NumberNode
from spmd.device._storage import Buffer, buffer_of, is_device_tensor, is_whole
from spmd.program.find._static import attributes_of
from spmd.program.reads import PLAIN, Pending, Varying

if TYPE_CHECKING:
    from spmd.program.trace._trace_settings import TraceSettings

Leave = Callable[[], None]
Action = Callable[[], Leave]  # called before the program runs, with Python's state from before the call; its result is called afterwards


class OptimizerAsObject(TraceAgain):
    """These optimizers must be traced as ordinary Python objects.

    Normally an optimizer that steps is prepared, and its state is updated in place and guarded as a whole. This does not work if it puts
    other tensors into its state, tensors into containers there, or values that are known only when the call ends; if torch's hooks do not
    see its `step` (its class does not call `Optimizer.__init__`); or if another method uses its state (SAM, Lookahead).
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.optimizers = optimizers

    def other_settings(self, settings: TraceSettings) -> TraceSettings:
        return replace(settings, as_objects=(*settings.as_objects, *self.optimizers))


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is of one of torch's own classes, whose steps leave parameters without a gradient as they are."""
    return type(optimizer).__module__.startswith("torch.optim.")


def drop_state_without_gradient(
    optimizer: torch.optim.Optimizer, prepared: Iterable[tuple[torch.optim.Optimizer, Sequence[torch.Tensor]]]
) -> None:
    """Remove, at a traced step, the state that was prepared for parameters without a gradient: the step does not create it.

    `prepared`: optimizers, each with the parameters for which state was created before the trace.
    """
    for parameter in (p for other, created in prepared if other is optimizer for p in created):
        if parameter.grad is None:
            optimizer.state.pop(parameter, None)


class TracedState:
    """Context that restores the state of the given optimizers after a trace.

    Attributes:
        born: (parameter, state tensor) of the state that the trace created.
        effects: the actions that repeat the changes in each call: they store new tensors and numbers, and remove entries.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._kept = [_Snapshot(optimizer) for optimizer in optimizers]
        self.born: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.effects: list[Action] = []
        self._parts: dict[Buffer, list[tuple[int, int]]] = {}  # (first, last) element of each view of a buffer that became state

    def __enter__(self) -> TracedState:
        return self

    def __exit__(self, *error: object) -> None:
        for kept in self._kept:
            kept.put_back()

    def mark(self) -> None:
        """Note what the function finds. Numbers that are inputs are not those from before the trace."""
        for kept in self._kept:
            kept.mark()

    def note(self, is_newborn: Callable[[Buffer], bool]) -> None:
        """Find the changes of the state since `mark`. `is_newborn`: whether the trace created a buffer.

        Raises:
            OptimizerAsObject: a state tensor was replaced by another one, or created inside a container or an object; or a value is known
                only when the call ends.
            TraceError: a new state tensor belongs to no parameter, so it has no sharding.
        """
        for kept in self._kept:
            optimizer = kept.optimizer
            if optimizer.state is kept.state:
                self.effects.extend(kept.removals())
                self.effects.extend(kept.empty())
            for owner, state in optimizer.state.items():
                if isinstance(state, dict):
                    self._note(optimizer, owner, state, kept.content_of(owner), is_newborn)
            alone = {key: value for key, value in optimizer.state.items() if not isinstance(value, dict)}
            self._note(optimizer, None, alone, kept.found, is_newborn)

    def _note(self, optimizer: torch.optim.Optimizer, owner: Any, state: Any, before: Any, is_newborn: Callable[[Buffer], bool]) -> None:
        """Note new entries in `state`: the dict of a parameter, or of another key `owner`; or, if `owner` is None, the entries that are
        not dicts."""
        for key, value in state.items():
            if value is before.get(key):
                continue
            if not is_device_tensor(value):
                if any(is_device_tensor(part) and is_newborn(buffer_of(part)) for part in _all_in(value)):
                    raise OptimizerAsObject([optimizer])
                self.effects.append(partial(_set_number, optimizer, owner, key, _value_per_call(optimizer, value)))
            elif is_device_tensor(before.get(key)):
                raise OptimizerAsObject([optimizer])
            elif not isinstance(owner, torch.Tensor):
                raise _without_parameter(optimizer, owner, key)
            elif is_newborn(buffer_of(value)):
                if not is_whole(value, buffer_of(value)):  # for example one tensor of a stack that was computed together
                    value = self._copied_view(optimizer, key, value)
                self.born.append((owner, value))
                self.effects.append(lambda owner=owner, key=key, value=value: _set(optimizer, owner, key, value))

    def _copied_view(self, optimizer: torch.optim.Optimizer, key: Any, value: torch.Tensor) -> torch.Tensor:
        """A view of a tensor, copied to a tensor of its own."""
        first, buffer = int(value.storage_offset()), buffer_of(value)
        last = first + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
        parts = self._parts.setdefault(buffer, [])
        if any(first <= end and begin <= last for begin, end in parts) or any(buffer_of(t) is buffer for _, t in self.born):
            name = f"{type(optimizer).__name__}'s state[{key!r}]"
            what = f"{name}, created inside the compiled function, shares memory with other state"
            raise TraceError(message(what, fix=f"store a copy: {name} = value.clone()"))
        parts.append((first, last))
        with torch.no_grad():
            return value.detach().clone(memory_format=torch.contiguous_format)


class _Snapshot:
    """A snapshot of an optimizer's state.

    Attributes:
        state: the state dict itself.
        alone: its entries that are not dicts, as in an optimizer that counts in `self.state["steps"]`.
        found: its entries at the last call of `mark`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.state = optimizer, optimizer.state
        self._dicts = {owner: (state, dict(state)) for owner, state in optimizer.state.items() if isinstance(state, dict)}
        self.alone = {key: value for key, value in optimizer.state.items() if not isinstance(value, dict)}
        self.found: dict[Any, Any] = {}
        self._found_dicts: dict[Any, dict[Any, Any]] = {}

    def mark(self) -> None:
        """See `TracedState.mark`."""
        self.found = dict(self.state)
        self._found_dicts = {owner: dict(state) for owner, (state, _) in self._dicts.items()}

    def content_of(self, owner: Any) -> dict[Any, Any]:
        """The state of a parameter, or of another key, at the last call of `mark`."""
        return self._found_dicts.get(owner, {})

    def removals(self) -> list[Action]:
        """Actions that remove, after each call, the entries that the trace removed."""
        found: list[Action] = [
            lambda owner=owner: partial(self.state.pop, owner, None) for owner in (*self._dicts, *self.alone) if owner not in self.state
        ]
        for owner, (_, content) in self._dicts.items():
            state = self.state.get(owner)
            if isinstance(state, dict):
                found.extend(partial(_remove, self.optimizer, owner, key) for key in content if key not in state)
        return found

    def empty(self) -> list[Action]:
        """Actions that make, in each call, the dicts without entries that the trace made by looking for an entry."""
        new = [owner for owner, state in self.state.items() if isinstance(state, dict) and not state and owner not in self._dicts]
        return [lambda owner=owner: partial(_place, self.optimizer, owner) for owner in new]

    def put_back(self) -> None:
        """Restore the state."""
        for owner in [owner for owner in self.state if owner not in self._dicts and owner not in self.alone]:
            del self.state[owner]
        self.state.update(self.alone)
        for owner, (state, content) in self._dicts.items():
            self.state[owner] = state
            for key in state.keys() - content.keys():
                del state[key]
            state.update(content)


def _place(optimizer: torch.optim.Optimizer, owner: Any) -> Any:
    """The dict of the state under `owner`, or the whole state if it is None."""
    return optimizer.state if owner is None else optimizer.state[owner]


def _set(optimizer: torch.optim.Optimizer, owner: Any, key: Any, value: Any) -> Leave:
    return lambda: _place(optimizer, owner).__setitem__(key, value)


def _remove(optimizer: torch.optim.Optimizer, owner: Any, key: Any) -> Leave:
    return lambda: _place(optimizer, owner).pop(key, None)


def _set_number(optimizer: torch.optim.Optimizer, owner: Any, key: Any, evaluate: Callable[[], Any]) -> Leave:
    return _set(optimizer, owner, key, evaluate())


def _value_per_call(optimizer: torch.optim.Optimizer, value: Any) -> Callable[[], Any]:
    """A function that returns a Python value of the state for each call, with numbers computed from those of the call.

    Raises:
        OptimizerAsObject: the value is known only when the call ends: a number of the program, or a text of a number that varies.
    """
    if isinstance(value, Varying):
        return value.evaluate
    if isinstance(value, Pending):
        raise OptimizerAsObject([optimizer])
    if type(value) in (tuple, list) and any(map(_has_number, value)):
        parts = [_value_per_call(optimizer, part) for part in value]
        kind = type(value)
        return lambda: kind(part() for part in parts)
    if type(value) is dict and any(map(_has_number, value.values())):
        named = {name: _value_per_call(optimizer, part) for name, part in value.items()}
        return lambda: {name: part() for name, part in named.items()}
    if not isinstance(value, torch.SymFloat):
        return lambda: value
    evaluate, kind = (value.node.evaluate, value.node.kind) if isinstance(value.node, NumberNode) else (None, float)
    if evaluate is None:
        raise OptimizerAsObject([optimizer])
    return lambda: kind(evaluate())


def _has_number(value: Any) -> bool:
    """Whether `value` contains a number that is an input, or a number or text that is computed from one."""
    if type(value) in (tuple, list):
        return any(map(_has_number, value))
    if type(value) is dict:
        return any(map(_has_number, value.values()))
    return isinstance(value, (Varying, Pending, torch.SymFloat))


def _without_parameter(optimizer: torch.optim.Optimizer, owner: Any, key: Any) -> TraceError:
    name = type(optimizer).__name__
    place = f"self.state[{key!r}]" if owner is None else f"self.state[{owner!r}][{key!r}]"
    return TraceError(
        message(
            f"{name} creates a tensor of its state inside the compiled function, {place}",
            "it belongs to no parameter, so its sharding is not known",
            fix=f"create it before the first step, in {name}.__init__: {place} = torch.zeros(..., device='jax')",
        )
    )


def _all_in(value: Any) -> Iterator[Any]:
    """A value and everything inside it, through containers and the attributes of objects."""
    waiting, seen = [value], dict[int, Any]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, PLAIN):
            continue
        seen[id(value)] = value
        yield value
        if isinstance(value, (tuple, list, set, frozenset, deque, dict)):
            waiting.extend(value.values() if isinstance(value, dict) else value)
        elif not isinstance(value, (torch.Tensor, type, ModuleType, FunctionType)):
            waiting.extend((attributes_of(value) or {}).values())

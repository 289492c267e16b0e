"""Python numbers as inputs of a program: those of optimizers' `param_groups` and state, and those that change from call to call."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import getitem, is_
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from spmd.device._numbers import lifted, of_settings
from spmd.device._storage import once
from spmd.program.reads import INPUT, NumberPlace, Numbers, Varying, with_inputs

_CAPACITY = 256  # varying numbers, and what is computed from them, that one program may use


class LiftedNumbers:
    """The floats of some optimizers' `param_groups`, and the numbers in their state, as one vector.

    What optimizers compute of them alone (`1 - beta2`, `1 - lr * weight_decay`) follows, four for each at most: the host's 64-bit
    floats are Python's, and are computed once for each setting, not in every step (on TPUs by 40 operations of 32-bit floats each).

    Attributes:
        slots: (group or state, key, position in a tuple or None) of each number, in the vector's order.
        today: the numbers as they were taken last, list[float]; None if one is not there any more.
        varying: other numbers that change from call to call; what of them the program uses follows in the vector.
        size: elements of the vector.
        stand_ins: of a trace, until it is taken apart: by id of each tuple with such numbers, the tuple, and what gives a call's.
    """

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        varying: Sequence[NumberPlace] = (),
        arguments: Mapping[int, int | float] = MappingProxyType({}),
    ) -> None:
        self.slots: list[tuple[dict[Any, Any], Any, int | None]] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                self.slots.extend(_float_slots(group))
        for optimizer in optimizers:
            states = (s for s in optimizer.state.values() if isinstance(s, dict))
            held: tuple[dict[Any, Any], ...] = (optimizer.state, *states)  # the first holds numbers as of `self.state["steps"] += 1`
            self.slots.extend((s, key, None) for s in held for key, value in s.items() if type(value) in (int, float))
        self._places = {(id(holder), key) for holder, key, _ in self.slots}
        self.varying = [p for p in varying if (id(p.holder), p.key) not in self._places and type(p.read()) is p.kind]
        self._paths: dict[tuple[int, Any], list[tuple[int, ...]]] = {}
        for place in self.varying:
            self._paths.setdefault((id(place.holder), place.key), []).append(place.path)
        self._capacity = _CAPACITY if varying or arguments else 0
        self._settings = _OfSettings(4 * len(self.slots))
        self.size = len(self.slots) + self._capacity + self._settings.capacity
        self._arguments = dict(arguments)
        self._used = Numbers(self._capacity)
        self._holders, self._keys = [holder for holder, _, _ in self.slots], [key for _, key, _ in self.slots]
        self.stand_ins: dict[int, tuple[Any, Callable[[], Any]]] = {}
        self._held: list[Any] = []  # what the slots held when `today` was taken
        self._may_change_unseen = True
        self.today: Any = None
        self.today = self._values()

    def _values(self) -> list[float]:
        values = [float(group[key] if position is None else group[key][position]) for group, key, position in self.slots]
        self.today = values  # varying numbers are computed of these too
        varying = [float(evaluate()) for evaluate in self._used.inputs]
        return [*values, *varying, *[0.0] * (self._capacity - len(varying)), *self._settings.computed(values)]

    def refresh(self, arguments: Mapping[int, int | float]) -> None:
        """Read the numbers of the next call into `today`. It stays the same list while no number has changed.

        Args:
            arguments: those among the arguments of a call that begins.
        """
        if arguments:
            self._arguments.update(arguments)
        try:
            held = list(map(getitem, self._holders, self._keys))
            if self._may_change_unseen or not all(map(is_, held, self._held)):
                self.today, self._held = self._values(), held
                self._may_change_unseen = self._capacity > 0 or any(isinstance(value, torch.Tensor) for value in held)
        except (KeyError, IndexError, TypeError, ValueError, ArithmeticError):
            self.today, self._may_change_unseen = None, True

    def expected(self, holder: Any, key: Any, value: Any) -> Any:
        """What the program expects in an entry that holds `value`: the value, with INPUT in place of each number that is an input."""
        if (id(holder), key) in self._places:
            return INPUT
        return with_inputs(value, self._paths.get((id(holder), key), ()))

    @property
    def computed(self) -> list[Callable[[], Any]]:
        """The functions that compute the inputs which are made of varying numbers and of settings."""
        return [*self._used.inputs, *(partial(self._of_today, key) for key in self._settings.keys)]

    def _of_today(self, key: Any) -> float:
        return float(of_settings(key, self.today))

    @property
    def has_varying(self) -> bool:
        """Whether other numbers than the optimizers' are inputs."""
        return self._capacity > 0

    def argument(self, index: int) -> Varying:
        """The number that stands for an argument in the trace."""
        return Varying(self._used, lambda: self._arguments[index])

    def _as_input(self, vector: Any, key: Any) -> Any:
        """The element of `vector` for a number that is computed of settings; None if there is no place left."""
        place = self._settings.place(key)
        if place is None:
            return None
        position = len(self.slots) + self._capacity + place
        return once("setting", (vector, position), lambda: vector[position])

    def completed(self, settings: Any) -> Any:
        """The vector (float64[size]) of one with the settings alone (float64[len(slots)]), computed where no host does."""
        if not self.slots:
            return settings
        computed = [of_settings(key, settings) for key in self._settings.keys]
        return jnp.concatenate([settings, jnp.asarray([*computed, *[0.0] * (self._settings.capacity - len(computed))], jnp.float64)])

    def have_same_types(self) -> bool:
        """Whether the varying numbers are ints or floats as when they were traced."""
        return all(type(place.read()) is place.kind for place in self.varying)

    @contextmanager
    def in_place(self, vector: Any, on_branch: Callable[..., None]) -> Generator[None]:
        """While tracing: every slot holds a lifted number read from `vector` (float64[size])."""
        kept = [(group, key, group[key]) for group, key, _ in self.slots]
        self._settings.start()
        as_input = partial(self._as_input, vector)
        for index, (group, key, position) in enumerate(self.slots):
            number = lifted(vector[index], lambda index=index: self.today[index], on_branch, key=("slot", index), as_input=as_input)
            if position is None:
                group[key] = number
            else:
                group[key] = (*group[key][:position], number, *group[key][position + 1 :])
        self._used.start(on_branch, lambda i: vector[len(self.slots) + i])
        kept_varying = [(place, place.look()) for place in self.varying]
        for place in self.varying:
            place.put(Varying(self._used, _Today(place, place.read(), self._used)))
        slots = ((group[key], partial(getitem, group, key)) for group, key, position in self.slots if position is not None)
        in_places = (found for place in self.varying for found in place.tuples())
        self.stand_ins = {id(value): (value, look) for value, look in (*slots, *in_places)}
        try:
            yield
        finally:
            for group, key, value in kept:
                group[key] = value
            for place, value in kept_varying:
                place.place(value)
            self._used.stop()
            self._may_change_unseen = True  # the trace computes other numbers of the settings


class _OfSettings:
    """The numbers that optimizers compute of their settings alone, by the key of each (see `NumberNode`).

    Attributes:
        capacity: of how many there is room.
        keys: what they are, in the order of their places.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: dict[Any, int] = {}
        self._alike: list[tuple[Any, Any, list[int]]] | None = None

    def start(self) -> None:
        """A trace begins."""
        self.keys.clear()
        self._alike = None

    def place(self, key: Any) -> int | None:
        """The place of a number, a new one if it has none; None if there is no room."""
        if key not in self.keys and len(self.keys) == self.capacity:
            return None
        self._alike = None
        return self.keys.setdefault(key, len(self.keys))

    def computed(self, settings: list[float]) -> list[float]:
        """All of them, and zeros for the room that is left.

        Counters of many parameters are equal, and so is what is made of them: it is computed once.

        Raises:
            ArithmeticError, ValueError, TypeError: Python has no such number, or no real one.
        """
        if self._alike is None:
            by_form: dict[Any, dict[int, list[int]]] = {}
            for key, place in self.keys.items():
                slots: list[int] = []
                by_form.setdefault(_form(key, slots), {})[place] = slots
            self._alike = [(form, np.asarray([*rows.values()], np.intp), [*rows]) for form, rows in by_form.items()]
        found = [0.0] * self.capacity
        array = np.asarray(settings)
        for form, slots, places in self._alike:
            given = array[slots]
            known: dict[bytes, float] = {}
            width = given.itemsize * given.shape[1]
            for i, (place, bits) in enumerate(zip(places, given.view(f"V{width}").ravel().tolist(), strict=True)):
                if bits not in known:
                    known[bits] = float(of_settings(form, given[i].tolist()))
                found[place] = known[bits]
        return found


def _form(key: Any, slots: list[int]) -> Any:
    """A key with its settings numbered in the order of their first use, in which they are added to `slots`."""
    name, *parts = key
    if name == "slot":
        if parts[0] not in slots:
            slots.append(parts[0])
        return (name, slots.index(parts[0]))
    return (name, *(_form(part, slots) if isinstance(part, tuple) else part for part in parts))


class _Today:
    """The value of a varying number: as it was before the trace while that runs, as its place holds it afterwards."""

    def __init__(self, place: NumberPlace, value: Any, numbers: Numbers) -> None:
        self._place, self._value, self._numbers = place, value, numbers

    def __call__(self) -> Any:
        return self._value if self._numbers.is_tracing else self._place.read()


def _float_slots(group: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, int | None]]:
    for key, value in group.items():
        if key == "params":
            continue
        if _is_number(value):
            yield group, key, None
        elif type(value) is tuple and value and all(map(_is_number, value)):
            for position in range(len(value)):
                yield group, key, position


def static_settings(optimizer: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    """What the trace bakes in of the groups besides their parameters: flags, and which keys are lifted."""
    return [tuple((k, _kind(v)) for k, v in group.items() if k != "params") for group in optimizer.param_groups]


def _is_number(value: Any) -> bool:
    """A float (numpy's too: schedules compute with it), or a 0-dim CPU tensor of floats, as `lr` may be."""
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and not value.dim() and value.device.type == "cpu")


def _kind(value: Any) -> Any:
    """How a setting is compared: a number by being one, a tensor by identity. Other settings are guarded where they are read."""
    if _is_number(value):
        return float
    if isinstance(value, torch.Tensor):
        return id(value)
    return tuple(map(_kind, value)) if type(value) is tuple else None


__all__ = ["LiftedNumbers", "static_settings"]

"""Python numbers as inputs of a program: those in `param_groups` and state of optimizers, and others that change from call to call.

Learning rates, betas and momenta are Python floats that schedulers change between steps. During a trace each is a lifted number
(`spmd.device._numbers`), an element of a float64 vector that every call fills anew. So a schedule causes no retrace.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import getitem, is_
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from spmd.base._errors import TraceError, message
from spmd.base._jax import variable_of
from spmd.device._numbers import lifted, of_settings
from spmd.device._storage import once
from spmd.program.reads import INPUT, LENGTH, Effect, NumberPlace, Numbers, PartPlace, Varying, with_inputs

_CAPACITY = 256  # varying numbers, and numbers computed from them, that one program may use


class LiftedNumbers:
    """The Python numbers that are inputs of one program, as one float64 vector.

    The vector has three sections: the settings (the floats in `param_groups` of the optimizers, and the numbers in their state); numbers
    that vary; and numbers that optimizers compute from settings alone (`1 - beta2`, `1 - lr * weight_decay`), at most four per setting. The
    host computes the last ones in float64, as Python does, once per value of a setting. On a TPU each of them would take 40 float32
    operations in every step.

    Attributes:
        slots: (group or state, key, position in a tuple or None) of each setting, in the order of the vector.
        today: the vector as list[float], as read last; None if a number does not exist any more.
        varying: places of the other numbers that change from call to call.
        size: number of elements of the vector.
        lengths: during a trace, the lengths of lists that are inputs, by id of the list.
        stand_ins: from the end of a trace until its results are taken apart: by id of each tuple with such numbers, and of each number in
            the place of a tensor, the value, and a function that returns that of a call.
    """

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        changed: Sequence[PartPlace] = (),
        arguments: Mapping[int, int | float] = MappingProxyType({}),
        has_known: bool = False,
        has_constant_ints: bool = False,
    ) -> None:
        """
        Args:
            optimizers: those that the function can reach.
            changed: the places of numbers and objects that vary.
            arguments: the numbers among the arguments that vary, by position.
            has_known: whether integers of inputs whose values the host knows vary.
            has_constant_ints: whether ints in the state of optimizers are constants.
        """
        self.slots: list[tuple[dict[Any, Any], Any, int | None]] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                self.slots.extend(_float_slots(group))
        num_of_groups = len(self.slots)
        for optimizer in optimizers:
            states = (s for s in optimizer.state.values() if isinstance(s, dict))
            held: tuple[dict[Any, Any], ...] = (optimizer.state, *states)  # the first may contain numbers: `self.state["steps"] += 1`
            kinds = (float,) if has_constant_ints else (int, float)
            self.slots.extend((s, key, None) for s in held for key, value in s.items() if type(value) in kinds)
        self._kinds = [type(holder[key]) for holder, key, _ in self.slots[num_of_groups:]]
        self._places = {(id(holder), key) for holder, key, _ in self.slots}
        self._tensors = {(id(h), key): h[key] for h, key, _ in self.slots if isinstance(h[key], torch.Tensor)}
        varying = [place for place in changed if isinstance(place, NumberPlace)]
        # two places may lead to one number: its object is in both
        now = {(p.slot, p.path): p for p in varying if p.slot not in self._places and type(p.read()) is p.kind}
        self.varying = list(now.values())
        self._paths: dict[tuple[int, Any], list[tuple[int, ...]]] = {}
        for slot, path in now:
            self._paths.setdefault(slot, []).append(path)
        num_ints = self._kinds.count(int)
        self._capacity = _CAPACITY + num_ints if varying or arguments or has_known or num_ints else 0
        self._settings = _OfSettings(4 * len(self.slots))
        self.size = len(self.slots) + self._capacity + self._settings.capacity
        self._arguments = dict(arguments)
        self._used = Numbers(self._capacity)
        self._holders, self._keys = [holder for holder, _, _ in self.slots], [key for _, key, _ in self.slots]
        self.stand_ins: dict[int, tuple[Any, Callable[[], Any]]] = {}
        self.lengths: dict[int, Varying] = {}
        self._held: list[Any] = []  # the values in the slots when `today` was read
        self._may_change_unseen = True
        self.today: Any = None
        self.today = self._values()

    def _values(self) -> list[float]:
        values = [float(group[key] if position is None else group[key][position]) for group, key, position in self.slots]
        self.today = values  # varying numbers may be computed from these
        varying = [float(evaluate()) for evaluate in self._used.inputs]
        return [*values, *varying, *[0.0] * (self._capacity - len(varying)), *self._settings.computed(values)]

    def refresh(self, arguments: Mapping[int, int | float]) -> None:
        """Read the numbers of the next call into `today`, which stays the same list while no number has changed.

        Args:
            arguments: the numbers among the arguments of the call, by position.
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
        """The value that the program expects in the entry `holder[key]`: `value`, with INPUT in place of each number that is an input."""
        if (id(holder), key) in self._places:
            return INPUT
        return with_inputs(value, self._paths.get((id(holder), key), ()))

    def has_input(self, holder: Any, key: Any) -> bool:
        """Whether the entry `holder[key]`, or a part of it, is an input that varies."""
        return (id(holder), key) in self._paths

    @property
    def computed(self) -> list[Callable[[], Any]]:
        """The functions that compute the sections after the settings: numbers that vary, and numbers computed from settings."""
        return [*self._used.inputs, *(partial(self._of_today, key) for key in self._settings.keys)]

    def _of_today(self, key: Any) -> float:
        return float(of_settings(key, self.today))

    @property
    def has_varying(self) -> bool:
        """Whether numbers other than the optimizers' may be inputs."""
        return self._capacity > 0

    def argument(self, index: int) -> Varying:
        """The placeholder of the number argument `index` in a trace."""
        return Varying(self._used, lambda: self._arguments[index], isinstance(self._arguments[index], np.generic))

    def known(self, evaluate: Callable[[], Any]) -> Varying:
        """A number that each call computes from inputs whose values the host knows."""
        return Varying(self._used, evaluate)

    def elements(self) -> dict[int, Callable[[], Any]]:
        """The functions that compute the numbers that vary and that the trace has used, by id of the variable of each."""
        return {id(variable_of(array)): evaluate for array, evaluate in zip(self._used.arrays, self._used.inputs, strict=True)}

    def _as_input(self, vector: Any, key: Any) -> Any:
        """The element of `vector` for the number `key`, which is computed from settings; None if the section is full."""
        place = self._settings.place(key)
        if place is None:
            return None
        position = len(self.slots) + self._capacity + place
        return once("setting", (vector, position), lambda: vector[position])

    def completed(self, settings: Any) -> Any:
        """The traced vector (float64[size]) from the settings alone (float64[len(slots)]), for programs without a host that fills it."""
        if not self.slots:
            return settings
        computed = [of_settings(key, settings) for key in self._settings.keys]
        return jnp.concatenate([settings, jnp.asarray([*computed, *[0.0] * (self._settings.capacity - len(computed))], jnp.float64)])

    def have_same_types(self) -> bool:
        """Whether each varying number, and each in the state of an optimizer, has the type, int or float, that it had in the trace."""
        of_states = self._held[len(self.slots) - len(self._kinds) :]
        return [*map(type, of_states)] == self._kinds[: len(of_states)] and all(type(place.read()) is place.kind for place in self.varying)

    def require_tensors_kept(self, effects: Iterable[Effect]) -> None:
        """Refuse writes to settings that are tensors: the trace has numbers in their place, and eager code may write to the tensor.

        Raises:
            TraceError: there is one.
        """
        for effect in effects:
            if (tensor := self._tensors.get((id(effect.holder), effect.key))) is not None:
                raise TraceError(
                    message(
                        f"the compiled function sets {effect.key!r} of an optimizer, which is a tensor: {tensor}",
                        "a schedule writes to that tensor, and other code replaces it",
                        fix=f"step the schedule after the compiled function, or use a number: {effect.key}={tensor.item():.6g}",
                    )
                )

    @contextmanager
    def in_place(self, vector: Any, on_branch: Callable[..., None]) -> Generator[None]:
        """Context for a trace in which each slot and varying place contains a lifted number, an element of `vector` (float64[size]).

        Args:
            vector: tracer of the vector.
            on_branch: called for each condition on a number, with its key, a function that evaluates it, and its outcome.
        """
        kept = [(group, key, group[key]) for group, key, _ in self.slots]
        self._settings.start()
        as_input = partial(self._as_input, vector)
        for index, (group, key, position) in enumerate(self.slots):
            number: Any = partial(
                lifted, vector[index], lambda index=index: self.today[index], on_branch, key=("slot", index), as_input=as_input
            )
            if type(group[key]) is int:
                today = _Today(partial(getitem, group, key), group[key], self._used)
                number = Varying(self._used, today, of_settings=partial(number, integral=True))
            else:
                number = number()
            if position is None:
                group[key] = number
            else:
                group[key] = (*group[key][:position], number, *group[key][position + 1 :])
        self._used.start(on_branch, lambda i: vector[len(self.slots) + i])
        kept_varying = [(place.entry, place.entry.look(), place.read()) for place in self.varying]
        for place, (_, _, value) in zip(self.varying, kept_varying, strict=True):  # items[0] and items[-1] may be one item
            number = Varying(self._used, _Today(place.read, value, self._used), issubclass(place.kind, np.generic))
            if place.entry.key is LENGTH:
                self.lengths[place.slot[0]] = number
            else:
                place.put(number)
        tuples = ((group[key], partial(getitem, group, key)) for group, key, position in self.slots if position is not None)
        tensors = ((group[key], partial(getitem, group, key)) for group, key, value in kept if isinstance(value, torch.Tensor))
        in_places = (found for place in self.varying for found in place.tuples())
        self.stand_ins = {id(value): (value, look) for value, look in (*tuples, *tensors, *in_places)}
        try:
            yield
        finally:
            for group, key, value in kept:
                group[key] = value
            for entry, whole, _ in kept_varying:
                entry.put(whole)
            self.lengths.clear()
            self._used.stop()
            self._may_change_unseen = True  # the trace may have added numbers that are computed from settings


class _OfSettings:
    """The numbers that optimizers compute from settings alone, by their key (see `NumberNode`).

    Attributes:
        capacity: the maximum number of them.
        keys: their keys, each with its position in the section.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: dict[Any, int] = {}
        self._alike: list[tuple[Any, Any, list[int]]] | None = None

    def start(self) -> None:
        """Begin a trace, without any number."""
        self.keys.clear()
        self._alike = None

    def place(self, key: Any) -> int | None:
        """The position of a number, which is added if it is new; None if there is no room for it."""
        if key not in self.keys and len(self.keys) == self.capacity:
            return None
        self._alike = None
        return self.keys.setdefault(key, len(self.keys))

    def computed(self, settings: list[float]) -> list[float]:
        """The section of the vector: all numbers, followed by zeros.

        The counters of many parameters are equal, so equal computations of equal numbers are done once.

        Raises:
            ArithmeticError, ValueError, TypeError: Python cannot compute a number, or it is not real.
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
    """A key with its settings renumbered in the order of their first use. Their numbers are added to `slots` in this order."""
    name, *parts = key
    if name == "slot":
        if parts[0] not in slots:
            slots.append(parts[0])
        return (name, slots.index(parts[0]))
    return (name, *(_form(part, slots) if isinstance(part, tuple) else part for part in parts))


class _Today:
    """The value of a varying number: during a trace the value from before it, later the current value, which `read` gives."""

    def __init__(self, read: Callable[[], Any], value: Any, numbers: Numbers) -> None:
        self._read, self._value, self._numbers = read, value, numbers

    def __call__(self) -> Any:
        return self._value if self._numbers.is_tracing else self._read()


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
    """The constants of a trace in `param_groups` besides the parameters: the keys, and for each whether it is a number."""
    return [tuple((k, _kind(v)) for k, v in group.items() if k != "params") for group in optimizer.param_groups]


def _is_number(value: Any) -> bool:
    """Whether `value` is a float (also numpy's, which schedules may produce) or a 0-dim CPU tensor, as `lr` may be."""
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and not value.dim() and value.device.type == "cpu")


def _kind(value: Any) -> Any:
    """The key by which a setting is compared: that it is a number, or the identity of a tensor. Other settings are guarded when read."""
    if _is_number(value):
        return float
    if isinstance(value, torch.Tensor):
        return id(value)
    return tuple(map(_kind, value)) if type(value) is tuple else None


__all__ = ["LiftedNumbers", "static_settings"]

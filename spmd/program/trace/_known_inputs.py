"""Inputs whose values the host knows, and the values that Python computed from them during a trace.

Note [Known inputs]. Python asks for values that determine the program: the number of patches of an image, their position in a text, whether
a mask hides anything. If such a value depends only on inputs that the host has sent to the devices (`device/_uploaded`), the host computes
it, with the operations that the trace has recorded. Nothing is read from a device. The program is valid for calls in which all these
values are the same. Before a call the inputs are compared with the previous ones, and the values are recomputed if an input differs.

A program may write such an input (`initialized.fill_(1)`, `step += 1`). If it is a small integer or bool tensor, and its new value depends
only on such inputs or constants, each call computes the new value on the host too, and the next call knows it. The same is done for a
float of one element, but only for whole numbers computed from whole numbers: other results are rounded, and a program does not round as the
host does. Every other input that a program has written is unknown, and a read of its value is refused.

An integer or float that Python asks for (`int(ptr)`) is a constant at first. If it was another one in a later call, each call computes it:
a number that varies (`reads/_varying`), unless Python branches on it. The new value of a counter may depend on such numbers.

Arguments that are indices are checked before each call if their values are known. The program does not depend on these values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._jax import derived, is_tracer, variable_of
from spmd.base._open_sizes import are_sizes_open
from spmd.device._indices import BeforeCall
from spmd.device._storage import Buffer, buffer_of, is_whole
from spmd.device._uploaded import host_values, kept, may_follow, sent, window
from spmd.program.reuse._columns import Guards
from spmd.program.trace._host_programs import HostProgram, is_exact, is_same
from spmd.program.trace._memory_order import stored_values
from spmd.program.xla._jaxpr import constants_within

_value = attrgetter("value")
_today = attrgetter("today")
Argument = Buffer | torch.Tensor | np.ndarray[Any, Any]  # of a device tensor; a CPU tensor, or a copy of its stored values
Target = int | Buffer  # the position of an argument, or a buffer of the state
Source = Target | Callable[[], Any]
Values = tuple[np.ndarray[Any, Any] | None, ...]


@dataclass(frozen=True)
class _Answer:
    """A value that Python was given during the trace.

    Attributes:
        inputs: numbers of the sources that it depends on.
        program: computes it from their values.
        value: the value in the trace.
    """

    inputs: tuple[int, ...]
    program: HostProgram
    value: np.ndarray[Any, Any]


class KnownNumber:
    """An integer or float that every call computes from known inputs, before it runs."""

    def __init__(self, known: KnownInputs, answer: _Answer) -> None:
        self._known, self._inputs, self._program = known, answer.inputs, answer.program

    def __call__(self) -> Any:
        given = [self._known.now[n] for n in self._inputs]
        if any(host is None for host in given):
            raise KeyError("an input was computed on the device")  # which `KnownInputs.guard` reports
        return self._program(given).reshape(()).item()


@dataclass
class ArgumentCheck:
    """A check of the values of an argument before each call, if the host knows them.

    Attributes:
        argument: number of the argument.
        shape: its shape in the trace. In a call, sizes that vary may differ.
        place: sizes, strides and offset of the view that is checked; None for the whole argument.
        check: raises if an index is out of bounds.
        seen: the values that were checked last.
    """

    argument: int
    shape: tuple[int, ...]
    place: tuple[tuple[int, ...], tuple[int, ...], int] | None
    check: BeforeCall
    seen: np.ndarray[Any, Any] | None = None

    @classmethod
    def of(cls, argument: int, tensor: torch.Tensor, check: BeforeCall) -> ArgumentCheck:
        """The check of `tensor`, which is the argument in the trace or a view of it."""
        buffer = buffer_of(tensor)
        place = None if is_whole(tensor, buffer) else (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        return cls(argument, buffer.shape, place, check)

    def __call__(self, host: np.ndarray[Any, Any] | None) -> None:
        if host is not None and host is not self.seen:
            known = host if self.place is None else window(host, *self.place) if host.shape == self.shape else None
            if known is not None and known.size:
                self.check(known)
        self.seen = host


class KnownInputs:
    """The known inputs of one trace, and the values that Python was given.

    Attributes:
        today: for each argument that such a value depends on, its values in the next call, or None if they are unknown.
        now: for each source, its values in the next call, or None if they are unknown.
        followed: (target, sources, program) for each write that a call repeats on the host. The target is a state buffer or the position
            of an argument; the sources are such, or functions that compute a number that varies.
        changed: sources of numbers that were others in a later call.
        checks: checks of arguments before each call.
    """

    def __init__(self, arguments: Sequence[Argument], varying: Collection[Target] = ()) -> None:
        """
        Args:
            arguments: those on the device, then those on the CPU.
            varying: sources of numbers that vary.
        """
        self._varying = set(map(_key, varying))
        self._hosts = list(map(_values_of, arguments))
        self._arguments = {id(argument): i for i, argument in enumerate(arguments)}
        self._tracers: Sequence[Any] = ()
        self._positions: dict[int, int] = {}  # position of an argument, by id of its tracer
        self._sources: list[Target] = []  # by number: the position of an argument, or a buffer of the state
        self._numbers: dict[int, int] = {}  # number of a source, by its `_key`
        self._last_values: list[np.ndarray[Any, Any]] = []
        self._answers: dict[int, tuple[Any, _Answer | None]] = {}  # by id of the tracer, which the tuple keeps alive
        self._computed: dict[int, tuple[Any, KnownNumber | None]] = {}  # the same for numbers that vary
        self.now: list[np.ndarray[Any, Any] | None] = self._last_values  # pyright: ignore[reportAttributeAccessIssue]
        self.today: Values = ()
        self.followed: list[tuple[Target, list[Source], Any]] = []
        self.changed: list[Target] = []
        self._has_numbers = False
        self.checks: list[ArgumentCheck] = []
        self._programs: dict[Any, HostProgram] = {}  # by the jaxpr's text and constants

    def install(self, tracers: Sequence[Any]) -> None:
        """Begin a trace. `tracers`: the tracers of the arguments, in their order."""
        self.checks.clear()
        self._tracers = tracers  # kept alive, so that their ids are not reused
        self._positions = {id(tracer): i for i, tracer in enumerate(tracers)}

    def each_call(self, tensor: torch.Tensor, check: BeforeCall) -> bool:
        """Call `check` with the values of (a view of) an argument, now and before each call, unless the trace has written to it.

        Returns:
            Whether the program has to look instead: at a view, which has other sizes in calls with other sizes.
        """
        position = self._positions.get(id(buffer_of(tensor).value))
        if position is None:
            return False
        made = ArgumentCheck.of(position, tensor, check)
        if made.place is not None and are_sizes_open():
            return True
        self.checks.append(made)
        made(self._hosts[position])
        return False

    @property
    def is_used(self) -> bool:
        """Whether the program has known inputs."""
        return bool(self._sources or self.checks or self.followed)

    def known_value(self, value: Any, states: dict[int, Buffer]) -> np.ndarray[Any, Any] | None:
        """The value of a tracer if the host knows all inputs that it depends on; else None.

        Args:
            value: the tracer.
            states: the buffers that the trace has read, by id of their arrays.
        """
        if id(value) not in self._answers:
            self._answers[id(value)] = value, self._answer(value, states)
        answer = self._answers[id(value)][1]
        return None if answer is None else answer.value

    def number(self, value: Any, states: dict[int, Buffer]) -> KnownNumber | None:
        """A function that computes a 0-dim tracer in each call, if it depends on sources of numbers that vary; else None."""
        if not self._varying:
            return None
        if id(value) not in self._computed:
            answer = self._answer(value, states)
            varies = answer is not None and not self._varying.isdisjoint(_key(self._sources[n]) for n in answer.inputs)
            self._computed[id(value)] = value, KnownNumber(self, answer) if varies and answer is not None else None
        return self._computed[id(value)][1]

    def _answer(self, value: Any, states: dict[int, Buffer]) -> _Answer | None:
        with exact_dtypes():
            found = derived(value, lambda atom: id(atom) in states, self._known)
            if found is None:
                return None
            atoms, program = found[0], self._on_host(found[1])
            numbers = [self._number(self._positions[id(a)] if is_tracer(a) else states[id(a)], self._known(a)) for a in atoms]
            return _Answer(tuple(numbers), program, program([self._last_values[n] for n in numbers]))

    def _on_host(self, closed: Any) -> HostProgram:
        constants = ((c.dtype, c.shape, c.tobytes()) for c in map(np.asarray, closed.consts))
        within = map(id, constants_within(closed.jaxpr))  # the program keeps these alive
        return self._programs.setdefault((str(closed.jaxpr), *constants, *within), HostProgram(closed))

    def _known(self, atom: Any) -> Any:
        """The host's values of an input, which is the tracer of an argument or an array; None if they are unknown."""
        if not is_tracer(atom):
            return sent(atom)
        host = self._hosts[self._positions[id(atom)]] if id(atom) in self._positions else None
        return None if host is None else _padded(host, atom.shape)

    def _number(self, source: Target, value: np.ndarray[Any, Any]) -> int:
        key = _key(source)
        if key not in self._numbers:
            self._numbers[key] = len(self._sources)
            self._sources.append(source)
            self._last_values.append(value)
        return self._numbers[key]

    def follow(
        self, written: Iterable[Buffer], states: dict[int, Buffer], counts: Iterable[Any], elements: Mapping[int, Callable[[], Any]]
    ) -> None:
        """End a trace: fill `followed` with the written flags and counters whose new values depend only on inputs that Python asked for.

        Args:
            written: buffers of state and arguments that the trace has written.
            states: the buffers that the trace has read, by id of their arrays.
            counts: integers that Python was given without their values.
            elements: functions that compute the numbers that vary, by id of their variables.
        """
        asked = set(self._numbers)

        def source(atom: Any) -> Source:
            if (number := id(variable_of(atom))) in elements:
                return elements[number]
            return self._positions[id(atom)] if is_tracer(atom) else states[id(atom)]

        def known(atom: Any) -> Any:
            number = id(variable_of(atom))
            return np.float64(elements[number]()) if number in elements else self._known(atom)

        def inputs_of(value: Any) -> tuple[list[Source], Any] | None:
            found = derived(value, lambda atom: id(atom) in states, known, elements)
            return None if found is None else ([source(atom) for atom in found[0]], self._on_host(found[1]))

        with exact_dtypes():
            for count in counts:
                asked.update(map(_key, (inputs_of(count) or ((), None))[0]))
            self.followed = [
                (self._arguments.get(id(buffer), buffer), *found)
                for buffer in written
                if (value := buffer.value) is not None and may_follow(value) and value.shape == buffer.shape
                if (found := inputs_of(value)) is not None
                and asked.issuperset(
                    _key(self._arguments.get(id(buffer), buffer) if callable(s) else s) for s in found[0]
                )  # if Python asks for it
                if found[1].is_exact
            ]

    def written(self, arguments: Sequence[Argument]) -> list[tuple[Buffer, np.ndarray[Any, Any]]]:
        """The new values that a call with these arguments writes to the followed state and arguments."""
        left: list[tuple[Buffer, np.ndarray[Any, Any]]] = []
        for target, sources, program in self.followed:
            given = [np.asarray(float(s())) if callable(s) else _values_of(arguments[s] if isinstance(s, int) else s) for s in sources]
            known = [host for host in given if host is not None]
            if len(known) == len(given) and all(map(is_exact, [*known, result := program(known)])):
                buffer = arguments[target] if isinstance(target, int) else target
                assert isinstance(buffer, Buffer)  # CPU tensors are not written
                left.append((buffer, result))
        return left

    def refresh(self, arguments: Sequence[Argument]) -> None:
        """Update `today` and `now` for a call with these arguments."""
        if self._sources:
            now = tuple(_values_of(arguments[s]) for s in self._sources if isinstance(s, int))
            if len(now) != len(self.today) or not all(map(is_, now, self.today)):
                self.today = now
            if self._has_numbers:
                self.now = self._current()

    def _current(self) -> list[np.ndarray[Any, Any] | None]:
        of_arguments = iter(self.today)
        hosts = (next(of_arguments) if isinstance(source, int) else host_values(source) for source in self._sources)
        return [None if host is None else _padded(host, then.shape) for host, then in zip(hosts, self._last_values, strict=True)]

    def guard(self, guards: Guards) -> None:
        """Guard that Python would be given the same values, and end the trace."""
        answers = [answer for _, answer in self._answers.values() if answer is not None]
        self._has_numbers = any(number is not None for _, number in self._computed.values())
        self._answers.clear()
        self._computed.clear()
        self._tracers, self._hosts = (), []
        self._programs.clear()
        if answers or self._has_numbers:
            states = [s for s in self._sources if isinstance(s, Buffer)]
            guards.add(lambda: self._reason(answers), values=[(_today, [self]), (_value, states)])

    def _reason(self, answers: list[_Answer]) -> str | None:
        """Why Python would be given another value in the next call; None if it would not."""
        now: list[np.ndarray[Any, Any]] = []
        self.changed = []
        for source, then, host in zip(self._sources, self._last_values, self._current(), strict=True):
            if host is None:
                return f"{_title(source, then)}, whose values the program depends on, was computed on the device"
            now.append(host)
        differing = {n for n, (then, host) in enumerate(zip(self._last_values, now, strict=True)) if not is_same(then, host)}
        reasons: list[str] = []
        for answer in answers if differing else ():
            if differing.isdisjoint(answer.inputs):
                continue
            value = answer.program([now[n] for n in answer.inputs])
            if not is_same(answer.value, value):
                numbers = [n for n in answer.inputs if n in differing]
                if may_follow(value) and value.dtype != np.bool_:
                    self.changed += [self._sources[n] for n in numbers]
                what = _title(self._sources[numbers[0]], self._last_values[numbers[0]])
                reasons.append(f"a value that Python computes from {what} changed from {_shown(answer.value)} to {_shown(value)}")
        if reasons:
            return reasons[0]
        self._last_values = now  # so that another call with these values need not recompute
        return None


def check_arguments(checks: Iterable[ArgumentCheck], arguments: Sequence[Argument]) -> None:
    """Check the arguments of a call whose values the host knows."""
    for check in checks:
        check(_values_of(arguments[check.argument]))


def _values_of(argument: Argument) -> np.ndarray[Any, Any] | None:
    """The values of an argument or of state if the host knows them and keeps those of its kind; else None."""
    if isinstance(argument, Buffer):
        return host_values(argument)
    return kept(argument if isinstance(argument, np.ndarray) else stored_values(argument))


def _key(source: Source) -> int:
    return source if isinstance(source, int) else ~id(source)


def _padded(host: np.ndarray[Any, Any], stored: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """`host` padded with zeros to the shape `stored` of its array on the devices, where uneven dims are padded."""
    return host if host.shape == stored else np.pad(host, [(0, m - n) for n, m in zip(host.shape, stored, strict=True)])


def _title(source: Target, values: np.ndarray[Any, Any]) -> str:
    what = "a state tensor" if isinstance(source, Buffer) else f"tensor argument {source}"
    return f"{what} ({values.dtype}{list(values.shape)})"


def _shown(value: np.ndarray[Any, Any]) -> str:
    text = " ".join(str(value.tolist()).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


__all__ = ["Argument", "ArgumentCheck", "KnownInputs", "check_arguments"]

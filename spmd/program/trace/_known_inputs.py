"""Inputs whose values the host knows, and what Python was told of them while a function was traced.

Note [Known inputs]. Python asks for values that decide what a program is: into how many patches an image was cut, where it stands
in a text, whether a mask hides anything. Where they follow from inputs that the host has sent to the devices (`device/_uploaded`), they are
computed on the host, by the operations that the trace has recorded. The program then holds for calls in which the same answers come out:
their inputs are compared first, and where one is another the answers are computed again. Nothing is read from a device. What a
program writes to a small integer or bool follows, where it follows from what Python was told of or from constants (`initialized.fill_(1)`,
`step += 1`): each call computes it on the host too, so that the next one knows it. A float follows while it is a whole number computed of
whole numbers, exactly then: other sums round, and a program's rounding is not the host's. Any other input that a program has written is not
known, and Python's question is refused as before. Arguments that are indices are looked at before
each call, where they are known, and no program is made for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import jax.numpy as jnp
import numpy as np

from spmd.base._convert import exact_dtypes
from spmd.base._jax import derived, evaluated, is_tracer
from spmd.device._storage import Buffer
from spmd.device._uploaded import host_values, sent, window
from spmd.program.reuse._columns import Guards

_FEW = 16  # elements of a state tensor that the host follows: flags and counters
_value = attrgetter("value")
_today = attrgetter("today")
Values = tuple[np.ndarray[Any, Any] | None, ...]


class _OnHost:
    """A closed jaxpr that the host evaluates. Layers that are alike ask alike, of the same values: it keeps its last result."""

    def __init__(self, closed: Any) -> None:
        self._closed = closed
        self._given: list[np.ndarray[Any, Any]] = []
        self._result: Any = None

    @property
    def is_exact(self) -> bool:
        """Whether a program computes the same of what it is given: of integers, or of whole numbers by operations that keep them whole."""
        ends = [atom.aval.dtype for atom in (*self._closed.jaxpr.invars, *self._closed.jaxpr.outvars)]
        return all(dtype.kind in "biu" for dtype in ends) or _keeps_whole(self._closed)

    def __call__(self, given: list[Any]) -> np.ndarray[Any, Any]:
        if self._result is None or not all(map(_is_same, given, self._given)):
            with exact_dtypes():
                self._given, self._result = given, np.asarray(evaluated(self._closed, given))
        return self._result


@dataclass(frozen=True)
class _Answer:
    """What Python was told.

    Attributes:
        inputs: what it was computed from, by number.
        program: computes it of these.
    """

    inputs: tuple[int, ...]
    program: _OnHost
    value: np.ndarray[Any, Any]


@dataclass
class _Look:
    """What is looked at before each call.

    Attributes:
        shape: of argument number `argument` in the trace; a call has other sizes where these vary.
        place: sizes, strides and offset of the view of it that `look` sees; None: all of it.
        seen: what the argument held the last time.
    """

    argument: int
    shape: tuple[int, ...]
    place: tuple[tuple[int, ...], tuple[int, ...], int] | None
    look: Callable[[np.ndarray[Any, Any]], None]
    seen: np.ndarray[Any, Any] | None = None

    def __call__(self, host: np.ndarray[Any, Any] | None) -> None:
        if host is not None and host is not self.seen:
            known = host if self.place is None else window(host, *self.place) if host.shape == self.shape else None
            if known is not None and known.size:
                self.look(known)
        self.seen = host


class KnownInputs:
    """The answers of one trace.

    Attributes:
        today: of each argument that has part in an answer its values in the call to come, or None.
        followed: what a call writes (state, or an argument's position), what it is computed from, and what computes it.
    """

    def __init__(self, arguments: Sequence[Buffer]) -> None:
        self._hosts = list(map(host_values, arguments))
        self._arguments = {id(argument): i for i, argument in enumerate(arguments)}
        self._tracers: Sequence[Any] = ()
        self._positions: dict[int, int] = {}  # of an argument, by id of its tracer
        self._sources: list[int | Buffer] = []  # by number: the position of an argument, or a buffer of the state
        self._numbers: dict[int, int] = {}  # by id of a source
        self._then: list[np.ndarray[Any, Any]] = []
        self._answers: dict[int, tuple[Any, _Answer | None]] = {}  # by id of the tracer, which is held
        self.today: Values = ()
        self.followed: list[tuple[int | Buffer, list[int | Buffer], Any]] = []
        self._looks: list[_Look] = []
        self._programs: dict[Any, _OnHost] = {}  # by text and constants

    def install(self, tracers: Sequence[Any]) -> None:
        """The trace begins: these stand for the arguments."""
        self._looks.clear()
        self._tracers = tracers  # held: an id names nothing once its owner is gone
        self._positions = {id(tracer): i for i, tracer in enumerate(tracers)}

    def each_call(self, buffer: Buffer, place: Any, look: Callable[[np.ndarray[Any, Any]], None]) -> None:
        """Let `look` see what a view of an argument shows, now and before each call, unless the trace has written to it."""
        position = self._positions.get(id(buffer.value))
        if position is not None:
            self._looks.append(_Look(position, buffer.shape, place, look))
            self._looks[-1](self._hosts[position])

    @property
    def is_used(self) -> bool:
        """Whether calls have to do with it."""
        return bool(self._sources or self._looks or self.followed)

    @property
    def has_looks(self) -> bool:
        """Whether arguments are looked at before each call."""
        return bool(self._looks)

    def look(self, arguments: Sequence[Buffer]) -> None:
        """A call begins, with these arguments."""
        for look in self._looks:
            look(host_values(arguments[look.argument]))

    def known_value(self, value: Any, states: dict[int, Buffer]) -> np.ndarray[Any, Any] | None:
        """The value of a tracer, if the host knows the inputs that it was computed from.

        Args:
            states: the buffers that the trace has read, by id of their arrays.
        """
        if id(value) not in self._answers:
            self._answers[id(value)] = value, self._answer(value, states)
        answer = self._answers[id(value)][1]
        return None if answer is None else answer.value

    def _answer(self, value: Any, states: dict[int, Buffer]) -> _Answer | None:
        with exact_dtypes():
            found = derived(value, lambda atom: id(atom) in states, self._known)
            if found is None:
                return None
            atoms, program = found[0], self._on_host(found[1])
            numbers = [self._number(self._positions[id(a)] if is_tracer(a) else states[id(a)], self._known(a)) for a in atoms]
            return _Answer(tuple(numbers), program, program([self._then[n] for n in numbers]))

    def _on_host(self, closed: Any) -> _OnHost:
        constants = map(np.asarray, closed.consts)
        return self._programs.setdefault((str(closed.jaxpr), *((c.dtype, c.shape, c.tobytes()) for c in constants)), _OnHost(closed))

    def _known(self, atom: Any) -> Any:
        """What the host knows of an input: the tracer of an argument, or an array."""
        if not is_tracer(atom):
            return sent(atom)
        host = self._hosts[self._positions[id(atom)]] if id(atom) in self._positions else None
        return None if host is None else _padded(host, atom.shape)

    def _number(self, source: int | Buffer, value: np.ndarray[Any, Any]) -> int:
        key = _key(source)
        if key not in self._numbers:
            self._numbers[key] = len(self._sources)
            self._sources.append(source)
            self._then.append(value)
        return self._numbers[key]

    def follow(self, written: Iterable[Buffer], states: dict[int, Buffer], counts: Iterable[Any]) -> None:
        """The trace ends: of the flags and counters that it has written, the host follows those that come of what was asked for.

        Args:
            written: state and arguments.
            states: the buffers that the trace has read, by id of their arrays.
            counts: integers that Python was given, whose values it has not asked for yet.
        """
        asked = set(self._numbers)

        def source(atom: Any) -> int | Buffer:
            return self._positions[id(atom)] if is_tracer(atom) else states[id(atom)]

        def inputs_of(value: Any) -> tuple[list[int | Buffer], Any] | None:
            found = derived(value, lambda atom: id(atom) in states, self._known)
            return None if found is None else ([source(atom) for atom in found[0]], self._on_host(found[1]))

        with exact_dtypes():
            for count in counts:
                asked.update(map(_key, (inputs_of(count) or ((), None))[0]))
            self.followed = [
                (self._arguments.get(id(buffer), buffer), *found)
                for buffer in written
                if (value := buffer.value) is not None and _may_follow(value) and value.shape == buffer.shape
                if (found := inputs_of(value)) is not None and asked.issuperset(map(_key, found[0]))
                if found[1].is_exact
            ]

    def written(self, arguments: Sequence[Buffer]) -> list[tuple[Buffer, np.ndarray[Any, Any]]]:
        """What a call with these arguments leaves in the state that is followed."""
        left: list[tuple[Buffer, np.ndarray[Any, Any]]] = []
        for target, sources, program in self.followed:
            given = [host_values(arguments[s] if isinstance(s, int) else s) for s in sources]
            known = [host for host in given if host is not None]
            if len(known) == len(given) and all(map(_is_exact, [*known, result := program(known)])):
                left.append((arguments[target] if isinstance(target, int) else target, result))
        return left

    def refresh(self, arguments: Sequence[Buffer]) -> None:
        """A call is to come, with these arguments."""
        if self._sources:
            now = tuple(host_values(arguments[s]) for s in self._sources if isinstance(s, int))
            if len(now) != len(self.today) or not all(map(is_, now, self.today)):
                self.today = now

    def guard(self, guards: Guards) -> None:
        """What Python was told would be the same."""
        answers = [answer for _, answer in self._answers.values() if answer is not None]
        self._answers.clear()
        self._tracers, self._hosts = (), []
        self._programs.clear()
        if answers:
            states = [s for s in self._sources if isinstance(s, Buffer)]
            guards.add(lambda: self._reason(answers), values=[(_today, [self]), (_value, states)])

    def _reason(self, answers: list[_Answer]) -> str | None:
        """Why an answer would be another today, or None."""
        of_arguments = iter(self.today)
        now: list[np.ndarray[Any, Any]] = []
        for source, then in zip(self._sources, self._then, strict=True):
            host = next(of_arguments) if isinstance(source, int) else host_values(source)
            if host is None:
                return f"{_title(source, then)}, whose values the program was made for, was computed on the device"
            now.append(_padded(host, then.shape))
        differing = {n for n, (then, host) in enumerate(zip(self._then, now, strict=True)) if not _is_same(then, host)}
        for answer in answers if differing else ():
            if differing.isdisjoint(answer.inputs):
                continue
            value = answer.program([now[n] for n in answer.inputs])
            if not _is_same(answer.value, value):
                number = next(n for n in answer.inputs if n in differing)
                what = _title(self._sources[number], self._then[number])
                return f"what Python reads of {what} changed from {_shown(answer.value)} to {_shown(value)}"
        self._then = now  # so that the next call with these need not compute
        return None


_WHOLE = frozenset(
    (
        *(
            "add",
            "sub",
            "mul",
            "max",
            "min",
            "neg",
            "abs",
            "sign",
            "add_any",
            "select_n",
            "and",
            "or",
            "not",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
        ),
        *("broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape", "squeeze", "expand_dims", "transpose", "jit", "pjit"),
    )
)


def _keeps_whole(closed: Any) -> bool:
    constants = [*closed.consts, *(atom.val for eqn in closed.jaxpr.eqns for atom in eqn.invars if hasattr(atom, "val"))]
    return all(
        eqn.primitive.name in _WHOLE and (eqn.primitive.name not in ("jit", "pjit") or _keeps_whole(eqn.params["jaxpr"]))
        for eqn in closed.jaxpr.eqns
    ) and all(map(_is_exact, map(np.asarray, constants)))


def _is_exact(value: np.ndarray[Any, Any]) -> bool:
    """False for a float that is not a whole number, or so large that the next one is not it plus 1."""
    if value.dtype.kind in "biu":
        return True
    return bool((np.floor(value) == value).all() and (abs(value) < 2 ** jnp.finfo(value.dtype).nmant).all())


def _may_follow(value: Any) -> bool:
    is_flag = value.dtype.kind in "biu" and value.size <= _FEW
    return is_flag or (value.size == 1 and jnp.issubdtype(value.dtype, jnp.floating))


def _key(source: int | Buffer) -> int:
    return source if isinstance(source, int) else ~id(source)


def _padded(host: np.ndarray[Any, Any], stored: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """`host` as an array of shape `stored` holds it: zeros at the ends of uneven dims."""
    return host if host.shape == stored else np.pad(host, [(0, m - n) for n, m in zip(host.shape, stored, strict=True)])


def _is_same(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """NaN is itself, and -0.0 is not 0.0."""
    return one is other or (one.shape == other.shape and one.tobytes() == other.tobytes())


def _title(source: int | Buffer, values: np.ndarray[Any, Any]) -> str:
    what = "a state tensor" if isinstance(source, Buffer) else f"tensor argument {source}"
    return f"{what} ({values.dtype}{list(values.shape)})"


def _shown(value: np.ndarray[Any, Any]) -> str:
    text = " ".join(str(value.tolist()).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


__all__ = ["KnownInputs"]

"""Branches on values that only the device knows. Each call takes the sides that its own values decide.

    if weight_norm == 0 or update_norm == 0:        # of an optimizer in the step
        trust_ratio = 1.0
    else:
        trust_ratio = weight_norm / update_norm

Note [Device branches]
    A trace takes one side of each such branch, and its program also computes the conditions. A call compares them with the sides of the
    program before it stores anything. If one differs, the call runs another program, traced with the other side of that branch. So
    a program with such branches does not donate its state, and each call of it waits for the device.

    The first trace leaves the function at a branch whose side is not decided yet. The device then computes the conditions so far from the
    values of the call, and the trace starts again with these sides. Later branches are guessed: at the same place in the code (for
    another parameter, in another iteration of a loop) they take the side that the last one took, or the one that another program has found.
    A guess is decided by the first call, or earlier if the function raises an exception or does not end.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from spmd.base._convert import exact_dtypes
from spmd.base._errors import TraceAgain, message, user_line
from spmd.base._jax import inline_jaxpr
from spmd.device._arrays import fetched
from spmd.device._checks import stacked
from spmd.device._storage import Buffer
from spmd.program.reads._library import is_recorded
from spmd.program.run._program_devices import ProgramDevices
from spmd.program.trace._trace_settings import TraceSettings

_MOST_GUESSED = 16  # and four times the number of decided sides: XLA compiles them unrolled, a draw of random numbers in 0.4 s on a CPU


class Visit(NamedTuple):
    """A branch of a trace: the place in the code, and how often the trace was there before."""

    filename: str
    line: int
    instruction: int
    number: int


class Side(NamedTuple):
    """The side of a branch that a trace took.

    Attributes:
        visit: the branch.
        line: `file:line in function` of the branch.
        taken: the truth value of its condition for which the program is valid.
    """

    visit: Visit
    line: str
    taken: bool


class SideNeeded(TraceAgain):
    """The function is at a branch whose side is not decided. Its trace ends here; `DeviceBranches.decided_by` finds the side."""

    def other_settings(self, settings: TraceSettings) -> TraceSettings:
        return settings


class OtherSides(TraceAgain):
    """A call takes other sides than the trace.

    Attributes:
        sides: of the first branches of the call.
        likely: guesses for the others.
        num_written: number of outputs that the trace has written, if it is to be repeated.
        reason: the last of `sides`.
    """

    def __init__(self, sides: tuple[bool, ...], line: str, likely: dict[Any, bool]) -> None:
        super().__init__()
        self.sides, self.likely, self.num_written = sides, likely, 0
        self.reason = f"the condition at {line} is {sides[-1]} now"

    def other_settings(self, settings: TraceSettings) -> TraceSettings:
        return replace(settings, sides=self.sides, likely_sides=self.likely, num_written=max(settings.num_written, self.num_written))


class DeviceBranches:
    """The branches of one trace. See Note [Device branches].

    Args:
        decided: the sides of the first branches, in the order of the trace.
        likely: guesses for others, by `Visit`.

    Attributes:
        sides: the sides taken so far.
        conditions: the traced condition of each, bool[].
        is_left: whether the trace has left the function, and computes the conditions only.
    """

    def __init__(self, decided: tuple[bool, ...], likely: Mapping[Any, bool]) -> None:
        self._decided, self._likely = decided, likely
        self._last: dict[Any, tuple[int, bool]] = {}  # the number and the side of the last visit
        self.sides: list[Side] = []
        self.conditions: list[Any] = []
        self.is_left = False

    @property
    def has_guesses(self) -> bool:
        """Whether a side is not decided yet."""
        return len(self.sides) > len(self._decided)

    def side_of(self, condition: Any) -> bool:
        """The side that the trace takes.

        Raises:
            SideNeeded: it is not decided.
        """
        position, place = len(self.sides), _place()
        number, last = self._last.get(place, (-1, None))
        visit = Visit(*place, number + 1)
        num_guessed = position - len(self._decided)
        taken = self._decided[position] if num_guessed < 0 else self._likely.get(visit, last)
        is_known = taken is not None and num_guessed < _MOST_GUESSED + 4 * len(self._decided)
        self.conditions.append(condition)
        self.sides.append(Side(visit, user_line(), bool(taken)))
        if taken is None or not is_known:
            raise SideNeeded
        self._last[place] = visit.number, taken
        return taken

    def leave(self) -> list[Any]:
        """End the trace. Returns its only output."""
        self.is_left = True
        return [stacked(self.conditions)]

    def decided_by(
        self, closed: Any, buffers: Sequence[Buffer | None], given: Sequence[Buffer | Any], devices: ProgramDevices
    ) -> OtherSides:
        """What the device decides for this call, after the trace has left the function.

        Args:
            closed: the trace, a closed jaxpr whose only output is that of `leave`.
            buffers: for each constant of it the buffer that it was read from, or None.
            given: its inputs: the buffers of arguments, and arrays of the host.
            devices: the devices that compute it.
        """
        for buffer in (*buffers, *given):
            if isinstance(buffer, Buffer):
                devices.place(buffer)
        consts = [c if b is None else b.value for c, b in zip(closed.consts, buffers, strict=True)]
        args = [one.value if isinstance(one, Buffer) else devices.array_of(np.asarray(one)) for one in given]
        with exact_dtypes():
            run = jax.jit(lambda consts, args: inline_jaxpr(closed.jaxpr, consts, *args)[0], out_shardings=devices.replicated)
            found = fetched(run(consts, args)) != 0
        return other_sides(self.sides, found) or OtherSides(tuple(map(bool, found)), self.sides[-1].line, {})


def other_sides(sides: Sequence[Side], conditions: Sequence[Any], num_decided: int = 0) -> OtherSides | None:
    """The exception for the first side that differs from its condition; None if all are equal.

    `num_decided`: the number of sides that another program has decided. The condition of this one may differ by rounding.
    """
    found = [side.taken if i < num_decided else bool(now) for i, (side, now) in enumerate(zip(sides, conditions, strict=True))]
    first = next((i for i, (side, now) in enumerate(zip(sides, found, strict=True)) if side.taken != now), None)
    if first is None:
        return None
    likely = {side.visit: now for side, now in zip(sides[first + 1 :], found[first + 1 :], strict=True)}
    return OtherSides(tuple(found[: first + 1]), sides[first].line, likely)


def waits(name: str, sides: Sequence[Side]) -> str:
    """The warning for a function whose calls wait for the device."""
    lines = [*dict.fromkeys(side.line for side in sides)]
    more = "" if len(lines) == 1 else f" and {len(lines) - 1} other place{'s' * (len(lines) > 2)}"
    return message(
        f"{name} branches on values of the device, at {lines[0]}{more}",
        "each call waits for them, and needs memory for its state twice, before and after the step",
        fix="torch.where(condition, a, b), or torch.cond",
    )


def _place() -> tuple[str, int, int]:
    """The instruction of the user's function, or of a library whose code is recorded, that needs the side."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_recorded(frame.f_globals.get("__name__")):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lasti


__all__ = ["DeviceBranches", "OtherSides", "Side", "SideNeeded", "other_sides", "waits"]

"""The programs that a compiled function keeps, by signature: at most so many, those that ran last.

Knows nothing of tracing. A program that is dropped is freed with its executable and whatever its trace held.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

from spmd.base._jax import forget_traces
from spmd.device._storage import Buffer

if TYPE_CHECKING:
    from spmd.program._program import Program

FORGET_EVERY = 8  # dropped programs: jax keeps half a megabyte of traces for each


class ProgramCache:
    """Programs by signature, newest first.

    Attributes:
        limit: how many are kept.
        state: buffers that the programs update or read without being passed them, by id. They enter signatures by identity, so
            they are held as long as a signature names them: an `id` must not be used twice.
        newest: the program that was used last.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.state: Mapping[int, Buffer] = {}
        self._programs: dict[Any, list[Program]] = {}
        self._asked: tuple[Any, tuple[Program, ...]] = (None, ())  # for which signature programs were asked for last
        self._used: dict[int, int] = {}  # by the program's id: when it was used last
        self._clock = count()
        self.newest: Program | None = None
        self._num_dropped = 0

    def __iter__(self) -> Iterator[Program]:
        return (program for programs in self._programs.values() for program in programs)

    def keys(self) -> Iterator[Any]:
        """The signatures."""
        return iter(self._programs)

    def of(self, key: Any) -> tuple[Program, ...]:
        """The programs of one signature, newest first."""
        are_tensors = type(key[0]) is int  # other values may have an `__eq__` of their own, which is asked where hashes are equal
        if are_tensors and key == self._asked[0]:  # mostly it is that of the last call, and need not be hashed
            return self._asked[1]
        found = tuple(self._programs.get(key, ()))
        if are_tensors and found:
            self._asked = key, found
        return found

    def note_state(self, buffers: list[Buffer]) -> None:
        """Buffers that a new program has as its state."""
        self.state = {**self.state, **{id(b): b for b in buffers}}

    def put(self, key: Any, program: Program) -> None:
        """Keep a program; where that is one too many, the one that has not been used for longest goes."""
        self._programs.setdefault(key, []).insert(0, program)
        self._asked = None, ()
        self.note_use(program)
        while len(self._used) > self.limit:
            self.drop(min(self, key=lambda p: self._used[id(p)]))

    def note_use(self, program: Program) -> None:
        """The program runs."""
        if program is not self.newest:
            self._used[id(program)], self.newest = next(self._clock), program

    def clear(self) -> None:
        """Keep none."""
        self._programs, self._used, self.state = {}, {}, {}
        self._asked, self.newest = (None, ()), None

    def drop(self, program: Program) -> None:
        """Keep it no longer."""
        self._num_dropped += 1
        if self._num_dropped % FORGET_EVERY == 0:
            forget_traces()
        del self._used[id(program)]
        self._asked = None, ()
        if program is self.newest:
            self.newest = None
        self._programs = {key: [p for p in programs if p is not program] for key, programs in self._programs.items()}
        self._programs = {key: programs for key, programs in self._programs.items() if programs}
        named = {id(b) for p in self for b in (*p.captured.inputs.shared, *p.captured.state.consts) if b is not None}
        for key in self._programs:
            named.update(_buffers_in(key))
        self.state = {i: b for i, b in self.state.items() if i in named}


def _buffers_in(key: Any) -> Iterator[int]:
    """Ids of the buffers that a signature names (see `_signature.signature`)."""
    for part in key:
        place = part[0] if isinstance(part, tuple) and part else None
        if isinstance(place, tuple) and len(place) == 2 and place[0] == "state":
            yield place[1]


__all__ = ["FORGET_EVERY", "ProgramCache"]

"""The least-recently-used cache of a compiled function's programs, by signature.

A program that is dropped is freed with its executable and everything that its trace kept alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

from spmd.base._jax import forget_traces
from spmd.device._storage import Buffer, buffer_of, is_device_tensor

if TYPE_CHECKING:
    from spmd.program._program import Program
    from spmd.program.trace._captured import Captured

FORGET_EVERY = 8  # dropped programs after which jax's trace cache is cleared: it keeps half a megabyte for each


class ProgramCache:
    """Programs by signature, newest first.

    Attributes:
        limit: the maximum number of programs.
        state: by id, buffers that are state of a program: it uses them without getting them as arguments. Signatures contain their
            ids, so they are kept alive as long as a signature contains them: an id must not be reused.
        reached: by id, objects that programs reached by name. Signatures contain their ids too.
        newest: the program that was used last, or None.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.state: Mapping[int, Buffer] = {}
        self.reached: Mapping[int, Any] = {}
        self._programs: dict[Any, list[Program]] = {}
        self._latest: tuple[Any, tuple[Program, ...]] = (None, ())  # the signature of the last lookup, and its programs
        self._used: dict[int, int] = {}  # time of the last use, by id of the program
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
        are_tensors = type(key[0]) is int  # other arguments may define `__eq__`, which must run only where hashes are equal
        if are_tensors and key == self._latest[0]:  # usually the signature of the last call, which then need not be hashed
            return self._latest[1]
        found = tuple(self._programs.get(key, ()))
        if are_tensors and found:
            self._latest = key, found
        return found

    def note_state(self, captured: Captured) -> None:
        """Add the state of a new program."""
        buffers = [b for b in _state_of(captured) if b not in captured.state.slots]
        self.state = {**self.state, **{id(b): b for b in buffers}}
        self.reached = {**self.reached, **captured.guarded.reached}

    def put(self, key: Any, program: Program) -> None:
        """Add a program, and drop the least recently used one if there are more than `limit`."""
        self._programs.setdefault(key, []).insert(0, program)
        self._latest = None, ()
        self.note_use(program)
        while len(self._used) > self.limit:
            self.drop(min(self, key=lambda p: self._used[id(p)]))

    def note_use(self, program: Program) -> None:
        """Note that a program is used."""
        if program is not self.newest:
            self._used[id(program)], self.newest = next(self._clock), program

    def clear(self) -> None:
        """Drop all programs."""
        self._programs, self._used, self.state, self.reached = {}, {}, {}, {}
        self._latest, self.newest = (None, ()), None

    def drop(self, program: Program) -> None:
        """Drop one program."""
        self._num_dropped += 1
        if self._num_dropped % FORGET_EVERY == 0:
            forget_traces()
        del self._used[id(program)]
        self._latest = None, ()
        if program is self.newest:
            self.newest = None
        self._programs = {key: [p for p in programs if p is not program] for key, programs in self._programs.items()}
        self._programs = {key: programs for key, programs in self._programs.items() if programs}
        self.reached = {i: o for p in self for i, o in p.captured.guarded.reached.items()}
        named = {id(b) for p in self for b in _state_of(p.captured)}
        for key in self._programs:
            named.update(_buffers_in(key))
        self.state = {i: b for i, b in self.state.items() if i in named}


def _state_of(captured: Captured) -> Iterator[Buffer]:
    """The buffers that are state of a program."""
    asked = (buffer_of(t) for t in captured.guarded.reached.values() if is_device_tensor(t))
    return (b for b in (*captured.inputs.shared, *captured.state.consts, *asked) if b is not None)


def _buffers_in(key: Any) -> Iterator[int]:
    """Ids of the buffers that a signature contains (see `_signature.signature`)."""
    for part in key:
        place = part[0] if isinstance(part, tuple) and part else None
        if isinstance(place, tuple) and len(place) == 2 and place[0] == "state":
            yield place[1]


__all__ = ["FORGET_EVERY", "ProgramCache"]

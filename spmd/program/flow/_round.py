"""A part of a trace that may run several times, or not at all: a micro-batch, a branch, the body of a loop.

Inside it jax's trace is another one, so no array made there may be seen outside but through what the part returns. A
`Round` records what the part reads and writes of what existed before, and puts everything back when the part has been
traced. Everything is told to the recorder around it too.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from spmd.device._arrays import padded
from spmd.device._random_stream import advanced, default_stream
from spmd.device._storage import Buffer, recording
from spmd.program.trace._buffer_use import DROPPED_VALUE, Recorder


@dataclass
class Round:
    """Recorder of one part of a trace.

    Attributes:
        trace: the recorder around it.
        words: the random state at its start.
        seen: each buffer from before that it read or wrote, with the value from before.
        written: buffers from before that it wrote, in order.
        draws: how many random numbers it drew; known once it is over.
    """

    trace: Any
    words: Any
    start_draws: int
    newborn: weakref.WeakSet[Buffer] = field(default_factory=weakref.WeakSet[Buffer])
    seen: dict[Buffer, Any] = field(default_factory=dict[Buffer, Any])
    written: dict[Buffer, None] = field(default_factory=dict[Buffer, None])
    draws: int = 0

    def born(self, buffer: Buffer) -> None:
        self.newborn.add(buffer)
        self.trace.born(buffer)

    def read(self, buffer: Buffer) -> None:
        self.trace.read(buffer)
        self._see(buffer)

    def will_write(self, buffer: Buffer) -> None:
        self.trace.will_write(buffer)
        if buffer not in self.newborn:
            self._see(buffer)
            self.written[buffer] = None

    def expect(self, flag: Any, check: Any) -> bool:
        """No flag made here can leave it."""
        return False

    def random_state(self) -> tuple[Any, int]:
        return self.words, self.start_draws

    def hold(self, values: Mapping[Buffer, Any]) -> None:
        """Let buffers from before have these values inside the round."""
        for buffer, value in values.items():
            self._see(buffer)
            buffer.value = value

    def _see(self, buffer: Buffer) -> None:
        if buffer not in self.seen and buffer not in self.newborn:
            self.seen[buffer] = buffer.value
            buffer.reads.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trace, name)

    def put_back(self) -> None:
        """Buffers from before the round have their values again; those born in it have none."""
        for buffer, value in self.seen.items():
            buffer.value = value
            buffer.reads.clear()
        for buffer in self.newborn:
            buffer.value, buffer.dropped = None, DROPPED_VALUE
            buffer.reads.clear()


def stored_value(buffer: Buffer) -> Any:
    """The buffer's array as it is stored, padded where its layout does not divide it: the one form in which a round takes and leaves it."""
    value = buffer.raw()
    if value.shape == buffer.stored or buffer.annotation is None:
        return value
    return padded(value, buffer.annotation.to_jax())


@contextmanager
def one_round(words: Any, kind: type[Round] = Round) -> Generator[Round]:
    """Record one round whose random state is `words`; afterwards the count of draws, and the trace around it, if any, is as before."""
    start = default_stream.draws
    trace: Any = recording.get() or Recorder(words, {}, start, {})
    round_ = kind(trace, words, start)
    token = recording.set(round_)  # pyright: ignore[reportArgumentType]
    num_flags = len(trace.finite)
    try:
        yield round_
    finally:
        recording.reset(token)
        round_.put_back()
        round_.draws = default_stream.draws - start
        default_stream.draws = start
        del trace.finite[num_flags:]  # flags of modules that ran inside cannot leave it


def words_now() -> Any:
    """The random state at this point of the trace."""
    recorder: Any = recording.get()
    words, start = recorder.random_state()
    return advanced(words, default_stream.draws - start)


__all__ = ["Round", "one_round", "stored_value", "words_now"]

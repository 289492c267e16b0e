"""A part of a trace that may run several times, or not at all: a micro-batch, a branch, the body of a loop.

Inside it jax's trace is another one, so no array made there may be seen outside but through what the part returns. A
`Round` records what the part reads and writes of what existed before, and puts everything back when the part has been
traced. The recorder around it records the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import jax.numpy as jnp

from spmd.device._arrays import padded
from spmd.device._random_stream import advanced, default_stream
from spmd.device._storage import Buffer, recording
from spmd.program.trace._buffer_use import DROPPED_VALUE
from spmd.program.trace._part import Part


class Round(Part):
    """Recorder of one part of a trace.

    Attributes:
        newborn: buffers made in it.
        seen: each buffer from before that it read or wrote, with the value from before.
        written: buffers from before that it wrote, in order.
        draws: how many random numbers it drew; known once it is over.
    """

    def __init__(self, words: Any, start_draws: int) -> None:
        super().__init__(words, start_draws)
        self.newborn: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self.seen: dict[Buffer, Any] = {}
        self.written: dict[Buffer, None] = {}
        self.draws = 0

    def born(self, buffer: Buffer) -> None:
        self.newborn.add(buffer)
        super().born(buffer)

    def read(self, buffer: Buffer) -> None:
        super().read(buffer)
        self._see(buffer)

    def will_write(self, buffer: Buffer) -> None:
        super().will_write(buffer)
        if buffer not in self.newborn:
            self._see(buffer)
            self.written[buffer] = None

    def random_state(self) -> tuple[Any, int]:
        return super().random_state() if self.axes is None else self.outer.random_state()

    def hold(self, values: Mapping[Buffer, Any]) -> None:
        """Let buffers from before have these values inside the round."""
        for buffer, value in values.items():
            self._see(buffer)
            buffer.value = value

    def _see(self, buffer: Buffer) -> None:
        if buffer not in self.seen and buffer not in self.newborn:
            self.seen[buffer] = buffer.value
            buffer.reads.clear()

    def put_back(self) -> None:
        """Buffers from before the round have their values again; those born in it have none."""
        for buffer, value in self.seen.items():
            buffer.value = value
            buffer.reads.clear()
        for buffer in self.newborn:
            buffer.drop(DROPPED_VALUE)
            buffer.reads.clear()


def stored_value(buffer: Buffer) -> Any:
    """The buffer's array as it is stored, padded where its layout does not divide it: the one form in which a round takes and leaves it."""
    value = buffer.raw()
    if value.shape == buffer.stored or buffer.annotation is None:
        return value
    return padded(value, buffer.annotation.to_jax())


RoundT = TypeVar("RoundT", bound=Round)


@contextmanager
def one_round(words: Any, kind: type[RoundT] = Round) -> Generator[RoundT]:
    """Record one round whose random state is `words`; afterwards the count of draws, and the trace around it, if any, is as before."""
    start = default_stream.draws
    round_ = kind(words, start)
    token = recording.set(round_)
    num_flags = len(round_.finite)
    try:
        yield round_
    finally:
        recording.reset(token)
        round_.put_back()
        round_.draws = default_stream.draws - start
        default_stream.draws = start
        del round_.finite[num_flags:]  # flags of modules that ran inside cannot leave it


def words_now() -> Any:
    """The random state at this point of the trace."""
    recorder = recording.get()
    assert recorder is not None
    if recorder.axes is not None:  # in a region nothing draws, so any will do
        return jnp.asarray(default_stream.words())
    words, start = recorder.random_state()
    return advanced(words, default_stream.draws - start)


__all__ = ["Round", "one_round", "stored_value", "words_now"]

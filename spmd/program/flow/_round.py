"""A part of a trace that may run repeatedly or conditionally: a micro-batch, a branch, the body of a loop.

The part has its own jax trace, so its arrays may leave it only as its results. A `Round` records the reads and writes of buffers that
existed before the part, and restores the buffers after the part has been traced. The outer recorder records the same reads and writes.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import jax.numpy as jnp
import torch

from spmd.device._arrays import padded
from spmd.device._checks import Check, stacked
from spmd.device._indices import BeforeCall
from spmd.device._random_stream import advanced, default_stream
from spmd.device._storage import Buffer, recording
from spmd.program.trace._buffer_use import DROPPED_VALUE
from spmd.program.trace._part import Part


class Round(Part):
    """Recorder of one part of a trace.

    Attributes:
        newborn: buffers created in the part.
        seen: earlier buffers that the part read or wrote, with their values before it.
        written: earlier buffers that the part wrote, in order.
        draws: number of random draws, set at the end of the part.
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
        """Give earlier buffers these values inside the round."""
        for buffer, value in values.items():
            self._see(buffer)
            buffer.value = value

    def _see(self, buffer: Buffer) -> None:
        if buffer not in self.seen and buffer not in self.newborn:
            self.seen[buffer] = buffer.value
            buffer.reads.clear()

    def put_back(self) -> None:
        """Restore the values of earlier buffers, and drop those of buffers created in the round."""
        for buffer, value in self.seen.items():
            buffer.value = value
            buffer.reads.clear()
        for buffer in self.newborn:
            buffer.drop(DROPPED_VALUE)
            buffer.reads.clear()


class CheckedRound(Round):
    """A round whose checks leave it: its caller returns `flags()` from the part's jax trace, and gives the results to `pass_on`.

    Attributes:
        checks: the checks of values, each with its flag.
    """

    def __init__(self, words: Any, start_draws: int) -> None:
        super().__init__(words, start_draws)
        self.checks: list[tuple[Check, Any]] = []

    @property
    def takes_checks(self) -> bool:
        return self.outer.takes_checks

    def expect(self, flag: Any, check: Check) -> bool:
        if self.takes_checks:
            self.checks.append((check, flag))
        return self.takes_checks

    def each_call(self, tensor: torch.Tensor, look: BeforeCall) -> bool:
        return self.takes_checks

    def flags(self) -> list[Any]:
        """One 0-dim flag per check, int64; 0 means that it passed."""
        return list(stacked([flag for _, flag in self.checks])) if self.checks else []


def pass_on(checks: Sequence[Check], flags: Sequence[Any]) -> None:
    """Let the enclosing recorder expect the checks of a round.

    Args:
        flags: one flag per check: 0-dim, or [iterations] of a loop, of which the first that is not 0 counts.
    """
    recorder = recording.get()
    if recorder is not None:
        for check, flag in zip(checks, flags, strict=True):
            recorder.expect(flag if flag.ndim == 0 else _first_nonzero(flag), check)


def _first_nonzero(flags: Any) -> Any:
    return flags[jnp.argmax(flags != 0)] if flags.size else jnp.zeros((), flags.dtype)


def stored_value(buffer: Buffer) -> Any:
    """The buffer's array as stored: padded if its layout does not divide it. Rounds take and return values in this form only."""
    value = buffer.raw()
    if value.shape == buffer.stored or buffer.annotation is None:
        return value
    return padded(value, buffer.annotation.to_jax())


RoundT = TypeVar("RoundT", bound=Round)


@contextmanager
def one_round(words: Any, kind: type[RoundT] = Round) -> Generator[RoundT]:
    """Record one round with the random state `words`. Afterwards the number of draws and the outer recorder, if any, are restored."""
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
        del round_.finite[num_flags:]  # flags of modules that ran inside cannot leave the inner trace


def words_now() -> Any:
    """The random state at this point of the trace."""
    recorder = recording.get()
    assert recorder is not None
    if recorder.axes is not None:  # nothing draws in a region, so any words will do
        return jnp.asarray(default_stream.words())
    words, start = recorder.random_state()
    return advanced(words, default_stream.draws - start)


__all__ = ["CheckedRound", "Round", "one_round", "pass_on", "stored_value", "words_now"]

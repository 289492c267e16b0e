"""Settings of a trace that only an earlier trace can find. A trace that needs other settings is discarded and repeated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, eq=False)
class Drawn:
    """Traces of one call during which random numbers of the host were drawn.

    Attributes:
        num_traces: their number.
        states: the states of the generators before the first of them.
    """

    num_traces: int
    states: tuple[Any, ...]


@dataclass(frozen=True)
class TraceSettings:
    """Settings of one trace. `TraceAgain.other_settings` returns those of the next trace.

    Attributes:
        attributes: names of attributes of tensor arguments that the function reads or writes. They are part of a call's signature.
        holders: classes whose instances among the arguments count as containers even if they have no tensor attribute.
        has_constant_numbers: no Python number is an input, because one was used where Python needs its value.
        has_constant_counters: integers of inputs whose values the host knows are constants, because one was used where Python needs it.
        has_counts: integers that the host knows become Python ints when they are read, because one was needed as a size or for a `range`.
        fixes_indices: numbers that index a tensor are constants, because the function writes to an element that it read at one.
        has_constant_texts: texts of numbers that vary are made during the trace, because the function failed after one was left to the
            end of the call.
        has_late_writes: all writes to CPU tensors wait for the end of the call, because the function writes to one from before the call.
        has_own_context: the function runs in a copy of the `contextvars` context, because it sets a variable that had no value, and
            a variable cannot be unset.
        share_counters: equal step counters of an optimizer are read as one. See Note [Equal counters].
        unmarked: ids of the leaf tensors to whose missing gradient the function may add (see `Gradients`).
        unreached: modules and optimizers that ran in a trace and that `reachable` does not find.
        as_objects: optimizers that are traced as ordinary objects, because the function uses their state without a step, or because
            they put new tensors into it.
        unprepared: optimizers whose state is created in their first step, and not prepared, because the function reads it before.
        imported: names of modules that were imported for this trace, because the function imports them for the first time.
        drawn: earlier traces during which random numbers of the host were drawn, perhaps by another thread.
        no_choices: places of blocks of which only one side may run. See Note [Choices].
        sides, likely_sides: the sides of the first branches on values that only the device knows, and guesses for others. See Note
            [Device branches].
        leaves_cached: whether every call leaves the tensors that it computes for a cached function in the cache. Not if sizes vary, which
            are keys there.
        puts_off_outputs: whether output that runs code of the user's (a handler of a logger) waits for the end of the call, with all other
            output; None if no trace has had such output.
        num_written: number of outputs (`print`, logging) that an earlier trace for the same call has written.
    """

    attributes: frozenset[str] = frozenset()
    holders: frozenset[type] = frozenset()
    has_constant_numbers: bool = False
    has_constant_counters: bool = False
    has_counts: bool = False
    fixes_indices: bool = False
    has_constant_texts: bool = False
    has_late_writes: bool = False
    has_own_context: bool = False
    share_counters: bool = True
    unmarked: frozenset[int] = frozenset()
    unreached: tuple[Any, ...] = ()
    as_objects: tuple[Any, ...] = ()
    unprepared: tuple[Any, ...] = ()
    imported: frozenset[str] = frozenset()
    drawn: Drawn | None = None
    no_choices: frozenset[Any] = frozenset()
    sides: tuple[bool, ...] = ()
    likely_sides: Mapping[Any, bool] = field(default_factory=dict[Any, bool])
    puts_off_outputs: bool | None = None
    leaves_cached: bool = True
    num_written: int = 0

    @property
    def of_reads(self) -> tuple[bool, bool, bool, bool, frozenset[str], frozenset[Any]]:
        """The settings of a `Recording`."""
        return (
            *(self.fixes_indices, self.has_constant_texts, self.has_own_context, self.has_late_writes),
            *(self.imported, self.no_choices),
        )

    def of_step(self) -> TraceSettings:
        """The settings that later traces of the step start with."""
        none: frozenset[Any] = frozenset()
        found = replace(self, share_counters=True, unmarked=none, unreached=(), as_objects=(), unprepared=(), imported=none)
        return replace(found, drawn=None, sides=(), likely_sides={}, num_written=0)

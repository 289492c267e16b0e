"""Settings of a trace that a first trace cannot know. A trace that meets something for which they must differ is thrown away."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class TraceSettings:
    """Settings of one trace. `TraceAgain.other_settings` gives those of the next.

    Attributes:
        attributes: names of attributes that the function reads or writes of tensors among its arguments: part of a call's signature.
        holders: classes of arguments that are containers even while they hold no tensor.
        has_constant_numbers: no Python number is an input: one was needed where only its value will do.
        has_counts: integers that the host knows are Python's own where they are read: one was needed as a size, or for a `range`.
        fixes_indices: what is read of a tensor at a number that varies is written to, so the number is a constant.
        has_own_context: the function runs in a copy of the context: it sets a context variable that had no value, and none can be unset.
        share_counters: equal step counters of an optimizer are read as one. See Note [Equal counters].
        unmarked: ids of the leaf tensors to whose missing gradient the function may add (see `Gradients`).
        unreached: modules and optimizers that a trace met and `reachable` does not find.
        as_objects: optimizers that are objects like any other: they do not step in the function, which uses their state, or they put
            new tensors into it.
        unprepared: optimizers whose state the function looks at before their first step: it is made in that step, and not before.
    """

    attributes: frozenset[str] = frozenset()
    holders: frozenset[type] = frozenset()
    has_constant_numbers: bool = False
    has_counts: bool = False
    fixes_indices: bool = False
    has_own_context: bool = False
    share_counters: bool = True
    unmarked: frozenset[int] = frozenset()
    unreached: tuple[Any, ...] = ()
    as_objects: tuple[Any, ...] = ()
    unprepared: tuple[Any, ...] = ()

    def of_step(self) -> TraceSettings:
        """What of it holds for the step's later traces too."""
        return replace(self, share_counters=True, unmarked=frozenset(), unreached=(), as_objects=(), unprepared=())

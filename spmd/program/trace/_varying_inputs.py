"""What was another number or object in a later call of a step: inputs of all programs that are traced from then on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from spmd.program.reads import PartPlace, changes
from spmd.program.reuse._signature import changed_positions
from spmd.program.trace._captured import Captured
from spmd.program.trace._known_inputs import Target
from spmd.program.trace._trace_settings import TraceSettings


class VaryingInputs:
    """The inputs that vary, of one step.

    Attributes:
        places: places of Python values that held another number or object, by their tokens.
        counters: inputs whose values the host knows, of which Python asked for another integer or float.
        arguments: the positions of the numbers among the arguments, by the structure of the arguments.
    """

    def __init__(self) -> None:
        self.places: dict[Any, PartPlace] = {}
        self.counters: list[Target] = []
        self.arguments: dict[Any, set[int]] = {}

    def note(self, captured: Captured, settings: TraceSettings) -> None:
        """Add what has changed since a trace."""
        if settings.has_constant_numbers:
            return
        self.places.update((place.token, place) for place in changes(captured.guarded.places))
        if captured.inputs.known is not None and not settings.has_constant_counters:
            self.counters += [s for s in captured.inputs.known.changed if all(s is not other for other in self.counters)]

    def note_arguments(self, keys: Iterable[Any], key: Any) -> bool:
        """Add the numbers in which the key of a call differs from one of `keys`, if it differs in them alone. Whether there are any."""
        for other in keys:
            positions = changed_positions(other, key)
            if positions:
                self.arguments.setdefault(key[0], set()).update(positions)
                return True
        return False

    def limited(self, settings: TraceSettings, before: TraceSettings) -> TraceSettings:
        """The settings of the next trace, and drop what they make constant: first the counters, if there are any, then all numbers.

        Args:
            settings: those that a trace asked for.
            before: those of that trace.
        """
        if not settings.has_constant_numbers:
            return settings
        if self.counters:
            self.counters.clear()
            return replace(settings, has_constant_numbers=before.has_constant_numbers, has_constant_counters=True)
        self.places.clear()
        self.arguments.clear()
        return settings


__all__ = ["VaryingInputs"]

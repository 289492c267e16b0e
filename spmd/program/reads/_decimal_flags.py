"""Decimal contexts: their settings, and the flags that operations raise. Every call raises those that the trace has raised."""

from __future__ import annotations

import decimal
from collections.abc import Callable
from functools import partial
from typing import Any

from spmd.program.reads._journal import Effect
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._trace_errors import refused


def digits_of(context: decimal.Context) -> tuple[Any, ...]:
    """The settings of a context, without its flags."""
    digits = context.prec, context.rounding, context.Emin, context.Emax, context.capitals, context.clamp
    return *digits, tuple(sorted(signal.__name__ for signal, is_on in context.traps.items() if is_on))


class Flags:
    """The flags of the decimal contexts that one trace uses."""

    def __init__(self) -> None:
        self._used: dict[int, tuple[decimal.Context, str]] = {}  # contexts, each with its flags before the trace
        self._cleared: set[int] = set()
        self._raised: list[tuple[decimal.Context, str]] = []

    def use(self, context: decimal.Context) -> None:
        """Before operations in a context: clear its flags, so that those show that the operations raise."""
        if id(context) not in self._used:
            self._used[id(context)] = context, _flags_of(context)
            context.clear_flags()

    def clear(self, context: decimal.Context) -> None:
        """Before `context.clear_flags()`: from then on its flags depend on the trace alone."""
        self.use(context)
        self._cleared.add(id(context))

    def require_cleared(self, context: Any) -> None:
        """Raise TraceError if flags (of a context, or as the object that holds them) depend on what happened before the trace."""
        for used, _ in self._used.values():
            if (used is context or used.flags is context) and id(used) in self._cleared:
                return
        raise refused("flags of a decimal.Context: what earlier operations signalled")

    def restore(self) -> None:
        """When the trace ends: restore the flags from before."""
        for context, before in self._used.values():
            if (raised := _flags_of(context)) or id(context) in self._cleared:
                self._raised.append((context, raised))
            context.clear_flags()
            _raise(context, before)
        self._used = {}

    def effects(self, is_before: Callable[[Any], bool]) -> list[Effect]:
        """What every call does to the flags of contexts from before the trace."""
        return [
            Effect(context, "flags", "the flags of a decimal.Context", ABSENT, raised, partial(self._put, context))
            for context, raised in self._raised
            if is_before(context)
        ]

    def _put(self, context: decimal.Context, raised: str) -> None:
        if id(context) in self._cleared:
            context.clear_flags()
        _raise(context, raised)


def _flags_of(context: decimal.Context) -> str:
    return " ".join(signal.__name__ for signal, is_raised in context.flags.items() if is_raised)


def _raise(context: decimal.Context, names: str) -> None:
    for name in names.split():
        context.flags[getattr(decimal, name)] = True


__all__ = ["Flags", "digits_of"]

"""Keeps the traces of a step in the compilation cache, for later processes: one that finds a trace there need not run the function.

    store = TraceStore.of(fn, name, options, call)       # None if the traces of this call are not stored
    captured = store.find(found)                         # the trace of an earlier process, if all that it read is the same here
    store.keep(program)                                  # after a trace: for later processes
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from spmd.base._program_files import files_in_use
from spmd.device._buffer_stack import stack_of
from spmd.device._storage import Buffer, buffer_of, is_device_tensor
from spmd.program.find._discover import Reachable
from spmd.program.optim._preparation import drop_unused_state
from spmd.program.reads import PLAIN
from spmd.program.reads._places import DictPlace
from spmd.program.reuse._signature import Signature
from spmd.program.roll._rolled import Loop
from spmd.program.roll._rolled_program import StackedState
from spmd.program.stored._description import LAYOUTS, NotStorable, is_ours
from spmd.program.stored._messages import Messages
from spmd.program.stored._paths import Search
from spmd.program.stored._pickled import NotHere, read, written
from spmd.program.stored._surroundings import digest_of
from spmd.program.trace._captured import Captured
from spmd.program.xla._cached_executables import CachedExecutable, look_up

if TYPE_CHECKING:
    from spmd.program._program import Options, Program

_MOST = 8  # traces of one step and one kind of arguments that are stored
_log = logging.getLogger("spmd.compile")
Lookup = Callable[[str], CachedExecutable | None]


@dataclass(frozen=True)
class StoredTrace:
    """A trace of an earlier process, with the objects of this one.

    Attributes:
        captured: the trace, without its jaxpr.
        digest: the digest of its executable.
        loops: the loops of the program, or the repeated parts that are not loops.
        stacks: the buffers of each stack, if the program has loops; else None.
        used: buffers of optimizer state that the trace used.
        reached: see `Guarded`.
        messages: what was logged and warned of during the trace.
    """

    captured: Captured
    digest: str
    loops: list[Loop]
    stacks: list[tuple[Buffer, ...]] | None
    used: list[Buffer]
    reached: list[Any]
    messages: Messages

    def stacked(self) -> StackedState | None:
        """The state of the program, if it has loops."""
        return None if self.stacks is None else StackedState(self.loops, list(map(stack_of, self.stacks)))


class TraceStore:
    """The stored traces for one call of a step.

    Args:
        key: the digest under which the traces are stored.
        fn: the function.
        call: the call.
        number: number of traces of the step before this one.

    Attributes:
        found: the trace that `find` returned; None if there was none.
        messages: notes what is logged and warned of during a trace.
    """

    def __init__(self, key: str, fn: Any, call: Signature, number: int) -> None:
        self._keys = [f"trace-{key}-{i}" for i in range(_MOST)]
        self._number = number
        self.messages = Messages()
        self._roots = {"function": fn, **{f"argument {i}": b for i, b in enumerate(call.buffers)}}
        self._reachable: Any = None
        self.found: StoredTrace | None = None

    @staticmethod
    def of(fn: Any, name: str, options: Options, call: Signature, client: Any, number: int) -> TraceStore | None:
        """The store for a call; None if its traces are not stored."""
        if files_in_use() is None or number >= _MOST or options.check or call.numbers or call.copied:
            return None
        try:
            return TraceStore(digest_of(fn, name, options, call.key, client), fn, call, number)
        except NotStorable as error:
            _log.debug("the trace of %s is not stored: %s", name, error)
            return None

    def find(self, reachable: Reachable, lookups: list[Lookup]) -> Captured | None:
        """The trace of an earlier process, if everything that it read is the same in this one.

        Args:
            reachable: what the function can reach, with prepared optimizers. State that the trace did not use is removed.
            lookups: functions that find the executable by its digest, besides the cache.
        """
        self._reachable, files = reachable, files_in_use()
        for key in self._keys if files is not None else ():
            content = files.get(key)
            if content is not None and self._fits(content, lookups):
                return self.found and self.found.captured
        return None

    def _fits(self, content: bytes, lookups: list[Lookup]) -> bool:
        try:
            stored: StoredTrace = read(content, self._roots)
        except NotHere as error:
            _log.debug("a stored trace is of something else: %s", error)
            return False
        if not any(lookup(stored.digest) is not None for lookup in (*lookups, look_up)):
            return False
        kept = [(optimizer, dict(optimizer.state)) for optimizer, _ in self._reachable.prepared]
        used = set(map(id, stored.used))
        for optimizer, created in self._reachable.prepared:
            drop_unused_state(optimizer, created, lambda buffer: id(buffer) in used)
        captured = stored.captured
        captured.guarded.reached.update((id(o), o) for o in stored.reached)
        captured.inputs.refresh({}, captured.inputs.arguments)
        reason = captured.guarded.guards.reason()
        if reason is None:
            self.found = stored
            return True
        _log.debug("a stored trace is of something else: %s", reason)
        for optimizer, state in kept:
            optimizer.state.clear()
            optimizer.state.update(state)
        return False

    def keep(self, program: Program) -> None:
        """Store the trace of a program, if another process can compare everything that it read."""
        files = files_in_use()
        captured = program.captured
        if files is None or program.digest is None or program.watched is not None or program.is_ahead:
            return
        try:
            _require_storable(captured)
            tensors = {id(buffer_of(t)): t for t in (*self._reachable.device_tensors(), *self._reachable.optimizer_tensors())}
            used = [b for b in (*captured.state.written, *captured.state.consts) if b is not None and id(b) in tensors]
            stored = StoredTrace(
                replace(captured, jaxpr=None, layers=[], guarded=replace(captured.guarded, reached={})),
                program.digest,
                [] if program.rolled is None else program.rolled.loops,
                None if program.rolled is None else [stack.members for stack in program.rolled.stacks],
                used,
                list(captured.guarded.reached.values()),
                self.messages,
            )
            search = Search(self._roots, _keys_read(captured))
            files.put(self._keys[self._number], written(stored, search, set(map(id, _live(captured))), tensors))
        except NotStorable as error:
            _log.debug("the trace is not stored: it depends on %s", error)


def _require_storable(captured: Captured) -> None:
    """Raise NotStorable for a trace with inputs or results that a later process may have at other places."""
    state, inputs = captured.state, captured.inputs
    if inputs.shared or inputs.numbers.has_varying or inputs.holders:
        raise NotStorable("an argument that is also state, or numbers that vary")
    if state.slots or state.held or state.born:
        raise NotStorable("gradients, tensors or state that each call replaces")


def _keys_read(captured: Captured) -> dict[int, list[Any]]:
    """The keys of each dict that the trace read or wrote, by id of the dict."""
    found: dict[int, list[Any]] = {}
    for place in captured.guarded.places:
        if isinstance(place, DictPlace):
            found.setdefault(id(place.holder), []).extend((*place.entries, *place.present, *(place.whole or ((),))[0]))
    return found


def _live(captured: Captured) -> Iterator[Any]:
    """The objects of the program that the trace read, wrote or guarded."""

    def found() -> Iterator[Any]:
        for place in captured.guarded.places:
            yield place.holder
            yield from place.values()
        for _, what in captured.guarded.guards.added:
            yield from what.get("dicts", ())
            for kind in ("values", "numbers", "blank"):
                for _, objects in what.get(kind, ()):
                    yield from objects
            yield from (holder for _, holder in what.get("parts", ()))
        yield from (effect.holder for effect in captured.writes.effects)
        yield from (holder for holder, _, _ in captured.inputs.numbers.slots)
        yield from captured.guarded.reached.values()

    for value in found():
        if isinstance(value, partial) and is_ours(value.func):
            continue
        if isinstance(value, LAYOUTS) or not (isinstance(value, (*PLAIN, tuple)) or is_ours(value) or is_ours(type(value))):
            yield value


__all__ = ["StoredTrace", "TraceStore"]

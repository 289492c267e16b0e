"""Keeps the traces of a step in the compilation cache, for later processes: one that finds a trace there need not run the function.

store = TraceStore.of(fn, name, options, call, client)
captured = store.find(reachable, lookups)            # the trace of an earlier process, if all that it read is the same here
with store.messages.noted():
    captured = capture(...)                          # otherwise
store.keep(program)
"""

from __future__ import annotations

import collections
import logging
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

from jax.sharding import NamedSharding

from spmd.base._program_files import ProgramFiles, files_in_use
from spmd.base._settings import keep_programs_by_default
from spmd.device._buffer_stack import stack_of
from spmd.device._storage import Buffer, buffer_of
from spmd.program.find._discover import Reachable
from spmd.program.find._static import is_a
from spmd.program.optim._preparation import drop_unused_state
from spmd.program.reads import ONLY_HERE, PLAIN, PartPlace
from spmd.program.reads._content_places import AttributePlace
from spmd.program.reads._places import DictPlace
from spmd.program.reuse._signature import Signature
from spmd.program.roll._rolled import Loop
from spmd.program.roll._rolled_program import StackedState
from spmd.program.stored._description import LAYOUTS, NotStorable, is_ours
from spmd.program.stored._messages import Messages
from spmd.program.stored._modules import note_trace
from spmd.program.stored._paths import Search
from spmd.program.stored._pickled import NotHere, read, written
from spmd.program.stored._surroundings import digest_of
from spmd.program.trace._captured import Captured
from spmd.program.trace._varying_inputs import VaryingInputs
from spmd.program.xla._cached_executables import Cached, look_up
from spmd.program.xla._compilation import Compilation, CompileRequest, Lookup, Making

if TYPE_CHECKING:
    from spmd.program._options import Options
    from spmd.program._program import Program

_MOST = 4  # traces of one function and one kind of arguments that are stored, and that a process stores
_num_stored: collections.Counter[str] = collections.Counter()  # by the first key of the store
_log = logging.getLogger("spmd.compile")


@dataclass(frozen=True)
class StoredTrace:
    """A trace of an earlier process, with the objects of this one.

    Attributes:
        captured: the trace, without its jaxpr.
        digest: the digest of its executable.
        loops: the repeated parts of the program.
        stacks: the buffers of each stack, if the program has loops; else None.
        used: buffers of optimizer state that the trace used.
        layouts: the shapes, dtypes and shardings of the arrays that it was compiled for (see `layouts_of`).
        reached: see `Guarded`.
        objects: the objects among the arguments, since the trace may have compared one with another object without reading it.
        messages: what was logged and warned of during the trace.
    """

    captured: Captured
    digest: str
    loops: list[Loop]
    stacks: list[tuple[Buffer, ...]] | None
    used: list[Buffer]
    layouts: list[Any]
    reached: list[Any]
    objects: list[Any]
    messages: Messages

    def stacked(self) -> StackedState | None:
        """The state of the program, if it has loops."""
        return None if self.stacks is None else StackedState(self.loops, list(map(stack_of, self.stacks)))

    def compilation(self, program: Program, name: str, arrays: Sequence[Any], client: Any, making: Making) -> Compilation:
        """The reading of the executable, which is in the cache.

        Args:
            program, name: its program, and the name of the step.
            arrays: the arrays of the program's state and arguments.
            client, making: see `CompileRequest`, `Making`.

        Raises:
            NotHere: it was compiled for other shardings, or cannot be loaded.
        """
        if layouts_of(arrays) != self.layouts:
            raise NotHere("its executable is for other shardings")
        request = CompileRequest(name, _not_lowered, ((),), True, None, program.mesh, program.devices.platform, False, self.digest, client)
        return Compilation(request, making=replace(making, is_beside=False), check=None)


def layouts_of(arrays: Sequence[Any]) -> list[Any]:
    """The shape, dtype and sharding of each array, as plain values."""
    return [(v.shape, v.dtype.name, v.weak_type, v.committed, repr(v.sharding), *_device_ids(v.sharding)) for v in arrays]


def _device_ids(sharding: Any) -> list[int]:
    mesh: Any = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return [device.id for device in (sharding.device_set if mesh is None else mesh.devices.flat)]


def _not_lowered(*args: Any) -> None:
    """The function of a program whose executable was stored with its trace."""
    raise NotHere("its executable cannot be loaded")


class TraceStore:
    """The stored traces for one call of a step.

    Args:
        keys: the keys of the cache under which they are.
        fn: the function.
        call: the signature of the call.
        objects: the objects among the arguments that are compared by identity.

    Attributes:
        begun: executables that other threads are reading already, by digest.
        found: the trace that `find` returned; None if there was none.
        messages: notes what is logged and warned of during a trace.
    """

    def __init__(self, keys: Sequence[str] = (), fn: Any = None, call: Signature | None = None, objects: Sequence[Any] = ()) -> None:
        self._keys, self._call = keys, call
        self._buffers = [] if call is None else call.buffers
        self._roots = {"function": fn, **{f"argument {i}": buffer for i, buffer in enumerate(self._buffers)}}
        self._roots |= {f"object {i}": value for i, value in enumerate(objects)}
        self._objects = list(objects)
        self._reachable: Any = None
        self._modules = set(sys.modules)
        self.messages = Messages()
        self.begun: dict[str, Cached] = {}
        self.found: StoredTrace | None = None

    @staticmethod
    def of(fn: Any, name: str, options: Options, call: Signature, varying: VaryingInputs, client: Any) -> TraceStore:
        """The store for a call. It stores nothing if the cache is not in use, or if the arguments cannot be described.

        Args:
            fn, name, options: of the step.
            call: the signature of the call.
            varying: what was another number or object at a later trace. A trace is found only for the same places.
            client: jax's client of the devices.
        """
        keep_programs_by_default()
        if files_in_use() is None or options.check:
            return TraceStore()
        try:
            changed = varying.places.values()
            places = sorted(f"{place.entry.key!r}, {place.path}, {place.kind.__qualname__}" for place in changed if _has_name(place))
            places.append(f"{len(varying.counters)} counters")
            key, objects = digest_of(fn, name, options, (call.key, tuple(places)), client)
        except NotStorable as error:
            _log.debug("the trace of %s is not stored: it depends on %s", name, error)
            return TraceStore()
        except Exception:  # of what a library or the program has put into a place that is described
            _log.debug("the trace of %s is not stored", name, exc_info=True)
            return TraceStore()
        store = TraceStore([f"trace-{key}-{i}" for i in range(_MOST)], fn, call, objects)
        store._begin(client)
        return store

    def _begin(self, client: Any) -> None:
        """Start reading the executable of the trace that was used last, while this thread prepares optimizers and compares the trace."""
        files = files_in_use()
        content = None if files is None else files.newest(self._keys)
        if content is not None:
            digest = _digest_and_trace(content)[0]
            cached = look_up(digest)
            if cached is not None:
                cached.begin(client)
                self.begun[digest] = cached

    @contextmanager
    def noted(self) -> Generator[None]:
        """Note the messages of a trace and the modules that it loads, also if it is given up."""
        try:
            with self.messages.noted():
                yield
        finally:
            note_trace(self._modules)

    def find(self, reachable: Reachable, lookups: Sequence[Lookup]) -> Captured | None:
        """The trace of an earlier process, if everything that it read is the same in this one. Its messages are shown.

        Args:
            reachable: what the function can reach, with prepared optimizers. State that the trace did not use is removed.
            lookups: functions that find the executable by its digest, besides the cache.
        """
        self._reachable, files = reachable, files_in_use()
        for content in map(files.get, self._keys) if files is not None else ():
            if content is not None and self._fits(content, lookups):
                assert self.found is not None
                self.found.messages.show()
                return self.found.captured
        return None

    def _fits(self, content: bytes, lookups: Sequence[Lookup]) -> bool:
        """Whether a trace is valid here. If so, it is `found`."""
        try:
            stored: StoredTrace = read(_digest_and_trace(content)[1], self._roots)
        except NotHere as error:
            _log.debug("a stored trace is of something else: %s", error)
            return False
        if not any(lookup(stored.digest) is not None for lookup in (*lookups, self.begun.get, look_up)):
            return False
        kept = [(optimizer, dict(optimizer.state)) for optimizer, _ in self._reachable.prepared]
        reason: str | None = "it was not compared"
        try:
            reason = self._difference(stored)
        except Exception as error:  # of whatever is in the place of an object of the trace
            reason = f"{type(error).__name__}: {error}"
        finally:
            if reason is not None:
                for optimizer, state in kept:
                    optimizer.state.clear()
                    optimizer.state.update(state)
        if reason is None:
            self.found = stored
        else:
            _log.debug("a stored trace is of something else: %s", reason)
        return reason is None

    def _difference(self, stored: StoredTrace) -> str | None:
        """What differs from what the trace read; None if nothing. Optimizer state that it did not use is removed."""
        used = set(map(id, stored.used))
        for optimizer, created in self._reachable.prepared:
            drop_unused_state(optimizer, created, lambda buffer: id(buffer) in used)
        captured = stored.captured
        captured.guarded.reached.update((id(o), o) for o in stored.reached)
        assert self._call is not None
        captured.inputs.refresh(self._call.numbers, self._call.arguments)
        return captured.guarded.guards.reason()

    def keep(self, program: Program) -> None:
        """Store the trace of a program of this process, if another process can compare everything that it read."""
        is_new = self._keys and self.found is None and _num_stored[self._keys[0]] < _MOST
        files, captured = files_in_use() if is_new else None, program.captured
        note_trace(self._modules)
        try:
            if files is None or program.digest is None or program.watched is not None or program.is_ahead:
                return
            _require_storable(captured, self.messages)
            search = Search(self._roots, _keys_read(captured))
            known = *search.device_tensors(), *self._reachable.device_tensors(), *self._reachable.optimizer_tensors()
            tensors = {id(buffer_of(t)): t for t in known}  # the last of each buffer
            content = written(self._record(program, tensors), search, set(map(id, _live(captured))), tensors)
        except NotStorable as error:
            _log.debug("the trace is not stored: it depends on %s", error)
        except Exception:  # objects of the program are of any kind, and its calls go on without a stored trace
            _log.debug("the trace is not stored", exc_info=True)
        else:
            files.put(self._place(files), program.digest.encode() + b"\n" + content)
            _num_stored[self._keys[0]] += 1
        finally:
            captured.guarded.guards.added.clear()

    def _record(self, program: Program, tensors: dict[int, Any]) -> StoredTrace:
        captured, rolled = program.captured, program.rolled
        assert program.digest is not None
        used = [b for b in (*captured.state.written, *captured.state.consts) if b is not None and id(b) in tensors]
        return StoredTrace(
            replace(captured, jaxpr=None, layers=[], guarded=replace(captured.guarded, reached={})),
            program.digest,
            program.loops,
            None if rolled is None else [stack.members for stack in rolled.stacks],
            used,
            layouts_of([b.value for b in (*program.written.buffers, *program.read.buffers, *self._buffers)]),
            list(captured.guarded.reached.values()),
            self._objects,
            self.messages,
        )

    def _place(self, files: ProgramFiles) -> str:
        """The key for a new trace: a free one, or that of an earlier trace, which it replaces."""
        return next((key for key in self._keys if not files.has(key)), self._keys[time.time_ns() % _MOST])


def _digest_and_trace(content: bytes) -> tuple[str, bytes]:
    """The parts of a file: the digest of the trace's executable, and the record."""
    digest, _, record = content.partition(b"\n")
    return digest.decode("latin1"), record


def _has_name(place: PartPlace) -> bool:
    return type(place.entry.key) in PLAIN


def _require_storable(captured: Captured, messages: Messages) -> None:
    """Raise NotStorable for a trace that another process could not repeat, or with inputs that it may have at other places."""
    if messages.lost is not None:
        raise NotStorable(messages.lost)
    state, inputs = captured.state, captured.inputs
    if inputs.shared or inputs.holders:
        raise NotStorable("an argument that is also state")
    if state.slots or state.held or state.born:
        raise NotStorable("gradients, tensors or state that each call replaces")
    for place in captured.guarded.places:
        if any(type(value) is str and value == ONLY_HERE for value in place.values()):
            raise NotStorable(place.title)
        if is_a(place.holder, (set, frozenset)) and not all(is_a(value, PLAIN) for value in place.holder):
            raise NotStorable("a set of objects, which is compared by their addresses")


def _keys_read(captured: Captured) -> dict[int, list[Any]]:
    """The keys that the trace read of each dict, by id of the dict, and the attributes of each function."""
    found: dict[int, list[Any]] = {}
    for place in captured.guarded.places:
        if isinstance(place, DictPlace):
            found.setdefault(id(place.holder), []).extend((*place.entries, *place.present, *(place.whole or ())))
        elif isinstance(place, AttributePlace):
            found.setdefault(id(place.holder), []).append(place.name)
    return found


def _live(captured: Captured) -> Iterator[Any]:
    """The objects of the program, and not of this package, that the trace read, wrote or guarded."""
    for value in _met(captured):
        if type(value) is partial and (is_ours(value.func) or is_a(value.func, BuiltinFunctionType)):
            continue
        if is_a(value, LAYOUTS) or not (is_a(value, (*PLAIN, tuple)) or is_ours(value) or is_ours(type(value))):
            yield value


def _met(captured: Captured) -> Iterator[Any]:
    for place in captured.guarded.places:
        yield place.holder
        yield from place.values()
    for _, what in captured.guarded.guards.added:
        yield from what.get("dicts", ())
        yield from (holder for _, holder in what.get("parts", ()))
        yield from (value for kind in ("values", "numbers", "blank") for _, objects in what.get(kind, ()) for value in objects)
    yield from (effect.holder for effect in captured.writes.effects)
    yield from (holder for holder, _, _ in captured.inputs.numbers.slots)
    yield from captured.guarded.reached.values()


__all__ = ["StoredTrace", "TraceStore"]

"""Objects that a trace makes and drops: a recording must not keep them alive where the program sees that.

CPython ends a generator, closes a file and clears weak references as soon as the last reference to an object is gone. A recording refers
to the objects that it has met, so that no other object gets their ids. Of objects that the trace has made, nothing is recorded in the end.
So those whose end is seen are not kept (`handles_of`, `FilesOfTrace`), and where the program may see the end of any other, the recording
first lets go of all that the trace has made (`let_go`).
"""

from __future__ import annotations

import collections.abc
import dis
import functools
import gc
import io
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from spmd.base._errors import TraceError, message
from spmd.base._live_objects import live_instances
from spmd.program.find._static import is_python_class
from spmd.program.reads._heap import made_in_trace
from spmd.program.reads._hidden_state import is_in_memory
from spmd.program.reads._pending import Pending

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedReader, io.FileIO)
SUSPENDED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_OURS = ("spmd", "mesh", "jax")  # packages whose generators run around the function
_WEAK = (weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet)


class FilesOfTrace:
    """Tells the files that a trace has opened from older ones."""

    def __init__(self) -> None:
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        self._older: dict[int, Any] = {}

    def __contains__(self, value: Any) -> bool:
        """Whether a value is a file of the disk that the trace has opened. It has no state that another call could find changed."""
        if (type(value) not in _FILES and type(value).__module__ != "tempfile") or id(value) in self._older:
            return False
        if value not in self._made:
            if is_in_memory(value) or not made_in_trace(value):
                self._older[id(value)] = value
                return False
            self._made.add(value)
        return True

    def still_open(self) -> list[Any]:
        """Those that are open."""
        return [file for file in self._made if not getattr(file, "closed", False)]


def handles_of(value: Any) -> list[Callable[[], Any]]:
    """Functions that give an iterator as long as it lives; several that give those inside if it is C code over generators: `zip(gen())`."""
    if isinstance(value, (*SUSPENDED, *_FILES)):
        return [weakref.ref(value)]
    inner = list(_generators_in(value))
    return [weakref.ref(each) for each in inner] if inner else [lambda: value]


def _generators_in(value: Any) -> Iterator[Any]:
    """The generators that an iterator in C runs over, at any depth."""
    for part in gc.get_referents(value) if isinstance(value, collections.abc.Iterator) and not is_python_class(type(value)) else ():
        for each in part if type(part) in (list, tuple) else (part,):
            if isinstance(each, SUSPENDED):
                yield each
            elif each is not value:
                yield from _generators_in(each)


def let_go(recording: Recording) -> None:
    """Drop what the recording has noted of objects that the trace has made, so that those end that the function has dropped.

    Raises:
        TraceError: a generator has ended only now, and its `with` or `finally` with it.
    """
    waiting = _with_block_open()
    recording._find_made()
    journal, owners = recording.journal, recording._owners

    def is_older(value: Any) -> bool:
        return recording.is_before(value) or not (gc.is_tracked(value) or id(value) in owners)

    recording.advanced = {key: used for key, used in recording.advanced.items() if any(is_older(get()) for get in used[0])}
    recording.places = {key: place for key, place in recording.places.items() if is_older(place.holder)}
    recording.compared[:] = [pair for pair in recording.compared if all(map(is_older, pair))]
    for table in (recording.seen, recording._passed, recording._copied, recording.asked, *recording._searched.values()):
        for key in [key for key, value in table.items() if not is_older(value)]:
            del table[key]
    if not journal.is_in_part:
        journal.keep(is_older)
    for number in [number for number, owner in owners.items() if not is_older(owner)]:
        del owners[number]
    _write_dropped(recording)
    for generator, name in waiting:
        if generator() is None:
            raise _left_late(name)


def _write_dropped(recording: Recording) -> None:
    """Write the text of those files of the trace to which only its outputs still refer."""
    files = recording.files.still_open() if recording.journal.outputs else []
    for file, num_all in zip(files, _num_references(files), strict=True):
        held = list(_held([each for output in recording.journal.outputs for each in (output.fn, output.given, output.streams)]))
        num_ours = sum(part is file for each in held for part in gc.get_referents(each))
        if num_all == num_ours + 1:
            _flush(file)


def _flush(file: Any) -> None:
    if isinstance(file, io.IOBase) and file.writable():
        file.flush()


def _num_references(values: list[Any]) -> list[int]:
    """How many references there are to each of the values, with that of `values`."""
    own, *found = [sys.getrefcount(value) for value in [object(), *values]]
    return [number - own for number in found]


def _held(values: list[Any]) -> Iterator[Any]:
    """The values, and what is inside those that hold the arguments of a call. Each once."""
    known: set[int] = set()
    while values:
        value = values.pop()
        if id(value) not in known and isinstance(value, (list, tuple, dict, types.BuiltinMethodType, Pending, functools.partial)):
            known.add(id(value))
            yield value
            values += gc.get_referents(value)


def let_go_before(recording: Recording, fn: Any, args: tuple[Any, ...]) -> None:
    """Before a call that may see which objects have ended (weak references, files): let go of those that the trace has made."""
    if isinstance(fn, weakref.ref):
        sees_end = made_in_trace(fn())
    else:
        owner = getattr(fn, "__self__", None) if isinstance(fn, (types.MethodType, types.BuiltinMethodType)) else None
        given = args if owner is None or isinstance(owner, types.ModuleType) else (owner, *args)
        is_given_path = any(isinstance(value, (str, bytes, os.PathLike)) for value in given[:1])
        sees_end = bool(is_given_path and recording.files.still_open()) or any(isinstance(value, _WEAK) for value in given)
    if sees_end:
        let_go(recording)


def end_dropped(recording: Recording) -> None:
    """At the end of a trace: let go of what the trace has made, and write the text of its files.

    A bytearray cannot be resized while a view of it is alive.

    Raises:
        TraceError: as `let_go`.
    """
    if recording.files.still_open() or _with_block_open():
        let_go(recording)
        for file in recording.files.still_open():
            _flush(file)
    recording.places = {key: place for key, place in recording.places.items() if recording.is_before(place.holder)}
    recording.seen = {key: value for key, value in recording.seen.items() if isinstance(value, torch.Tensor)}
    recording._passed, recording._copied = {}, {}


def _left_late(name: str) -> TraceError:
    return TraceError(
        message(
            f"the compiled function drops {name} inside a `with`, `try` or `finally` block",
            "CPython leaves the block at once, but a trace refers to what holds the generator, and leaves it later",
            fix="end it where it is dropped: generator.close(), or loop over it directly (`for value in generator():`)",
        )
    )


def _name(generator: types.GeneratorType[Any, Any, Any]) -> str:
    return f"the generator {generator.__qualname__} ({os.path.basename(generator.gi_code.co_filename)}:{generator.gi_code.co_firstlineno})"


def _with_block_open() -> list[tuple[Callable[[], Any], str]]:
    """Weak references to the generators of the trace that wait inside a `with` or `try`, whose end is code that runs when they are dropped,
    and their names."""
    return [(weakref.ref(each), _name(each)) for each in live_instances(types.GeneratorType) if _has_block_open(each)]


def _has_block_open(generator: types.GeneratorType[Any, Any, Any]) -> bool:
    frame = generator.gi_frame
    if frame is None or not generator.gi_suspended or str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS:
        return False
    found: Any = dis.Bytecode(frame.f_code)
    starts = {entry.target for entry in found.exception_entries if entry.start <= frame.f_lasti < entry.end}
    return any(instr.opname != "CALL_INTRINSIC_1" for instr in found if instr.offset in starts)  # which all generators end with


__all__ = ["SUSPENDED", "FilesOfTrace", "end_dropped", "handles_of", "let_go", "let_go_before"]

"""Gets the executable of a traced program: from the cache, or by lowering and compiling it, in this thread or another.

Note [Compiled beside]
    Tracing and lowering use Python and jax's thread-local trace state. XLA's compiler needs neither. So when several programs are
    prepared, this thread traces and lowers them one after the other, in the same order in all processes, while other threads compile
    those that are already lowered. An exception of such a thread is raised when the program is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from jax.errors import JaxRuntimeError

from mesh import Mesh
from spmd.base._convert import exact_dtypes
from spmd.base._jax_executables import Written
from spmd.base._program_files import cache_requests, programs_not_kept
from spmd.base._progress import underway
from spmd.base._settings import keep_programs_by_default
from spmd.program.xla._cached_executables import Cached, look_up, read, store
from spmd.program.xla._compile_options import compiled
from spmd.program.xla._compile_threads import compile_threads
from spmd.program.xla._executable import lowered
from spmd.program.xla._not_compiled import in_words
from spmd.program.xla._target import target_text

Lookup = Callable[[str], Cached | None]


@dataclass(frozen=True)
class Timings:
    """Seconds spent on one program. `prepare_s` is the time to create missing optimizer state."""

    prepare_s: float
    trace_s: float
    lower_s: float
    compile_s: float


@dataclass(frozen=True)
class CompileRequest:
    """A program to be compiled.

    Attributes:
        name: the name in log and progress lines.
        run, args: a function of arrays, and example arguments: arrays or `jax.ShapeDtypeStruct`s.
        donate, pinned: see `lowered`.
        is_ahead: the program is compiled for a topology that is not attached, so it cannot run here.
        digest: the program's digest, or None if it has none. Then no executable is looked up.
        client: jax's client of the devices.
        jaxpr: the program as traced, or None. An error names its lines.
    """

    name: str
    run: Callable[..., Any]
    args: Sequence[Any]
    donate: bool
    pinned: Any
    mesh: Mesh | None
    platform: str
    is_ahead: bool
    digest: str | None
    client: Any
    jaxpr: Any = None


@dataclass(frozen=True)
class Making:
    """How to get an executable.

    Attributes:
        lookups: functions from a digest to a cached executable or None, tried before the compilation cache.
        is_beside: compile in another thread. See Note [Compiled beside].
    """

    lookups: Sequence[Lookup] = ()
    is_beside: bool = False


class Compilation:
    """An executable that is being compiled or read from the cache.

    Args:
        check: two functions: one called with the lowered program before it is compiled, one called with the executable. If given, no
            executable is looked up by digest.

    Attributes:
        lower_s: seconds for the search of the cache and for lowering.
        read_from: the serialized executable that was read; None if it was compiled.
        has_failed: the other thread raised an exception, which `result` will raise.
    """

    def __init__(
        self, request: CompileRequest, *, making: Making, check: tuple[Callable[[Any], None], Callable[[Any], None]] | None
    ) -> None:
        self._request, self._check = request, check
        self.read_from: Written | None = None
        self.has_failed = False
        keep_programs_by_default()
        start = time.perf_counter()
        self._cached = None if check is not None else self._look_up(making.lookups)
        self._lowered = self._lower() if self._cached is None else None
        self.lower_s = time.perf_counter() - start
        self._future: Future[tuple[Any, float]] | None = None
        self._made: tuple[Any, float] | None = None
        if self._cached is None:
            self._forget_arrays()
        if making.is_beside and not request.is_ahead:
            self._future = compile_threads().submit(self._make)
            self._future.add_done_callback(self._note_end)
        else:
            self._made = self._make()

    def result(self) -> tuple[Any, float]:
        """jax's executable and the seconds that compiling or reading it took. Waits for the other thread, and raises its exception."""
        if self._made is None:
            assert self._future is not None
            self._made = self._future.result()
        return self._made

    def _forget_arrays(self) -> None:
        """Drop the references to the example arguments, which are not needed once the program is lowered."""
        self._request = replace(self._request, run=_nothing, args=())

    def _note_end(self, future: Future[Any]) -> None:
        self.has_failed = future.cancelled() or future.exception() is not None

    def _look_up(self, lookups: Sequence[Lookup]) -> Cached | None:
        digest = self._request.digest
        if digest is None:
            return None
        return next((cached for lookup in (*lookups, look_up) if (cached := lookup(digest)) is not None), None)

    def _lower(self) -> Any:
        request = self._request
        with exact_dtypes(), underway(f"lowering {request.name}"):
            found = lowered(
                request.run, request.args, donate=request.donate, pinned=request.pinned, mesh=request.mesh, platform=request.platform
            )
        if self._check is not None:
            self._check[0](found)
        return found

    def _make(self) -> tuple[Any, float]:
        request, start = self._request, time.perf_counter()
        found = None
        if self._cached is not None:
            with exact_dtypes(), underway(f"{self._cached.doing} {request.name}"):
                found = read(self._cached, request.client, request.name)
                self.read_from = self._cached.executable
            self._lowered = self._lower() if found is None else None
        if found is None:
            self.read_from = None
            found = self._compiled()
        if self._check is not None:
            self._check[1](found)
        self._cached = self._lowered = self._check = None
        self._forget_arrays()
        self._request = replace(self._request, jaxpr=None)
        return found, time.perf_counter() - start

    def _compiled(self) -> Any:
        request = self._request
        assert self._lowered is not None
        progress = underway(f"compiling {request.name}{target_text(request.mesh)}")
        with exact_dtypes(), progress, programs_not_kept() if request.is_ahead else nullcontext(), cache_requests() as cached:
            try:
                found = compiled(self._lowered, request.platform, is_ahead=request.is_ahead)
            except JaxRuntimeError as error:
                explained = in_words(error, request.name, request.mesh, request.jaxpr)
                if explained is None:
                    raise
                raise explained from error
        if cached.value is not None:  # jax read it from its cache
            self.read_from = Written(cached.value, in_cache=True)
        if cached.key is not None and request.digest is not None:
            store(request.digest, found, cached.key, self._lowered)
        return found


def _nothing() -> None:
    """Replaces a function that has been lowered."""


__all__ = ["Compilation", "Making", "CompileRequest", "Timings"]

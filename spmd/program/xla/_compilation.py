"""From a traced program to its executable: found among those that were kept, or lowered and compiled, here or by another thread.

Note [Compiled beside]
    A trace holds Python and jax's trace state, which belong to a thread; XLA's compiler needs neither. So whoever prepares several programs
    traces and lowers one after the other, in an order that is the same in all processes, while threads compile those that are lowered.
    What a thread raises is raised where the program is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from mesh import Mesh, topology_options
from spmd.base._convert import exact_dtypes
from spmd.base._jax_executables import Written
from spmd.base._program_files import cache_requests, programs_not_kept
from spmd.base._progress import underway
from spmd.base._settings import keep_programs_by_default
from spmd.program.xla._cached_executables import KeptExecutable, keep_in_folder, kept_in_folder, read
from spmd.program.xla._compile_threads import compile_threads
from spmd.program.xla._executable import lowered
from spmd.program.xla._target import target_text

Find = Callable[[str], KeptExecutable | None]


@dataclass(frozen=True)
class Timings:
    """Seconds spent making one program; `prepare_s`: on the state that optimizers did not have yet."""

    prepare_s: float
    trace_s: float
    lower_s: float
    compile_s: float


@dataclass(frozen=True)
class Order:
    """What is to be compiled.

    Attributes:
        name: as it is said.
        run, args: a function of arrays, and arguments like those that it will have.
        donate, pinned: see `lowered`.
        is_ahead: for chips that are not here.
        digest: None: it has none, and is not looked for.
        client: jax's, of its devices.
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


@dataclass(frozen=True)
class Making:
    """How an executable is made.

    Attributes:
        finds: asked for one that was kept, before the folder of kept programs is.
        is_beside: compile in another thread. See Note [Compiled beside].
    """

    finds: Sequence[Find] = ()
    is_beside: bool = False


class Compilation:
    """An executable that is being made.

    Args:
        check: called with the lowered program before it is compiled, and with the executable; then none that was kept is looked for.

    Attributes:
        lower_s: seconds, those that it took to look for a kept one included.
        read_from: what the executable was read from; None where it was compiled.
        has_failed: another thread has raised; `result` raises that.
    """

    def __init__(self, order: Order, *, making: Making, check: tuple[Callable[[Any], None], Callable[[Any], None]] | None) -> None:
        self._order, self._check = order, check
        self.read_from: Written | None = None
        self.has_failed = False
        keep_programs_by_default()
        start = time.perf_counter()
        self._kept = None if check is not None else self._found(making.finds)
        self._lowered = self._lower() if self._kept is None else None
        self.lower_s = time.perf_counter() - start
        self._future: Future[tuple[Any, float]] | None = None
        self._made: tuple[Any, float] | None = None
        if self._kept is None:
            self._forget_arrays()
        if making.is_beside and not order.is_ahead:
            self._future = compile_threads().submit(self._make)
            self._future.add_done_callback(self._note_end)
        else:
            self._made = self._make()

    def result(self) -> tuple[Any, float]:
        """jax's executable, and the seconds that compiling it took; waits for it."""
        if self._made is None:
            assert self._future is not None
            self._made = self._future.result()
        return self._made

    def _forget_arrays(self) -> None:
        """Hold the state's arrays no longer: nothing is lowered any more."""
        self._order = replace(self._order, run=_nothing, args=())

    def _note_end(self, future: Future[Any]) -> None:
        self.has_failed = future.cancelled() or future.exception() is not None

    def _found(self, finds: Sequence[Find]) -> KeptExecutable | None:
        digest = self._order.digest
        if digest is None:
            return None
        return next((kept for find in (*finds, kept_in_folder) if (kept := find(digest)) is not None), None)

    def _lower(self) -> Any:
        order = self._order
        with exact_dtypes(), underway(f"lowering {order.name}"):
            found = lowered(order.run, order.args, donate=order.donate, pinned=order.pinned, mesh=order.mesh, platform=order.platform)
        if self._check is not None:
            self._check[0](found)
        return found

    def _make(self) -> tuple[Any, float]:
        order, start = self._order, time.perf_counter()
        found = None
        if self._kept is not None:
            with exact_dtypes(), underway(f"reading {order.name}"):
                found = read(self._kept, order.client, order.name)
                self.read_from = self._kept.executable
            self._lowered = self._lower() if found is None else None
        if found is None:
            self.read_from = None
            found = self._compiled()
        if self._check is not None:
            self._check[1](found)
        self._kept = self._lowered = self._check = None
        self._forget_arrays()
        return found, time.perf_counter() - start

    def _compiled(self) -> Any:
        order = self._order
        assert self._lowered is not None
        says = underway(f"compiling {order.name}{target_text(order.mesh)}")
        with exact_dtypes(), says, programs_not_kept() if order.is_ahead else nullcontext(), cache_requests() as request:
            found = self._lowered.compile(topology_options() if order.is_ahead else None)
        if request.value is not None:  # it was not compiled
            self.read_from = Written(request.value, in_cache=True)
        if request.key is not None and order.digest is not None:
            keep_in_folder(order.digest, found, request.key)
        return found


def _nothing() -> None:
    """Stands for a function that was lowered."""


__all__ = ["Compilation", "Making", "Order", "Timings"]

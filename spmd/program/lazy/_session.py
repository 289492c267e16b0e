"""`spmd.lazy()`: runs the operations of an unmodified training loop between two step boundaries as one program.

with spmd.lazy() as lazy:
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()              # the step ends: the recorded operations run
    print(loss.item())                # reading a value also runs them
lazy.num_executables                  # 2: the first step creates the optimizer's state
"""

from __future__ import annotations

import warnings
from collections import deque
from contextlib import ExitStack, suppress
from typing import Any

import jax
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from mesh import ShardingSpec
from spmd.base import _counters
from spmd.base._convert import exact_dtypes, to_torch_dtype
from spmd.base._errors import SpmdError, message
from spmd.base._exact import exactly
from spmd.base._jax import forget_traces, is_tracing
from spmd.base._signals import handlers_wait
from spmd.device._deferred import ByIdentity, Deferrable, deferring, end_step
from spmd.device._storage import Buffer, buffer_of, recording
from spmd.device._trace_lock import trace_lock
from spmd.program._job_checks import compiling
from spmd.program.flow._remat import barrier_on_recompute
from spmd.program.lazy._described import NotDeferrable
from spmd.program.lazy._effect import Effects
from spmd.program.lazy._node import Node, difference
from spmd.program.lazy._one_by_one import run_one_by_one
from spmd.program.lazy._recording import Recording
from spmd.program.lazy._region import Region, recording_mesh
from spmd.program.lazy._replay import tensor_over
from spmd.program.reuse._program_cache import FORGET_EVERY
from spmd.program.reuse._retrace_log import log_retrace
from spmd.program.xla._target import platform_of

_MAX_NODES = 100_000  # about 100 MB
_MAX_OPERATIONS = 50_000


class Lazy:
    """Records operations and runs them one step at a time. Created by `spmd.lazy`.

    Attributes:
        retraces: for every program after the first two, how its operations differed from earlier ones.
    """

    def __init__(self, max_programs: int = 32, max_retraces: int = 8) -> None:
        if max_programs < 1:
            raise SpmdError(
                message("max_programs of lazy must be at least 1", f"max_programs={max_programs!r}", fix="spmd.lazy(max_programs=32)")
            )
        self.root = Node(None, ())
        self.effects = _EffectsOf()
        self.num_nodes = 0
        self.retraces: list[str] = []
        self._specs: dict[ShardingSpec, ByIdentity] = {}
        self._max_programs = max_programs
        self._max_retraces = max_retraces
        self._recording = Recording(self)
        self._regions: deque[Region] = deque()
        self._latest: Region | None = None
        self._divergence: str | None = None
        self._is_warned = False
        self._num_dropped = 0
        self._hook: Any = None
        self._undo = ExitStack()

    def __enter__(self) -> Lazy:
        self.start()
        self._hook = register_optimizer_step_post_hook(lambda *_: end_step())
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()
        self.stop()

    def start(self) -> None:
        """Start recording this thread's operations. Unlike under `with`, an optimizer's `step()` does not end a step.

        Raises:
            SpmdError: the thread's operations are already recorded.
        """
        if deferring.get() is not None:
            raise SpmdError(message("spmd.lazy() is already active", "it cannot be nested", fix="remove the inner spmd.lazy()"))
        self._undo.enter_context(barrier_on_recompute())
        deferring.set(self)

    def stop(self) -> None:
        """Run the recorded operations and stop recording."""
        deferring.set(None)
        self._undo.close()
        self.boundary()

    @property
    def num_executables(self) -> int:
        """Number of cached programs."""
        return len(self._regions)

    @property
    def program(self) -> Region:
        """The program that ran last, with methods `hlo()`, `collectives()`, `memory()` and `flops()`.

        Raises:
            SpmdError: no program has run.
        """
        if self._latest is None:
            raise SpmdError(message("nothing has run yet", fix="end a step first: spmd.sync()"))
        return self._latest

    def __str__(self) -> str:
        count = self.num_executables
        lines = [f"spmd.lazy(): {count} program{'' if count == 1 else 's'} kept"]
        if self._latest is not None:
            lines += [f"  the latest: {self._latest.title}", *(f"  {line}" for line in str(self._latest.memory()).splitlines())]
        lines += [f"  program {i}: {reason}" for i, reason in enumerate(self.retraces, start=3)]
        return "\n".join(lines)

    def call(self, operation: Deferrable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operation, or run it now if it cannot be deferred."""
        if not is_tracing():
            with trace_lock:
                recorded = self._recording
                if recorded.node.count >= _MAX_OPERATIONS:
                    self.run(recorded)
                    recorded = self._recording
                with suppress(NotDeferrable):  # it then runs below, where the lock is released
                    return recorded.call(operation, args, kwargs)
        return operation.kernel(*args, **kwargs)

    def boundary(self) -> None:
        """End a step: run the recorded operations."""
        self.run(self._recording)

    def annotate(self, recorded: Recording, buffer: Buffer, spec: ShardingSpec) -> None:
        """Record a sharding constraint for the value of a buffer that is not computed yet."""
        if recorded is not self._recording or deferring.get() is not self:
            self.run(recorded)
            buffer.place(spec.to_jax())
            return
        held = self._specs.setdefault(spec, ByIdentity(spec))
        _lay_out(tensor_over(buffer, to_torch_dtype(recorded.dtype_of(buffer))), held)
        recorded.layouts[buffer.place_in_queue] = spec

    def note_divergence(self, node: Node, operation: Deferrable, key: tuple[Any, ...]) -> None:
        """Record the reason why an operation has no node among the children of `node`."""
        if node.latest is not None:
            self._divergence = difference(node.latest, operation, key)
        if self.num_nodes > _MAX_NODES:  # steps that always differ would fill memory
            self.root, self.num_nodes, self.effects = Node(None, ()), 0, _EffectsOf()

    def run(self, recorded: Recording) -> None:
        """Run the operations of a recording, and start a new one."""
        with trace_lock:
            if recorded is not self._recording:  # it has already run
                return
            self._recording = Recording(self)
            if recorded.node.parent is None:
                return
            alive = {i for i, ref in enumerate(recorded.buffers) if (b := ref()) is not None and b.queue is recorded and b.is_waiting}
            if not alive and not recorded.node.regions:
                return
            token, inner = deferring.set(None), recording.set(None)
            try:
                self._run(recorded, alive)
            except BaseException:
                if any(b is not None and b.queue is recorded and b.is_waiting for b in (ref() for ref in recorded.buffers)):
                    self._recording = recorded  # the run was interrupted, so its operations are still pending
                raise
            finally:
                deferring.reset(token)
                recording.reset(inner)
            recorded.forget()

    def _run(self, recorded: Recording, alive: set[int]) -> None:
        try:
            region = self._region(recorded, alive)
            with handlers_wait():
                for place, value in zip(region.outputs, region(recorded), strict=True):
                    buffer = recorded.buffers[place]()
                    if buffer is not None and buffer.queue is recorded and buffer.is_waiting:
                        buffer.value = value
        except Exception as error:
            run_one_by_one(recorded)
            self._warn_slow(error)

    def _warn_slow(self, error: Exception) -> None:
        if self._is_warned:
            return
        self._is_warned = True
        warnings.warn(
            message(
                "recorded operations could not be compiled as one program, and ran one at a time",
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                fix="call spmd.sync() before the operation that fails",
            ),
            stacklevel=6,
        )

    def _region(self, recorded: Recording, alive: set[int]) -> Region:
        """The program for a recording: an existing one, or a new one."""
        regions = recorded.node.regions
        for region in regions:
            if alive.issubset(region.outputs) and region.holds(recorded.numbers):
                _counters.count("step_programs_found")
                self._regions.remove(region)
                self._regions.append(region)  # least recently used first
                break
        else:
            varying = _varying(recorded)
            for other in regions:
                varying |= set(other.varying)
                varying |= {i for i, value in other.literals if exactly(recorded.numbers[i]) != value}
            with compiling():
                region = Region(recorded, sorted(alive), frozenset(varying), platform_of(recording_mesh(recorded)))
            _counters.count("step_programs_made")
            _counters.count("aliased_buffers", len(region.donated))
            self._note_program(region)
            regions.insert(0, region)
        self._latest = region
        self._divergence = None
        return region

    def _note_program(self, region: Region) -> None:
        if len(self._regions) >= 2:
            where = f" at {region.node.line}" if region.node.line else ""
            self.retraces.append((self._divergence or _same_path(region)) + where)
            log_retrace("a step under spmd.lazy()", self.retraces[-1], len(self.retraces), self._max_retraces)
            if len(self.retraces) == self._max_retraces:
                warnings.warn(
                    message(
                        f"{len(self._regions) + 1} programs were compiled, because the steps keep differing",
                        f"the last reason: {self.retraces[-1]}",
                        fix="keep shapes and the order of operations the same from step to step; all reasons are in lazy.retraces",
                    ),
                    stacklevel=5,
                )
        self._regions.append(region)
        if len(self._regions) > self._max_programs:
            dropped = self._regions.popleft()
            dropped.node.regions.remove(dropped)
            self._num_dropped += 1
            if self._num_dropped % FORGET_EVERY == 0:
                forget_traces()


def _same_path(region: Region) -> str:
    """Why the same operations needed another program."""
    if not region.node.regions:
        return f"the recorded operations end with {region.node.operation.name} for the first time"
    before = region.node.regions[0]
    if set(region.outputs) <= set(before.outputs):
        return "a Python number among the arguments changed"
    return "tensors are still in use that had been freed when these operations ran before"


def _laid_out(tensor: torch.Tensor, spec: ByIdentity) -> torch.Tensor:
    buffer = buffer_of(tensor)
    with exact_dtypes():
        value = jax.lax.with_sharding_constraint(buffer.get(), spec.value.to_jax())
        buffer.annotation = spec.value
        buffer.set(value)
    return tensor


_lay_out = Deferrable("mark_sharding", _laid_out)


def _varying(recorded: Recording) -> set[int]:
    """Positions of the numbers that are inputs: those that changed, and those of in-place operations, which are mostly updates."""
    found: set[int] = set()
    nodes = list(recorded.node.path())
    ends = [*(node.first_number for node in nodes[1:]), len(recorded.numbers)]
    for node, end in zip(nodes, ends, strict=True):
        if node.operation.writes or node.has_varied:
            found.update(range(node.first_number, end))
    return found


class _EffectsOf:
    """Finds effects for the default platform, with deferring and recording disabled."""

    def __init__(self) -> None:
        self._effects = Effects()

    def of(self, node: Node, roots: Any, numbers: Any) -> Any:
        token, inner = deferring.set(None), recording.set(None)
        try:
            return self._effects.of(node, roots, numbers, platform_of(None))
        finally:
            deferring.reset(token)
            recording.reset(inner)


def lazy(*, max_programs: int = 32, max_retraces: int = 8) -> Lazy:
    """A context manager under which operations on device 'jax' are recorded and run as one compiled program per step.

    Recorded operations run when a step ends (an optimizer's `step()`, `spmd.sync()`, the end of the context) and when a value is read. A
    step that repeats the previous one is not traced again: each operation is only compared with its counterpart in the previous step.
    Values, in-place writes, views, random draws, gradients, exceptions and prints are those of eager execution.

    Args:
        max_programs: the number of compiled programs to cache; the least recently used one is dropped first.
        max_retraces: warn when steps differed this often, with the difference.
    """
    return Lazy(max_programs, max_retraces)


def sync() -> None:
    """End a step under `spmd.lazy()`: run the recorded operations."""
    end_step()


__all__ = ["Lazy", "lazy", "sync"]

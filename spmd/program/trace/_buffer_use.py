"""Records the device tensors that a trace uses: buffers created, read and written, host reads, random draws, branches."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mesh import Mesh, ShardingSpec
from spmd.base._errors import TraceAgain
from spmd.base._jax import variable_of
from spmd.device._checks import Check
from spmd.device._indices import BeforeCall
from spmd.device._storage import Buffer, buffer_of
from spmd.program.reads._library import is_recorded
from spmd.program.trace._device_branches import DeviceBranches
from spmd.program.trace._known_inputs import KnownInputs
from spmd.program.trace._layer_runs import LayerRun, layer_runs
from spmd.program.xla._target import only_mesh

DROPPED_VALUE = (
    "this tensor was made inside a compiled function and its value was not kept\n"
    "  only results of the function leave the program\n"
    "  fix: return the tensor from the function"
)


@dataclass
class TraceRecorder:
    """The `Recorder` of a whole trace.

    Attributes:
        words, start_draws: the random state at the start of the trace.
        counters: step counters that may be read as one, each with its group. See Note [Equal counters].
        leaders: for each counter that is read as another one, that other one.
        reads: buffers that the trace has read, by id of the array that jax notes as a constant.
        touched: buffers from before the trace that it has read or written, with their value and host value from before.
        births, newborn: buffers created in the trace.
        written: buffers from before the trace that it has written, in order.
        unwritable: buffers that must not be written, each with the exception that a write raises.
        copied: by base, copies that become stale when the base is written.
        layers: the layers that must become loops.
        layouts: shardings to which the trace constrained values.
        known: inputs whose values the host knows; None if the traced arguments are not those of a call (stacked steps).
        is_stacked: each argument is the first element of a stack.
        met: ids of dicts of optimizer state that the function itself read or wrote.
        early: optimizers whose state the function read or wrote before they stepped.
        copies_leave: copies to the host may leave the function.
        as_number: makes a number that varies of a function that computes it in every call.
        has_counts: integers that the host knows become Python ints; otherwise `counts` collects the integers that were asked for.
        branches_on_device: the branches on values that only the device knows; None if each is refused.
    """

    words: Any
    start_draws: int
    counters: dict[Buffer, Any]
    scalars: dict[Any, Any] = field(default_factory=dict[Any, Any])
    counter_of: dict[Any, Buffer] = field(default_factory=dict[Any, Buffer])
    leaders: dict[Buffer, Buffer] = field(default_factory=dict[Buffer, Buffer])
    reads: dict[int, Buffer] = field(default_factory=dict[int, Buffer])
    touched: dict[Buffer, tuple[Any, Any]] = field(default_factory=dict[Buffer, tuple[Any, Any]])
    births: list[weakref.ref[Buffer]] = field(default_factory=list[weakref.ref[Buffer]])
    newborn: weakref.WeakSet[Buffer] = field(default_factory=weakref.WeakSet[Buffer])
    written: dict[Buffer, None] = field(default_factory=dict[Buffer, None])
    host_reads: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    branches: dict[Any, tuple[Callable[[], bool], bool]] = field(default_factory=dict[Any, tuple[Callable[[], bool], bool]])
    finite: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    checks: list[tuple[Check, Any]] = field(default_factory=list[tuple[Check, Any]])
    modules: dict[int, torch.nn.Module] = field(default_factory=dict[int, torch.nn.Module])
    layers: list[LayerRun] = field(default_factory=list[LayerRun])
    stepped: list[torch.optim.Optimizer] = field(default_factory=list[torch.optim.Optimizer])
    met: set[int] = field(default_factory=set[int])
    early: list[torch.optim.Optimizer] = field(default_factory=list[torch.optim.Optimizer])
    unwritable: weakref.WeakKeyDictionary[Buffer, type[TraceAgain]] = field(
        default_factory=weakref.WeakKeyDictionary[Buffer, type[TraceAgain]]
    )
    copied: weakref.WeakKeyDictionary[Buffer, weakref.WeakSet[Buffer]] = field(
        default_factory=weakref.WeakKeyDictionary[Buffer, weakref.WeakSet[Buffer]]
    )
    stale: weakref.WeakSet[Buffer] = field(default_factory=weakref.WeakSet[Buffer])
    reduce_dtype: Any = None
    platform: str | None = None
    axes: tuple[str, ...] | None = None
    layouts: dict[ShardingSpec, None] = field(default_factory=dict[ShardingSpec, None])
    known: KnownInputs | None = None
    is_stacked: bool = False
    has_counts: bool = False
    counts: list[Any] = field(default_factory=list[Any])
    copies_leave: bool = False
    as_number: Callable[[Callable[[], Any]], Any] = lambda evaluate: None
    branches_on_device: DeviceBranches | None = None

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer begins a step."""
        if self.has_met(optimizer) and all(optimizer is not stepped for stepped in self.stepped):
            self.early.append(optimizer)
        self.stepped.append(optimizer)

    def has_met(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the function itself has read or written state of this optimizer."""
        return not self.met.isdisjoint(map(id, (optimizer.state, *optimizer.state.values())))

    def born(self, buffer: Buffer) -> None:
        self.births.append(weakref.ref(buffer))
        self.newborn.add(buffer)

    def read(self, buffer: Buffer) -> None:
        if buffer in self.stale:
            raise self.unwritable[buffer]()
        if buffer not in self.touched and buffer not in self.newborn:
            buffer.reads.clear()
            self.touched[buffer] = (buffer.value, buffer.host)
            leader = self.counter_of.setdefault(self.counters.get(buffer, id(buffer)), buffer)
            if leader is buffer:
                self.reads[id(buffer.value)] = buffer
            else:  # See Note [Equal counters]
                self.leaders[buffer] = leader
                buffer.value = self.touched[leader][0]

    def refuse_writes(self, buffer: Buffer, why: type[TraceAgain]) -> None:
        """Let any later write to this buffer, which the trace created, raise `why`."""
        self.unwritable[buffer] = why

    def is_copy_of(self, base: Buffer, copy: Buffer, why: type[TraceAgain]) -> None:
        """Let `copy` raise `why` if it is written, is read after a write to `base`, or leaves the trace."""
        self.refuse_writes(copy, why)
        self.copied.setdefault(base, weakref.WeakSet()).add(copy)

    def is_current(self, copy: Buffer) -> None:
        self.stale.discard(copy)
        self.unwritable.pop(copy, None)

    def will_write(self, buffer: Buffer) -> None:
        self._make_stale(buffer)
        if buffer in self.newborn:
            if buffer in self.unwritable:
                raise self.unwritable[buffer]()
            return
        self.touched.setdefault(buffer, (buffer.value, buffer.host))
        self.written[buffer] = None

    def _make_stale(self, buffer: Buffer) -> None:
        """Make the copies of elements of a buffer stale, and those of elements of the copies."""
        for copy in tuple(self.copied.get(buffer, ())):
            self.stale.add(copy)
            self._make_stale(copy)

    def laid_out(self, spec: ShardingSpec) -> None:
        self.layouts[spec] = None

    def only_mesh(self) -> Mesh | None:
        return only_mesh([*(buffer.annotation for buffer in self.touched), *self.layouts], [value for value, _ in self.touched.values()])

    def ran_layers(self, results: Sequence[Any], trained: Sequence[frozenset[str]]) -> None:
        self.layers.extend(layer_runs(results, trained, lambda t: variable_of(buffer_of(t).value)))

    def is_state(self, array: Any) -> bool:
        return id(array) in self.reads

    def is_counter(self, array: Any) -> bool:
        return id(array) in self.reads and self.reads[id(array)] in self.counters

    def known_value(self, value: Any) -> Any:
        return None if self.known is None else self.known.known_value(value, self.reads)

    def known_number(self, value: Any) -> Any:
        evaluate = None if self.known is None else self.known.number(value, self.reads)
        return None if evaluate is None else self.as_number(evaluate)

    def each_call(self, tensor: torch.Tensor, look: BeforeCall) -> bool:
        return self.is_stacked if self.known is None else self.known.each_call(tensor, look)

    def known_count(self, value: Any) -> int | None:
        if self.has_counts:
            return self.known_value(value)
        self.counts.append(value)
        return None

    def knows_counts(self) -> bool:
        """Whether the host knows any of the integers that were asked for."""
        return any(self.known_value(value) is not None for value in self.counts)

    def makes_host_copy(self) -> bool | None:
        if not self.copies_leave:
            return False
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and not is_recorded(name := str(frame.f_globals.get("__name__"))):
            if not name.startswith("spmd."):
                return None if "tolist" not in frame.f_code.co_names else False  # C++ reads the memory of the copy there
            frame = frame.f_back
        return True

    def host_read(self, tensor: torch.Tensor) -> None:
        self.host_reads.append(tensor)

    def random_state(self) -> tuple[Any, int]:
        return self.words, self.start_draws

    @property
    def takes_checks(self) -> bool:
        return True

    def expect(self, flag: Any, check: Check) -> bool:
        self.checks.append((check, flag))
        return True

    def side_of(self, value: Any) -> bool | None:
        return None if self.branches_on_device is None else self.branches_on_device.side_of(value)

    def reduce_in(self, dtype: Any) -> None:
        if self.reduce_dtype is None or dtype.itemsize > self.reduce_dtype.itemsize:
            self.reduce_dtype = dtype

    def on_branch(self, key: Any, evaluate: Callable[[], bool], outcome: bool) -> None:
        self.branches.setdefault(key if key is not None else object(), (evaluate, outcome))  # one entry for all parameters of an optimizer

    def put_back(self) -> None:
        """Restore the value of every buffer from before the trace, and drop the values of those created in it that are still alive."""
        for buffer, (value, host) in self.touched.items():
            buffer.value, buffer.host = value, host
            buffer.reads.clear()
        for reference in self.births:
            buffer = reference()
            if buffer is not None:
                buffer.drop(DROPPED_VALUE)
                buffer.reads.clear()


__all__ = ["DROPPED_VALUE", "TraceRecorder"]

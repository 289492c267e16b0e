"""One trace of a user's function: what it computes, which storages it read and wrote, and what it returned.

While jax traces, every device array that the function reads appears as a constant of the jaxpr by identity, so constants
map back to the buffers they came from. Buffers that hold a tracer afterwards were written. Nothing of the user's state
changes here: whatever the outcome, values, gradients and numbers are put back before `capture` returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from spmd._convert import exact_dtypes, host_array, to_numpy_dtype
from spmd._errors import TraceError, message
from spmd._tensor import XLAShardedTensor
from spmd.device._numbers import carried
from spmd.device._random import default_stream
from spmd.device._storage import Buffer, buffer_of, is_whole, load, recording, wrap
from spmd.program import _guards
from spmd.program._discover import Reachable
from spmd.program._guards import Guard
from spmd.program._optim import LiftedNumbers
from spmd.program._remat import recomputing_for_real

DROPPED_GRADIENT = (
    "this gradient was computed inside a compiled step and not kept\n"
    "  a gradient that leaves the program costs a copy of the parameter\n"
    "  fix: compile with @spmd.compile(keep_grads=True)"
)
DROPPED_VALUE = (
    "this tensor was made inside a compiled function and its value was not kept\n"
    "  only what the function returns leaves the program\n"
    "  fix: return the tensor from the function"
)
STALE_GRADIENT = (
    "the compiled function adds to gradients of an earlier call, which were not kept\n"
    "  fix: call optimizer.zero_grad() inside the function before backward, or compile with keep_grads=True"
)


class UnknownOptimizer(Exception):
    """An optimizer stepped that `reachable` had not found: prepare it and trace again."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer


@dataclass
class Leaf:
    """One leaf of the function's result.

    Attributes:
        kind: "array" (an output of the program), "number" (an output read as a float), "same" (a tensor that existed
            before: returned as it is), "static" (any other value, as the trace returned it).
        value: the tensor or static value; for arrays the class the tensor is returned as.
    """

    kind: str
    value: Any = None


@dataclass
class Captured:
    """What one trace found."""

    jaxpr: Any
    arg_buffers: list[Buffer]
    const_buffers: list[Buffer | None]
    written: list[Buffer]
    leaves: list[Leaf]
    tree: Any
    numbers: LiftedNumbers
    draws: int
    guards: list[Guard]
    gradients: list[tuple[torch.Tensor, torch.Tensor | None]]
    kept_gradients: list[torch.Tensor]
    host_tensors: int
    finite: list[str]


@dataclass
class Recorder:
    """The trace's ears: births, reads and writes of buffers, host reads, random draws."""

    words: Any
    host_inputs: dict[int, Any]
    start_draws: int
    reads: dict[int, Buffer] = field(default_factory=dict[int, Buffer])
    touched: dict[Buffer, tuple[Any, Any]] = field(default_factory=dict[Buffer, tuple[Any, Any]])
    births: list[weakref.ref[Buffer]] = field(default_factory=list[weakref.ref[Buffer]])
    newborn: weakref.WeakSet[Buffer] = field(default_factory=weakref.WeakSet[Buffer])
    written: dict[Buffer, None] = field(default_factory=dict[Buffer, None])
    host_reads: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    branches: list[tuple[Callable[[], bool], bool]] = field(default_factory=list[tuple[Callable[[], bool], bool]])
    finite: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    modules: dict[int, torch.nn.Module] = field(default_factory=dict[int, torch.nn.Module])

    def born(self, buffer: Buffer) -> None:
        self.births.append(weakref.ref(buffer))
        self.newborn.add(buffer)

    def read(self, buffer: Buffer) -> None:
        if buffer not in self.touched and buffer not in self.newborn:
            buffer.reads.clear()
            self.touched[buffer] = (buffer.value, buffer.host)
            self.reads[id(buffer.value)] = buffer

    def will_write(self, buffer: Buffer) -> None:
        if buffer in self.newborn:
            return
        self.touched.setdefault(buffer, (buffer.value, buffer.host))
        self.written[buffer] = None

    def host_argument(self, tensor: torch.Tensor) -> Any:
        return self.host_inputs.get(id(tensor))

    def host_read(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self.host_inputs:
            self.host_reads.append(tensor)

    def random_state(self) -> tuple[Any, int]:
        return self.words, self.start_draws

    def on_branch(self, evaluate: Callable[[], bool], outcome: bool) -> None:
        self.branches.append((evaluate, outcome))

    def put_back(self) -> None:
        """Every buffer that existed before has its value again; those born in the trace and still alive have none."""
        for buffer, (value, host) in self.touched.items():
            buffer.value, buffer.host = value, host
            buffer.reads.clear()
        for reference in self.births:
            buffer = reference()
            if buffer is not None:
                buffer.value, buffer.host, buffer.dropped = None, None, DROPPED_VALUE
                buffer.reads.clear()


def capture(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], found: Reachable, *, keep_grads: bool, marked_grads: bool, debug_nans: bool
) -> Captured:
    """Trace `fn(*args, **kwargs)` once.

    Args:
        found: modules and optimizers that the function can reach, the optimizers prepared.
        keep_grads: gradients left on parameters become outputs of the program.
        debug_nans: the program also says for each module that ran whether its outputs are finite.
        marked_grads: parameters without a gradient carry a marker that refuses to be read, as after an earlier call.

    Raises:
        UnknownOptimizer: the function stepped an optimizer that is not in `found`.
        TraceError: Python needed a value that only the program will have.
    """
    flat, tree = pytree.tree_flatten((args, kwargs))
    bound, arg_buffers, host_tensors = _bind(flat)
    numbers = LiftedNumbers(found.optimizers)
    state = _Running(fn, pytree.tree_unflatten(bound, tree), numbers, found, keep_grads, marked_grads, debug_nans)
    arg_values = [b.get() for b in arg_buffers] + [host_array(t) for t in host_tensors]
    with exact_dtypes(), _grads_put_back(found) as leaf_parameters:
        state.parameters = leaf_parameters
        jaxpr = jax.make_jaxpr(lambda values, vector, words: state.run(arg_buffers, host_tensors, values, vector, words))(
            arg_values, jnp.zeros(len(numbers.slots), jnp.float64), default_stream.words()
        )
    recorder = state.recorder
    assert recorder is not None
    guards = state.guards(recorder)
    _refuse_writes_to_copies(flat, bound, recorder)
    return Captured(
        jaxpr=jaxpr,
        arg_buffers=arg_buffers,
        const_buffers=[recorder.reads.get(id(c)) for c in jaxpr.consts],
        written=list(recorder.written),
        leaves=state.leaves,
        tree=state.tree,
        numbers=numbers,
        draws=state.draws,
        guards=guards,
        gradients=state.gradients,
        kept_gradients=[g for _, g in state.gradients if g is not None] if keep_grads else [],
        host_tensors=len(host_tensors),
        finite=[name for name, _ in recorder.finite],
    )


def _refuse_writes_to_copies(flat: list[Any], bound: list[Any], recorder: Recorder) -> None:
    for given, used in zip(flat, bound, strict=True):
        if used is not given and isinstance(used, torch.Tensor) and buffer_of(used) in recorder.written:
            raise TraceError(
                message(
                    f"the compiled function writes in place to an argument that is a view, of shape {tuple(given.shape)}",
                    "only an argument that shows its whole storage is updated",
                    fix="pass the tensor that it is a view of, or a clone",
                )
            )


def _bind(flat: list[Any]) -> tuple[list[Any], list[Buffer], list[torch.Tensor]]:
    """Arguments as the trace gets them: whole tensors as they are, views as tensors of their own, the rest unchanged."""
    bound: list[Any] = []
    buffers: list[Buffer] = []
    hosts: list[torch.Tensor] = []
    for value in flat:
        if isinstance(value, torch.Tensor) and value.device.type == "jax":
            bound.append(own_storage(value))
            buffers.append(buffer_of(bound[-1]))
        else:
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                hosts.append(value)
            bound.append(value)
    return bound, list(dict.fromkeys(buffers)), hosts


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it shows its whole storage, else a tensor of its own with the view's value."""
    buffer = buffer_of(tensor)
    shows_root = tensor.shape == buffer.shape and tensor.is_contiguous() and not tensor.storage_offset()
    if shows_root and (buffer.value is None or is_whole(tensor, buffer)):
        return tensor
    with exact_dtypes():
        return wrap(load(tensor)).requires_grad_(tensor.requires_grad)


@contextmanager
def _grads_put_back(found: Reachable) -> Generator[list[torch.Tensor]]:
    """The leaf parameters in reach; whatever happens to their gradients in the trace, the old ones are put back."""
    parameters: dict[int, torch.Tensor] = {}
    for _, module in found.modules.values():
        parameters.update((id(p), p) for p in module.parameters())
    for optimizer in found.optimizers:
        parameters.update((id(p), p) for group in optimizer.param_groups for p in group["params"])
    leaves = [p for p in parameters.values() if p.requires_grad and p.is_leaf and p.device.type == "jax"]
    kept = [p.grad for p in leaves]
    try:
        yield leaves
    finally:
        for p, grad in zip(leaves, kept, strict=True):
            p.grad = grad


@dataclass
class _Running:
    """The body of one trace and what it leaves behind."""

    fn: Callable[..., Any]
    call: tuple[tuple[Any, ...], dict[str, Any]]
    numbers: LiftedNumbers
    found: Reachable
    keep_grads: bool
    marked_grads: bool
    debug_nans: bool
    parameters: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    recorder: Recorder | None = None
    leaves: list[Leaf] = field(default_factory=list[Leaf])
    tree: Any = None
    draws: int = 0
    gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=list[tuple[torch.Tensor, "torch.Tensor | None"]])

    def run(self, buffers: list[Buffer], hosts: list[torch.Tensor], values: list[Any], vector: Any, words: Any) -> Any:
        """Called by jax: install tracers, run the user's function, collect outputs, put everything back."""
        inputs = dict(zip(map(id, hosts), values[len(buffers) :], strict=True))
        recorder = self.recorder = Recorder(words, inputs, default_stream.draws)
        token = recording.set(recorder)
        try:
            for buffer, value in zip(buffers, values, strict=False):
                recorder.touched[buffer] = (buffer.value, buffer.host)
                buffer.value, buffer.host = value, None
                buffer.reads.clear()
            markers = self._mark_gradients() if self.marked_grads else []
            before = {id(p): p.grad for p in self.parameters}
            with ExitStack() as stack:
                stack.enter_context(self.numbers.in_place(vector, recorder.on_branch))
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                stack.enter_context(_watching(recorder, self.found, self.debug_nans))
                stack.enter_context(recomputing_for_real())
                args, kwargs = self.call
                result = self.fn(*args, **kwargs)
            outputs = [*self._outputs(result, recorder), *(flag for _, flag in recorder.finite)]
            self.gradients = [
                (p, p.grad)
                for p in self.parameters
                if (p.grad is not before[id(p)] or _is_written(p.grad)) and (p.grad is None or buffer_of(p.grad) in recorder.newborn)
            ]
            del markers
            kept = [load(g) for _, g in self.gradients if g is not None] if self.keep_grads else []
            return outputs, [b.value for b in recorder.written], kept
        finally:
            recording.reset(token)
            self.draws = default_stream.draws - recorder.start_draws
            default_stream.draws = recorder.start_draws
            recorder.put_back()
            for _, grad in self.gradients:
                if grad is not None:
                    buffer_of(grad).dropped = DROPPED_GRADIENT

    def _mark_gradients(self) -> list[torch.Tensor]:
        """Parameters without a gradient, or with one that an earlier call did not keep, get one that refuses to be read:
        so a step that adds to gradients of an earlier call is told apart from one that starts anew."""
        markers: list[torch.Tensor] = []
        for p in self.parameters:
            if p.grad is None or buffer_of(p.grad).dropped is not None:
                marker = wrap(jnp.zeros(p.shape, to_numpy_dtype(p.dtype)))
                buffer_of(marker).value, buffer_of(marker).dropped = None, STALE_GRADIENT
                p.grad = marker
                markers.append(marker)
        return markers

    def _outputs(self, result: Any, recorder: Recorder) -> list[Any]:
        flat, self.tree = pytree.tree_flatten(result)
        arrays: list[Any] = []
        for value in flat:
            if isinstance(value, torch.Tensor) and value.device.type == "jax":
                buffer = buffer_of(value)
                if buffer not in recorder.newborn and value.is_leaf:
                    self.leaves.append(Leaf("same", value))
                    continue
                arrays.append(load(value))
                self.leaves.append(Leaf("array", XLAShardedTensor if isinstance(value, XLAShardedTensor) else torch.Tensor))
            elif isinstance(value, torch.SymFloat):
                arrays.append(carried(value))
                self.leaves.append(Leaf("number"))
            elif isinstance(value, torch.Tensor):
                raise TraceError(
                    message(
                        f"the compiled function returns a tensor on {value.device}, of shape {tuple(value.shape)}",
                        "its value would stay what it was in the trace",
                        fix="return a tensor on device 'jax'",
                    )
                )
            else:
                self.leaves.append(Leaf("static", value))
        return arrays

    def guards(self, recorder: Recorder) -> list[Guard]:
        """Everything the trace baked in."""
        guards: list[Guard] = []
        names = module_names(self.found)
        for key, module in recorder.modules.items():
            name = names.get(key, "")
            guards.append(_guards.module_guard(name, module))
            for kind in ("_parameters", "_buffers"):
                held = module.__dict__[kind].items()
                guards.extend(_guards.storage_guard(f"{name}.{k}", t) for k, t in held if t is not None and t.device.type == "jax")
        guards.extend(_guards.optimizer_guard(o, self.numbers) for o in self.found.optimizers)
        guards.extend(_guards.branch_guard(evaluate, outcome) for evaluate, outcome in recorder.branches)
        guards.extend(_guards.host_tensor_guard(t) for t in recorder.host_reads)
        closure = _guards.closure_guard(self.fn) if hasattr(self.fn, "__code__") else None  # pyright: ignore[reportArgumentType]
        return guards if closure is None else [*guards, closure]


@contextmanager
def _watching(recorder: Recorder, found: Reachable, debug_nans: bool) -> Generator[None]:
    """Note the modules that run, name their operations after them, and refuse optimizers that were not prepared."""
    names = module_names(found)
    scopes: list[tuple[str, Any]] = []

    def enter(module: torch.nn.Module, args: Any) -> None:
        recorder.modules[id(module)] = module
        name = names.get(id(module)) or type(module).__name__
        inner = name.removeprefix(scopes[-1][0] + ".") if scopes else name
        scope = jax.named_scope(inner.replace(".", "/"))
        scope.__enter__()
        scopes.append((name, scope))

    def leave(module: torch.nn.Module, args: Any, result: Any) -> None:
        if scopes:
            name, scope = scopes.pop()
            scope.__exit__(None, None, None)
            if debug_nans:
                recorder.finite.extend((name, flag) for flag in _finite_flags(result))

    def stepping(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if all(optimizer is not known for known in found.optimizers):
            raise UnknownOptimizer(optimizer)

    handles = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
        register_optimizer_step_pre_hook(stepping),
    ]
    try:
        yield
    finally:
        while scopes:
            scopes.pop()[1].__exit__(None, None, None)
        for handle in handles:
            handle.remove()


def _finite_flags(result: Any) -> list[Any]:
    """For each floating tensor in a module's result, whether all its elements are finite."""
    tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.device.type == "jax"]
    with exact_dtypes():
        return [jnp.all(jnp.isfinite(load(t))) for t in tensors if t.is_floating_point() or t.is_complex()]


def module_names(found: Reachable) -> dict[int, str]:
    """Qualified name of every module under the roots that were found, by identity."""
    names: dict[int, str] = {}
    for root_name, root in found.modules.values():
        for name, module in root.named_modules():
            names.setdefault(id(module), name or root_name)
    return names


def _is_written(grad: torch.Tensor | None) -> bool:
    """True if a gradient marker got a value in place (`zero_grad(set_to_none=False)`)."""
    return grad is not None and buffer_of(grad).value is not None

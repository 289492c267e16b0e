"""Records the modules and optimizers that run in a trace, names their operations, and checks that outputs are finite."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from threading import get_ident
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import TraceAgain, TraceError, message
from spmd.base._torch import (
    UninitializedTensorMixin,
    global_optimizer_post_hooks,
    global_optimizer_pre_hooks,
    is_functorch_wrapped_tensor,
    pytree,
    tensor_str,
)
from spmd.device._storage import buffer_of, is_device_tensor, load
from spmd.patches._table import replaced
from spmd.program.find._discover import Reachable, has_device_parameters
from spmd.program.optim._preparation import made_inside
from spmd.program.optim._traced_state import OptimizerAsObject, drop_state_without_gradient, is_of_torch
from spmd.program.reads import RunModule
from spmd.program.trace._trace_settings import TraceSettings

if TYPE_CHECKING:
    from spmd.program.trace._buffer_use import TraceRecorder


class Undiscovered(TraceAgain):
    """An optimizer stepped, or a module ran, that `reachable` had not found. The next trace includes it."""

    def __init__(self, value: torch.optim.Optimizer | torch.nn.Module) -> None:
        super().__init__()
        self.value = value

    def other_settings(self, settings: TraceSettings) -> TraceSettings:
        return replace(settings, unreached=(*settings.unreached, self.value))


class StateBeforeStep(TraceAgain):
    """The function reads optimizer state that was prepared before the trace. PyTorch would create this state in the first step."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.optimizers = optimizers

    def other_settings(self, settings: TraceSettings) -> TraceSettings:
        return replace(settings, unprepared=(*settings.unprepared, *self.optimizers))


def require_known_state(recorder: TraceRecorder, found: Reachable) -> None:
    """Check that the function itself reads or writes only state of optimizers that it steps, and no state that was prepared too early.

    Raises:
        OptimizerAsObject: the function uses the state of an optimizer that it does not step.
        StateBeforeStep: the function uses state, prepared for this trace, before the optimizer's step.
    """
    unstepped = [o for o in found.optimizers if all(o is not stepped for stepped in recorder.stepped) and recorder.has_met(o)]
    if unstepped:
        raise OptimizerAsObject(unstepped)
    if early := [o for o in recorder.early if any(o is prepared and created for prepared, created in found.prepared)]:
        raise StateBeforeStep(early)


@contextmanager
def watching(recorder: TraceRecorder, found: Reachable, debug_nans: bool) -> Generator[RunModule]:
    """Context that notes the modules and optimizers that run, and names operations after their module.

    Yields:
        The function by which a `Recording` runs each module.

    Raises:
        Undiscovered: a module or optimizer runs that is not in `found`.
        TraceError: a module cannot be traced: it is a TorchScript module or has uninitialised parameters; or LBFGS steps.
    """
    names = {id(module): name for name, module in found.all_modules()}
    known = {buffer_of(t) for t in found.device_tensors()}
    running: list[str] = []
    thread = get_ident()  # torch calls the hook for the optimizers of all threads

    def is_new(p: torch.Tensor) -> bool:
        if p.device.type != "jax" or is_functorch_wrapped_tensor(p):  # an ensemble's, under `vmap`
            return False
        return buffer_of(p) not in known and buffer_of(p) not in recorder.newborn

    def ran(module: torch.nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise _scripted(module)
        if any(isinstance(t, UninitializedTensorMixin) for t in (*module._parameters.values(), *module._buffers.values())):
            raise _uninitialised(module, names.get(id(module)))
        # A module that the function itself creates around known tensors is allowed: each trace creates another one.
        if id(module) not in names and any(map(is_new, module.parameters())):
            raise Undiscovered(module)
        recorder.modules[id(module)] = module

    def run_module(module: torch.nn.Module, run: Callable[[], Any]) -> Any:
        ran(module)
        name = names.get(id(module)) or type(module).__name__
        inner = name.removeprefix(running[-1] + ".") if running else name
        running.append(name)
        try:
            with jax.named_scope(inner.replace(".", "/")):
                result = run()
        finally:
            running.pop()
        if debug_nans:
            recorder.finite.extend((name, flag) for flag in _finite_flags(result))
        return result

    def stepping(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if get_ident() == thread:
            _begin_step(optimizer, args, kwargs, recorder, found)

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if get_ident() == thread and _has_closure(args, kwargs) and is_of_torch(optimizer):
            drop_state_without_gradient(optimizer, found.prepared)

    key: Any = object()  # not a number of `RemovableHandle`: those of the program's hooks are as without a trace
    global_optimizer_pre_hooks[key], global_optimizer_post_hooks[key] = stepping, stepped
    try:
        yield run_module
    finally:
        del global_optimizer_pre_hooks[key], global_optimizer_post_hooks[key]


def _begin_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, recorder: TraceRecorder, found: Reachable) -> None:
    """Before an optimizer steps in a trace. See `watching` for what it raises."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise _lbfgs()
    if has_device_parameters(optimizer) and all(optimizer is not known for known in (*found.optimizers, *found.as_objects)):
        _require_new_parameters(optimizer, recorder, found)
        return
    recorder.note_step(optimizer)
    if not _has_closure(args, kwargs):
        drop_state_without_gradient(optimizer, found.prepared)


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Whether these arguments of an optimizer's `step` have a closure, which gives the parameters their gradients within the step."""
    return any(value is not None for value in (*args[1:], *kwargs.values()))


def _require_new_parameters(optimizer: torch.optim.Optimizer, recorder: TraceRecorder, found: Reachable) -> None:
    """Let an optimizer step that the trace made for a copy of a model: its state is made in every call, like all that a call computes.

    Raises:
        Undiscovered: its parameters are from before the trace.
        TraceError: some of them are.
    """
    older = set(map(id, found.device_tensors()))  # `p.data = new` gives one of these new memory
    params = [p for group in optimizer.param_groups for p in group["params"] if is_device_tensor(p)]
    news = [id(p) not in older and buffer_of(p) in recorder.newborn for p in params]
    if not any(news):
        raise Undiscovered(optimizer)
    if not all(news):
        raise made_inside(optimizer)


def _lbfgs() -> TraceError:
    return TraceError(
        message(
            "LBFGS cannot step inside a compiled function",
            "it evaluates the loss a data-dependent number of times",
            fix="compile its closure: optimizer.step(spmd.compile(closure, keep_grads=True))",
        )
    )


def _scripted(module: torch.jit.ScriptModule) -> TraceError:
    return TraceError(
        message(
            f"the TorchScript module {module.original_name} runs in a compiled function",
            "its interpreter reads flags and attributes that cannot be guarded: after model.eval() the program would stay in training mode",
            fix="compile the nn.Module that it was made from, or call it outside of the compiled function",
        )
    )


def _uninitialised(module: torch.nn.Module, name: str | None) -> TraceError:
    what = f"module '{name}'" if name else "a module"
    return TraceError(
        message(
            f"{what}, {type(module).__name__}, has parameters without a shape when it runs in a compiled function",
            "its first call creates them and changes its class",
            fix="call the model once before it is compiled: with torch.no_grad(): model(x)",
        )
    )


def _finite_flags(result: Any) -> list[Any]:
    """For each floating-point or complex tensor in a module's result, a 0-dim bool: whether all its elements are finite."""
    tensors = [t for t in pytree.tree_leaves(result) if is_device_tensor(t)]
    with exact_dtypes():
        return [jnp.all(jnp.isfinite(load(t))) for t in tensors if t.is_floating_point() or t.is_complex()]


@contextmanager
def report_compiling() -> Generator[None]:
    """Context in which `torch.compiler.is_compiling()` is true for all code except torch's own.

    Libraries call it before they read values (transformers: whether a mask hides anything). torch's optimizers and modules call it
    too, but to detect Dynamo, which prepares things for them that this trace does not.
    """
    before, thread = torch.compiler.is_compiling, get_ident()

    def is_compiling() -> bool:
        name: str = sys._getframe(1).f_globals.get("__name__", "")
        return before() if name.partition(".")[0] == "torch" or get_ident() != thread else True

    with replaced("torch.compiler.is_compiling", is_compiling):
        yield


@contextmanager
def restore_functorch() -> Generator[None]:
    """Context that restores functorch after an error inside torch's printing of a tensor.

    `torch._tensor_str._str` disables functorch for the lifetime of a local variable. The traceback of an error keeps the frame, and so
    the variable, alive: `vmap` and `jacfwd` would fail while a prompt or a test runner keeps the error.
    """
    try:
        yield
    except BaseException as error:
        found: BaseException | None = error
        seen: set[int] = set()
        while found is not None and id(found) not in seen:  # causes can form a cycle: `raise kept from caught`, twice
            seen.add(id(found))
            trace = found.__traceback__
            while trace is not None:
                if trace.tb_frame.f_code is tensor_str.__code__:
                    trace.tb_frame.clear()
                trace = trace.tb_next
            found = found.__cause__
        raise


__all__ = ["Undiscovered", "report_compiling", "require_known_state", "restore_functorch", "watching"]

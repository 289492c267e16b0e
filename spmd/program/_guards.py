"""What Python state a trace baked in, and whether it still holds: each guard gives a reason to retrace, or None.

A program may be reused only while everything the trace read that is not an input of it is unchanged. Guards are cheap:
a call of a step with a hundred modules checks them in some tens of microseconds.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch

from spmd.device._storage import Buffer, buffer_of
from spmd.program._optim import LiftedNumbers, static_settings

Guard = Callable[[], str | None]
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def module_guard(name: str, module: torch.nn.Module) -> Guard:
    """The module's plain attributes (training, dropout's p, flags) and which parameters, buffers and children it holds."""
    attributes = module.__dict__
    names = tuple(k for k, v in attributes.items() if type(v) in _PLAIN)
    read = itemgetter(*names)
    values = read(attributes)
    registries = [(attributes[r], tuple(attributes[r].items())) for r in ("_parameters", "_buffers", "_modules") if attributes[r]]
    flags = [(p, p.requires_grad) for p in attributes["_parameters"].values() if p is not None]
    hooks = [attributes[h] for h in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")]
    hook_keys = [tuple(h) for h in hooks]
    title = name or type(module).__name__

    def check() -> str | None:
        if read(attributes) != values:
            now = zip(names, [attributes.get(n) for n in names], values if len(names) > 1 else (values,), strict=True)
            return "; ".join(f"{title}.{n} changed from {old!r} to {new!r}" for n, new, old in now if new != old)
        for registry, items in registries:
            if len(registry) != len(items) or any(registry.get(k) is not v for k, v in items):
                return f"{title} holds other parameters, buffers or modules than when it was traced"
        for parameter, flag in flags:
            if parameter.requires_grad != flag:
                return f"requires_grad of a parameter of {title} changed from {flag} to {not flag}"
        if any(tuple(h) != k for h, k in zip(hooks, hook_keys, strict=True)):
            return f"{title} got or lost a hook"
        return None

    return check


def storage_guard(name: str, tensor: torch.Tensor) -> Guard:
    """The tensor still shows the storage that the program updates (`p.data = ...` gives it another one)."""
    buffer = buffer_of(tensor)
    storage_of = tensor.untyped_storage

    def check() -> str | None:
        if storage_of().spmd_buffer is not buffer:  # pyright: ignore[reportAttributeAccessIssue]
            return f"{name} was given another storage"
        return None

    return check


def annotation_guard(buffers: list[Buffer]) -> Guard:
    """No state tensor was marked anew."""
    kept = [b.annotation for b in buffers]

    def check() -> str | None:
        for buffer, annotation in zip(buffers, kept, strict=True):
            if buffer.annotation is not annotation:
                return f"a state tensor of shape {list(buffer.shape)} was marked {buffer.annotation}, it was {annotation}"
        return None

    return check


def optimizer_guard(optimizer: torch.optim.Optimizer, numbers: LiftedNumbers) -> Guard:
    """Same groups, flags and state tensors as traced; only the lifted numbers may differ."""
    state, groups, settings = optimizer.state, optimizer.param_groups, static_settings(optimizer)
    entries = [(s, k, v) for s in state.values() if isinstance(s, dict) for k, v in s.items() if isinstance(v, torch.Tensor)]
    title = type(optimizer).__name__

    def check() -> str | None:
        if optimizer.state is not state or (len(state) and any(s.get(k) is not v for s, k, v in entries)):
            return f"{title}'s state was replaced (load_state_dict)"
        if optimizer.param_groups is not groups or static_settings(optimizer) != settings:
            return f"{title}'s param_groups changed: other parameters, flags or kinds of numbers"
        return None

    return check


def branch_guard(evaluate: Callable[[], bool], outcome: bool) -> Guard:
    """A comparison of a hyperparameter that Python branched on still goes the same way."""

    def check() -> str | None:
        return None if evaluate() == outcome else f"a branch on an optimizer's number now goes the other way ({not outcome})"

    return check


def host_tensor_guard(tensor: torch.Tensor) -> Guard:
    """A CPU tensor whose values became constants of the program is unchanged."""
    reference, version = weakref.ref(tensor), tensor._version

    def check() -> str | None:
        alive = reference()
        if alive is not None and alive._version != version:
            return f"a CPU tensor of shape {tuple(alive.shape)} that the program holds as a constant was changed in place"
        return None

    return check


def closure_guard(fn: types.FunctionType) -> Guard | None:
    """Plain values that the function reads from its closure and its globals."""
    cells = [(n, c) for n, c in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True) if type(_content(c)) in _PLAIN]
    held = [c.cell_contents for _, c in cells]
    names = [n for n in fn.__code__.co_names if type(fn.__globals__.get(n, fn)) in _PLAIN]
    values = [fn.__globals__[n] for n in names]
    if not cells and not names:
        return None

    def check() -> str | None:
        for (name, cell), old in zip(cells, held, strict=True):
            if _content(cell) != old:
                return f"{name} changed from {old!r} to {_content(cell)!r}"
        for name, old in zip(names, values, strict=True):
            if fn.__globals__.get(name) != old:
                return f"global {name} changed from {old!r} to {fn.__globals__.get(name)!r}"
        return None

    return check


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def first_reason(guards: list[Guard]) -> str | None:
    """The first guard's reason that no longer holds."""
    for guard in guards:
        reason = guard()
        if reason is not None:
            return reason
    return None

"""What Python state a trace baked in, and whether it still holds: each guard gives a reason to retrace, or None.

A program may be reused only while everything the trace read that is not an input of it is unchanged. Guards are cheap:
a call of a step with a hundred modules checks them in some tens of microseconds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from spmd.device._storage import Buffer, buffer_of
from spmd.program._optim import LiftedNumbers, static_settings

Guard = Callable[[], str | None]


def modules_guard(modules: list[tuple[str, torch.nn.Module]]) -> Guard:
    """Which parameters of the modules require gradients, and the hooks of the modules and their parameters."""
    parameters = [
        (name, p, p.requires_grad, _hook_keys(p._backward_hooks), _hook_keys(p._post_accumulate_grad_hooks))  # pyright: ignore[reportAttributeAccessIssue]
        for name, module in modules
        for p in module.__dict__["_parameters"].values()
        if p is not None
    ]
    hooks = [(name, module.__dict__[kind], tuple(module.__dict__[kind])) for name, module in modules for kind in _HOOKS]

    def check() -> str | None:
        for name, p, flag, before, after in parameters:
            if p.requires_grad is not flag:
                return f"requires_grad of a parameter of {name} changed from {flag} to {not flag}"
            if (p._backward_hooks or before) and _hook_keys(p._backward_hooks) != before:
                return f"a parameter of {name} got or lost a hook"
            if (p._post_accumulate_grad_hooks or after) and _hook_keys(p._post_accumulate_grad_hooks) != after:
                return f"a parameter of {name} got or lost a hook"
        for name, registry, keys in hooks:
            if (registry or keys) and tuple(registry) != keys:
                return f"{name} got or lost a hook"
        return None

    return check


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hook_keys(hooks: Any) -> tuple[Any, ...]:
    return tuple(hooks or ())


def storages_guard(tensors: list[tuple[str, torch.Tensor]]) -> Guard:
    """The tensors still show the storages that the program updates (`p.data = ...` gives one another)."""
    shown = [(name, tensor.untyped_storage, buffer_of(tensor)) for name, tensor in tensors]

    def check() -> str | None:
        for name, storage_of, buffer in shown:
            if storage_of().spmd_buffer is not buffer:  # pyright: ignore[reportAttributeAccessIssue]
                return f"{name} was given another storage"
        return None

    return check


def annotation_guard(buffers: list[Buffer]) -> Guard:
    """No state tensor was marked anew."""
    kept = [b.annotation for b in buffers]

    def check() -> str | None:
        for buffer, annotation in zip(buffers, kept, strict=True):
            if buffer.annotation is not annotation and buffer.annotation != annotation:
                return f"a state tensor of shape {list(buffer.shape)} was marked {buffer.annotation}, it was {annotation}"
        return None

    return check


def optimizer_guard(optimizer: torch.optim.Optimizer, numbers: LiftedNumbers) -> Guard:
    """Same groups, flags and state as traced; only the lifted numbers may differ."""
    state, groups, settings = optimizer.state, optimizer.param_groups, static_settings(optimizer)
    lifted = {(id(holder), key) for holder, key, _ in numbers.slots}
    held = [s for s in state.values() if isinstance(s, dict)]
    sizes = [len(s) for s in held]
    entries = [(s, k, v) for s in held for k, v in s.items() if (id(s), k) not in lifted]
    title = type(optimizer).__name__

    def check() -> str | None:
        if optimizer.state is not state:
            return f"{title}'s state was replaced (load_state_dict)"
        if len(state) != len(sizes) or [len(s) for s in held] != sizes:
            return f"{title}'s state has other entries than when it was traced"
        if any(s.get(k) is not v for s, k, v in entries):
            return f"an entry of {title}'s state was replaced"
        if optimizer.param_groups is not groups or static_settings(optimizer) != settings:
            return f"{title}'s param_groups changed: other parameters, flags or kinds of numbers"
        return None

    return check


def numbers_guard(numbers: LiftedNumbers) -> Guard:
    """The lifted numbers are still there; takes their values of today, on which the branch guards decide."""

    def check() -> str | None:
        try:
            numbers.today = numbers.values()
        except (KeyError, IndexError, TypeError, ValueError):
            return "an optimizer's param_groups or state lost a number"
        return None

    return check


def branch_guard(evaluate: Callable[[], bool], outcome: bool) -> Guard:
    """A comparison of a hyperparameter that Python branched on still goes the same way."""

    def check() -> str | None:
        return None if evaluate() == outcome else f"a branch on an optimizer's number now goes the other way ({not outcome})"

    return check


def equal_counters_guard(leaders: dict[Buffer, Buffer]) -> Guard:
    """State that the trace read as one value still is. See Note [Equal counters]."""
    pairs = list(leaders.items())

    def check() -> str | None:
        for follower, leader in pairs:
            if follower.value is not leader.value:
                its, other = np.asarray(follower.get()), np.asarray(leader.get())
                if its.tobytes() != other.tobytes():
                    return f"step counters of an optimizer that were equal are now {other} and {its}"
                follower.set(leader.value)  # so that the next call need not look
        return None

    return check


def host_tensor_guard(tensor: torch.Tensor) -> Guard:
    """A CPU tensor whose values became constants of the program is unchanged."""
    owner = tensor if tensor._base is None else tensor._base  # a view dies soon, its base has the same version counter
    reference, version = weakref.ref(owner), owner._version

    def check() -> str | None:
        alive = reference()
        if alive is not None and alive._version != version:
            return f"a CPU tensor of shape {tuple(alive.shape)} that the program holds as a constant was changed in place"
        return None

    return check


def first_reason(guards: list[Guard]) -> str | None:
    """The first guard's reason that no longer holds."""
    for guard in guards:
        reason = guard()
        if reason is not None:
            return reason
    return None
